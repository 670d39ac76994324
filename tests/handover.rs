//! Every interleaving of the hand-over between worker and watchdog, by a model checker.
//!
//! The real `slot.rs` and `plan.rs`, compiled here with loom's atomics in place of those of `std`:
//! loom runs each model once for every order in which its threads can act and every value that
//! the memory model lets them read.

#![allow(dead_code)]

mod sync {
    pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
}

#[path = "../src/watchdog/plan.rs"]
mod plan;
#[path = "../src/slot.rs"]
mod slot;

use loom::sync::Arc;
use loom::thread;
use slot::{Deadline, Plan, Slot, Stage, State};

const PLAN: Plan = Plan {
    deadline: Deadline {
        stall_ms: 10,
        total_ms: 100,
    },
    cancel_grace_ms: 4,
};

fn running(attempt: u64) -> Arc<Slot> {
    let slot = Arc::new(Slot::default());
    slot.begin(attempt, Stage::Work, PLAN, false, 0);
    slot
}

#[test]
fn worker_and_watchdog_never_both_own_an_outcome() {
    loom::model(|| {
        let slot = running(1);
        let watchdog = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.abandon(slot.seen()))
        };
        let finished = slot.finish(1);
        let abandoned = watchdog.join().unwrap();
        assert!(!(finished && abandoned), "two owners");
        let state = slot.seen().state();
        if finished {
            assert_eq!(state, State::Done);
        } else {
            assert!(abandoned, "nobody owns it");
            assert_eq!(state, State::Abandoned);
        }
    });
}

#[test]
fn an_old_deadline_never_hits_the_next_attempt() {
    loom::model(|| {
        let slot = running(1);
        let seen = slot.seen();
        let watchdog = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.abandon(seen))
        };
        let finished = slot.finish(1);
        if finished {
            slot.begin(2, Stage::Work, PLAN, false, 50);
        }
        let abandoned = watchdog.join().unwrap();
        assert_ne!(finished, abandoned);
        if finished {
            assert_eq!(
                (slot.seen().attempt(), slot.seen().state()),
                (2, State::Running)
            );
        }
    });
}

#[test]
fn a_cancel_never_hits_the_next_attempt() {
    loom::model(|| {
        let slot = running(1);
        let canceller = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.cancel(1, 5))
        };
        assert!(slot.finish(1), "a cancel takes nothing from the worker");
        slot.begin(2, Stage::Connect, PLAN, false, 50);
        canceller.join().unwrap();
        assert!(!slot.seen().cancelled());
        assert!(!slot.stops(2));
    });
}

#[test]
fn a_cancel_is_lost_neither_to_the_next_stage_nor_to_an_abandonment() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        slot.begin(1, Stage::Connect, PLAN, false, 0);
        let canceller = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.cancel(1, 5))
        };
        let entered = slot.enter_work(1, PLAN, 7);
        let cancelled = canceller.join().unwrap();
        assert!(entered && cancelled);
        assert!(slot.stops(1));
        assert_eq!(slot.seen().stage(), Stage::Work);
    });
}

#[test]
fn a_step_begins_or_its_connect_is_abandoned() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        slot.begin(1, Stage::Connect, PLAN, false, 0);
        let seen = slot.seen();
        let watchdog = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || slot.abandon(seen))
        };
        let entered = slot.enter_work(1, PLAN, 7);
        let abandoned = watchdog.join().unwrap();
        assert_ne!(
            entered, abandoned,
            "the step would run on after it was given up"
        );
    });
}

#[test]
fn a_watchdog_that_wins_judged_by_times_of_that_attempt() {
    loom::model(|| {
        let slot = running(1);
        let watchdog = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                let seen = slot.seen();
                let due = slot.due(seen);
                // At 40 ms only an attempt that was never prolonged is overdue.
                due.abandon_ms <= 40 && seen.attempt() == 2 && slot.abandon(seen)
            })
        };
        assert!(slot.finish(1));
        slot.begin(2, Stage::Work, PLAN, false, 35);
        let wrong = watchdog.join().unwrap();
        assert!(!wrong, "the second attempt has until 45 ms");
    });
}

#[test]
fn no_deadline_is_slept_through() {
    loom::model(|| {
        let slot = Arc::new(Slot::default());
        let plan = Arc::new(plan::Plan::default());
        let watchdog = {
            let (slot, plan) = (Arc::clone(&slot), Arc::clone(&plan));
            thread::spawn(move || {
                plan.begin_look();
                let saw = slot.seen().state() == State::Running;
                plan.end_look(if saw { 6 } else { u64::MAX });
                saw
            })
        };
        slot.begin(1, Stage::Work, PLAN, false, 0);
        let due = slot.due(slot.seen());
        let rings = plan.is_later_than(due.cancel_ms);
        let saw = watchdog.join().unwrap();
        // Before its first look the plan is 0: whoever rings then rings for nothing, and the
        // first look finds the slot.
        assert!(saw || rings, "neither saw the other");
    });
}
