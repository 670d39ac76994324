//! Whole domains: breakers, probes, the pause for lack of space, the restart that helps.

use super::backoff::doubled;
use super::domain::{Gate, Pause};
use super::table::Run;
use super::work::Class;
use super::{Command, Sched};
use crate::backend::Error;
use crate::model::{ErrorKind, Lane, Millis, ObjectId, Phase};
use std::collections::BTreeMap;

/// How often a healthy backend is asked, unless `breaker.open` is longer.
const HEALTHY_PROBE_MS: u64 = 30_000;

impl Sched {
    /// An attempt came back: whatever it says, its pool's backend has answered, unless it says
    /// that it hasn't.
    pub(super) fn answered(&mut self, run: &Run, id: ObjectId, error: Option<&Error>) {
        let says_nothing = [
            ErrorKind::NoSpace,
            ErrorKind::Unreachable,
            ErrorKind::SessionLost,
            ErrorKind::Cancelled,
        ];
        let again = error.is_some_and(|error| says_nothing.contains(&error.kind));
        self.canary_back(&run.domain, id, again);
        match error.map(|error| error.kind) {
            Some(ErrorKind::Unreachable) => {
                let why = error.map(ToString::to_string).unwrap_or_default();
                self.unreachable(&run.domain, &why);
            }
            Some(ErrorKind::SessionLost | ErrorKind::Cancelled) => {
                // Says nothing about the backend. A canary that ends so is replaced by another.
                if let Some(domain) = self.domains.get_mut(&run.domain)
                    && let Gate::HalfOpen { canary, .. } = &mut domain.lane_mut(run.lane).gate
                    && *canary == Some(id)
                {
                    *canary = None;
                }
            }
            _ => self.close(&run.domain, run.lane),
        }
    }

    fn close(&mut self, domain: &str, lane: Lane) {
        let Some(state) = self.domains.get_mut(domain) else {
            return;
        };
        let gate = &mut state.lane_mut(lane).gate;
        let was = std::mem::replace(gate, Gate::Closed { hangs: 0 });
        if let Some((since, _)) = was.trouble() {
            let words = format!(
                "work flows again after {} s; what waited goes on by itself",
                self.now.since(since) / 1000
            );
            self.log(self.now, pool(domain, lane), false, "BreakerClosed", words);
        }
    }

    fn open(&mut self, domain: &str, lane: Lane, why: &str) {
        let (first, cap) = (self.policy.breaker_open_ms, self.policy.breaker_open_cap_ms);
        let now = self.now;
        let Some(state) = self.domains.get_mut(domain) else {
            return;
        };
        let gate = &mut state.lane_mut(lane).gate;
        let (since, open_ms) = match gate {
            Gate::Closed { .. } => (now, first),
            // Open already: it keeps its time.
            Gate::Open { .. } => return,
            Gate::Probing { since, open_ms, .. } | Gate::HalfOpen { since, open_ms, .. } => {
                (*since, doubled(*open_ms, 2, cap))
            }
        };
        let news = matches!(gate, Gate::Closed { .. });
        let why = why.to_owned();
        *gate = Gate::Open {
            since,
            until: now.plus(open_ms),
            open_ms,
            why: why.clone(),
        };
        if news {
            let words = format!("{why}; its objects wait, unharmed, until the backend answers");
            self.log(now, pool(domain, lane), true, "BreakerOpen", words);
        }
    }

    /// Nothing of that domain can be reached.
    fn unreachable(&mut self, domain: &str, why: &str) {
        for lane in Lane::ALL {
            self.open(domain, lane, why);
        }
    }

    /// An attempt was abandoned.
    pub(super) fn hung(&mut self, run: &Run, id: ObjectId) {
        let limit = self.policy.breaker_hangs;
        self.canary_back(&run.domain, id, true);
        let Some(domain) = self.domains.get_mut(&run.domain) else {
            return;
        };
        // What hangs is worth a question.
        domain.probe.next_at = Some(domain.probe.next_at.map_or(self.now, |at| at.min(self.now)));
        let lane = domain.lane_mut(run.lane);
        // The pool says when its replacement is there.
        lane.workers = lane.workers.saturating_sub(1);
        let open = match &mut lane.gate {
            Gate::Closed { hangs } => {
                *hangs = hangs.saturating_add(1);
                *hangs >= limit
            }
            Gate::HalfOpen { canary, .. } => *canary == Some(id),
            Gate::Open { .. } | Gate::Probing { .. } => false,
        };
        if open {
            let why = format!("{} calls hang in the storage library", run.lane.as_str());
            self.open(&run.domain, run.lane, &why);
        }
    }

    pub(super) fn is_short_of_space(&self, domain: &str) -> bool {
        self.domains
            .get(domain)
            .is_some_and(|domain| domain.pause.is_some())
    }

