//! Making volumes and snapshots what their records wish.
//!
//! A new image costs three round trips more than librbd's own: its id is read and its mark
//! written without opening it. Nothing is reported that was not seen or made by the same call.

use super::cluster::{EEXIST, EINVAL, IoCtx};
use super::image::{self, Image, Layout, Mode, Origin};
use super::look::{self, About, Header, Spot};
use super::mark::{self, LUKS2_HEADER_BYTES, Mark, Owner};
use super::{Desk, RbdSession, import};
use crate::backend::{Ctl, Error, Result, SnapshotState, VolumeState};
use crate::model::{ErrorKind, Known, Record, Source, SourceFormat, Step};
use std::sync::Arc;

/// How long an open image's users have to take over new limits, in milliseconds.
const NOTIFY_MS: u64 = 3000;

/// An image of ours, as it stands.
#[derive(Debug, Clone)]
pub struct Ours {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its header.
    pub header: Header,
    /// Its mark.
    pub mark: Mark,
}

impl Ours {
    /// What is reported of it.
    pub fn state(&self, desk: &Desk, did: bool) -> VolumeState {
        VolumeState {
            size_bytes: shown_bytes(self.header.size_bytes, self.mark.luks),
            used_bytes: None,
            handle: desk.handle(&self.name),
            wwn: self.header.wwn.clone(),
            image_id: Some(self.id.clone()),
            encrypted: self.mark.luks,
            has_parent: self.header.parent.is_some(),
            identity: Some(desk.identity.clone()),
            generation: self.mark.generation,
            did,
        }
    }
}

/// What a user sees of an image of that size.
pub fn shown_bytes(image_bytes: u64, luks: bool) -> u64 {
    if luks {
        image_bytes.saturating_sub(LUKS2_HEADER_BYTES)
    } else {
        image_bytes
    }
}

fn image_bytes(record: &Record, luks: bool) -> u64 {
    let wished = record.volume().map_or(0, |volume| volume.size_bytes);
    let header = if luks { LUKS2_HEADER_BYTES } else { 0 };
    wished.saturating_add(511) / 512 * 512 + header
}

fn wants_luks(record: &Record) -> bool {
    record.volume().is_some_and(|v| v.encryption.is_some())
}

impl RbdSession {
    /// The image of a record if it is in its place and ours; `None` if there is nothing or only
    /// a remnant.
    fn ours(&self, desk: &Desk, record: &Record) -> Result<Option<Ours>> {
        match desk.find(record)? {
            Spot::Named { id, name, header } => {
                let Some(header) = header else {
                    return Ok(None);
                };
                match header.owner(&id, &self.config().instance, Some(record.image)) {
                    Owner::Ours(mark) => Ok(Some(Ours {
                        id,
                        name,
                        header,
                        mark,
                    })),
                    Owner::Unmarked => Ok(None),
                    Owner::Foreign(words) => Err(desk.foreign(&words)),
                }
            }
            Spot::Trash { .. } | Spot::Lost { .. } | Spot::Nowhere => Ok(None),
        }
    }

    /// The same, where nothing else will do.
    pub(super) fn must_be_ours(&self, desk: &Desk, record: &Record) -> Result<Ours> {
        self.ours(desk, record)?.ok_or_else(|| {
            Error::new(
                ErrorKind::Gone,
                "look",
                format!("{}: it is not in its place, or not ours", desk.title),
            )
        })
    }

    pub(super) fn make(&self, step: Step, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let desk = self.desk(record)?;
        match step {
            Step::Create => self.create(&desk, record, ctl),
            Step::Import => self.import(&desk, record, ctl),
            Step::Encrypt => self.encrypt(&desk, record),
            _ => {
                let ours = self.must_be_ours(&desk, record)?;
                self.update(&desk, record, ours, ctl)
            }
        }
    }

    fn create(&self, desk: &Desk, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        // A first create looks only if it must: the name was seen to be free.
        if record.known != Known::Free
            && let Some(ours) = self.ours(desk, record)?
        {
            return self.update(desk, record, ours, ctl);
        }
        for last in [false, true] {
            match self.create_image(desk, record, ctl) {
                Err(error) if error.errno == Some(EEXIST) => {
                    if let Some(ours) = self.ours(desk, record)? {
                        self.drop_hidden_snap(record)?;
                        return self.update(desk, record, ours, ctl);
                    }
                    if record.known != Known::Free || last {
                        return Err(desk.foreign("it has no mark, and the name was not seen free"));
                    }
                    // Unmarked under a name that we saw free: our own remnant.
                    image::remove(&desk.io, &desk.name)
                        .about(&format!("the remnant of {}", desk.title))?;
                }
                other => return other,
            }
        }
        Err(desk.foreign("it has no mark"))
    }

