//! Pools and watchdog together, with a clock and a storage that the tests move by hand.

mod stage_tests;

use crate::backend::Error;
use crate::model::{ErrorKind, Lane, Millis, Step};
use crate::pool::{Layout, Pools, PoolsError, ProbeJob, Report, Unreplaced, system_spawner};
use crate::slot::{Deadline, Plan};
use stage_tests::{Act, CONNECT_MS, DEADLINE_MS, Stage, domain, word};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One domain `a` with that many workers per lane; the reports of its start are taken.
fn stage(threads: usize, abandoned_max: usize) -> Stage {
    let stage = Stage::new(vec![domain("a", threads, abandoned_max)], 1_000);
    let told = [format!("create {threads}"), format!("delete {threads}")];
    assert_eq!(stage.told(), told);
    stage
}

fn counts(stage: &Stage) -> (usize, usize, usize, usize) {
    let counts = stage.pools.counts("a", Lane::Create);
    (counts.threads, counts.idle, counts.abandoned, counts.late)
}

#[test]
fn a_hung_attempt_is_abandoned_and_replaced_and_others_go_on() {
    let mut stage = stage(1, 2);
    let (hung, call) = stage.enter();
    assert_eq!(stage.pools.free("a", Lane::Create), 0);
    stage.pass(DEADLINE_MS - 1);
    assert_eq!(stage.told(), Vec::<String>::new());
    stage.pass(1);
    let Report::Abandoned {
        about,
        abandoned_at,
        ran_ms,
        deadline_ms,
        late_ms,
        unreplaced,
    } = stage.report()
    else {
        panic!("something else was reported");
    };
    assert_eq!((about.attempt, about.doing()), (hung, Step::Create));
    assert_eq!((about.started_at, abandoned_at), (Millis(0), Millis(1_000)));
    assert_eq!((ran_ms, deadline_ms, late_ms), (1_000, 1_000, 0));
    assert_eq!(unreplaced, None);
    assert_eq!(stage.told(), ["create 1"], "told after the abandonment");
    assert_eq!(counts(&stage), (1, 1, 1, 0));
    assert_eq!(stage.puppet.retired.load(Ordering::SeqCst), 1);

    let (next, other) = stage.enter();
    other.act(Act::Return);
    assert_eq!(word(&stage.report()), format!("finished {next} ok"));
    let running = stage.pools.running();
    assert_eq!(running.len(), 1);
    assert!(running[0].abandoned && running[0].about.attempt == hung);

    call.act(Act::Return);
    assert_eq!(word(&stage.report()), format!("late {hung} ok"));
    stage.until(|pools| pools.threads() == 3);
    stage.pass(DEADLINE_MS);
    assert_eq!(counts(&stage), (1, 1, 0, 0));
    assert_eq!(stage.told(), Vec::<String>::new(), "told once, and no more");
}

#[test]
fn a_step_whose_session_opens_too_late_never_begins() {
    let mut stage = stage(1, 1);
    stage.puppet.acts_on_connect.store(true, Ordering::SeqCst);
    let (attempt, call) = stage.enter();
    assert_eq!(call.step, Step::Connect);
    stage.pass(CONNECT_MS);
    let Report::Abandoned { about, .. } = stage.report() else {
        panic!("something else was reported");
    };
    assert_eq!((about.doing(), about.step), (Step::Connect, Step::Create));
    assert_eq!(stage.told(), ["create 1"]);
    call.act(Act::Return);
    let Report::LateReturn { about, result, .. } = stage.report() else {
        panic!("something else was reported");
    };
    assert_eq!((about.attempt, about.connecting), (attempt, true));
    assert!(result.is_err_and(|error| !error.touched));
    stage.until(|pools| pools.threads() == 3);
    assert!(stage.no_call(), "the step was not begun");
}

