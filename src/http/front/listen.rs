//! Listening sockets: bound so that nobody is robbed and nobody gets in too early.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, Gid, Mode};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections that the kernel keeps for us until they are accepted.
const BACKLOG: i32 = 1024;
/// Length of `sun_path` without its end mark (unix(7)).
const UNIX_PATH_MAX_BYTES: usize = 107;

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenSpec {
    /// A unix socket; `group` is a name of /etc/group or a number, kept as it is when `None`.
    Unix {
        /// Where the socket file goes; its directory is made, with mode 0755, if it is missing.
        path: PathBuf,
        /// Permission bits, such as 0o660.
        mode: u32,
        /// Who owns it beside our user.
        group: Option<String>,
    },
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
}

/// Why it can't be listened there, in words: the path or address, the cause, the mend.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BindError(String);

/// A bound and listening socket; dropping it closes it and removes its socket file.
#[derive(Debug)]
pub struct Listener {
    pub(crate) socket: OwnedFd,
    file: Option<SocketFile>,
    address: Option<SocketAddr>,
}

/// The socket file that is ours, by its inode: a successor's is left alone.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Listener {
    /// Binds and listens.
    ///
    /// # Errors
    /// A living daemon listens there already, something that is no socket lies at the path, the
    /// path is too long, the group is unknown, or the system refuses.
    pub fn bind(spec: &ListenSpec) -> Result<Listener, BindError> {
        match spec {
            ListenSpec::Unix { path, mode, group } => bind_unix(path, *mode, group.as_deref()),
            ListenSpec::Tcp(address) => bind_tcp(*address),
        }
    }

    /// The TCP address with its real port; `None` on a unix socket.
    #[must_use]
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file
            && let Ok(found) = fs::symlink_metadata(&file.path)
            && (found.dev(), found.ino()) == (file.device, file.inode)
            && let Err(error) = fs::remove_file(&file.path)
        {
            log::warn!("socket {} stays behind: {error}", file.path.display());
        }
    }
}

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn bind_tcp(address: SocketAddr) -> Result<Listener, BindError> {
    let attempt = || -> io::Result<Listener> {
        let family = if address.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let socket = net::socket_with(family, SocketType::STREAM, FLAGS, None)?;
        net::sockopt::set_socket_reuseaddr(&socket, true)?;
        net::bind(&socket, &address)?;
        net::listen(&socket, BACKLOG)?;
        let bound = SocketAddr::try_from(net::getsockname(&socket)?)?;
        Ok(Listener {
            socket,
            file: None,
            address: Some(bound),
        })
    };
    attempt().map_err(|error| {
        let mend = match error.kind() {
            io::ErrorKind::AddrInUse => "another process listens there; stop it or choose another",
            io::ErrorKind::AddrNotAvailable => "no interface of this host has that address",
            io::ErrorKind::PermissionDenied => "ports below 1024 need CAP_NET_BIND_SERVICE",
            _ => "choose another address",
        };
        BindError(format!("can't listen on {address}: {error}; {mend}"))
    })
}

fn bind_unix(path: &Path, mode: u32, group: Option<&str>) -> Result<Listener, BindError> {
    let shown = path.display();
    let gid = group.map(|name| group_id(name, path)).transpose()?;
    make_directory(path)?;
    make_room(path)?;
    let temporary = temporary_name(path)?;
    let attempt = || -> Result<Listener, (io::Error, &'static str)> {
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)
            .map_err(|error| (error.into(), "making a socket"))?;
        let address =
            SocketAddrUnix::new(&temporary).map_err(|error| (error.into(), "naming the socket"))?;
        let _none_left_by_a_crash = fs::remove_file(&temporary);
        net::bind(&socket, &address).map_err(|error| {
            (
                error.into(),
                "binding; is the directory there and writable?",
            )
        })?;
        // Nobody can connect before listen(2), so the mode is set before the first caller.
        rustix::fs::chmod(&temporary, Mode::from_raw_mode(mode & 0o777))
            .map_err(|error| (error.into(), "setting its mode"))?;
        if let Some(gid) = gid {
            rustix::fs::chownat(CWD, &temporary, None, Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| {
                    (
                        error.into(),
                        "setting its group; run as root or as a member of that group",
                    )
                })?;
        }
        net::listen(&socket, BACKLOG).map_err(|error| (error.into(), "listening"))?;
        let made = fs::symlink_metadata(&temporary)
            .map_err(|error| (error, "looking at the new socket"))?;
        fs::rename(&temporary, path).map_err(|error| (error, "moving it into place"))?;
        let file = SocketFile {
            path: path.to_owned(),
            device: made.dev(),
            inode: made.ino(),
        };
        Ok(Listener {
            socket,
            file: Some(file),
            address: None,
        })
    };
    attempt().map_err(|(error, doing)| {
        let _perhaps_never_made = fs::remove_file(&temporary);
        BindError(format!("can't listen on socket {shown}: {error} ({doing})"))
    })
}