    fn create_image(&self, desk: &Desk, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let layout = self.layout(record);
        let source = record.source();
        match source {
            None | Some(Source::File { .. }) => {
                let size = image_bytes(record, wants_luks(record));
                image::create(&desk.io, &desk.name, size, &layout).about(&desk.title)?;
            }
            Some(Source::Snapshot {
                name,
                uid,
                image,
                image_born,
                place,
            }) => {
                let io = self.io_of(place)?;
                let parent = mark::image_name(&self.config().prefix, image_born.as_str(), *image);
                let snap = mark::snap_name(name.as_str(), *uid);
                let origin = Origin {
                    io: &io,
                    image: &parent,
                    snap: &snap,
                };
                image::clone(&origin, &desk.io, &desk.name, &layout)
                    .about(&format!("clone of {parent}@{snap} to {}", desk.title))?;
            }
            Some(Source::Volume {
                uid, born, place, ..
            }) => {
                let io = self.io_of(place)?;
                let parent = mark::image_name(&self.config().prefix, born.as_str(), *uid);
                self.clone_volume(desk, record, &io, &parent, &layout)?;
            }
        }
        let id = look::id_of(&desk.io, &desk.name)
            .about(&desk.title)?
            .unwrap_or_default();
        let cloned = matches!(
            source,
            Some(Source::Snapshot { .. } | Source::Volume { .. })
        );
        self.mark_new(desk, record, &id, cloned, ctl)
    }

    /// Marks an image that was made just now, and says how it stands.
    fn mark_new(
        &self,
        desk: &Desk,
        record: &Record,
        id: &str,
        cloned: bool,
        ctl: &dyn Ctl,
    ) -> Result<VolumeState> {
        let mut mark = Mark::new(record, &self.config().instance, id);
        mark.filling = matches!(record.source(), Some(Source::File { .. }));
        let mut set = mark::metadata(record, self.config());
        let mut header = Header {
            size_bytes: image_bytes(record, wants_luks(record)),
            snap_ids: Vec::new(),
            parent: None,
            mark: None,
            wwn: set.get(mark::KEY_WWN).cloned(),
        };
        let mut remove = Vec::new();
        if cloned {
            // A clone inherits all metadata of its parent: mark, snapshots' records and limits.
            let inherited = look::metadata(&desk.io, id).about(&desk.title)?;
            let theirs = inherited.get(mark::KEY_MARK);
            mark.luks = theirs
                .and_then(|text| serde_json::from_str::<Mark>(text).ok())
                .is_some_and(|mark| mark.luks);
            remove = inherited
                .into_keys()
                .filter(|key| key.starts_with("volward.") || mark::KEYS_QOS.contains(&key.as_str()))
                .filter(|key| !set.contains_key(key))
                .collect();
            let seen = look::header(&desk.io, id).about(&desk.title)?;
            let wwn = header.wwn.take();
            header = seen.ok_or_else(|| desk.vanished())?;
            header.wwn = wwn;
            let wished = image_bytes(record, mark.luks);
            if header.size_bytes < wished {
                let image = Image::open(&desk.io, id, Mode::Write).about(&desk.title)?;
                image.grow(wished, ctl).about(&desk.title)?;
                header.size_bytes = wished;
            }
        }
        remove.retain(|key| key != mark::KEY_MARK);
        set.insert(mark::KEY_MARK.to_owned(), mark.text());
        look::set_metadata(&desk.io, id, &set, &remove).about(&desk.title)?;
        let ours = Ours {
            id: id.to_owned(),
            name: desk.name.clone(),
            header,
            mark,
        };
        let mut state = ours.state(desk, true);
        if wants_luks(record) {
            state.size_bytes = shown_bytes(ours.header.size_bytes, true);
        }
        Ok(state)
    }