#[test]
fn the_step_has_its_whole_deadline_however_long_the_connect_took() {
    let mut stage = stage(1, 1);
    stage.puppet.acts_on_connect.store(true, Ordering::SeqCst);
    let (attempt, call) = stage.enter();
    stage.pass(CONNECT_MS - 1);
    call.act(Act::Return);
    let step = stage.call();
    stage.pass(DEADLINE_MS - 1);
    step.act(Act::Return);
    assert_eq!(word(&stage.report()), format!("finished {attempt} ok"));
}

#[test]
fn what_failed_before_the_step_began_touched_nothing() {
    for (act, kind) in [
        (
            Act::Fail(Error::of_errno(110, "rados_connect", "no answer")),
            ErrorKind::Unreachable,
        ),
        (Act::Panic, ErrorKind::Transient),
    ] {
        let mut stage = stage(1, 1);
        stage.puppet.acts_on_connect.store(true, Ordering::SeqCst);
        let (_, call) = stage.enter();
        call.act(act);
        let Report::Finished { about, result, .. } = stage.report() else {
            panic!("something else was reported");
        };
        let error = result.expect_err("it failed");
        assert_eq!((error.kind, error.touched), (kind, false));
        assert!(about.connecting);
    }
}

#[test]
fn a_panic_is_an_error_of_its_attempt_and_costs_no_thread() {
    let mut stage = stage(1, 1);
    let threads = stage.pools.threads();
    let (_, call) = stage.enter();
    call.act(Act::Panic);
    let Report::Finished { result, .. } = stage.report() else {
        panic!("something else was reported");
    };
    let error = result.expect_err("it panicked");
    assert_eq!((error.kind, error.touched), (ErrorKind::Transient, true));
    assert!(error.message.contains("lost its mind"), "{error}");
    assert_eq!(stage.pools.leaked_sessions(), 1);
    let (next, call) = stage.enter();
    call.act(Act::Return);
    assert_eq!(word(&stage.report()), format!("finished {next} ok"));
    assert_eq!(stage.pools.threads(), threads);
}

#[test]
fn sessions_that_panics_leave_behind_are_bounded() {
    let mut stage = stage(1, 1);
    for _ in 0..70 {
        let (_, call) = stage.enter();
        call.act(Act::Panic);
        stage.report();
    }
    assert_eq!(stage.pools.leaked_sessions(), 64);
}

#[test]
fn the_cancel_flag_goes_up_before_the_deadline_and_a_clean_end_is_no_hang() {
    let mut stage = stage(1, 1);
    let (attempt, call) = stage.enter();
    assert!(call.progress(1));
    stage.pass(DEADLINE_MS - 101);
    assert!(call.progress(2));
    stage.pass(1);
    assert!(!call.progress(3), "the flag is up");
    call.act(Act::ObeyCancel);
    assert_eq!(
        word(&stage.report()),
        format!("finished {attempt} Cancelled")
    );
    stage.pass(DEADLINE_MS);
    assert_eq!(counts(&stage), (1, 1, 0, 0));
}

#[test]
fn a_cancel_names_its_attempt_and_finds_it_in_the_queue_as_well() {
    let mut stage = stage(1, 1);
    let (attempt, call) = stage.enter();
    assert!(!stage.pools.cancel(attempt + 1), "no such attempt");
    assert!(call.progress(1));
    assert!(stage.pools.cancel(attempt));
    assert!(!stage.pools.cancel(attempt), "once");
    call.act(Act::ObeyCancel);
    assert_eq!(
        word(&stage.report()),
        format!("finished {attempt} Cancelled")
    );
    assert!(!stage.pools.cancel(attempt), "it is over");

    // Whether the worker has taken it by then or not: the flag is up when the step begins.
    stage.puppet.acts_on_connect.store(true, Ordering::SeqCst);
    let next = stage.send();
    assert!(stage.pools.cancel(next));
    loop {
        match stage.reports.try_recv() {
            Ok(report) => {
                assert_eq!(word(&report), format!("finished {next} Cancelled"));
                break;
            }
            Err(_) if stage.no_call() => std::thread::yield_now(),
            Err(_) => stage.call().act(Act::ObeyCancel),
        }
    }
}

