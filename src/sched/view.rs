//! What the scheduler shows: pools, domains, counts, and what objects wait for.

use super::domain::Domain;
use super::probe::pool;
use super::table::WaitKey;
use super::work::{self, Work};
use super::{Sched, domain};
use crate::model::{Lane, Millis, ObjectId, Phase, Step, Uid, Wish};
use std::collections::BTreeMap;

/// A pool as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneView {
    /// Its domain.
    pub domain: String,
    /// Which of the domain's pools.
    pub lane: Lane,
    /// Unmet wishes.
    pub backlog: usize,
    /// When the oldest of them was uttered.
    pub oldest_pending: Option<Millis>,
    /// `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Since when work hasn't flowed, and why.
    pub trouble: Option<(Millis, String)>,
    /// Attempts whose thread is abandoned.
    pub held: usize,
    /// Abandoned threads that it may have.
    pub abandoned_max: usize,
}

/// A domain as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainView {
    /// Its name.
    pub name: String,
    /// Since when a probe is under way.
    pub probing_since: Option<Millis>,
    /// When the last probe succeeded.
    pub last_ok_at: Option<Millis>,
    /// Since when all of them have.
    pub ok_since: Option<Millis>,
    /// Why the last one failed.
    pub error: Option<String>,
    /// Since when it has no room, and what the backend said.
    pub no_space: Option<(Millis, String)>,
}

/// Everything but the objects themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// Every pool.
    pub lanes: Vec<LaneView>,
    /// Every domain.
    pub domains: Vec<DomainView>,
    /// How many objects of each kind are in each phase.
    pub counts: BTreeMap<(&'static str, Phase), u64>,
    /// What objects wait for, besides a worker and the time; at most `WAITING_MAX` of them.
    pub waiting: BTreeMap<ObjectId, String>,
    /// Most unmet wishes per pool.
    pub backlog_max: usize,
    /// Objects that were reported as stuck since the start.
    pub stuck_reports: u64,
    /// Hot loops since the start.
    pub hot_loops: u64,
    /// No new wishes are taken.
    pub draining: bool,
}

/// How many waiting objects a view explains.
const WAITING_MAX: usize = 1000;

impl Sched {
    /// How everything stands.
    #[must_use]
    pub fn view(&self) -> View {
        let lanes = self.domains.iter().flat_map(|(name, state)| {
            Lane::ALL
                .into_iter()
                .map(move |lane| self.lane_view(name, state, lane))
        });
        let domains = self.domains.iter().map(|(name, state)| DomainView {
            name: name.clone(),
            probing_since: state.probe.outstanding_since,
            last_ok_at: state.probe.last_ok_at,
            ok_since: state.probe.ok_since,
            error: state.probe.error.clone(),
            no_space: state
                .pause
                .as_ref()
                .map(|pause| (pause.since, pause.why.clone())),
        });
        let waiting = self.table.parked().take(WAITING_MAX);
        let waiting = waiting
            .filter_map(|id| self.cause(id).map(|words| (id, words)))
            .collect();
        View {
            lanes: lanes.collect(),
            domains: domains.collect(),
            counts: self.table.counts().clone(),
            waiting,
            backlog_max: self.policy.backlog,
            stuck_reports: self.stuck_reports,
            hot_loops: self.hot_loops,
            draining: self.draining,
        }
    }

    fn lane_view(&self, name: &str, state: &Domain, lane: Lane) -> LaneView {
        let pool = state.lane(lane);
        LaneView {
            domain: name.to_owned(),
            lane,
            backlog: self.table.backlog(name, lane),
            oldest_pending: self.table.oldest(name, lane),
            breaker: pool.gate.word(),
            trouble: pool
                .gate
                .trouble()
                .map(|(since, why)| (since, why.to_owned())),
            held: self.table.busy(name, lane).held,
            abandoned_max: pool.abandoned_max,
        }
    }

    /// Why an object is not as wished, in a sentence.
    pub(super) fn cause(&self, id: ObjectId) -> Option<String> {
        let object = self.table.get(id)?;
        let record = &object.record;
        if let Some(run) = &object.run {
            let seconds = |at: Millis| self.now.since(at) / 1000;
            return Some(match run.held_since {
                Some(at) => format!(
                    "its {} has hung for {} s and the call has not returned",
                    run.step.as_str(),
                    seconds(at)
                ),
                None => format!("{} has run for {} s", run.step.as_str(), seconds(run.since)),
            });
        }
        match object.parked {
            Some(WaitKey::Image(image)) => return Some(self.words_of_user(image, id)),
            Some(WaitKey::Source(source)) => {
                let title = self.table.get(source).map(|object| object.record.title());
                let title = title.unwrap_or_else(|| source.uid().to_string());
                return Some(format!(
                    "it waits for its source {title}, which isn't there yet"
                ));
            }
            Some(WaitKey::Encrypt) => {
                return Some("it waits for another LUKS2 format (limits.encrypt)".to_owned());
            }
            None => {}
        }
        if record.wish == Wish::Absent && object.pinned {
            let others = self.table.dependents(id);
            let title = |id: &ObjectId| self.table.get(*id).map(|object| object.record.title());
            let names: Vec<String> = others.iter().take(5).filter_map(title).collect();
            return Some(format!(
                "it is the source of {}, which is made first",
                names.join(", ")
            ));
        }
        if let Work::Step(step) = work::next(object) {
            let lane = work::lane(object, step);
            let gate = self
                .domains
                .get(&record.place.domain)
                .map(|d| &d.lane(lane).gate);
            if let Some((_, why)) = gate.and_then(domain::Gate::trouble) {
                return Some(format!(
                    "{} is paused: {why}",
                    pool(&record.place.domain, lane)
                ));
            }
        }
        record.message.clone().or_else(|| self.words_of_pool(id))
    }

    fn words_of_user(&self, image: Uid, id: ObjectId) -> String {
        let record = self.table.get(id).map(|object| &object.record);
        let user = self.table.user_of(image).filter(|user| *user != id);
        let run = user.and_then(|user| self.table.get(user)?.run.as_ref().map(|run| (user, run)));
        let kind = record.map_or("it", |record| record.id.kind());
        match run {
            Some((user, run)) => {
                let title = self.table.get(user).map(|object| object.record.title());
                let state = if run.held_since.is_some() {
                    "hangs"
                } else {
                    "runs"
                };
                format!(
                    "the {kind} waits for {} of {}, which {state} on the same image",
                    run.step.as_str(),
                    title.unwrap_or_default()
                )
            }
            None => format!("the {kind} waits for another attempt on the same image"),
        }
    }

    fn words_of_pool(&self, id: ObjectId) -> Option<String> {
        let object = self.table.get(id)?;
        let Work::Step(step) = work::next(object) else {
            return None;
        };
        let lane = work::lane(object, step);
        let name = &object.record.place.domain;
        let busy = self.table.busy(name, lane);
        let before = step != Step::Inspect || busy.running > 0;
        before.then(|| {
            format!(
                "it waits for a worker of {}: {} run, {} hang",
                pool(name, lane),
                busy.running,
                busy.held
            )
        })
    }
}