    /// A step found no room: the domain's creates wait, its trash goes early.
    pub(super) fn no_space(&mut self, id: ObjectId, run: &Run, error: &Error) {
        self.table.change(id, |record, _| {
            record.reason = Some(ErrorKind::NoSpace);
            record.message = Some(error.to_string());
        });
        if Class::of(run.step) != Class::Space {
            // What frees space, or needs none, isn't paused; it only comes back later.
            let wait = super::backoff::in_use_ms(1).min(self.policy.retry.cap_ms);
            let at = self.now.plus(wait);
            self.table
                .change(id, |record, _| record.next_attempt_at = Some(at));
            self.table.touch(id, |object| object.wait_until = Some(at));
        }
        let now = self.now;
        let next_canary_at = now.plus(self.policy.breaker_open_ms);
        let Some(domain) = self.domains.get_mut(&run.domain) else {
            return;
        };
        if domain.pause.is_some() {
            return;
        }
        let why = error.to_string();
        domain.pause = Some(Pause {
            since: now,
            next_canary_at,
            canary: None,
            why: why.clone(),
        });
        let words = format!("{why}; creates wait until there is room, the trash is reclaimed now");
        self.log(
            now,
            format!("domain/{}", run.domain),
            true,
            "NoSpace",
            words,
        );
        self.hurry_trash(&run.domain);
    }

    fn hurry_trash(&mut self, domain: &str) {
        let waits = |object: &super::table::Object| {
            let record = &object.record;
            record.place.domain == domain
                && record.phase == Phase::Trashed
                && record.reason.is_none()
                && object.wait_until.is_some()
        };
        let early: Vec<ObjectId> = self
            .table
            .objects()
            .filter(|object| waits(object))
            .map(|o| o.record.id)
            .collect();
        for id in early {
            self.table.change(id, |record, now| {
                if let Some(volume) = record.volume_mut() {
                    volume.reclaim_after = Some(now);
                }
            });
            self.table.touch(id, |object| object.wait_until = None);
        }
    }

    /// The create that tries whether there is room again has come back, or hangs.
    fn canary_back(&mut self, domain: &str, id: ObjectId, again: bool) {
        let next = self.now.plus(self.policy.breaker_open_ms);
        let Some(state) = self.domains.get_mut(domain) else {
            return;
        };
        let Some(pause) = &mut state.pause else {
            return;
        };
        if pause.canary != Some(id) {
            return;
        }
        pause.canary = None;
        pause.next_canary_at = next;
        if !again {
            let since = pause.since;
            state.pause = None;
            let words = format!(
                "there is room again after {} s",
                self.now.since(since) / 1000
            );
            self.log(
                self.now,
                format!("domain/{domain}"),
                false,
                "SpaceAgain",
                words,
            );
        }
    }

    /// A probe came back.
    pub(super) fn probed(&mut self, name: &str, result: Result<BTreeMap<String, String>, Error>) {
        let now = self.now;
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        let asked = domain.probe.outstanding_since.take().unwrap_or(now);
        match result {
            Ok(identities) => {
                domain.probe.last_ok_at = Some(now);
                domain.probe.ok_since.get_or_insert(now);
                domain.probe.error = None;
                self.probe_succeeded(name, asked);
                self.identify(name, identities);
            }
            Err(error) => {
                let why = error.to_string();
                domain.probe.ok_since = None;
                domain.probe.error = Some(why.clone());
                let far = error.kind == ErrorKind::Unreachable;
                for lane in Lane::ALL {
                    let gate = self.domains.get(name).map(|domain| &domain.lane(lane).gate);
                    if far || matches!(gate, Some(Gate::Probing { .. })) {
                        self.open(name, lane, &why);
                    }
                }
            }
        }
        let wait = if self.is_troubled(name) {
            self.policy.breaker_open_ms
        } else {
            self.policy.breaker_open_ms.max(HEALTHY_PROBE_MS)
        };
        if let Some(domain) = self.domains.get_mut(name) {
            domain.probe.next_at = Some(now.plus(wait));
        }
    }

    fn probe_succeeded(&mut self, name: &str, asked: Millis) {
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        let mut idle = Vec::new();
        for lane in Lane::ALL {
            let gate = &mut domain.lane_mut(lane).gate;
            match gate {
                Gate::Probing {
                    since,
                    open_ms,
                    why,
                } => {
                    let (since, open_ms, why) = (*since, *open_ms, std::mem::take(why));
                    *gate = Gate::HalfOpen {
                        since,
                        open_ms,
                        why,
                        canary: None,
                    };
                }
                // Nobody was there to go first: the next one finds the pool open.
                Gate::HalfOpen { canary: None, .. } => idle.push(lane),
                Gate::HalfOpen { .. } | Gate::Open { .. } | Gate::Closed { .. } => {}
            }
        }
        for lane in idle {
            self.close(name, lane);
        }
        let held: Vec<ObjectId> = self.table.held(name).collect();
        for id in held {
            let run = self.table.get(id).and_then(|object| object.run.as_ref());
            let healthy = |run: &Run| run.held_since.is_some_and(|at| at <= asked);
            if run.is_some_and(|run| healthy(run) && !run.hang_counted) {
                self.count_hang(id);
            }
        }
    }

