//! Records as the scheduler hands them to a backend.

use volward::backend::{Retired, VolumeState};
use volward::model::{
    Body, Known, Millis, Name, ObjectId, Phase, Place, Record, SnapshotBody, Source, Uid,
    VolumeBody,
};

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub fn place(domain: &str, root: &str) -> Place {
    Place {
        class: "default".to_owned(),
        domain: domain.to_owned(),
        root: root.to_owned(),
        data_pool: None,
        namespace: None,
        identity: None,
    }
}

fn record(id: ObjectId, title: &str, born: &str, image: Uid, place: Place, body: Body) -> Record {
    let mut record = Record::accepted(id, name(title), place, body, Millis(1));
    record.born = name(born);
    record.image = image;
    record.phase = Phase::Creating;
    record.known = Known::Free;
    record
}

/// A volume that a look found free and that nobody has made yet.
pub fn volume(title: &str, uid: u128, size_bytes: u64, place: &Place) -> Record {
    let body = VolumeBody::of_size(size_bytes, "{}".to_owned());
    let uid = Uid(uid);
    let id = ObjectId::Volume(uid);
    record(
        id,
        title,
        title,
        uid,
        place.clone(),
        Body::Volume(Box::new(body)),
    )
}

/// A snapshot of a volume.
pub fn snapshot(title: &str, uid: u128, of: &Record) -> Record {
    let body = SnapshotBody {
        volume: of.name.clone(),
        size_bytes: None,
        depth: 0,
    };
    record(
        ObjectId::Snapshot(Uid(uid)),
        title,
        of.born.as_str(),
        of.image,
        of.place.clone(),
        Body::Snapshot(body),
    )
}

/// The same volume, made from something.
pub fn made_from(mut volume: Record, source: Source) -> Record {
    volume.volume_mut().unwrap().source = Some(source);
    volume
}

pub fn from_snapshot(snapshot: &Record) -> Source {
    Source::Snapshot {
        name: snapshot.name.clone(),
        uid: snapshot.id.uid(),
        image: snapshot.image,
        image_born: snapshot.born.clone(),
        place: snapshot.place.clone(),
    }
}

pub fn from_volume(volume: &Record) -> Source {
    Source::Volume {
        name: volume.name.clone(),
        uid: volume.id.uid(),
        born: volume.born.clone(),
        place: volume.place.clone(),
    }
}

/// The record after its volume was seen.
pub fn seen(mut record: Record, state: &VolumeState) -> Record {
    record.known = Known::Live;
    record.place.identity.clone_from(&state.identity);
    if let Some(volume) = record.volume_mut() {
        volume.image_id.clone_from(&state.image_id);
    }
    record
}

/// The record after its volume went out of sight.
pub fn retired(mut record: Record, how: &Retired) -> Record {
    match how {
        Retired::Trashed { image_id } => {
            record.known = Known::Trashed;
            record.volume_mut().unwrap().image_id.clone_from(image_id);
        }
        Retired::Carrier { .. } => record.known = Known::Carrier,
        Retired::Gone => {}
    }
    record
}
