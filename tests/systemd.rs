//! What systemd hears from a real daemon on a real notify socket.

#![allow(clippy::unwrap_used)] // a test may fail by panicking, its helpers as well
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Unit {
    dir: PathBuf,
    socket: UnixDatagram,
    child: Child,
}

impl Unit {
    fn start() -> Unit {
        let dir = std::env::temp_dir().join(format!("volward-notify-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let socket = UnixDatagram::bind(dir.join("notify")).unwrap();
        let patience = Some(Duration::from_secs(30));
        socket.set_read_timeout(patience).unwrap();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let at = dir.display();
        let config = format!(
            "[api]\nlisten = \"unix:{at}/api.sock\"\n[health]\nlisten = \"127.0.0.1:{port}\"\n\
             [store]\npath = \"{at}/volward.db\"\n[backend]\nkind = \"sim\"\n"
        );
        std::fs::write(dir.join("volward.toml"), config).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_volward"))
            .args(["serve", "--config"])
            .arg(dir.join("volward.toml"))
            .env("NOTIFY_SOCKET", dir.join("notify"))
            .env("WATCHDOG_USEC", "400000")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(dir.join("log")).unwrap())
            .spawn()
            .unwrap();
        Unit { dir, socket, child }
    }

    /// Waits for a line; those before it are passed over, but for `unless`.
    fn hear(&self, wanted: &str, unless: &str) {
        let mut heard = Vec::new();
        let mut buffer = [0; 4096];
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            let Ok(n) = self.socket.recv(&mut buffer) else {
                break;
            };
            let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
            for line in text.lines() {
                assert_ne!(line, unless, "before {wanted}");
                if line == wanted {
                    return;
                }
                heard.push(line.to_owned());
            }
        }
        let log = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        heard.dedup();
        panic!("systemd never heard {wanted}, only {heard:?}\n{log}");
    }

    fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn it_hears_of_the_start_the_beats_a_reload_and_the_end() {
    let mut unit = Unit::start();
    unit.hear("READY=1", "STOPPING=1");
    // More than one, so that it isn't only fed at the start.
    for _ in 0..3 {
        unit.hear("WATCHDOG=1", "STOPPING=1");
    }
    unit.signal("HUP");
    unit.hear("RELOADING=1", "STOPPING=1");
    unit.hear("READY=1", "STOPPING=1");
    unit.signal("TERM");
    unit.hear("STOPPING=1", "READY=1");
    let ended = unit.child.wait().unwrap();
    assert!(ended.success(), "{ended}");
}
