//! The command line against a small fake daemon: exit codes, waiting, output.

#![allow(clippy::unwrap_used)] // a test may fail by panicking, its helpers as well
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Dir {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("volward-cli-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Dir(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Answers one connection per line of the script, and gives back the requests.
fn daemon(dir: &Dir, answers: Vec<(u16, &'static str)>) -> (String, JoinHandle<Vec<String>>) {
    let path = dir.0.join("api.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let serve = |(status, body): (u16, &str)| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            loop {
                let n = stream.read(&mut buffer).unwrap();
                assert!(n > 0, "the command sent fewer requests than expected");
                request.extend_from_slice(&buffer[..n]);
                let text = String::from_utf8_lossy(&request).into_owned();
                let Some((head, sent)) = text.split_once("\r\n\r\n") else {
                    continue;
                };
                let length = head
                    .lines()
                    .find_map(|l| l.strip_prefix("Content-Length: "));
                if sent.len() >= length.unwrap().parse().unwrap() {
                    break;
                }
            }
            // In two chunks, as tiny_http sends what is long.
            let (a, b) = body.split_at(body.len() / 2);
            let (la, lb) = (a.len(), b.len());
            write!(
                stream,
                "HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n{la:x}\r\n{a}\r\n{lb:x}\r\n{b}\r\n0\r\n\r\n"
            )
            .unwrap();
            String::from_utf8(request).unwrap()
        };
        answers.into_iter().map(serve).collect()
    });
    (path.to_str().unwrap().to_owned(), thread)
}

/// The requests of a command that has ended. A daemon that still waits for one is let go, and fails.
fn requests(api: &str, thread: JoinHandle<Vec<String>>) -> Vec<String> {
    while !thread.is_finished() {
        drop(UnixStream::connect(api));
        std::thread::yield_now();
    }
    thread.join().unwrap()
}

