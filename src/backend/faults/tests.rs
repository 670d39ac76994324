//! The rules applied to a backend that notes its calls.

use super::*;
use crate::backend::sim::{SimBackend, SimConfig};
use std::sync::mpsc;
use std::thread;

fn rules(json: &str) -> Vec<Rule> {
    serde_json::from_str(json).unwrap()
}

fn armed(json: &str) -> FaultRules {
    let faults = FaultRules::new(7);
    faults.set(rules(json));
    faults
}

fn call<'a>(faults: &'a FaultRules, step: Step, name: &'a str) -> Call<'a> {
    Call {
        rules: faults,
        step,
        name,
        domain: "fast",
    }
}

/// Waits until that many calls hang.
fn until_hanging(faults: &FaultRules, wanted: usize) {
    let begun = Instant::now();
    while faults.hanging() != wanted {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "nothing has hung within 30 s"
        );
        thread::yield_now();
    }
}

/// A `Ctl` whose owner wants an end.
#[derive(Default)]
struct Cancelled(std::sync::atomic::AtomicUsize);

impl Ctl for Cancelled {
    fn progress(&self, _done: u64, _total: u64) -> ControlFlow<()> {
        self.0.fetch_add(1, Ordering::SeqCst);
        ControlFlow::Break(())
    }

    fn cancelled(&self) -> bool {
        true
    }
}

#[test]
fn a_hang_honours_nothing_but_clear_and_then_does_its_work() {
    let faults = armed(r#"[{"step":"trash","name":"victim-*","action":"hang"}]"#);
    let (done, heard) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let answer = call(&faults, Step::Trash, "victim-1").run(&Cancelled::default(), |_| {
                done.send(()).unwrap();
                Ok(5)
            });
            assert_eq!(answer, Ok(5));
        });
        until_hanging(&faults, 1);
        // New rules don't free it.
        faults.set(Vec::new());
        assert_eq!(faults.hanging(), 1);
        assert!(heard.try_recv().is_err(), "a hung call has done its work");
        faults.clear();
        heard.recv_timeout(Duration::from_secs(30)).unwrap();
    });
    assert_eq!(faults.hanging(), 0);
}

#[test]
fn only_the_first_matching_calls_are_hit_and_counted() {
    let faults = armed(
        r#"[{"step":"create","name":"a*","domain":"fa*","action":"error","errno":5,"count":2},
            {"step":"create","action":"error","errno":28,"count":1}]"#,
    );
    let kind = |name: &str| {
        call(&faults, Step::Create, name)
            .run(&super::super::Unwatched, |_| Ok(()))
            .map_err(|e| (e.kind, e.touched))
    };
    assert_eq!(kind("a1"), Err((ErrorKind::Transient, false)));
    assert_eq!(kind("a2"), Err((ErrorKind::Transient, false)));
    assert_eq!(kind("a3"), Err((ErrorKind::NoSpace, false)));
    assert_eq!(kind("a4"), Ok(()));
    let other = call(&faults, Step::Trash, "a1").run(&super::super::Unwatched, |_| Ok(()));
    assert_eq!(other, Ok(()));
    let struck: Vec<u64> = faults.list().iter().map(|rule| rule.struck).collect();
    assert_eq!(struck, [2, 1]);
    let shown = serde_json::to_value(faults.list()).unwrap();
    assert_eq!(shown[0]["struck"], 2);
    assert_eq!(shown[0]["name"], "a*");
    faults.clear();
    assert!(faults.list().is_empty());
}

#[test]
fn the_same_seed_hits_the_same_calls() {
    let pattern = |seed| {
        let faults = FaultRules::new(seed);
        faults.set(rules(
            r#"[{"action":"error","errno":5,"probability":0.3,"count":1000}]"#,
        ));
        let mut hits = Vec::new();
        for _ in 0..2000 {
            let call = call(&faults, Step::Create, "a");
            hits.push(call.run(&super::super::Unwatched, |_| Ok(())).is_err());
        }
        hits
    };
    let first = pattern(1);
    assert_eq!(first, pattern(1));
    assert_ne!(first, pattern(2));
    let hit = first.iter().filter(|hit| **hit).count();
    assert!((250..350).contains(&hit), "{hit} of 1000 at 0.3");
    assert!(
        first[1000..].iter().all(|hit| !hit),
        "beyond the first 1000"
    );
}

