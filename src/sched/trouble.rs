//! Errors and hangs: the table of error kinds, one arm each.

use super::backoff::{doubled, in_use_ms, retry_ms};
use super::table::Run;
use super::{Sched, work};
use crate::backend::Error;
use crate::model::{ErrorKind, Millis, ObjectId, Phase, Record, Step, Wish};

/// The shortest wait for something that isn't allowed yet.
const NOT_YET_MIN_MS: u64 = 1_000;
/// The wait for something that isn't allowed yet, if the backend doesn't say until when.
const NOT_YET_MS: u64 = 30_000;

/// A call that didn't return before its deadline.
#[derive(Debug, Clone, Copy)]
pub struct Hang {
    /// When it was taken up.
    pub started_at: Millis,
    /// When its thread was abandoned.
    pub at: Millis,
    /// Its deadline in milliseconds.
    pub deadline_ms: u64,
    /// What it was doing.
    pub step: Step,
}

impl Sched {
    /// An attempt ended with an error.
    pub(super) fn failed(&mut self, id: ObjectId, run: &Run, error: Error, late: bool) {
        let makes = matches!(run.step, Step::Create | Step::Import | Step::Snapshot);
        if makes && !error.touched {
            self.table.change(id, |record, _| record.look = false);
        }
        // An earlier reclaim may have begun, whatever this one says of itself.
        if run.first_reclaim && !error.touched {
            self.table.change(id, back_to_trash);
        }
        if self
            .table
            .get(id)
            .is_some_and(|o| o.record.phase == Phase::Failed)
        {
            // It was given up while it hung, with the reason; this says nothing better.
            return;
        }
        let endless = self
            .table
            .get(id)
            .is_some_and(|object| is_endless(object.record.phase));
        match error.kind {
            ErrorKind::Gone
            | ErrorKind::AlreadyExists
            | ErrorKind::Forbidden
            | ErrorKind::Invalid => {
                if endless {
                    self.wait_and_retry(id, &error);
                } else {
                    self.give_up(id, error.kind, error.to_string());
                }
            }
            ErrorKind::InUse | ErrorKind::Blocked => self.wait_for_users(id, &error),
            ErrorKind::NotYet => {
                let at = error.not_before.unwrap_or(self.now.plus(NOT_YET_MS));
                self.wait_until(id, at.max(self.now.plus(NOT_YET_MIN_MS)), &error);
            }
            ErrorKind::NoSpace => self.no_space(id, run, &error),
            // The breaker of the domain is open now: the object waits for that, unharmed.
            ErrorKind::Unreachable => {
                self.table.change(id, |record, _| excuse(record, &error));
                self.table.touch(id, |object| object.wait_until = None);
            }
            ErrorKind::Cancelled if run.cancelled => {
                self.table
                    .change(id, |record, _| record.next_attempt_at = None);
                self.table.touch(id, |object| object.wait_until = None);
            }
            ErrorKind::SessionLost | ErrorKind::Cancelled => self.wait_and_retry(id, &error),
            // What hung was counted as a hang; the same call is not charged twice.
            ErrorKind::Transient | ErrorKind::Internal | ErrorKind::Hung if late => {
                self.wait_and_retry(id, &error);
            }
            ErrorKind::Transient | ErrorKind::Internal | ErrorKind::Hung => {
                self.charge(id, &error, endless);
            }
        }
    }

    /// One attempt fewer; after the last one the object is given up.
    fn charge(&mut self, id: ObjectId, error: &Error, endless: bool) {
        let Some(object) = self.table.get(id) else {
            return;
        };
        let attempts = object.record.attempts.saturating_add(1);
        let allowed = self.policy.retry.attempts;
        if attempts >= allowed && !endless {
            self.table
                .change(id, |record, _| record.attempts = attempts);
            return self.give_up(id, error.kind, error.to_string());
        }
        let wait = retry_ms(&self.policy.retry, attempts, &mut self.rng);
        let at = self.now.plus(wait);
        self.table
            .change(id, |record, _| record.attempts = attempts);
        self.wait_until(id, at, error);
        let of = if endless {
            String::new()
        } else {
            format!(" of {allowed}")
        };
        let words = format!("attempt {attempts}{of} failed: {error}; the next one is in {wait} ms");
        self.log_object(id, true, "Retrying", words);
    }

    /// Another try after a growing wait that costs no attempt.
    fn wait_and_retry(&mut self, id: ObjectId, error: &Error) {
        let Some(object) = self.table.get(id) else {
            return;
        };
        let waits = object.record.waits.saturating_add(1);
        let at = self
            .now
            .plus(retry_ms(&self.policy.retry, waits, &mut self.rng));
        self.table.change(id, |record, _| record.waits = waits);
        self.wait_until(id, at, error);
        if waits == 1 {
            self.log_object(id, true, error.kind.as_str(), error.to_string());
        }
    }