#[test]
fn steady_progress_prolongs_a_stall_deadline_and_repeated_figures_do_not() {
    let mut stage = stage(1, 1);
    let deadline = Deadline {
        stall_ms: 1_000,
        total_ms: 60_000,
    };
    let job = stage.job(Step::Reclaim, Lane::Delete, deadline);
    let attempt = job.attempt;
    stage.pools.dispatch(job).expect("a free worker");
    let call = stage.call();
    for done in 1..=20 {
        stage.pass(890);
        assert!(call.progress(done), "it moves on");
    }
    stage.pass(890);
    assert!(call.progress(20), "no news");
    stage.pass(110);
    let Report::Abandoned {
        about, deadline_ms, ..
    } = stage.report()
    else {
        panic!("something else was reported");
    };
    assert_eq!((about.attempt, deadline_ms), (attempt, 20 * 890 + 1_000));
}

#[test]
fn progress_never_prolongs_the_total_deadline() {
    let mut stage = stage(1, 1);
    let deadline = Deadline {
        stall_ms: 1_000,
        total_ms: 3_000,
    };
    let job = stage.job(Step::Reclaim, Lane::Delete, deadline);
    stage.pools.dispatch(job).expect("a free worker");
    let call = stage.call();
    for done in 1..=6 {
        stage.pass(499);
        call.progress(done);
    }
    stage.pass(6);
    let Report::Abandoned { deadline_ms, .. } = stage.report() else {
        panic!("something else was reported");
    };
    assert_eq!(deadline_ms, 3_000);
}

#[test]
fn at_abandoned_max_the_overdue_stay_busy_cancelled_and_without_replacement() {
    let mut stage = stage(2, 1);
    let (first, one) = stage.enter();
    let (second, two) = stage.enter();
    stage.pass(DEADLINE_MS);
    // Either may be looked at first.
    let Report::Abandoned { about, .. } = stage.report() else {
        panic!("something else was reported");
    };
    let (gone, stays, gone_call, stays_call) = if about.attempt == first {
        (first, second, one, two)
    } else {
        (second, first, two, one)
    };
    assert_eq!(stage.told(), ["create 2"]);
    assert_eq!(counts(&stage), (2, 1, 1, 1));
    assert!(!stays_call.progress(1), "cancelled");
    stage.pass(10 * DEADLINE_MS);
    assert_eq!(counts(&stage), (2, 1, 1, 1));
    assert_eq!(stage.told(), Vec::<String>::new());

    // The first one comes back, so there is room again.
    gone_call.act(Act::Return);
    assert_eq!(word(&stage.report()), format!("late {gone} ok"));
    stage.until(|pools| pools.counts("a", Lane::Create).abandoned == 0);
    stage.pass(0);
    assert_eq!(
        stage.told(),
        [format!("abandoned {stays}"), "create 2".to_owned()]
    );
    assert_eq!(counts(&stage), (2, 2, 1, 0));
}

#[test]
fn a_raised_abandoned_max_is_used_at_once() {
    let mut stage = stage(1, 0);
    let (attempt, _call) = stage.enter();
    stage.pass(DEADLINE_MS);
    assert_eq!(counts(&stage), (1, 0, 0, 1));
    stage.pools.resize("a", Lane::Create, 1, 1).expect("room");
    stage.pass(0);
    let told = [
        "create 1".to_owned(),
        format!("abandoned {attempt}"),
        "create 1".to_owned(),
    ];
    assert_eq!(stage.told(), told);
}

