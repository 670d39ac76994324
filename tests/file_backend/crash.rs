//! The process is killed between any two system calls that change something. Then the same call
//! again, by a new process, brings the object where it should be, and nothing is left over.

use crate::common::records::{from_snapshot, made_from, snapshot, volume};
use crate::scratch::Scratch;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use volward::backend::file::FAILPOINTS;
use volward::backend::{Found, Reclaimed, Retired, Session, Unwatched};
use volward::model::{Known, Record, Step};

const SIGABRT: i32 = 6;

/// A life of a volume, its snapshot and a clone of that.
const LIFE: [&str; 11] = [
    "create",
    "snapshot",
    "clone",
    "grow",
    "trash",
    "restore",
    "trash",
    "reclaim",
    "unsnapshot",
    "trash-clone",
    "reclaim-clone",
];

fn records(scratch: &Scratch) -> (Record, Record, Record) {
    let source = volume("db-01", 1, 1 << 20, &scratch.place());
    let kept = snapshot("kept", 2, &source);
    let clone = volume("clone", 3, 1 << 20, &scratch.place());
    let clone = made_from(clone, from_snapshot(&kept));
    (source, kept, clone)
}

fn known(mut record: Record, known: Known) -> Record {
    record.known = known;
    record
}

/// What the daemon does in that step.
fn live(scratch: &Scratch, session: &mut dyn Session, step: &str) {
    let c = &Unwatched;
    let (mut source, kept, clone) = records(scratch);
    match step {
        "create" => {
            session.ensure_volume(Step::Create, &source, c).unwrap();
        }
        "snapshot" => {
            session.ensure_snapshot(&kept, c).unwrap();
        }
        "clone" => {
            session.ensure_volume(Step::Create, &clone, c).unwrap();
        }
        "grow" => {
            source.generation = 2;
            source.volume_mut().unwrap().size_bytes = 2 << 20;
            let source = known(source, Known::Live);
            let state = session.ensure_volume(Step::Update, &source, c).unwrap();
            assert_eq!((state.size_bytes, state.generation), (2 << 20, 2));
        }
        "restore" => {
            source.generation = 3;
            let source = known(source, Known::Trashed);
            let state = session.restore(&source, c).unwrap();
            assert_eq!((state.size_bytes, state.generation), (2 << 20, 3));
        }
        "trash" | "trash-clone" => {
            let record = if step == "trash" { source } else { clone };
            let record = known(record, Known::Live);
            let how = session.retire_volume(&record, c).unwrap();
            assert_eq!(how, Retired::Trashed { image_id: None });
        }
        "reclaim" | "reclaim-clone" => {
            let record = if step == "reclaim" { source } else { clone };
            let record = known(record, Known::Trashed);
            assert_eq!(session.reclaim(&record, c), Ok(Reclaimed::Done));
        }
        "unsnapshot" => {
            let kept = known(kept, Known::Live);
            assert_eq!(session.retire_snapshot(&kept, c), Ok(Retired::Gone));
        }
        other => panic!("no step {other}"),
    }
}

/// Not a test of its own: the process that is killed. Does nothing unless it was told what.
#[test]
fn crash_child() {
    let Ok(step) = std::env::var("VOLWARD_TEST_STEP") else {
        return;
    };
    let directory = PathBuf::from(std::env::var("VOLWARD_TEST_DIRECTORY").unwrap());
    let scratch = Scratch::at(directory, "root");
    live(&scratch, scratch.session().as_mut(), &step);
    // The directory is the parent's.
    std::mem::forget(scratch);
}

fn child(scratch: &Scratch, step: &str, failpoint: Option<&str>) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "crash::crash_child", "--test-threads=1"])
        .env("VOLWARD_TEST_STEP", step)
        .env("VOLWARD_TEST_DIRECTORY", &scratch.directory)
        .env_remove("VOLWARD_FAILPOINT");
    if let Some(failpoint) = failpoint {
        command.env("VOLWARD_FAILPOINT", failpoint);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let aborted = output.status.signal() == Some(SIGABRT);
    assert!(
        output.status.success() || (failpoint.is_some() && aborted),
        "{step} at {failpoint:?}: {text}"
    );
    output.status
}

/// A look after a kill answers, and finds the object in one place at most.
fn assert_findable(scratch: &Scratch) {
    let mut session = scratch.session();
    let (source, kept, clone) = records(scratch);
    for record in [source, kept, clone] {
        let found = session.inspect(&record, &Unwatched).unwrap();
        assert!(
            !matches!(found, Some(Found::Foreign(_) | Found::Unmarked)),
            "{found:?}"
        );
        let uid = record.id.uid().lower();
        let of_it = |line: &String| line.contains(&uid) && !line.starts_with("tmp/");
        let places = scratch.all().into_iter().filter(|line| of_it(line));
        assert!(places.count() <= 1, "{:?}", scratch.all());
    }
}

#[test]
fn every_step_survives_a_kill_anywhere() {
    let mut never: BTreeSet<&str> = FAILPOINTS.iter().copied().collect();
    for failpoint in FAILPOINTS {
        // The second time it is reached is another step, or another file.
        for nth in 1..=2 {
            let scratch = Scratch::new();
            let armed = format!("{failpoint}:{nth}");
            for step in LIFE {
                let status = child(&scratch, step, Some(&armed));
                if status.signal() == Some(SIGABRT) {
                    never.remove(failpoint);
                    assert_findable(&scratch);
                    // As often as it dies: a second kill at the same place as well.
                    child(&scratch, step, Some(failpoint));
                    assert_findable(&scratch);
                    child(&scratch, step, None);
                }
                if step == "snapshot" && nth == 1 {
                    let (source, kept, _) = records(&scratch);
                    assert!(scratch.image_of(&source).exists());
                    assert!(scratch.image_of(&kept).exists());
                }
            }
            assert!(scratch.all().is_empty(), "{armed}: {:?}", scratch.all());
            // The daemon probes when it starts.
            scratch.session().probe(&Unwatched).unwrap();
            let root = crate::scratch::list(std::path::Path::new(scratch.root()));
            assert_eq!(root.len(), 5, "{armed}: {root:?}");
        }
    }
    assert!(never.is_empty(), "no step ever came to {never:?}");
}
