//! What is stored of a volume or a snapshot.

use super::{ErrorKind, Lane, Millis, Name, ObjectId, Phase, Uid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the user wants of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wish {
    /// It shall be there.
    Present,
    /// It shall go.
    Absent,
}

/// What is known of the backend's side of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Known {
    /// Nothing was ever done for it: there can be nothing of it.
    Nothing,
    /// A look, committed before the first create, found its name free. What is there unmarked
    /// under that name from now on is our own remnant.
    Free,
    /// It was seen, complete.
    Live,
    /// A deleted volume whose image stays for its snapshots.
    Carrier,
    /// In the backend's trash.
    Trashed,
}

/// Where an image lives. Set when the object is accepted; classes only place new ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The class it was made with.
    pub class: String,
    /// What fails together with it.
    pub domain: String,
    /// The pool (RBD) or the root directory (file).
    pub root: String,
    /// A pool of its own for the data (RBD).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_pool: Option<String>,
    /// The namespace in the pool (RBD).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Which cluster and pool, or which root, that really is: `FSID/POOL-ID`, or the id in the
    /// root's id file. `None` until the root was reached for the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
}

/// Limits on the I/O of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Qos {
    /// Operations per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
}

/// The format of a file that a volume is filled from. It is never guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceFormat {
    /// Bytes as they are.
    Raw,
    /// QEMU's copy-on-write format, without a backing file.
    Qcow2,
}

/// What a volume is made from, resolved when it was accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// A snapshot of the image `image`.
    Snapshot {
        /// Its name at that time.
        name: Name,
        /// The snapshot.
        uid: Uid,
        /// The volume that it was taken of.
        image: Uid,
        /// The name that volume was created with: part of its image's name.
        image_born: Name,
        /// Where that image lives.
        place: Place,
    },
    /// Another volume as it stands.
    Volume {
        /// Its name at that time.
        name: Name,
        /// The volume.
        uid: Uid,
        /// The name that volume was created with: part of its image's name.
        born: Name,
        /// Where its image lives.
        place: Place,
    },
    /// A file below a directory that the configuration allows.
    File {
        /// Its absolute path.
        path: String,
        /// Its format.
        format: SourceFormat,
    },
}

impl Source {
    /// The object that this one is cloned from, if it is one of ours.
    #[must_use]
    pub fn object(&self) -> Option<ObjectId> {
        match self {
            Source::Snapshot { uid, .. } => Some(ObjectId::Snapshot(*uid)),
            Source::Volume { uid, .. } => Some(ObjectId::Volume(*uid)),
            Source::File { .. } => None,
        }
    }

    /// The image that a clone reads, whose key it shares.
    #[must_use]
    pub fn image(&self) -> Option<Uid> {
        match self {
            Source::Snapshot { image, .. } => Some(*image),
            Source::Volume { uid, .. } => Some(*uid),
            Source::File { .. } => None,
        }
    }
}

/// What only a volume has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeBody {
    /// The wished size in bytes.
    pub size_bytes: u64,
    /// What it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Wished limits on its I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<Qos>,
    /// The key id of its LUKS2 encryption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<String>,
    /// Whether the LUKS2 format was seen to be done.
    #[serde(default)]
    pub encrypted: bool,
    /// The first request, normalised (JSON): the same again is answered with the volume.
    pub request: String,
    /// The size of the image in bytes as last seen.
    #[serde(default)]
    pub seen_size_bytes: Option<u64>,
    /// Allocated bytes as last seen, where that is cheap to know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// What other tools call it: a path, or `rbd:pool/image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
    /// The world wide name that guests see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wwn: Option<String>,
    /// The backend's own id of the image (RBD), recorded before it can be trashed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// How many parents stand above it; 0 for a volume of its own.
    #[serde(default)]
    pub depth: u32,
    /// When it went out of sight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trashed_at: Option<Millis>,
    /// When its space may be freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaim_after: Option<Millis>,
    /// What its reclaim waits for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked_by: Vec<String>,
    /// It shall be made independent of its parent, in the background.
    #[serde(default)]
    pub flatten: bool,
}

impl VolumeBody {
    /// A volume of that size that nothing else was said of.
    #[must_use]
    pub fn of_size(size_bytes: u64, request: String) -> VolumeBody {
        VolumeBody {
            size_bytes,
            source: None,
            qos: None,
            encryption: None,
            encrypted: false,
            request,
            seen_size_bytes: None,
            used_bytes: None,
            handle: None,
            wwn: None,
            image_id: None,
            depth: 0,
            trashed_at: None,
            reclaim_after: None,
            blocked_by: Vec::new(),
            flatten: false,
        }
    }
}

/// What only a snapshot has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotBody {
    /// The name of its volume when it was accepted.
    pub volume: Name,
    /// Its size in bytes, once it was seen.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// How many parents stand above it.
    #[serde(default)]
    pub depth: u32,
}

/// What only one kind has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// A volume, or its trash entry.
    Volume(Box<VolumeBody>),
    /// A snapshot.
    Snapshot(SnapshotBody),
}

