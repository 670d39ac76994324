//! Reading every marked image of a domain, to re-create a lost state file.
//!
//! The only place that lists a pool; it runs for `volward rebuild` alone and changes nothing.

use super::RbdSession;
use super::image;
use super::look::{self, About};
use super::mark::{self, Owner};
use super::volume::{Ours, shown_bytes};
use crate::backend::{Ctl, Error, Marked, Result, VolumeState};
use crate::model::{ErrorKind, Known, Record};
use std::collections::BTreeMap;

/// All of them: volumes in their place, carriers, trashed ones, and snapshots.
pub(super) fn survey(session: &RbdSession, ctl: &dyn Ctl) -> Result<Vec<Marked>> {
    let places: BTreeMap<(String, Option<String>), ()> = session
        .domain_classes()
        .map(|class| ((class.pool.clone(), class.namespace.clone()), ()))
        .collect();
    let mut found = Vec::new();
    for (pool, namespace) in places.into_keys() {
        let io = session.link.io(&pool, namespace.as_deref())?;
        let thing = format!("pool {pool}");
        let mut images: Vec<(String, String, bool)> = image::list(&io)
            .about(&thing)?
            .into_iter()
            .map(|(id, name)| (id, name, false))
            .collect();
        let trashed = image::trash_list(&io).about(&thing)?;
        images.extend(trashed.into_iter().map(|e| (e.id, e.name, true)));
        let total = images.len() as u64;
        for (done, (id, name, trashed)) in (0u64..).zip(images) {
            if ctl.progress(done, total).is_break() {
                let words = format!("{thing}: ended early, as asked for");
                return Err(Error::new(ErrorKind::Cancelled, "survey", words));
            }
            let place = Seen {
                pool: &pool,
                namespace: namespace.as_deref(),
                id,
                name,
                trashed,
            };
            read(session, &place, &mut found)?;
        }
    }
    Ok(found)
}

struct Seen<'a> {
    pool: &'a str,
    namespace: Option<&'a str>,
    id: String,
    name: String,
    trashed: bool,
}

fn read(session: &RbdSession, seen: &Seen<'_>, found: &mut Vec<Marked>) -> Result<()> {
    let io = session.link.io(seen.pool, seen.namespace)?;
    let title = format!("image {}/{}", seen.pool, seen.name);
    let Some(header) = look::header(&io, &seen.id).about(&title)? else {
        return Ok(());
    };
    // Marks of other instances are reported as well: the caller chooses.
    let Some(mark) = header
        .mark
        .as_deref()
        .and_then(|text| serde_json::from_str::<mark::Mark>(text).ok())
    else {
        return Ok(());
    };
    let Owner::Ours(mark) = header.owner(&seen.id, &mark.instance, None) else {
        return Ok(());
    };
    let metadata = look::metadata(&io, &seen.id).about(&title)?;
    let record = |key: &str| {
        metadata
            .get(key)
            .and_then(|text| serde_json::from_str::<Record>(text).ok())
    };
    let snaps = look::snapshots(&io, &seen.id, &header.snap_ids).about(&title)?;
    let (identity, instance) = (session.link.identity(&io), mark.instance.clone());
    for (key, _) in metadata.range(mark::KEY_SNAPSHOT.to_owned()..) {
        let Some(record) = record(key).filter(|_| key.starts_with(mark::KEY_SNAPSHOT)) else {
            continue;
        };
        let name = mark::snap_name(record.name.as_str(), record.id.uid());
        let Some(snap) = snaps.iter().find(|s| s.name == name && !s.trashed) else {
            continue;
        };
        found.push(Marked {
            record,
            known: Known::Live,
            state: VolumeState {
                size_bytes: shown_bytes(snap.size_bytes, mark.luks),
                identity: Some(identity.clone()),
                ..VolumeState::default()
            },
            instance: instance.clone(),
        });
    }
    let Some(record) = record(mark::KEY_RECORD) else {
        return Ok(());
    };
    let known = match (seen.trashed, mark.carrier) {
        (true, _) => Known::Trashed,
        (false, true) => Known::Carrier,
        (false, false) => Known::Live,
    };
    let desk = session.desk(&record)?;
    let ours = Ours {
        id: seen.id.clone(),
        name: seen.name.clone(),
        header,
        mark,
    };
    found.push(Marked {
        record,
        known,
        state: ours.state(&desk, false),
        instance,
    });
    Ok(())
}