#[test]
fn a_failed_spawn_is_tried_again_and_the_budget_stays_right() {
    let mut stage = stage(1, 3);
    let threads = stage.pools.threads();
    let (_, call) = stage.enter();
    stage.dry.store(true, Ordering::SeqCst);
    stage.pass(DEADLINE_MS);
    assert_eq!(word(&stage.report()), "no thread");
    let Report::Abandoned { unreplaced, .. } = stage.report() else {
        panic!("something else was reported");
    };
    assert_eq!(unreplaced, Some(Unreplaced::SpawnFailed));
    assert_eq!(stage.told(), ["create 0"], "the true count");
    assert_eq!(stage.pools.threads(), threads, "only the abandoned one");
    let job = stage.job(Step::Create, Lane::Create, Deadline::whole(1));
    assert!(
        stage.pools.dispatch(job).is_err(),
        "nobody is there to take it"
    );
    // Backed off: 1 s, then 2 s.
    stage.pass(999);
    assert_eq!(stage.told(), Vec::<String>::new());
    stage.pass(1);
    assert_eq!(stage.told(), ["no thread"]);
    stage.dry.store(false, Ordering::SeqCst);
    assert_eq!(stage.pass(1_999), Some(4_000), "the next try");
    assert_eq!(stage.told(), Vec::<String>::new());
    stage.pass(1);
    assert_eq!(stage.told(), ["create 1"]);
    assert_eq!(counts(&stage), (1, 1, 1, 0));
    call.act(Act::Return);
    stage.until(|pools| pools.threads() == threads);
}

#[test]
fn a_domain_without_threads_corrupts_no_count_and_gets_them_later() {
    let mut stage = stage(1, 1);
    let threads = stage.pools.threads();
    stage.dry.store(true, Ordering::SeqCst);
    let refused = stage.pools.add_domain(&domain("b", 2, 1));
    assert!(
        matches!(refused, Err(PoolsError::Spawn { .. })),
        "{refused:?}"
    );
    let job = || ProbeJob {
        recover: false,
        domain: Arc::from("b"),
        attempt: 900,
    };
    assert!(stage.pools.probe(job()).is_err());
    assert_eq!(stage.pools.threads(), threads);
    stage.dry.store(false, Ordering::SeqCst);
    stage.pass(1_000);
    assert_eq!(stage.pools.counts("b", Lane::Delete).idle, 2);
    stage.pools.probe(job()).expect("a thread for it");
    assert_eq!(stage.pools.threads(), threads + 5);
    stage.call().act(Act::Return);
    stage.pools.remove_domain("b");
    stage.until(|pools| pools.threads() == threads);
}

#[test]
fn pools_that_could_rob_each_other_are_refused() {
    let mut stage = stage(2, 2);
    // a: 2 lanes * (2 + 2) + 1 = 9 of 64.
    stage
        .pools
        .add_domain(&domain("b", 20, 7))
        .expect("55 more are just right");
    let refused = stage.pools.resize("a", Lane::Create, 2, 3);
    let words = refused.expect_err("one too many").to_string();
    assert!(words.contains("64") && words.contains("65"), "{words}");
    assert!(stage.pools.set_threads_max(63).is_err());
    stage.pools.set_threads_max(65).expect("more is fine");
    stage
        .pools
        .resize("a", Lane::Create, 2, 3)
        .expect("now it fits");
    let refused = stage.pools.resize("nowhere", Lane::Create, 2, 3);
    assert!(matches!(refused, Err(PoolsError::NoPool { .. })));

    let layout = Layout {
        domains: vec![domain("a", 2, 2)],
        threads_max: 8,
        stack_bytes: 64 << 10,
        connect: Plan {
            deadline: Deadline::whole(1),
            cancel_grace_ms: 0,
        },
    };
    let (report, _reports) = crossbeam::channel::bounded(100);
    let backend = Arc::clone(&stage.puppet) as Arc<_>;
    let started = Pools::start(
        backend,
        &layout,
        stage.clock.clone(),
        system_spawner(),
        report,
    );
    assert!(matches!(started, Err(PoolsError::Budget { needed: 9, .. })));
    stage.pass(0);
}