/// A volume (with its trash entry) or a snapshot, as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Which object.
    pub id: ObjectId,
    /// Its name. Names of volumes in the trash are free for others.
    pub name: Name,
    /// The name that its image was created with (a volume's own, a snapshot's volume's).
    pub born: Name,
    /// The unit of serialization: the volume's uid, for its snapshots as well.
    pub image: Uid,
    /// Where its image lives.
    pub place: Place,
    /// Counts the changes of the wish, from 1.
    pub generation: u64,
    /// The generation that was last brought about.
    pub observed_generation: u64,
    /// What the user wants.
    pub wish: Wish,
    /// Where it stands. Set by `move_to` only.
    pub phase: Phase,
    /// What is known of the backend's side.
    pub known: Known,
    /// An attempt that changes something was dispatched and its outcome isn't known: look first.
    #[serde(default)]
    pub look: bool,
    /// Attempts that were charged since the last success or `retry`.
    pub attempts: u32,
    /// Hangs on a healthy backend since the last success or `retry`.
    pub hangs: u32,
    /// How often it has waited in a row for something in use; the exponent of that wait.
    pub waits: u32,
    /// Not before this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<Millis>,
    /// Why it is not as wished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<ErrorKind>,
    /// The same in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Free text for the user.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// When it was accepted.
    pub created_at: Millis,
    /// When the record last changed.
    pub updated_at: Millis,
    /// When its phase last changed.
    pub phase_since: Millis,
    /// When the current wish was uttered: the oldest goes first.
    pub wished_at: Millis,
    /// When its deletion was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_requested_at: Option<Millis>,
    /// What only its kind has.
    pub body: Body,
}

impl Record {
    /// An object as it is accepted: wished, and nothing done for it yet.
    #[must_use]
    pub fn accepted(id: ObjectId, name: Name, place: Place, body: Body, now: Millis) -> Record {
        Record {
            id,
            born: name.clone(),
            name,
            image: id.uid(),
            place,
            generation: 1,
            observed_generation: 0,
            wish: Wish::Present,
            phase: Phase::Pending,
            known: Known::Nothing,
            look: false,
            attempts: 0,
            hangs: 0,
            waits: 0,
            next_attempt_at: None,
            reason: None,
            message: None,
            labels: BTreeMap::new(),
            created_at: now,
            updated_at: now,
            phase_since: now,
            wished_at: now,
            deletion_requested_at: None,
            body,
        }
    }

    /// Moves to another phase.
    ///
    /// # Panics
    /// When the table of phases has no such move: that is a fault of volward.
    pub fn move_to(&mut self, phase: Phase, now: Millis) {
        assert!(
            self.phase.may_move_to(phase),
            "{} {}: no move from {:?} to {:?}",
            self.id.kind(),
            self.name,
            self.phase,
            phase
        );
        if self.phase != phase {
            self.phase = phase;
            self.phase_since = now;
        }
    }

    /// The volume's part.
    #[must_use]
    pub fn volume(&self) -> Option<&VolumeBody> {
        match &self.body {
            Body::Volume(volume) => Some(volume),
            Body::Snapshot(_) => None,
        }
    }

    /// The volume's part, to change it.
    pub fn volume_mut(&mut self) -> Option<&mut VolumeBody> {
        match &mut self.body {
            Body::Volume(volume) => Some(volume),
            Body::Snapshot(_) => None,
        }
    }

    /// The snapshot's part.
    #[must_use]
    pub fn snapshot(&self) -> Option<&SnapshotBody> {
        match &self.body {
            Body::Snapshot(snapshot) => Some(snapshot),
            Body::Volume(_) => None,
        }
    }

    /// What it is made from.
    #[must_use]
    pub fn source(&self) -> Option<&Source> {
        self.volume().and_then(|volume| volume.source.as_ref())
    }

    /// Whether nothing is left to do for it: it is ready as last wished and waits for no flatten, or
    /// it failed. A trash entry is never settled; it ends by going.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let flatten = self.volume().is_some_and(|volume| volume.flatten);
        match self.phase {
            Phase::Ready => !flatten && self.observed_generation == self.generation,
            Phase::Failed | Phase::Gone => true,
            _ => false,
        }
    }

    /// The lane of the work that its wish needs.
    #[must_use]
    pub fn lane(&self) -> Lane {
        match self.wish {
            Wish::Present => Lane::Create,
            Wish::Absent => Lane::Delete,
        }
    }

    /// `volume/NAME`, `snapshot/NAME`, or `trash/UID`: as the events name it.
    #[must_use]
    pub fn title(&self) -> String {
        if self.phase.is_trash() {
            format!("trash/{}", self.id.uid())
        } else {
            format!("{}/{}", self.id.kind(), self.name)
        }
    }
}

/// One line of the event log: what an operator may want to know afterwards. The store numbers
/// them without gaps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When it happened.
    pub at: Millis,
    /// `volume/NAME`, `snapshot/NAME`, `trash/UID`, or `pool/DOMAIN/LANE`, `domain/DOMAIN`,
    /// `daemon`.
    pub object: String,
    /// Whether somebody should look at it.
    pub warning: bool,
    /// A stable CamelCase word.
    pub reason: String,
    /// A sentence.
    pub message: String,
}