    /// Others hold it: 30 s, doubling to an hour, or until the one that holds it settles.
    pub(super) fn wait_for_users(&mut self, id: ObjectId, error: &Error) {
        let Some(object) = self.table.get(id) else {
            return;
        };
        let waits = object.record.waits.saturating_add(1);
        let at = self.now.plus(in_use_ms(waits));
        self.table.change(id, |record, _| {
            record.waits = waits;
            if record.phase.is_trash()
                && let Some(volume) = record.volume_mut()
            {
                volume.blocked_by.clone_from(&error.blockers);
            }
        });
        self.wait_until(id, at, error);
        if waits == 1 {
            self.log_object(id, false, error.kind.as_str(), error.to_string());
        }
    }

    fn wait_until(&mut self, id: ObjectId, at: Millis, error: &Error) {
        self.table.change(id, |record, _| {
            excuse(record, error);
            record.next_attempt_at = Some(at);
        });
        self.table.touch(id, |object| object.wait_until = Some(at));
    }

    /// Given up until `retry` or a new wish. What was promised a copy of it is given up as well.
    pub(super) fn give_up(&mut self, id: ObjectId, kind: ErrorKind, message: String) {
        let Some(object) = self.table.get(id) else {
            return;
        };
        let half_made = !work::is_live(&object.record);
        let (title, phase) = (object.record.title(), object.record.phase);
        // Its user deleted it, and it was only made because a copy was promised: what there is of
        // it goes now.
        let promised = half_made && object.pinned && object.record.wish == Wish::Absent;
        if half_made {
            for dependent in self.table.dependents(id) {
                let words = format!("its source {title} failed: {message}");
                self.give_up(dependent, ErrorKind::Gone, words);
            }
        }
        if promised || is_endless(phase) {
            return;
        }
        self.table.change(id, |record, now| {
            record.reason = Some(kind);
            record.message = Some(message.clone());
            record.next_attempt_at = None;
            record.move_to(Phase::Failed, now);
        });
        self.log_object(id, true, "Failed", message);
    }

    /// The watchdog gave up waiting: the object is held until the call returns.
    pub(super) fn abandoned(&mut self, attempt: u64, id: ObjectId, hang: &Hang) {
        let Some(run) = self.table.get(id).and_then(|object| object.run.clone()) else {
            return;
        };
        if run.attempt != attempt || run.held_since.is_some() {
            return;
        }
        self.table.touch(id, |object| {
            if let Some(run) = &mut object.run {
                run.held_since = Some(hang.at);
            }
        });
        let words = format!(
            "{} hangs in the storage library: not back after {} ms (deadline {} ms); its thread is \
             abandoned and replaced, the object is held until the call returns",
            hang.step.as_str(),
            hang.at.since(hang.started_at),
            hang.deadline_ms
        );
        self.table.change(id, |record, _| {
            record.reason = Some(ErrorKind::Hung);
            record.message = Some(words.clone());
        });
        let at = hang.at;
        self.log_object_at(at, id, true, "Hung", words);
        self.hung(&run, id);
    }

    /// The probe succeeded although that call hangs: the backend isn't to blame.
    pub(super) fn count_hang(&mut self, id: ObjectId) {
        self.table.touch(id, |object| {
            if let Some(run) = &mut object.run {
                run.hang_counted = true;
            }
        });
        self.table.change(id, |record, _| {
            record.hangs = record.hangs.saturating_add(1)
        });
        let Some(object) = self.table.get(id) else {
            return;
        };
        let (hangs, phase) = (object.record.hangs, object.record.phase);
        if is_endless(phase) {
            // Never given up; what hangs again and again rests ever longer, also after a restart.
            let wait = doubled(self.policy.retry.base_ms, hangs, self.policy.retry.cap_ms);
            let at = self.now.plus(wait);
            self.table
                .change(id, |record, _| record.next_attempt_at = Some(at));
            return self.table.touch(id, |object| object.wait_until = Some(at));
        }
        if hangs >= self.policy.retry.hangs && phase != Phase::Failed {
            let words = format!(
                "it hung {hangs} times although the backend answers; it stays held until the last \
                 call returns, then `retry` takes it up again"
            );
            self.give_up(id, ErrorKind::Hung, words);
        }
    }
}

/// The backend says that nothing of it was removed: it can be restored again.
pub(super) fn back_to_trash(record: &mut Record, now: Millis) {
    if record.phase == Phase::Reclaiming {
        record.move_to(Phase::Trashed, now);
    }
}

/// What is done for these is done in the background, for ever if need be: they are as wished, or
/// out of sight.
fn is_endless(phase: Phase) -> bool {
    phase.is_trash() || phase == Phase::Ready
}

/// Says why an object is not as wished.
fn excuse(record: &mut Record, error: &Error) {
    record.reason = Some(error.kind);
    record.message = Some(error.to_string());
}