/// A name in the same directory, so that the socket can be moved into place in one step.
fn temporary_name(path: &Path) -> Result<PathBuf, BindError> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let own = format!(
        ".v{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let temporary = path.with_file_name(own);
    let longest = path.as_os_str().len().max(temporary.as_os_str().len());
    if longest > UNIX_PATH_MAX_BYTES {
        return Err(BindError(format!(
            "can't listen on socket {}: the path (or its temporary name) takes {longest} bytes, \
             the system allows {UNIX_PATH_MAX_BYTES}; choose a shorter directory",
            path.display()
        )));
    }
    Ok(temporary)
}

/// Makes the directory of the socket, mode 0755, if only that is missing (its own parent must be
/// there: a mistyped path makes no tree).
fn make_directory(path: &Path) -> Result<(), BindError> {
    let Some(directory) = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
    else {
        return Ok(());
    };
    if directory.exists() {
        return Ok(());
    }
    fs::DirBuilder::new()
        .mode(0o755)
        .create(directory)
        .map_err(|error| {
            BindError(format!(
                "can't make the directory of socket {}: {error}; make {} or choose another path",
                path.display(),
                directory.display()
            ))
        })
}

/// Makes sure that nothing alive or foreign lies at the path. A dead socket stays: the rename
/// replaces it in one step.
fn make_room(path: &Path) -> Result<(), BindError> {
    let shown = path.display();
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(BindError(format!("can't look at socket {shown}: {error}"))),
    };
    if !found.file_type().is_socket() {
        return Err(BindError(format!(
            "can't listen on {shown}: something that is not a socket lies there; it is left \
             alone, move it away or choose another path"
        )));
    }
    let knock = || -> rustix::io::Result<()> {
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)
    };
    match knock() {
        Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT) => Ok(()),
        // EAGAIN: its backlog is full, so it is alive.
        Ok(()) | Err(rustix::io::Errno::AGAIN) => Err(BindError(format!(
            "can't listen on socket {shown}: another daemon answers there; stop it first or \
             choose another path"
        ))),
        Err(error) => Err(BindError(format!(
            "can't tell whether a daemon still listens on socket {shown}: {error}; remove the \
             file if none does"
        ))),
    }
}

/// Looks a group up in /etc/group; a number stands for itself. (A static binary has no NSS.)
fn group_id(name: &str, path: &Path) -> Result<Gid, BindError> {
    if let Ok(number) = name.parse::<u32>() {
        return Ok(Gid::from_raw(number));
    }
    let wrong = |why: String| {
        BindError(format!(
            "can't give socket {} to group {name:?}: {why}; create the group or name another",
            path.display()
        ))
    };
    let table = fs::read_to_string("/etc/group")
        .map_err(|error| wrong(format!("/etc/group can't be read: {error}")))?;
    find_group(&table, name)
        .map(Gid::from_raw)
        .ok_or_else(|| wrong("no such group".to_owned()))
}