    fn clone_volume(
        &self,
        desk: &Desk,
        record: &Record,
        io: &Arc<IoCtx>,
        parent: &str,
        layout: &Layout,
    ) -> Result<()> {
        let thing = format!("volume image {parent}");
        let id = look::id_of(io, parent)
            .about(&thing)?
            .ok_or_else(|| Error::new(ErrorKind::Gone, "look", format!("{thing}: not there")))?;
        let snap = mark::hidden_snap_name(&self.config().prefix, record.image);
        let image = Image::open(io, &id, Mode::Write).about(&thing)?;
        match image.snap_create(&snap) {
            Err(fail) if fail.errno != EEXIST => return Err(fail.about(thing)),
            _ => {}
        }
        let origin = Origin {
            io,
            image: parent,
            snap: &snap,
        };
        let cloned = image::clone(&origin, &desk.io, &desk.name, layout)
            .about(&format!("clone of {parent}"));
        // It moves out of sight and goes with its clone. A failure costs nothing but a snapshot
        // that the parent's reclaim removes.
        let _ = image.snap_remove(&snap);
        cloned
    }

    /// Removes the hidden snapshot that an attempt which was killed may have left.
    fn drop_hidden_snap(&self, record: &Record) -> Result<()> {
        let Some(Source::Volume {
            uid, born, place, ..
        }) = record.source()
        else {
            return Ok(());
        };
        let io = self.io_of(place)?;
        let parent = mark::image_name(&self.config().prefix, born.as_str(), *uid);
        let snap = mark::hidden_snap_name(&self.config().prefix, record.image);
        if let Some(id) = look::id_of(&io, &parent).about(&parent)?
            && let Ok(image) = Image::open(&io, &id, Mode::Write)
        {
            let _ = image.snap_remove(&snap);
        }
        Ok(())
    }

    /// Grows it, sets limits, and writes the mark of this generation.
    pub(super) fn update(
        &self,
        desk: &Desk,
        record: &Record,
        mut ours: Ours,
        ctl: &dyn Ctl,
    ) -> Result<VolumeState> {
        let mut did = false;
        let pending_luks = wants_luks(record) && !ours.mark.luks;
        let wished = image_bytes(record, ours.mark.luks || pending_luks);
        if ours.header.size_bytes < wished {
            let image = Image::open(&desk.io, &ours.id, Mode::Write).about(&desk.title)?;
            image.grow(wished, ctl).about(&desk.title)?;
            ours.header.size_bytes = wished;
            did = true;
        }
        let before = look::metadata(&desk.io, &ours.id).about(&desk.title)?;
        let mut set = mark::metadata(record, self.config());
        ours.mark.generation = record.generation;
        ours.mark.carrier = false;
        set.insert(mark::KEY_MARK.to_owned(), ours.mark.text());
        let remove: Vec<String> = mark::KEYS_QOS
            .iter()
            .map(|key| (*key).to_owned())
            .filter(|key| before.contains_key(key) && !set.contains_key(key))
            .collect();
        ours.header.wwn = set.get(mark::KEY_WWN).cloned();
        set.retain(|key, value| before.get(key) != Some(value));
        if !set.is_empty() || !remove.is_empty() {
            look::set_metadata(&desk.io, &ours.id, &set, &remove).about(&desk.title)?;
            did = true;
        }
        let limits = |key: &String| mark::KEYS_QOS.contains(&key.as_str());
        if !remove.is_empty() || set.keys().any(limits) {
            // Those who have it open read the limits again. They may take their time.
            let _ = desk.io.notify(&look::header_object(&ours.id), NOTIFY_MS);
        }
        let mut state = ours.state(desk, did);
        if pending_luks {
            state.size_bytes = shown_bytes(ours.header.size_bytes, true);
        }
        Ok(state)
    }

