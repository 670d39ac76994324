//! The seeded simulator: the scheduler against a world that hangs, lies, dies and comes back.
//!
//! `VOLWARD_SIM_SEED=N` runs one seed, `VOLWARD_SIM_SEEDS=N` so many of them, and
//! `VOLWARD_SIM_FROM=N` starts elsewhere than at 1. A failing seed is printed.

#[path = "sim/checker.rs"]
mod checker;
#[path = "sim/dice.rs"]
mod dice;
#[path = "sim/disk.rs"]
mod disk;
#[path = "sim/options.rs"]
mod options;
#[path = "sim/world.rs"]
mod world;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use world::World;

/// How many seeds a plain run has.
const SEEDS: u64 = 2_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number")),
    )
}

#[test]
fn every_seed_holds_every_promise() {
    let (from, count) = match number("VOLWARD_SIM_SEED") {
        Some(seed) => (seed, 1),
        None => {
            let from = number("VOLWARD_SIM_FROM").unwrap_or(1);
            (from, number("VOLWARD_SIM_SEEDS").unwrap_or(SEEDS))
        }
    };
    let started = Instant::now();
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    let totals: Vec<[u64; 4]> = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..threads)
            .map(|lane| scope.spawn(move || run_seeds(from + lane, from + count, threads)))
            .collect();
        lanes
            .into_iter()
            .map(|lane| lane.join().expect("a seed failed, see above"))
            .collect()
    });
    let sum = |n: usize| totals.iter().map(|total| total[n]).sum::<u64>();
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{count} seeds, {} steps ({:.0}/s), {} attempts, {} crashes, {} restarts, {seconds:.1} s",
        sum(0),
        sum(0) as f64 / seconds,
        sum(1),
        sum(2),
        sum(3),
    );
}

/// Every `stride`-th seed: steps, attempts, crashes, restarts.
fn run_seeds(from: u64, end: u64, stride: u64) -> [u64; 4] {
    let mut total = [0; 4];
    let mut steps = BTreeSet::new();
    let mut seeds = 0;
    let mut seed = from;
    while seed < end {
        let mut world = World::new(seed);
        let run = catch_unwind(AssertUnwindSafe(|| world.run()));
        assert!(
            run.is_ok(),
            "seed {seed} breaks a promise; VOLWARD_SIM_SEED={seed} shows it"
        );
        let one = [
            world.steps,
            world.checker.dispatches,
            world.crashes,
            world.restarts,
        ];
        total.iter_mut().zip(one).for_each(|(sum, n)| *sum += n);
        steps.append(&mut world.checker.seen_steps);
        seeds += 1;
        seed += stride;
    }
    if seeds > 200 {
        // A world that never gets to some step proves nothing about it.
        let missing: Vec<_> = world::STEPS
            .iter()
            .filter(|step| !steps.contains(step))
            .collect();
        assert!(missing.is_empty(), "no seed came to {missing:?}");
    }
    total
}