#[test]
fn a_busy_lane_shrinks_when_its_workers_are_done_and_grows_at_once() {
    let mut stage = stage(3, 1);
    let (first, one) = stage.enter();
    let (second, two) = stage.enter();
    stage.pools.resize("a", Lane::Create, 1, 1).expect("less");
    assert_eq!(stage.told(), ["create 2"], "only the free one can go");
    one.act(Act::Return);
    assert_eq!(
        word(&stage.report()),
        "create 1",
        "before its slot looks free"
    );
    assert_eq!(word(&stage.report()), format!("finished {first} ok"));
    assert_eq!(counts(&stage), (1, 0, 0, 0));
    stage.until(|pools| pools.threads() == 1 + 3 + 1);
    stage.pools.resize("a", Lane::Create, 4, 1).expect("more");
    assert_eq!(stage.told(), ["create 4"]);
    two.act(Act::Return);
    assert_eq!(word(&stage.report()), format!("finished {second} ok"));
    assert_eq!(counts(&stage), (4, 4, 0, 0));
}

#[test]
fn a_hung_probe_is_waited_for_and_never_doubled() {
    let mut stage = stage(1, 1);
    let threads = stage.pools.threads();
    let job = |attempt, recover| ProbeJob {
        recover,
        domain: Arc::from("a"),
        attempt,
    };
    stage.pools.probe(job(1, true)).expect("the first");
    let call = stage.call();
    assert_eq!(call.step, Step::Probe);
    stage.pass(1_000_000);
    assert!(stage.pools.probe(job(2, true)).is_err(), "one at a time");
    assert_eq!(stage.pools.probing().len(), 1);
    // The domain goes and comes back: still the same thread.
    stage.pools.remove_domain("a");
    stage.pools.add_domain(&domain("a", 1, 1)).expect("again");
    assert!(stage.pools.probe(job(3, true)).is_err(), "still out");
    stage.until(|pools| pools.threads() == threads);
    stage.told();
    call.act(Act::Return);
    assert_eq!(word(&stage.report()), "probed true");
    assert_eq!(stage.puppet.recovered.load(Ordering::SeqCst), 1);
    stage.pools.probe(job(4, false)).expect("free again");
    stage.call().act(Act::Return);
    assert_eq!(word(&stage.report()), "probed true");
    assert_eq!(
        stage.puppet.recovered.load(Ordering::SeqCst),
        1,
        "not asked for"
    );
    stage.pools.probe(job(5, true)).expect("free again");
    stage.call().act(Act::Panic);
    assert_eq!(word(&stage.report()), "probed false");
    assert_eq!(
        stage.puppet.recovered.load(Ordering::SeqCst),
        1,
        "not after a failure"
    );
}

#[test]
fn a_shutdown_waits_for_nobody_and_names_what_still_runs() {
    let mut stage = stage(3, 1);
    let (hung, _stuck) = stage.enter();
    stage.pass(DEADLINE_MS);
    assert_eq!(
        stage.told(),
        [format!("abandoned {hung}"), "create 3".to_owned()]
    );
    let (busy, call) = stage.enter();
    let left = stage.pools.shutdown();
    let left: Vec<(u64, bool)> = left
        .iter()
        .map(|running| (running.about.attempt, running.abandoned))
        .collect();
    assert_eq!(left, [(hung, true), (busy, false)]);
    let job = stage.job(Step::Create, Lane::Create, Deadline::whole(1));
    assert!(stage.pools.dispatch(job).is_err());
    assert!(!call.progress(1), "cancelled");
    call.act(Act::ObeyCancel);
    stage.until(|pools| pools.threads() == 1);
    let told = stage.told();
    assert!(
        told.contains(&format!("finished {busy} Cancelled")),
        "{told:?}"
    );
    assert_eq!(stage.pools.running().len(), 1, "the hung one");
}

