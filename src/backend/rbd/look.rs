//! Finding out what is there: by name, by id, in the trash, and whose it is.
//!
//! Reads only, one object at a time, no image is opened and no list of a pool is read, except for
//! the trash when the id of a vanished image isn't known. "Not there" is said only after the pool
//! itself was seen to be there.

use super::cluster::{EBADMSG, Fail, IoCtx, Outcome};
use super::image::{self, Image, Mode};
use super::mark::{self, Owner};
use super::wire::{self, Decoder, Encoder, Linked, Snap};
use crate::backend::Result;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The head of an image, not one of its snapshots.
const NO_SNAP: u64 = u64::MAX - 1;
/// The most bytes of names that are shown as blockers.
const CHILDREN_SHOWN: usize = 16;
const DIRECTORY: &str = "rbd_directory";

/// What an image's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The image's size in bytes.
    pub size_bytes: u64,
    /// Its snapshots by number, those in the trash included.
    pub snap_ids: Vec<u64>,
    /// What it was cloned from and isn't flattened of.
    pub parent: Option<Linked>,
    /// Its mark, as it stands there.
    pub mark: Option<String>,
    /// Its world wide name.
    pub wwn: Option<String>,
}

/// Where an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Spot {
    /// Under a name. Without a header it is half made.
    Named {
        /// Its id; empty if its making stopped before it had one.
        id: String,
        /// The name: ours, or the one that somebody gave it.
        name: String,
        /// What its header says.
        header: Option<Header>,
    },
    /// In the trash. Without a header most of it is gone.
    Trash {
        /// Its entry.
        entry: image::Trashed,
        /// What its header says.
        header: Option<Header>,
    },
    /// Neither under a name nor in the trash, but its header is there: half removed.
    Lost {
        /// Its id.
        id: String,
        /// What its header says.
        header: Header,
    },
    /// Nowhere.
    Nowhere,
}

impl Header {
    /// Whose the image with this header is.
    pub fn owner(&self, id: &str, instance: &str, uid: Option<crate::model::Uid>) -> Owner {
        mark::owner(self.mark.as_deref(), id, instance, uid)
    }
}

/// The object that is an image's header.
pub fn header_object(id: &str) -> String {
    format!("rbd_header.{id}")
}

fn decoded<T>(op: &'static str, value: Option<T>) -> Outcome<T> {
    value.ok_or(Fail { op, errno: EBADMSG })
}

fn optional<T>(outcome: Outcome<T>) -> Outcome<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(fail) if fail.is_gone() => Ok(None),
        Err(fail) => Err(fail),
    }
}

/// Reads an image's header in one round trip; `None` if it isn't there.
pub fn header(io: &IoCtx, id: &str) -> Outcome<Option<Header>> {
    let head = Encoder::new().u64(NO_SNAP).done();
    let mark = Encoder::new().text(mark::KEY_MARK).done();
    let wwn = Encoder::new().text(mark::KEY_WWN).done();
    let asked = io.ask(
        &header_object(id),
        &[
            (c"get_size", &head),
            (c"get_snapcontext", &[]),
            (c"parent_get", &[]),
            (c"metadata_get", &mark),
            (c"metadata_get", &wwn),
        ],
    );
    let Some(answers) = optional(asked)? else {
        return Ok(None);
    };
    let mut answers = answers.into_iter();
    let mut next = || {
        answers.next().unwrap_or(Err(Fail {
            op: "rbd_header",
            errno: EBADMSG,
        }))
    };
    // An object without a size is no header yet.
    let Some(size) = optional(next())? else {
        return Ok(None);
    };
    let (_, size_bytes) = decoded("get_size", wire::size(&size))?;
    let snap_ids = decoded("get_snapcontext", wire::snap_ids(&next()?))?;
    let parent = decoded("parent_get", wire::parent(&next()?))?;
    let text = |answer: Option<Vec<u8>>| -> Outcome<Option<String>> {
        answer
            .map(|a| decoded("metadata_get", Decoder::new(&a).text()))
            .transpose()
    };
    Ok(Some(Header {
        size_bytes,
        snap_ids,
        parent,
        mark: text(optional(next())?)?,
        wwn: text(optional(next())?)?,
    }))
}

/// All metadata of an image.
pub fn metadata(io: &IoCtx, id: &str) -> Outcome<BTreeMap<String, String>> {
    const PAGE: u64 = 256;
    let mut all = BTreeMap::new();
    let mut after = String::new();
    loop {
        let input = Encoder::new().text(&after).u64(PAGE).done();
        let answer = io.ask_one(&header_object(id), c"metadata_list", &input)?;
        let page = decoded("metadata_list", Decoder::new(&answer).map())?;
        let Some(last) = page.keys().next_back().cloned() else {
            return Ok(all);
        };
        let full = page.len() as u64 >= PAGE;
        all.extend(page);
        if !full || last <= after {
            return Ok(all);
        }
        after = last;
    }
}

/// The id that belongs to a name: from the name's own object, or from the directory, where a half
/// made image may be alone. An empty id is one that wasn't written yet.
pub fn id_of(io: &IoCtx, name: &str) -> Outcome<Option<String>> {
    if let Some(bytes) = optional(io.read(&format!("rbd_id.{name}")))? {
        return Ok(Some(Decoder::new(&bytes).text().unwrap_or_default()));
    }
    let input = Encoder::new().text(name).done();
    let answer = optional(io.ask_one(DIRECTORY, c"dir_get_id", &input))?;
    answer
        .map(|a| decoded("dir_get_id", Decoder::new(&a).text()))
        .transpose()
}

