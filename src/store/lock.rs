//! One instance per state file: the lock beside it, and who holds it, in words.
//!
//! Owns the lock file and reads /proc. Knows nothing of what the state file holds.

use super::error::{Result, StoreError, of_io};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The lock, as long as it lives. The file stays behind: removing it would let two instances
/// hold a lock of the same name.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// The lock file of a state file.
pub fn path_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    PathBuf::from(name)
}

impl Lock {
    /// Takes the lock or says who holds it. Never waits.
    ///
    /// # Errors
    /// `Locked`; or what the lock file's directory says.
    pub fn take(path: &Path) -> Result<Lock> {
        let doing = "taking its lock";
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o640)
            .open(path_of(path))
            .map_err(|error| of_io(&error, path, doing))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(held(path, &mut file)),
            Err(errno) => return Err(of_io(&errno.into(), path, doing)),
        }
        // On a full disk the words may be missing; the lock itself holds.
        let words = format!(
            "volward, process {} on host {}, since {}\n",
            std::process::id(),
            rustix::system::uname().nodename().to_string_lossy(),
            jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        );
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(words.as_bytes()));
        if let Err(error) = written {
            log::warn!("lock of {}: its words: {error}", path.display());
        }
        Ok(Lock { _file: file })
    }
}

fn held(path: &Path, file: &mut File) -> StoreError {
    let mut words = String::new();
    // A holder that has just taken it may not have written yet.
    let _ = file.take(512).read_to_string(&mut words);
    let by_kernel = file
        .metadata()
        .ok()
        .and_then(|meta| locker(&std::fs::read_to_string("/proc/locks").ok()?, meta.ino()));
    let pid = pid_in(&words).or(by_kernel);
    let who = match words.trim() {
        "" => pid.map_or("another process".to_owned(), |pid| format!("process {pid}")),
        words => words.to_owned(),
    };
    let state = pid.map_or_else(State::default, |pid| state(Path::new("/proc"), pid));
    StoreError::Locked {
        pid,
        ending: state.ending,
        words: format!(
            "state file {} is in use by {who}{}; {}",
            path.display(),
            state.words,
            if state.ending {
                "wait until the kernel lets it go, or reboot"
            } else {
                "stop that instance first, or give this one a `store.path` of its own"
            }
        ),
    }
}

/// The pid in the words of a lock file.
fn pid_in(words: &str) -> Option<u32> {
    let rest = words.split("process ").nth(1)?;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The pid that holds a flock on that inode, by the text of /proc/locks.
fn locker(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = fields.as_slice() else {
            return None;
        };
        let here = file.rsplit(':').next()?.parse() == Ok(inode);
        here.then(|| pid.parse().ok()).flatten()
    })
}

#[derive(Debug, Default, PartialEq, Eq)]
struct State {
    ending: bool,
    words: String,
}

/// What keeps that process: a zombie whose threads are in the kernel still holds its locks.
fn state(proc: &Path, pid: u32) -> State {
    let dir = proc.join(pid.to_string());
    let Some(leader) = letter(&dir) else {
        return State::default();
    };
    let ending = matches!(leader, 'Z' | 'X');
    let stuck = stuck_threads(&dir);
    let mut words = String::new();
    if ending {
        words = format!("; process {pid} has ended (zombie) but is not gone");
    }
    if let Some((tid, wchan)) = stuck.first() {
        let more = match stuck.len() - 1 {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let of = if ending {
            String::new()
        } else {
            format!(" of process {pid}")
        };
        words.push_str(&format!(
            "; thread {tid}{of} is stuck in the kernel (state D in {wchan}){more}"
        ));
    }
    State { ending, words }
}

/// The state letter: what follows the last `)` of the stat file.
fn letter(dir: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(dir.join("stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// The threads in uninterruptible sleep with their wait channels, by thread id.
fn stuck_threads(dir: &Path) -> Vec<(u32, String)> {
    let Ok(tasks) = std::fs::read_dir(dir.join("task")) else {
        return Vec::new();
    };
    let mut all: Vec<(u32, String)> = tasks
        .flatten()
        .filter(|task| letter(&task.path()) == Some('D'))
        .filter_map(|task| {
            let tid = task.file_name().to_str()?.parse().ok()?;
            let wchan = std::fs::read_to_string(task.path().join("wchan")).unwrap_or_default();
            Some(match wchan.trim() {
                "" | "0" => (tid, "an unknown wait channel".to_owned()),
                wchan => (tid, wchan.to_owned()),
            })
        })
        .collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("volward-lock-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn the_pid_is_found_in_the_words_and_in_the_kernels_list() {
        let words = "volward, process 4711 on host a1, since 2026-01-01T00:00:00Z\n";
        assert_eq!(pid_in(words), Some(4711));
        assert_eq!(pid_in(""), None);
        let locks = "1: POSIX  ADVISORY  WRITE 12 fd:00:99 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 815 fd:00:99 0 EOF\n";
        assert_eq!(locker(locks, 99), Some(815));
        assert_eq!(locker(locks, 98), None);
    }

    #[test]
    fn a_zombie_with_a_thread_in_the_kernel_is_described() {
        let proc = scratch("proc");
        let put = |path: &str, text: &str| {
            let path = proc.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("77/stat", "77 (a) D (b) Z 1 77 77 0");
        put("77/task/77/stat", "77 (vol) Z 1 77");
        put("77/task/80/stat", "80 (rbd worker) D 1 77");
        put("77/task/80/wchan", "request_wait_answer");
        put("77/task/81/stat", "81 (rbd worker) D 1 77");
        let found = state(&proc, 77);
        assert!(found.ending);
        assert!(
            found.words.contains("process 77 has ended (zombie)")
                && found
                    .words
                    .contains("thread 80 is stuck in the kernel (state D in request_wait_answer)")
                && found.words.contains("and 1 more"),
            "{}",
            found.words
        );
        assert_eq!(state(&proc, 78), State::default());
        std::fs::remove_dir_all(proc).unwrap();
    }

    #[test]
    fn a_real_zombie_is_recognised() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while letter(&dir) != Some('Z') {
            assert!(std::time::Instant::now() < until, "no zombie in 20 s");
            std::thread::yield_now();
        }
        assert!(state(Path::new("/proc"), pid).ending);
        child.wait().unwrap();
    }
}
