//! `volward rebuild`: makes the state file again from the marks that every image carries.

use super::backends;
use crate::backend::{Marked, NoLedger, Unwatched};
use crate::cli::{Exit, RebuildArgs};
use crate::clock::Clock;
use crate::config::Config;
use crate::model::{Known, Lane, Millis, ObjectId, Phase, Record, Wish};
use crate::store::{OpenOptions, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Reads the marks and says what a new state file would hold; with `--apply` makes it.
#[must_use]
pub fn rebuild(args: &RebuildArgs, config: Config) -> Exit {
    match run(args, &config) {
        Ok(()) => Exit::Done,
        Err(words) => {
            eprintln!("volward rebuild: {words}");
            Exit::Failed
        }
    }
}

/// What was found: the marked images, and which root is which.
struct Survey {
    images: Vec<Marked>,
    identities: BTreeMap<String, String>,
}

fn run(args: &RebuildArgs, config: &Config) -> Result<(), String> {
    let wanted = args.instance.clone();
    let survey = survey(config, wanted.as_deref().unwrap_or(""))?;
    let instance = instance(&survey.images, wanted)?;
    let ours = |image: &Marked| image.instance == instance;
    let mut records = records(survey.images.into_iter().filter(ours));
    keep_trash(&mut records, Clock::real().wall(), config.trash.keep_ms);
    for record in &records {
        let size = record.volume().map_or(0, |volume| volume.size_bytes);
        println!(
            "{}  {}  {}  {size} bytes",
            record.title(),
            record.id.uid(),
            record.phase.as_str()
        );
    }
    println!("{} objects of instance {instance}", records.len());
    if !args.apply {
        println!(
            "nothing was written; --apply makes {}",
            config.store_path.display()
        );
        return Ok(());
    }
    write(config, &instance, &records, &survey.identities)
}

fn survey(config: &Config, instance: &str) -> Result<Survey, String> {
    let built = backends::build(config, instance, Arc::new(NoLedger), BTreeMap::new())?;
    let mut found = Survey {
        images: Vec::new(),
        identities: BTreeMap::new(),
    };
    for domain in backends::roots(config).into_keys() {
        let named = |error: crate::backend::Error| format!("domain {domain}: {error}");
        let mut session = built
            .backend
            .connect(&domain, Lane::Create, &Unwatched)
            .map_err(named)?;
        found
            .identities
            .extend(session.probe(&Unwatched).map_err(named)?);
        found
            .images
            .extend(session.survey(&Unwatched).map_err(named)?);
    }
    Ok(found)
}

/// Whose images these are, if that is clear.
fn instance(images: &[Marked], wanted: Option<String>) -> Result<String, String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for image in images {
        *counts.entry(&image.instance).or_default() += 1;
    }
    let list = || {
        let words = counts.iter().map(|(id, n)| format!("{id} ({n} objects)"));
        words.collect::<Vec<_>>().join(", ")
    };
    match (wanted, counts.len()) {
        (Some(id), _) if counts.contains_key(id.as_str()) => Ok(id),
        (Some(id), _) => Err(format!(
            "no image carries the mark of instance {id}; there are {}",
            list()
        )),
        (None, 0) => Err("no image here carries a mark of volward".to_owned()),
        (None, 1) => Ok(counts
            .keys()
            .next()
            .map(|id| (*id).to_owned())
            .unwrap_or_default()),
        (None, _) => Err(format!(
            "images of several instances are here: {}; say which with --instance",
            list()
        )),
    }
}

/// The records as they are known to be: what was under way is looked at anew.
fn records(images: impl Iterator<Item = Marked>) -> Vec<Record> {
    let mut names = BTreeSet::new();
    let mut all: Vec<Record> = images.map(record).collect();
    all.sort_by_key(|record| record.id);
    for record in all.iter_mut().filter(|record| !record.phase.is_trash()) {
        let fresh = names.insert((record.id.kind(), record.name.clone()));
        if !fresh && let Ok(name) = record.id.uid().lower().parse() {
            eprintln!(
                "{}: the name is taken twice, this one is {name} now",
                record.title()
            );
            record.name = name;
        }
    }
    all
}

/// Deleted volumes can be restored as long as if they had been deleted now.
fn keep_trash(records: &mut [Record], now: Millis, keep_ms: u64) {
    for record in records.iter_mut().filter(|record| record.phase.is_trash()) {
        record.updated_at = now;
        if let Some(volume) = record.volume_mut() {
            volume.trashed_at = Some(now);
            volume.reclaim_after = Some(now.plus(keep_ms));
        }
    }
}

fn record(image: Marked) -> Record {
    let mut record = image.record;
    record.known = image.known;
    record.look = false;
    record.attempts = 0;
    record.hangs = 0;
    record.waits = 0;
    record.next_attempt_at = None;
    record.reason = None;
    record.message = None;
    let trash = matches!(image.known, Known::Trashed | Known::Carrier);
    record.wish = if trash { Wish::Absent } else { Wish::Present };
    // Taken from what was seen, not moved to: there is no phase before.
    record.phase = if trash { Phase::Trashed } else { Phase::Ready };
    // An update follows for a volume whose mark is of an older wish.
    record.observed_generation = match record.id {
        ObjectId::Volume(_) if !trash => image.state.generation.min(record.generation),
        _ => record.generation,
    };
    if let Some(volume) = record.volume_mut() {
        volume.handle = Some(image.state.handle).filter(|handle| !handle.is_empty());
        volume.seen_size_bytes = Some(image.state.size_bytes);
        volume.image_id = image.state.image_id.or(volume.image_id.take());
        volume.encrypted |= image.state.encrypted;
        volume.flatten = false;
    }
    record
}

fn write(
    config: &Config,
    instance: &str,
    records: &[Record],
    identities: &BTreeMap<String, String>,
) -> Result<(), String> {
    let path = &config.store_path;
    if path.exists() {
        return Err(format!(
            "{} is there; move it (and its -wal and -shm) away first, so that it can be looked at",
            path.display()
        ));
    }
    let mut options = OpenOptions::new(super::serve::machine_id());
    options.instance = Some(instance.to_owned());
    let words = |error: crate::store::StoreError| error.to_string();
    let mut store = Store::open(path, &options).map_err(words)?;
    store.begin().map_err(words)?;
    for record in records {
        store.put(record).map_err(words)?;
    }
    for (root, identity) in identities {
        store.identity(root, identity).map_err(words)?;
    }
    store.commit().map_err(words)?;
    println!("{} is made", path.display());
    Ok(())
}