fn volward(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_volward"));
    command
        .args(args)
        .env_remove("VOLWARD_API")
        .env_remove("VOLWARD_TOKEN_FILE");
    command.stdin(Stdio::null()).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const CREATING: &str = r#"{"name":"a","uid":"U1","generation":1,"observed_generation":0,"status":{"phase":"creating","step":"create","progress":{"done":1,"total":2}},"deletion_requested_at":null}"#;
const READY: &str = r#"{"name":"a","uid":"U1","generation":1,"observed_generation":1,"status":{"phase":"ready","size_bytes":5},"deletion_requested_at":null}"#;
const FAILED: &str = r#"{"name":"a","uid":"U1","generation":1,"observed_generation":1,"status":{"phase":"failed","reason":"Forbidden","message":"no\u001b[31m cap"},"deletion_requested_at":null}"#;
const DELETED: &str = r#"{"name":"a","uid":"U1","generation":2,"observed_generation":2,"status":{"phase":"deleted"},"deletion_requested_at":"x"}"#;

#[test]
fn answers_become_exit_codes() {
    for (status, expected) in [(404, 4), (409, 5), (422, 2), (503, 1), (500, 1)] {
        let dir = Dir::new();
        let (api, thread) = daemon(&dir, vec![(status, r#"{"detail":"volume a: so it is"}"#)]);
        let output = volward(&["--api", &api, "volume", "get", "a"]);
        assert_eq!(code(&output), expected, "{status}");
        assert!(err(&output).contains("volume a: so it is"));
        requests(&api, thread);
    }
    let output = volward(&["--api", "/nowhere/api.sock", "status"]);
    assert_eq!(code(&output), 3);
    assert!(err(&output).contains("/nowhere/api.sock"));
    assert_eq!(code(&volward(&["--api", "nonsense", "status"])), 2);
    assert_eq!(code(&volward(&["volume", "explode"])), 2);
    assert_eq!(code(&volward(&["--help"])), 0);
}

#[test]
fn waiting_goes_on_until_it_is_settled() {
    let dir = Dir::new();
    let (api, thread) = daemon(&dir, vec![(202, CREATING), (200, CREATING), (200, READY)]);
    let args = [
        "--api", &api, "--output", "json", "volume", "create", "a", "--size", "5B", "--wait", "1m",
    ];
    let output = volward(&args);
    assert_eq!(code(&output), 0, "{}", err(&output));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["status"]["phase"], "ready");
    let requests = requests(&api, thread);
    assert!(requests[0].starts_with("POST /v1/volumes HTTP/1.1\r\n"));
    assert!(requests[0].ends_with(r#"{"name":"a","size":"5B"}"#));
    assert!(requests[2].starts_with("GET /v1/volumes/a?uid=U1&wait="));
}

#[test]
fn waiting_ends_with_failure_and_with_time() {
    let dir = Dir::new();
    let (api, thread) = daemon(&dir, vec![(202, CREATING), (200, FAILED)]);
    let output = volward(&[
        "--api", &api, "volume", "create", "a", "--size", "5B", "--wait",
    ]);
    assert_eq!(code(&output), 1);
    assert!(err(&output).contains("Forbidden") && !err(&output).contains('\u{1b}'));
    assert!(!output.stdout.contains(&0x1b));
    requests(&api, thread);

    let dir = Dir::new();
    let (api, thread) = daemon(&dir, vec![(202, CREATING)]);
    let output = volward(&[
        "--api", &api, "volume", "create", "a", "--size", "5B", "--wait", "0s",
    ]);
    assert_eq!(code(&output), 6);
    requests(&api, thread);
}

#[test]
fn delete_names_the_uid_that_it_saw() {
    let dir = Dir::new();
    let (api, thread) = daemon(&dir, vec![(200, READY), (202, DELETED)]);
    assert_eq!(
        code(&volward(&[
            "--api", &api, "volume", "delete", "a", "--wait"
        ])),
        0
    );
    assert!(requests(&api, thread)[1].starts_with("DELETE /v1/volumes/a?uid=U1 "));
}

#[test]
fn lists_follow_pages_and_events_survive_a_gap() {
    let dir = Dir::new();
    let (api, thread) = daemon(
        &dir,
        vec![
            (200, r#"{"items":[{"name":"a"}],"next":"a"}"#),
            (200, r#"{"items":[{"name":"b"}],"next":null}"#),
        ],
    );
    let output = volward(&["--api", &api, "volume", "list"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        text.lines()
            .filter_map(|l| l.split_whitespace().next())
            .collect::<Vec<_>>(),
        ["NAME", "a", "b"]
    );
    assert!(requests(&api, thread)[1].contains("&after=a "));

    let dir = Dir::new();
    let (api, thread) = daemon(
        &dir,
        vec![
            (410, r#"{"oldest":9}"#),
            (200, r#"{"items":[{"seq":9}],"next":9}"#),
            (200, r#"{"items":[],"next":9}"#),
        ],
    );
    assert_eq!(
        code(&volward(&["--api", &api, "events", "--after", "1"])),
        0
    );
    assert!(requests(&api, thread)[1].contains("after=8"));
}

#[test]
fn the_token_comes_from_a_file() {
    let dir = Dir::new();
    let token = dir.file("token", "s3cret\n");
    let (api, thread) = daemon(&dir, vec![(200, "{}")]);
    assert_eq!(
        code(&volward(&["--api", &api, "--token-file", &token, "status"])),
        0
    );
    assert!(requests(&api, thread)[0].contains("Authorization: Bearer s3cret\r\n"));
    assert_eq!(
        code(&volward(&[
            "--api",
            &api,
            "--token-file",
            "/nowhere",
            "status"
        ])),
        2
    );
}

#[test]
fn bad_configurations_end_with_2_and_words() {
    let dir = Dir::new();
    let good = format!(
        "[api]\nlisten='unix:{0}/a.sock'\n[store]\npath='{0}/v.db'\n[backend.file]\nroot='{0}/volumes'\n",
        dir.0.display()
    );
    let file = dir.file("good.toml", &good);
    let output = volward(&["check-config", "--config", &file]);
    assert_eq!(code(&output), 0, "{}", err(&output));
    let open = dir.file("open", "secret");
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let table = [
        (
            "[lanes.create]\nthread = 4\n".to_owned(),
            "did you mean \"threads\"",
        ),
        (format!("[keys.k]\nfile='{open}'\n"), "chmod 0600"),
        (
            "[keys.k]\nfile='/nowhere/key'\n".to_owned(),
            "/nowhere/key can't be read",
        ),
    ];
    for (text, words) in table {
        let file = dir.file("bad.toml", &(good.clone() + &text));
        let output = volward(&["check-config", "--config", &file]);
        assert_eq!(code(&output), 2, "{text}");
        assert!(err(&output).contains(words), "{}", err(&output));
    }
    assert_eq!(code(&volward(&["serve", "--config", "/nowhere.toml"])), 2);
}

#[test]
fn manual_and_completions_are_printed() {
    let man = volward(&["man"]);
    assert!(String::from_utf8_lossy(&man.stdout).contains(".TH volward"));
    let bash = volward(&["completions", "bash"]);
    assert!(String::from_utf8_lossy(&bash.stdout).contains("_volward"));
}
