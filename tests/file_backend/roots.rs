//! Roots that vanish, are swapped, or are not ours.

use crate::common::records::{made_from, seen, volume};
use crate::scratch::Scratch;
use std::fs;
use std::path::Path;
use std::process::Command;
use volward::backend::file::FileBackend;
use volward::backend::{Backend, Session, Unwatched};
use volward::model::{ErrorKind, Lane, Record, Source, SourceFormat, Step};

/// A root with a volume in it, and the session that made it.
fn used() -> (Scratch, Box<dyn Session>, Record) {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let record = volume("db-01", 1, 4096, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let record = seen(record, &state);
    (scratch, session, record)
}

fn assert_nothing_goes(session: &mut dyn Session, record: &Record) {
    let c = &Unwatched;
    let mut kinds = vec![
        session.inspect(record, c).unwrap_err().kind,
        session.retire_volume(record, c).unwrap_err().kind,
        session.restore(record, c).unwrap_err().kind,
        session.reclaim(record, c).unwrap_err().kind,
        session.probe(c).unwrap_err().kind,
        session.survey(c).unwrap_err().kind,
    ];
    // A record that doesn't know its root yet finds it changed as well.
    let mut fresh = volume("db-09", 9, 4096, &record.place);
    fresh.place.identity = None;
    let made = session.ensure_volume(Step::Create, &fresh, c);
    kinds.push(made.unwrap_err().kind);
    assert!(
        kinds.iter().all(|k| *k == ErrorKind::Unreachable),
        "{kinds:?}"
    );
}

#[test]
fn a_survey_makes_no_root_of_an_empty_mount_point() {
    // As `volward rebuild` comes: with no records, so that nobody knows the root.
    let scratch = Scratch::new();
    let error = scratch.session().survey(&Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert_eq!(fs::read_dir(scratch.root()).unwrap().count(), 0);
    fs::remove_dir(scratch.root()).unwrap();
    let error = scratch.session().survey(&Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(!Path::new(scratch.root()).exists());
}

#[test]
fn an_unmounted_disk_is_no_new_root() {
    let (scratch, mut session, record) = used();
    let away = scratch.directory.join("away");
    fs::rename(scratch.root(), &away).unwrap();
    // Nothing there at all, then the empty mount point.
    assert_nothing_goes(session.as_mut(), &record);
    assert!(!Path::new(scratch.root()).exists(), "it was made anew");
    fs::create_dir(scratch.root()).unwrap();
    assert_nothing_goes(session.as_mut(), &record);
    // Nor for a process that was just started and knows it from its records.
    let mut config = scratch.config("ours");
    let identity = record.place.identity.clone().unwrap();
    config
        .identities
        .insert(scratch.root().to_owned(), identity);
    let started = FileBackend::new(config);
    let mut second = started.connect("local", Lane::Create, &Unwatched).unwrap();
    assert_nothing_goes(second.as_mut(), &record);
    assert_eq!(fs::read_dir(scratch.root()).unwrap().count(), 0);
    // It comes back, and all is well.
    fs::remove_dir(scratch.root()).unwrap();
    fs::rename(&away, scratch.root()).unwrap();
    assert!(session.inspect(&record, &Unwatched).unwrap().is_some());
    assert!(second.probe(&Unwatched).is_ok());
}

#[test]
fn another_disk_in_its_place_is_told_apart() {
    let (scratch, mut session, record) = used();
    let (other, _, theirs) = used();
    let away = scratch.directory.join("away");
    fs::rename(scratch.root(), away).unwrap();
    fs::rename(other.root(), scratch.root()).unwrap();
    let before = scratch.all();
    assert_nothing_goes(session.as_mut(), &record);
    assert_eq!(scratch.all(), before);
    assert_ne!(theirs.place.identity, record.place.identity);
}

#[test]
fn a_directory_with_something_in_it_is_no_new_root() {
    let scratch = Scratch::new();
    fs::write(Path::new(scratch.root()).join("thesis.tex"), b"precious").unwrap();
    let mut session = scratch.session();
    let error = session.probe(&Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(error.message.contains("thesis.tex"), "{error}");
    assert_eq!(fs::read_dir(scratch.root()).unwrap().count(), 1);
    fs::remove_file(Path::new(scratch.root()).join("thesis.tex")).unwrap();
    session.probe(&Unwatched).unwrap();
}

#[test]
fn a_damaged_id_file_stops_everything() {
    let (scratch, mut session, record) = used();
    let path = Path::new(scratch.root()).join("volward-root.json");
    for damage in [&b""[..], b"{", b"{\"volward\":\"root\"}", &[0; 512]] {
        fs::write(&path, damage).unwrap();
        assert_nothing_goes(session.as_mut(), &record);
    }
}

#[test]
fn workers_that_meet_in_a_new_root_give_it_one_id() {
    for _ in 0..8 {
        let scratch = Scratch::new();
        let probe = || {
            // Each its own process, as far as the backend can tell.
            let mut session = scratch.session();
            session.probe(&Unwatched).unwrap()
        };
        let found = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(probe)).collect();
            all.into_iter()
                .map(|one| one.join().unwrap())
                .collect::<Vec<_>>()
        });
        assert!(found.iter().all(|one| *one == found[0]), "{found:?}");
        let left = fs::read_dir(scratch.root()).unwrap().count();
        assert_eq!(left, 1, "more than the id file");
    }
}

/// A mount that goes with the test.
pub struct Mount(pub std::path::PathBuf);

impl Mount {
    /// `None`, with words, where mounting isn't possible.
    pub fn new(arguments: &[&str], at: &Path) -> Option<Mount> {
        fs::create_dir_all(at).unwrap();
        let done = Command::new("mount").args(arguments).arg(at).output();
        match done {
            Ok(output) if output.status.success() => Some(Mount(at.to_owned())),
            other => {
                eprintln!("not shown here: mount {arguments:?} doesn't work: {other:?}");
                None
            }
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(&self.0).status();
        assert!(
            std::thread::panicking() || done.is_ok_and(|status| status.success()),
            "{} is still mounted",
            self.0.display()
        );
    }
}

#[test]
fn a_full_disk_refuses_data_and_still_deletes() {
    let scratch = Scratch::new();
    let options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs"];
    let Some(_mount) = Mount::new(&options, Path::new(scratch.root())) else {
        return;
    };
    let mut session = scratch.session();
    let first = volume("db-01", 1, 1 << 30, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &first, &Unwatched)
        .unwrap();
    let first = seen(first, &state);
    let path = scratch.imports().join("large");
    fs::write(&path, vec![7u8; 4 << 20]).unwrap();
    let source = Source::File {
        path: path.to_str().unwrap().to_owned(),
        format: SourceFormat::Raw,
    };
    let second = made_from(volume("db-02", 2, 4 << 20, &scratch.place()), source);
    let before = scratch.all();
    let error = session
        .ensure_volume(Step::Import, &second, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoSpace, "{error}");
    // It doesn't sit on the space that it couldn't use.
    assert_eq!(scratch.all(), before);
    // Fill it to the last block, then delete.
    let filler = Path::new(scratch.root()).join("volumes/filler");
    let _ = fs::write(&filler, vec![1u8; 4 << 20]);
    session.retire_volume(&first, &Unwatched).unwrap();
    session.reclaim(&first, &Unwatched).unwrap();
    fs::remove_file(&filler).unwrap();
    assert!(scratch.all().is_empty());
}

#[test]
fn a_read_only_disk_answers_its_probe_with_words() {
    let (scratch, mut session, record) = used();
    let root = scratch.root().to_owned();
    let Some(_mount) = Mount::new(&["--bind", &root], Path::new(&root)) else {
        return;
    };
    let done = Command::new("mount")
        .args(["-o", "remount,bind,ro", &root])
        .status();
    assert!(done.unwrap().success());
    let error = session.probe(&Unwatched).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unreachable);
    assert!(error.message.contains("read-only"), "{error}");
    assert!(session.inspect(&record, &Unwatched).unwrap().is_some());
    let second = volume("db-02", 2, 4096, &scratch.place());
    let error = session
        .ensure_volume(Step::Create, &second, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
}