#[test]
fn nobody_waits_for_a_loop_that_is_behind_and_nothing_is_lost() {
    let mut stage = Stage::new(vec![domain("a", 4, 4)], 1);
    let calls: Vec<_> = (0..4).map(|_| stage.enter()).collect();
    // One place, and nobody reads: workers and watchdog go on all the same.
    assert_eq!(
        stage.pass(DEADLINE_MS),
        Some(DEADLINE_MS + 20),
        "tries again"
    );
    for (_, call) in &calls {
        call.act(Act::Return);
    }
    stage.until(|pools| pools.threads() == 9);
    let mut told = Vec::new();
    let mut last = None;
    while told.len() < 2 + 4 * 3 {
        stage.pass(20);
        for word in stage.told() {
            last = word.starts_with("create").then(|| word.clone()).or(last);
            told.push(word);
        }
    }
    for (attempt, _) in &calls {
        let at = |word: String| told.iter().position(|other| *other == word);
        let gone = at(format!("abandoned {attempt}"));
        let late = at(format!("late {attempt} ok"));
        assert!(gone.is_some() && gone < late, "{told:?}");
    }
    assert_eq!(last.as_deref(), Some("create 4"), "{told:?}");
}

#[test]
fn a_stopped_process_gives_what_runs_a_second_chance() {
    let mut stage = stage(1, 1);
    let (attempt, call) = stage.enter();
    stage.stand_still(3_600_000);
    assert_eq!(
        stage.told(),
        Vec::<String>::new(),
        "it could not run either"
    );
    assert!(call.progress(1));
    stage.pass(DEADLINE_MS);
    assert_eq!(
        stage.told(),
        [format!("abandoned {attempt}"), "create 1".to_owned()]
    );
}

#[test]
fn threads_that_hang_while_they_leave_use_up_no_more_than_the_share_of_their_pool() {
    let mut stage = stage(1, 1);
    stage.puppet.acts_on_close.store(true, Ordering::SeqCst);
    let mut closing = Vec::new();
    for round in 0..2 {
        let (_, call) = stage.enter();
        call.act(Act::Return);
        stage.report();
        stage.pools.resize("a", Lane::Create, 0, 1).expect("less");
        closing.push(stage.call());
        stage.pools.resize("a", Lane::Create, 1, 1).expect("more");
        let told = stage.told();
        match round {
            0 => assert_eq!(told, ["create 0", "create 1"]),
            _ => assert_eq!(told, ["create 0", "no thread", "create 0"]),
        }
    }
    for _ in 0..3 {
        assert_eq!(stage.pass(10_000), None, "only the end of a thread helps");
        assert_eq!(stage.told(), Vec::<String>::new(), "told once");
    }
    closing[0].act(Act::Return);
    stage.until(|pools| pools.threads() == 3);
    stage.pass(0);
    assert_eq!(stage.told(), ["create 1"]);
    // Let go of everything that is still to be closed.
    stage.puppet.acts_on_close.store(false, Ordering::SeqCst);
}

#[test]
fn a_lost_session_is_closed_and_opened_within_the_next_attempt() {
    let mut stage = stage(1, 1);
    let (_, call) = stage.enter();
    call.act(Act::Fail(Error::of_errno(108, "rbd_open", "blocklisted")));
    assert!(word(&stage.report()).ends_with("SessionLost"));
    stage.puppet.acts_on_close.store(true, Ordering::SeqCst);
    let (attempt, call) = stage.enter();
    assert_eq!(call.step, Step::Connect, "it closes the lost one first");
    stage.puppet.acts_on_close.store(false, Ordering::SeqCst);
    stage.pass(CONNECT_MS);
    assert_eq!(
        stage.told(),
        [format!("abandoned {attempt}"), "create 1".to_owned()]
    );
    drop(call);
    assert_eq!(word(&stage.report()), format!("late {attempt} Cancelled"));
}
