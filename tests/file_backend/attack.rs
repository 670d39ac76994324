//! Links, pipes and paths that lead elsewhere.

use crate::common::records::{made_from, seen, snapshot, volume};
use crate::scratch::Scratch;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use volward::backend::{Result, Unwatched, VolumeState};
use volward::model::{ErrorKind, Known, Record, Source, SourceFormat, Step};

/// A directory outside of the root with a file that nobody may touch.
fn outside(scratch: &Scratch) -> std::path::PathBuf {
    let outside = scratch.directory.join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("image"), b"precious").unwrap();
    fs::write(outside.join("meta.json"), b"precious").unwrap();
    outside
}

fn assert_precious(outside: &Path) {
    for name in ["image", "meta.json"] {
        assert_eq!(fs::read(outside.join(name)).unwrap(), b"precious");
    }
}

#[test]
fn a_link_in_place_of_a_volume_is_not_followed() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let outside = outside(&scratch);
    let mut record = volume("db-01", 1, 4096, &scratch.place());
    let place = scratch.image_of(&record).parent().unwrap().to_owned();
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    session.probe(&Unwatched).unwrap_err(); // Not empty, no id file: not a root of ours.
    fs::remove_dir(place.parent().unwrap()).unwrap();
    session.probe(&Unwatched).unwrap();
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    symlink(&outside, &place).unwrap();
    for known in [Known::Free, Known::Live] {
        record.known = known;
        let error = session
            .ensure_volume(Step::Create, &record, &Unwatched)
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::AlreadyExists, "{error}");
        let _ = session.retire_volume(&record, &Unwatched);
        let _ = session.restore(&record, &Unwatched);
        let _ = session.reclaim(&record, &Unwatched);
        assert_precious(&outside);
        assert!(fs::symlink_metadata(&place).unwrap().is_symlink());
    }
}

#[test]
fn a_link_in_place_of_an_image_or_a_directory_is_not_followed() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    let outside = outside(&scratch);
    let record = volume("db-01", 1, 4096, &scratch.place());
    let state = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap();
    let mut record = seen(record, &state);
    fs::remove_file(&state.handle).unwrap();
    symlink(outside.join("image"), &state.handle).unwrap();
    record.generation = 2;
    record.volume_mut().unwrap().size_bytes = 8192;
    let grown = session.ensure_volume(Step::Update, &record, &Unwatched);
    assert_eq!(grown.unwrap_err().kind, ErrorKind::Invalid);
    let kept = session.ensure_snapshot(&snapshot("kept", 2, &record), &Unwatched);
    assert_eq!(kept.unwrap_err().kind, ErrorKind::Invalid);
    assert_precious(&outside);
    // The directory of all volumes, and the one where new ones are made.
    for kind in ["volumes", "tmp", "trash", "snapshots"] {
        let path = Path::new(scratch.root()).join(kind);
        let _ = fs::remove_dir_all(&path);
        symlink(&outside, &path).unwrap();
    }
    let other = volume("db-02", 3, 4096, &scratch.place());
    let error = session
        .ensure_volume(Step::Create, &other, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
    assert!(session.retire_volume(&record, &Unwatched).is_err());
    assert!(session.reclaim(&record, &Unwatched).is_err());
    assert!(session.survey(&Unwatched).is_err());
    assert_precious(&outside);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 2);
}

#[test]
fn what_is_not_ours_in_a_remnant_keeps_it() {
    let scratch = Scratch::new();
    let mut session = scratch.session();
    session.probe(&Unwatched).unwrap();
    let record = volume("db-01", 1, 4096, &scratch.place());
    let image = scratch.image_of(&record);
    fs::create_dir_all(image.parent().unwrap()).unwrap();
    fs::write(&image, b"a").unwrap();
    fs::write(image.with_file_name("thesis.tex"), b"precious").unwrap();
    let error = session
        .ensure_volume(Step::Create, &record, &Unwatched)
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::AlreadyExists, "{error}");
    assert!(error.message.contains("thesis.tex"), "{error}");
    assert!(image.exists());
}

fn import(scratch: &Scratch, path: &str, format: SourceFormat) -> Result<VolumeState> {
    let record: Record = volume("db-01", 1, 1 << 20, &scratch.place());
    let path = path.to_owned();
    let record = made_from(record, Source::File { path, format });
    scratch
        .session()
        .ensure_volume(Step::Import, &record, &Unwatched)
}

#[test]
fn only_regular_raw_files_below_the_allowed_directories_are_imported() {
    let scratch = Scratch::new();
    let imports = scratch.imports();
    let secret = scratch.directory.join("secret");
    fs::write(&secret, b"secret").unwrap();
    fs::write(imports.join("good"), b"good").unwrap();
    fs::create_dir(imports.join("sub")).unwrap();
    symlink(&secret, imports.join("link")).unwrap();
    symlink(&scratch.directory, imports.join("sub/up")).unwrap();
    symlink("/dev", imports.join("dev")).unwrap();
    fs::create_dir(scratch.directory.join("import-evil")).unwrap();
    fs::write(scratch.directory.join("import-evil/a"), b"secret").unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        imports.join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let base = imports.to_str().unwrap();
    for bad in [
        "link",
        "sub/up/secret",
        "../secret",
        "sub/../../secret",
        "pipe",
        "sub",
        "dev/zero",
        "",
        ".",
        "..",
    ] {
        let path = format!("{base}/{bad}");
        let error = import(&scratch, &path, SourceFormat::Raw).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{bad}: {error}");
    }
    for bad in [
        format!("{base}-evil/a"),
        secret.to_str().unwrap().to_owned(),
        "/dev/zero".to_owned(),
        "import/good".to_owned(),
        String::new(),
    ] {
        let error = import(&scratch, &bad, SourceFormat::Raw).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{bad}: {error}");
    }
    let good = format!("{base}/good");
    let error = import(&scratch, &good, SourceFormat::Qcow2).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(scratch.all().is_empty(), "{:?}", scratch.all());
    import(&scratch, &good, SourceFormat::Raw).unwrap();
}