    /// Remembers which cluster and pool, or which root directory, each root is.
    fn identify(&mut self, name: &str, identities: BTreeMap<String, String>) {
        for (root, identity) in identities {
            match self.identities.get(&root) {
                None => {
                    self.identities.insert(root.clone(), identity.clone());
                    self.out.push(Command::Identity { root, identity });
                }
                Some(known) if *known == identity => {}
                Some(known) => {
                    let why = format!(
                        "{root} is {identity} now, but the volumes here were made in {known}: \
                         nothing in it is touched until the old one is back"
                    );
                    if let Some(domain) = self.domains.get_mut(name) {
                        domain.probe.error = Some(why.clone());
                        domain.probe.ok_since = None;
                    }
                    self.unreachable(name, &why);
                }
            }
        }
    }

    fn is_troubled(&self, name: &str) -> bool {
        let Some(domain) = self.domains.get(name) else {
            return false;
        };
        let open = |lane| !matches!(domain.lane(lane).gate, Gate::Closed { hangs: 0 });
        domain.probe.error.is_some()
            || Lane::ALL.into_iter().any(open)
            || self.table.held(name).next().is_some()
    }

    /// What time alone does to domains: breakers ask, probes go, a full pool asks for a restart.
    pub(super) fn settle_domains(&mut self) {
        let names: Vec<String> = self.domains.keys().cloned().collect();
        for name in names {
            self.settle_gates(&name);
            self.settle_probe(&name);
            for lane in Lane::ALL {
                self.settle_full(&name, lane);
            }
        }
    }

    fn settle_gates(&mut self, name: &str) {
        let now = self.now;
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        let mut ask = false;
        for lane in Lane::ALL {
            let gate = &mut domain.lane_mut(lane).gate;
            if let Gate::Open {
                since,
                until,
                open_ms,
                why,
            } = gate
                && *until <= now
            {
                let (since, open_ms, why) = (*since, *open_ms, std::mem::take(why));
                *gate = Gate::Probing {
                    since,
                    open_ms,
                    why,
                };
                ask = true;
            }
        }
        if ask {
            domain.probe.next_at = Some(now);
        }
    }

    fn settle_probe(&mut self, name: &str) {
        let now = self.now;
        let recover = self.table.held(name).next().is_some();
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        let due = domain.probe.next_at.is_some_and(|at| at <= now);
        if due && domain.probe.outstanding_since.is_none() {
            domain.probe.outstanding_since = Some(now);
            domain.probe.next_at = None;
            self.out.push(Command::Probe {
                domain: name.to_owned(),
                recover,
            });
        }
    }

    fn settle_full(&mut self, name: &str, lane: Lane) {
        let now = self.now;
        let held = self.table.busy(name, lane).held;
        let after = self.policy.restart_after_ms;
        let Some(domain) = self.domains.get_mut(name) else {
            return;
        };
        let ok_since = domain.probe.ok_since;
        let state = domain.lane_mut(lane);
        let max = state.abandoned_max;
        if held < max {
            state.full_since = None;
            return;
        }
        let since = *state.full_since.get_or_insert(now);
        let Some(ok_since) = ok_since else { return };
        if self.restarting || self.draining || now < since.max(ok_since).plus(after) {
            return;
        }
        self.restarting = true;
        let why = format!(
            "{held} calls hang in the {} pool of domain {name} although its backend has answered \
             for {} s; only a new process gets their threads back",
            lane.as_str(),
            now.since(since.max(ok_since)) / 1000
        );
        self.log(now, pool(name, lane), true, "Restarting", why.clone());
        self.out.push(Command::Restart { why });
    }

    /// When a domain next has something to do.
    pub(super) fn next_domain_wake(&self) -> Option<Millis> {
        let mut next: Option<Millis> = None;
        // What is due already waits for something else than the time.
        let mut at = |time: Millis| {
            if time > self.now {
                next = Some(next.map_or(time, |next| next.min(time)));
            }
        };
        for domain in self.domains.values() {
            if domain.probe.outstanding_since.is_none() {
                domain.probe.next_at.into_iter().for_each(&mut at);
            }
            if let Some(pause) = &domain.pause
                && pause.canary.is_none()
            {
                at(pause.next_canary_at);
            }
            for lane in Lane::ALL {
                let state = domain.lane(lane);
                if let Gate::Open { until, .. } = &state.gate {
                    at(*until);
                }
                if let (Some(full), Some(ok)) = (state.full_since, domain.probe.ok_since)
                    && !self.restarting
                    && !self.draining
                {
                    at(full.max(ok).plus(self.policy.restart_after_ms));
                }
            }
        }
        next
    }
}

/// A pool as the events name it.
pub fn pool(domain: &str, lane: Lane) -> String {
    format!("pool/{domain}/{}", lane.as_str())
}
