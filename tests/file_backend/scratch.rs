//! A root directory of a test, removed with it.

use crate::common::records;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use volward::backend::file::{FileBackend, FileConfig};
use volward::backend::{Backend, Session, Unwatched};
use volward::model::{Lane, ObjectId, Place, Record};

pub struct Scratch {
    pub directory: PathBuf,
    root: String,
}

impl Scratch {
    pub fn new() -> Scratch {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let nth = COUNT.fetch_add(1, Ordering::SeqCst);
        let name = format!("volward-file-{}-{nth}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        fs::create_dir(directory.join("import")).unwrap();
        Scratch::at(directory, "root")
    }

    /// A root of that name in a directory that is there.
    pub fn at(directory: PathBuf, root: &str) -> Scratch {
        let root = directory.join(root);
        fs::create_dir_all(&root).unwrap();
        Scratch {
            root: root.to_str().unwrap().to_owned(),
            directory,
        }
    }

    pub fn root(&self) -> &str {
        &self.root
    }

    pub fn imports(&self) -> PathBuf {
        self.directory.join("import")
    }

    pub fn place(&self) -> Place {
        records::place("local", &self.root)
    }

    pub fn config(&self, instance: &str) -> FileConfig {
        FileConfig {
            domains: BTreeMap::from([("local".to_owned(), vec![self.root.clone()])]),
            import_dirs: vec![self.imports()],
            instance: instance.to_owned(),
            identities: BTreeMap::new(),
        }
    }

    pub fn backend(&self, instance: &str) -> FileBackend {
        FileBackend::new(self.config(instance))
    }

    pub fn session(&self) -> Box<dyn Session> {
        let backend = self.backend("ours");
        backend.connect("local", Lane::Create, &Unwatched).unwrap()
    }

    /// Where the image of an object is when it is in its place.
    pub fn image_of(&self, record: &Record) -> PathBuf {
        let (kind, name) = match record.id {
            ObjectId::Volume(_) => ("volumes", &record.born),
            ObjectId::Snapshot(_) => ("snapshots", &record.name),
        };
        let directory = format!("{name}-{}", record.id.uid().lower());
        Path::new(&self.root)
            .join(kind)
            .join(directory)
            .join("image")
    }

    /// A line for each object in each place, with its files and their sizes.
    pub fn all(&self) -> Vec<String> {
        let mut all = Vec::new();
        for kind in ["volumes", "snapshots", "trash", "tmp"] {
            for entry in list(&Path::new(&self.root).join(kind)) {
                let file = |path: &PathBuf| {
                    let length = fs::symlink_metadata(path).unwrap().len();
                    format!("{} {length}", path.file_name().unwrap().display())
                };
                let files: Vec<String> = list(&entry).iter().map(file).collect();
                let name = entry.file_name().unwrap().display().to_string();
                all.push(format!("{kind}/{name}: {}", files.join(", ")));
            }
        }
        all
    }
}

/// What is in a directory, sorted; nothing if it is none.
pub fn list(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A second scratch at the same directory may have been faster.
        let _ = fs::remove_dir_all(&self.directory);
    }
}
