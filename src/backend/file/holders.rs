//! Who has a file open, in words for the user. Only reads /proc and /sys, never the file system
//! that the file is on: that may hang.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The search ends after that time: it is a courtesy.
const TIME_MAX: Duration = Duration::from_millis(300);
/// And after that many names.
const NAMES_MAX: usize = 8;

/// Whose opening counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// Those who can write.
    Writers,
    /// All of them.
    Everybody,
}

/// Names the loop devices and processes that have the open file `file` open as well.
pub fn holders(file: &impl AsFd, of: Of) -> Vec<String> {
    let begun = Instant::now();
    let own = file.as_fd().as_raw_fd();
    let Ok(path) = fs::read_link(format!("/proc/self/fd/{own}")) else {
        return Vec::new();
    };
    let mut found = loops(&path);
    for (pid, process) in numbered("/proc") {
        for (fd, link) in numbered(process.join("fd")) {
            let mine = pid == std::process::id() && i64::from(fd) == i64::from(own);
            if mine || fs::read_link(link).ok().as_deref() != Some(&path) {
                continue;
            }
            if of == Of::Everybody || writes(&process, fd) {
                found.push(name_of(pid, &process));
                break;
            }
        }
        if found.len() >= NAMES_MAX || begun.elapsed() > TIME_MAX {
            break;
        }
    }
    found
}

/// The entries of a directory whose names are numbers.
fn numbered(directory: impl AsRef<Path>) -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, entry.path()))
    })
}

fn loops(path: &Path) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let backed = devices.filter_map(|device| {
        let name = device.file_name().into_string().ok()?;
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        (Path::new(file.trim_end_matches('\n')) == path).then(|| format!("loop device /dev/{name}"))
    });
    backed.take(NAMES_MAX).collect()
}

fn writes(process: &Path, fd: u32) -> bool {
    let info = fs::read_to_string(process.join("fdinfo").join(fd.to_string())).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok());
    // O_WRONLY is 1, O_RDWR is 2.
    flags.is_some_and(|flags| flags & 3 != 0)
}

fn name_of(pid: u32, process: &Path) -> String {
    let comm = fs::read_to_string(process.join("comm")).unwrap_or_default();
    format!("process {pid} ({})", comm.trim_end())
}