/// The number of a group in the form of /etc/group: `name:password:number:members`.
fn find_group(table: &str, name: &str) -> Option<u32> {
    table.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    /// A directory of its own for each test, removed at its end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("vw-{name}-{}", std::process::id()));
            let _leftover = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).expect("a scratch directory");
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _gone = fs::remove_dir_all(&self.0);
        }
    }

    fn unix(path: &Path, mode: u32, group: Option<&str>) -> Result<Listener, BindError> {
        let group = group.map(str::to_owned);
        Listener::bind(&ListenSpec::Unix {
            path: path.to_owned(),
            mode,
            group,
        })
    }

    #[test]
    fn mode_group_and_removal() {
        let scratch = Scratch::new("mode");
        let path = scratch.0.join("s");
        let own = rustix::process::getegid().as_raw();
        let listener = unix(&path, 0o640, Some(&own.to_string())).expect("bound");
        let found = fs::symlink_metadata(&path).expect("the socket");
        assert_eq!(found.mode() & 0o777, 0o640);
        assert_eq!(found.gid(), own);
        UnixStream::connect(&path).expect("it listens");
        drop(listener);
        assert_eq!(
            fs::read_dir(&scratch.0).expect("the directory").count(),
            0,
            "nothing stays"
        );
    }

    #[test]
    fn a_living_socket_is_not_robbed() {
        let scratch = Scratch::new("live");
        let path = scratch.0.join("s");
        let living = UnixListener::bind(&path).expect("bound");
        let error = unix(&path, 0o660, None).expect_err("refused").to_string();
        assert!(
            error.contains("another daemon answers") && error.contains("/s:"),
            "{error}"
        );
        UnixStream::connect(&path).expect("still the other's");
        drop(living);
        let ours = unix(&path, 0o660, None).expect("a dead socket is replaced");
        UnixStream::connect(&path).expect("ours");
        // A successor's socket is not removed by us.
        fs::remove_file(&path).expect("removed");
        let _successor = UnixListener::bind(&path).expect("bound");
        drop(ours);
        UnixStream::connect(&path).expect("the successor's");
    }

    #[test]
    fn what_is_no_socket_stays() {
        let scratch = Scratch::new("file");
        let path = scratch.0.join("s");
        fs::write(&path, "precious").expect("written");
        let error = unix(&path, 0o660, None).expect_err("refused").to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
        let link = scratch.0.join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        assert!(unix(&link, 0o660, None).is_err(), "nor is a link followed");
    }

    #[test]
    fn words_for_the_rest() {
        let scratch = Scratch::new("words");
        let long = unix(&scratch.0.join("x".repeat(120)), 0o660, None).expect_err("too long");
        assert!(long.to_string().contains("the system allows 107"), "{long}");
        let nobody = unix(&scratch.0.join("s"), 0o660, Some("no-such-group")).expect_err("unknown");
        assert!(nobody.to_string().contains("no such group"), "{nobody}");
        let nowhere = unix(&scratch.0.join("no/no/s"), 0o660, None).expect_err("no directory");
        assert!(
            nowhere.to_string().contains("can't make the directory"),
            "{nowhere}"
        );
        let made = unix(&scratch.0.join("made/s"), 0o660, None).expect("bound");
        let mode = fs::metadata(scratch.0.join("made"))
            .expect("a directory")
            .mode()
            & 0o777;
        assert_eq!(mode & !0o755, 0, "at most 0755: {mode:o}");
        drop(made);
        let one = Listener::bind(&ListenSpec::Tcp(([127, 0, 0, 1], 0).into())).expect("bound");
        let taken = one.tcp_address().expect("TCP");
        let two = Listener::bind(&ListenSpec::Tcp(taken))
            .expect_err("taken")
            .to_string();
        assert!(
            two.contains(&taken.to_string()) && two.contains("another process"),
            "{two}"
        );
    }

    #[test]
    fn groups_by_name() {
        let table = "root:x:0:\ndisk:x:6:a,b\nodd\n";
        assert_eq!(find_group(table, "disk"), Some(6));
        assert_eq!(find_group(table, "dis"), None);
        assert_eq!(find_group(table, "odd"), None);
    }
}
