//! The stuck watch: what makes no progress for ten minutes is reported, whatever the cause.

use super::Sched;
use crate::model::{ErrorKind, Millis, ObjectId};
use std::collections::BTreeMap;

impl Sched {
    /// Time has passed; `progress` says when running attempts last got further.
    pub(super) fn watch(&mut self, progress: &BTreeMap<u64, Millis>) {
        while let Some((at, id)) = self.table.next_stuck()
            && at <= self.now
        {
            self.watch_one(id, progress);
        }
    }

    fn watch_one(&mut self, id: ObjectId, progress: &BTreeMap<u64, Millis>) {
        let now = self.now;
        let Some(object) = self.table.get(id) else {
            return;
        };
        let moved = object
            .run
            .as_ref()
            .filter(|run| run.held_since.is_none())
            .and_then(|run| progress.get(&run.attempt))
            .copied()
            .filter(|at| *at > object.idle_since);
        if let Some(at) = moved {
            return self
                .table
                .touch(id, |object| object.idle_since = at.min(now));
        }
        let record = &object.record;
        // These wait for somebody else, and say for whom; a trash entry is kept on purpose.
        let shown_as_waiting = object.run.is_none()
            && (matches!(
                record.reason,
                Some(ErrorKind::InUse | ErrorKind::Blocked | ErrorKind::NotYet)
            ) || record.phase.is_trash() && object.wait_until.is_some());
        if shown_as_waiting {
            return self.table.touch(id, |object| object.idle_since = now);
        }
        let minutes = now.since(object.idle_since) / 60_000;
        let cause = self
            .cause(id)
            .unwrap_or_else(|| "no cause is known".to_owned());
        let phase = record.phase.as_str();
        let words = format!("{phase} for {minutes} minutes without progress: {cause}");
        self.stuck_reports += 1;
        self.table.touch(id, |object| object.stuck = true);
        self.log_object(id, true, "Stuck", words);
    }
}