#[test]
fn a_delayed_background_step_reports_and_can_be_cancelled() {
    let faults = armed(r#"[{"action":"delay","for":"1h"}]"#);
    let ctl = Cancelled::default();
    let error = call(&faults, Step::Reclaim, "a")
        .run(&ctl, |_| Ok(()))
        .unwrap_err();
    assert_eq!((error.kind, error.touched), (ErrorKind::Cancelled, false));
    assert_eq!(ctl.0.load(Ordering::SeqCst), 1);
}

#[test]
fn a_late_answer_comes_after_the_work() {
    let faults = armed(r#"[{"action":"late-ok","for":"1h"}]"#);
    let (done, heard) = mpsc::channel();
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            call(&faults, Step::Create, "a").run(&Cancelled::default(), |_| {
                done.send(()).unwrap();
                Ok(())
            })
        });
        heard.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(!caller.is_finished(), "it has answered at once");
        // Clearing the rules ends the wait as well.
        faults.clear();
        assert_eq!(caller.join().unwrap(), Ok(()));
    });
}

#[test]
fn half_stops_in_the_middle_and_goes_on_after_clear() {
    let faults = armed(r#"[{"action":"half"}]"#);
    let made = std::sync::atomic::AtomicU64::new(0);
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            call(&faults, Step::Reclaim, "a").run(&super::super::Unwatched, |ctl| {
                for done in 1..=10 {
                    made.store(done, Ordering::SeqCst);
                    let _ = ctl.progress(done, 10);
                }
                Ok(())
            })
        });
        until_hanging(&faults, 1);
        assert_eq!(made.load(Ordering::SeqCst), 5);
        faults.clear();
        assert_eq!(caller.join().unwrap(), Ok(()));
        assert_eq!(made.load(Ordering::SeqCst), 10);
    });
}

#[test]
fn half_of_an_atomic_step_is_the_step_without_its_answer() {
    let faults = armed(r#"[{"action":"half"}]"#);
    let made = AtomicBool::new(false);
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            call(&faults, Step::Trash, "a").run(&super::super::Unwatched, |_| {
                made.store(true, Ordering::SeqCst);
                Ok(())
            })
        });
        until_hanging(&faults, 1);
        assert!(made.load(Ordering::SeqCst) && !caller.is_finished());
        faults.clear();
        assert_eq!(caller.join().unwrap(), Ok(()));
    });
}

#[test]
fn a_panic_is_one_and_the_rules_live_on() {
    let faults = armed(r#"[{"action":"panic","count":1}]"#);
    let again = faults.clone();
    let panicked = thread::spawn(move || {
        call(&again, Step::Create, "a").run(&super::super::Unwatched, |_| Ok(()))
    })
    .join();
    assert!(panicked.is_err());
    let answer = call(&faults, Step::Create, "a").run(&super::super::Unwatched, |_| Ok(()));
    assert_eq!(answer, Ok(()));
}

#[test]
fn connect_and_probe_are_hit_as_well() {
    let config = SimConfig {
        domains: BTreeMap::from([("fast".to_owned(), vec!["pool".to_owned()])]),
        instance: "i".to_owned(),
        ..SimConfig::default()
    };
    let faults = armed(
        r#"[{"step":"connect","action":"error","errno":110,"count":1},
            {"step":"probe","domain":"fast","action":"error","errno":5,"count":1},
            {"step":"probe","name":"victim","action":"error","errno":13}]"#,
    );
    let inner: crate::backend::SharedBackend = Arc::new(SimBackend::new(config));
    let backend = Faulty::new(inner, faults);
    let ctl = super::super::Unwatched;
    let connect = || backend.connect("fast", Lane::Create, &ctl);
    assert_eq!(connect().err().unwrap().kind, ErrorKind::Unreachable);
    let mut session = connect().unwrap();
    assert_eq!(session.probe(&ctl).unwrap_err().kind, ErrorKind::Transient);
    assert!(session.probe(&ctl).unwrap().contains_key("pool"));
}