/// The name that belongs to an id.
fn name_of(io: &IoCtx, id: &str) -> Outcome<Option<String>> {
    let input = Encoder::new().text(id).done();
    let answer = optional(io.ask_one(DIRECTORY, c"dir_get_name", &input))?;
    answer
        .map(|a| decoded("dir_get_name", Decoder::new(&a).text()))
        .transpose()
}

/// Finds an image by its name, by its id if that is known, and in the trash.
pub fn find(io: &IoCtx, name: &str, known_id: Option<&str>) -> Outcome<Spot> {
    if let Some(id) = id_of(io, name)? {
        let header = if id.is_empty() {
            None
        } else {
            header(io, &id)?
        };
        return Ok(Spot::Named {
            id,
            name: name.to_owned(),
            header,
        });
    }
    let entry = match known_id {
        Some(id) => image::trash_get(io, id)?,
        None => image::trash_list(io)?.into_iter().find(|e| e.name == name),
    };
    if let Some(entry) = entry {
        let header = header(io, &entry.id)?;
        return Ok(Spot::Trash { entry, header });
    }
    let Some(id) = known_id else {
        return Ok(Spot::Nowhere);
    };
    let Some(header) = header(io, id)? else {
        return Ok(Spot::Nowhere);
    };
    let id = id.to_owned();
    Ok(match name_of(io, &id)? {
        Some(name) => Spot::Named {
            id,
            name,
            header: Some(header),
        },
        None => Spot::Lost { id, header },
    })
}

/// The snapshots with those numbers, in one round trip.
pub fn snapshots(io: &IoCtx, id: &str, snap_ids: &[u64]) -> Outcome<Vec<Snap>> {
    if snap_ids.is_empty() {
        return Ok(Vec::new());
    }
    let inputs: Vec<Vec<u8>> = snap_ids
        .iter()
        .map(|snap| Encoder::new().u64(*snap).done())
        .collect();
    let mut snaps = Vec::new();
    // In pieces, so that an image with thousands of snapshots makes no huge operation.
    for inputs in inputs.chunks(64) {
        let methods: Vec<super::cluster::Method<'_>> = inputs
            .iter()
            .map(|input| (c"snapshot_get", input.as_slice()))
            .collect();
        for answer in io.ask(&header_object(id), &methods)? {
            // One that was removed meanwhile isn't there.
            if let Some(answer) = optional(answer)? {
                snaps.push(decoded("snapshot_get", wire::snapshot(&answer))?);
            }
        }
    }
    Ok(snaps)
}

/// The clones of a snapshot, in words. Only pools that are given are asked for names; librbd's
/// own listing would read every pool of the cluster.
pub fn children(
    io: &IoCtx,
    id: &str,
    snap: u64,
    pools: &[(String, Arc<IoCtx>)],
) -> Outcome<Vec<String>> {
    let input = Encoder::new().u64(snap).done();
    let answer = optional(io.ask_one(&header_object(id), c"children_list", &input))?;
    let Some(answer) = answer else {
        return Ok(Vec::new());
    };
    let children = decoded("children_list", wire::children(&answer))?;
    let more = children.len().saturating_sub(CHILDREN_SHOWN);
    let mut words = Vec::new();
    for child in children.iter().take(CHILDREN_SHOWN) {
        words.push(child_in_words(child, pools)?);
    }
    if more > 0 {
        words.push(format!("{more} more images"));
    }
    Ok(words)
}

fn child_in_words(child: &Linked, pools: &[(String, Arc<IoCtx>)]) -> Outcome<String> {
    let id = &child.image_id;
    let ours = pools
        .iter()
        .find(|(namespace, io)| io.pool_id() == child.pool_id && *namespace == child.namespace);
    let Some((_, io)) = ours else {
        return Ok(format!(
            "image with id {id} in pool number {}",
            child.pool_id
        ));
    };
    if let Some(name) = name_of(io, id)? {
        return Ok(format!("image {name}"));
    }
    Ok(match image::trash_get(io, id)? {
        Some(entry) => format!("image {} (id {id}) in the trash", entry.name),
        None => format!("image with id {id}"),
    })
}

/// Who has an image open, in words; nothing if that can't be found out.
pub fn watchers(io: &Arc<IoCtx>, id: &str) -> Vec<String> {
    let found = Image::open(io, id, Mode::Look).and_then(|image| image.watchers());
    found
        .unwrap_or_default()
        .into_iter()
        .map(|address| format!("watcher {address}"))
        .collect()
}

/// Changes metadata in one operation, all or nothing: what has a value is set, what has none is
/// removed.
pub fn set_metadata(
    io: &IoCtx,
    id: &str,
    set: &BTreeMap<String, String>,
    remove: &[String],
) -> Outcome<()> {
    let map = Encoder::new().map(set).done();
    let removed: Vec<Vec<u8>> = remove
        .iter()
        .map(|key| Encoder::new().text(key).done())
        .collect();
    let mut methods: Vec<super::cluster::Method<'_>> = removed
        .iter()
        .map(|key| (c"metadata_remove", key.as_slice()))
        .collect();
    if !set.is_empty() {
        methods.push((c"metadata_set", &map));
    }
    if methods.is_empty() {
        return Ok(());
    }
    io.tell(&header_object(id), &methods)
}

/// Turns an outcome into a result about a thing.
pub trait About<T> {
    /// The same, with a sentence about the thing if it failed.
    ///
    /// # Errors
    /// The failure.
    fn about(self, thing: &str) -> Result<T>;
}

impl<T> About<T> for Outcome<T> {
    fn about(self, thing: &str) -> Result<T> {
        self.map_err(|fail| fail.about(thing))
    }
}
