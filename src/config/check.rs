//! Looks at the files and directories that a configuration names.

use super::{Backend, Config, Listen};
use rustix::fs::{Access, access};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

impl Config {
    /// Looks whether the files of the daemon itself are there, private where they must be, and
    /// whether their directories can be written by this process. Says each fault in a sentence
    /// with its key and the mend; empty means that all is well.
    #[must_use]
    pub fn check_paths(&self) -> Vec<String> {
        let mut faults = Faults::default();
        let mut note = |key: String, result: Result<(), String>| faults.note(&key, result);
        if let Listen::Unix(path) = &self.api.listen {
            note("api.listen".into(), writable_parent(path));
        }
        if let Listen::Unix(path) = &self.health.listen {
            note("health.listen".into(), writable_parent(path));
        }
        for (key, file) in [
            ("api.token_file", &self.api.token_file),
            ("health.token_file", &self.health.token_file),
        ] {
            if let Some(file) = file {
                note(key.into(), private(file));
            }
        }
        for (id, file) in &self.keys {
            note(format!("keys.{id}.file"), private(file));
        }
        note("store.path".into(), writable_parent(&self.store_path));
        faults.0
    }

    /// The same for the paths of the storage, which may lie on a file system that hangs: then this
    /// never returns.
    #[must_use]
    pub fn check_storage_paths(&self) -> Vec<String> {
        let mut faults = Faults::default();
        let mut note = |key: String, result: Result<(), String>| faults.note(&key, result);
        match &self.backend {
            Backend::File(_) => {
                for (name, class) in &self.classes {
                    let root = Path::new(&class.root);
                    note(format!("classes.{name}.root"), writable(root));
                }
            }
            Backend::Rbd(rbd) => {
                note("backend.rbd.conf".into(), readable(&rbd.conf));
                if let Some(keyring) = &rbd.keyring {
                    note("backend.rbd.keyring".into(), readable(keyring));
                }
            }
            Backend::Sim(_) => {}
        }
        for dir in self.backend.import_dirs() {
            let key = format!("backend.{}.import_dirs", self.backend.kind());
            note(key, readable(dir));
        }
        faults.0
    }
}

/// Sentences about what is wrong.
#[derive(Debug, Default)]
struct Faults(Vec<String>);

impl Faults {
    fn note(&mut self, key: &str, result: Result<(), String>) {
        if let Err(message) = result {
            self.0.push(format!("{key}: {message}"));
        }
    }
}

/// A secret: a file that is there, not empty, and closed to others.
fn private(file: &Path) -> Result<(), String> {
    let shown = file.display();
    let meta = fs::metadata(file)
        .map_err(|error| format!("{shown} can't be read: {error}; create it with mode 0600"))?;
    if !meta.is_file() {
        return Err(format!("{shown} is no regular file; name one"));
    }
    if meta.permissions().mode() & 0o007 != 0 {
        let mode = meta.mode() & 0o777;
        return Err(format!(
            "{shown} can be reached by everybody (mode {mode:04o}) although it holds a secret; run \
             chmod 0600 {shown}"
        ));
    }
    if meta.len() == 0 {
        return Err(format!("{shown} is empty; write the secret into it"));
    }
    readable(file)
}

fn readable(path: &Path) -> Result<(), String> {
    access(path, Access::READ_OK).map_err(|error| {
        let shown = path.display();
        format!("{shown} can't be read: {error}; check that it is there and who owns it")
    })
}

/// The directory of a file that will be created.
fn writable_parent(file: &Path) -> Result<(), String> {
    match file.parent() {
        Some(dir) => writable(dir),
        None => Err(format!("{} has no directory; name a file", file.display())),
    }
}

/// A directory that can be written, or can be made because its nearest ancestor can.
fn writable(dir: &Path) -> Result<(), String> {
    let mut there: PathBuf = dir.to_owned();
    while !there.exists() {
        if !there.pop() {
            break;
        }
    }
    let shown = there.display();
    if !there.is_dir() {
        return Err(format!(
            "{shown} is no directory; remove it or choose another path"
        ));
    }
    access(&there, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| {
        format!(
            "{} can't be written: {error} at {shown}; create it, give it to the user that runs \
             volward, or choose another path",
            dir.display()
        )
    })
}