    fn encrypt(&self, desk: &Desk, record: &Record) -> Result<VolumeState> {
        let mut ours = self.must_be_ours(desk, record)?;
        if ours.mark.luks {
            return Ok(ours.state(desk, false));
        }
        let key_id = record.volume().and_then(|v| v.encryption.clone());
        let key_id = key_id.unwrap_or_default();
        let Some(path) = self.config().keys.get(&key_id) else {
            return Err(Error::new(
                ErrorKind::Invalid,
                "encrypt",
                format!("key {key_id}: the configuration has no [keys.{key_id}]"),
            ));
        };
        let mut key = std::fs::read(path).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(EINVAL);
            Error::of_errno(errno, "read", format!("key {key_id}: its file: {error}"))
        })?;
        if key.last() == Some(&b'\n') {
            key.pop();
        }
        let image = Image::open(&desk.io, &ours.id, Mode::Write).about(&desk.title)?;
        let formatted = image.format_luks2(&key).about(&desk.title);
        // It must not be found in memory or in a core dump later.
        key.fill(0);
        std::hint::black_box(&key);
        formatted?;
        drop(image);
        ours.mark.luks = true;
        self.write_mark(desk, &ours)?;
        Ok(ours.state(desk, true))
    }

    pub(super) fn write_mark(&self, desk: &Desk, ours: &Ours) -> Result<()> {
        let set = [(mark::KEY_MARK.to_owned(), ours.mark.text())].into();
        look::set_metadata(&desk.io, &ours.id, &set, &[]).about(&desk.title)
    }

    fn import(&self, desk: &Desk, record: &Record, ctl: &dyn Ctl) -> Result<VolumeState> {
        let Some(Source::File { path, format }) = record.source() else {
            return self.create(desk, record, ctl);
        };
        if *format != SourceFormat::Raw {
            let words = "only raw files can be imported into RBD; convert it with qemu-img";
            return Err(Error::new(
                ErrorKind::Invalid,
                "import",
                format!("{path}: {words}"),
            ));
        }
        let wished = record.volume().map_or(0, |v| v.size_bytes);
        let file = import::open(path, &self.config().import_dirs, wished)?;
        let (mut ours, fresh) = match self.ours(desk, record)? {
            Some(ours) if !ours.mark.filling => return self.update(desk, record, ours, ctl),
            Some(ours) => (ours, false),
            None => {
                self.create(desk, record, ctl)?;
                (self.must_be_ours(desk, record)?, true)
            }
        };
        let image = Image::open(&desk.io, &ours.id, Mode::Write).about(&desk.title)?;
        if !fresh {
            // What an earlier attempt wrote may be of another state of the file.
            import::discard_all(&image, ours.header.size_bytes, &desk.title, ctl)?;
        }
        import::fill(&image, &file, path, &desk.title, ctl)?;
        drop(image);
        ours.mark.filling = false;
        self.write_mark(desk, &ours)?;
        Ok(ours.state(desk, true))
    }

    pub(super) fn snapshot(&self, record: &Record) -> Result<SnapshotState> {
        let desk = self.desk(record)?;
        let ours = self.must_be_ours(&desk, record)?;
        let snap = mark::snap_name(record.name.as_str(), record.id.uid());
        let key = format!("{}{}", mark::KEY_SNAPSHOT, record.id.uid());
        let set = [(key, mark::record_text(record))].into();
        look::set_metadata(&desk.io, &ours.id, &set, &[]).about(&desk.title)?;
        let image = Image::open(&desk.io, &ours.id, Mode::Write).about(&desk.title)?;
        let did = match image.snap_create(&snap) {
            Ok(()) => true,
            Err(fail) if fail.errno == EEXIST => false,
            Err(fail) => return Err(fail.about(format!("snapshot {}@{snap}", desk.title))),
        };
        drop(image);
        let header = look::header(&desk.io, &ours.id).about(&desk.title)?;
        let header = header.ok_or_else(|| desk.vanished())?;
        let snaps = look::snapshots(&desk.io, &ours.id, &header.snap_ids).about(&desk.title)?;
        let found = snaps.iter().find(|s| s.name == snap).ok_or_else(|| {
            let words = format!(
                "snapshot {}@{snap}: not there after it was made",
                desk.title
            );
            Error::new(ErrorKind::Transient, "rbd_snap_create", words)
        })?;
        Ok(SnapshotState {
            size_bytes: shown_bytes(found.size_bytes, ours.mark.luks),
            identity: Some(desk.identity.clone()),
            did,
        })
    }

    fn layout(&self, record: &Record) -> Layout {
        let class = self.config().classes.get(&record.place.class);
        let order = class
            .and_then(|class| class.object_size)
            .map(|bytes| u64::from(bytes.trailing_zeros()));
        Layout {
            features: Some(class.and_then(|class| class.features).unwrap_or(61)),
            order,
            data_pool: record.place.data_pool.clone(),
        }
    }
}
