//! What the seed draws: the configuration, the moods of the backends, how bad the day is.

use super::dice::Dice;
use super::disk::Extent;
use std::collections::BTreeMap;
use volward::backend::{Caps, Error};
use volward::model::{ErrorKind, Place, Step};
use volward::sched::{ClassPolicy, DomainPolicy, Policy, RetryPolicy};

/// How a backend is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Well,
    /// Errors of every kind, and hangs.
    Flaky,
    /// Nothing answers, in time.
    Unreachable,
    /// Nothing returns.
    Hanging,
    /// No room.
    Full,
}

impl Mood {
    pub fn draw(dice: &mut Dice) -> Mood {
        match dice.below(10) {
            0..4 => Mood::Well,
            4..6 => Mood::Flaky,
            6 => Mood::Unreachable,
            7..9 => Mood::Hanging,
            _ => Mood::Full,
        }
    }
}

/// What a call will do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// `None`: it hangs.
    pub ends_after_ms: Option<u64>,
    pub early: bool,
    pub extent: Extent,
    pub answer: Option<Error>,
}

#[derive(Debug, Clone)]
pub struct Options {
    pub policy: Policy,
    pub deadline_ms: u64,
    pub span_ms: u64,
    pub client_every_ms: u64,
    pub mood_every_ms: u64,
    pub crash_every_ms: u64,
    pub config_every_ms: u64,
    pub stop_every_ms: u64,
    pub clock_jump_ms: u64,
    pub names: u64,
    pub batch_max: u64,
    /// Per mille.
    pub together: u64,
    pub commit_fails: u64,
    pub dies_before_commit: u64,
    pub dies_between_commands: u64,
    pub fault: u64,
}

impl Options {
    pub fn draw(dice: &mut Dice) -> Options {
        let calm = dice.chance(200);
        let often = |dice: &mut Dice, ms: u64| if dice.chance(300) { 0 } else { ms };
        Options {
            policy: policy(dice),
            deadline_ms: dice.between(1_000, 30_000),
            span_ms: dice.between(60_000, 3_600_000),
            client_every_ms: dice.between(200, 20_000),
            mood_every_ms: if calm {
                0
            } else {
                dice.between(5_000, 600_000)
            },
            crash_every_ms: often(dice, 300_000),
            config_every_ms: often(dice, 600_000),
            stop_every_ms: often(dice, 900_000),
            clock_jump_ms: 7_200_000,
            names: dice.between(2, 8),
            batch_max: dice.between(1, 8),
            together: dice.below(500),
            commit_fails: if calm { 0 } else { dice.below(50) },
            dies_before_commit: if calm { 0 } else { dice.below(10) },
            dies_between_commands: if calm { 0 } else { dice.below(10) },
            fault: if calm { 0 } else { dice.below(150) },
        }
    }

    /// A reload with other bounds.
    pub fn redraw(&mut self, dice: &mut Dice) {
        let policy = policy(dice);
        // The domains stay, their sizes change.
        for (name, bounds) in &mut self.policy.domains {
            if let Some(other) = policy.domains.get(name) {
                *bounds = *other;
            }
        }
        self.policy.backlog = policy.backlog;
        self.policy.retry = policy.retry;
        self.policy.trash_flatten = policy.trash_flatten;
        self.policy.trash_keep_ms = policy.trash_keep_ms;
    }

    pub fn domains(&self) -> impl Iterator<Item = String> + use<> {
        self.policy
            .domains
            .keys()
            .cloned()
            .collect::<Vec<_>>()
            .into_iter()
    }

    pub fn some_extent(&self, dice: &mut Dice) -> Extent {
        *dice.pick(&[Extent::Nothing, Extent::Half, Extent::Whole])
    }

    pub fn plan(&self, dice: &mut Dice, mood: Mood, step: Step, healed: bool) -> Plan {
        let quick = dice.between(1, 200);
        let good = Plan {
            ends_after_ms: Some(quick),
            early: dice.chance(300),
            extent: Extent::Whole,
            answer: None,
        };
        if healed {
            return good;
        }
        let space = matches!(
            step,
            Step::Create | Step::Import | Step::Update | Step::Snapshot | Step::Encrypt
        );
        match mood {
            Mood::Unreachable => {
                let answer = Some(Error::of_errno(110, "model", "no answer"));
                Plan {
                    extent: self.some_extent(dice),
                    answer,
                    ..good
                }
            }
            Mood::Hanging => Plan {
                ends_after_ms: None,
                extent: self.some_or_whole(dice),
                ..good
            },
            Mood::Full if space => {
                let answer = Some(Error::of_errno(28, "model", "no room"));
                Plan {
                    extent: Extent::Nothing,
                    answer,
                    early: false,
                    ..good
                }
            }
            Mood::Flaky if dice.chance(400) => self.fault(dice, step, good),
            _ if dice.chance(self.fault) => self.fault(dice, step, good),
            Mood::Well | Mood::Full | Mood::Flaky => good,
        }
    }

    fn some_or_whole(&self, dice: &mut Dice) -> Extent {
        if dice.chance(500) {
            Extent::Whole
        } else {
            self.some_extent(dice)
        }
    }

    fn fault(&self, dice: &mut Dice, step: Step, good: Plan) -> Plan {
        let error = |kind: ErrorKind| Some(Error::new(kind, "model", "the dice say so"));
        let extent = self.some_extent(dice);
        let nothing = Plan {
            extent: Extent::Nothing,
            early: false,
            ..good.clone()
        };
        match dice.below(20) {
            // Hangs for good although the backend is well.
            0 | 1 => Plan {
                ends_after_ms: None,
                extent,
                ..good
            },
            // Comes late.
            2..5 => {
                let late = self.deadline_ms + dice.below(self.deadline_ms * 3);
                Plan {
                    ends_after_ms: Some(late),
                    extent: Extent::Whole,
                    ..good
                }
            }
            5 => {
                let late = self.deadline_ms * 2;
                let answer = error(ErrorKind::Transient);
                Plan {
                    ends_after_ms: Some(late),
                    extent,
                    answer,
                    ..good
                }
            }
            6 => Plan {
                extent,
                answer: error(ErrorKind::SessionLost),
                ..good
            },
            7 => Plan {
                extent,
                answer: error(ErrorKind::Unreachable),
                ..good
            },
            8 => Plan {
                answer: error(ErrorKind::InUse),
                ..nothing
            },
            9 if step == Step::Reclaim => Plan {
                answer: error(ErrorKind::NotYet),
                ..nothing
            },
            10 => Plan {
                answer: error(ErrorKind::Forbidden),
                ..nothing
            },
            11 => Plan {
                answer: error(ErrorKind::Invalid),
                ..nothing
            },
            12 => Plan {
                extent,
                answer: error(ErrorKind::Cancelled),
                ..good
            },
            13 => Plan {
                answer: error(ErrorKind::NoSpace),
                ..nothing
            },
            _ => Plan {
                extent,
                answer: error(ErrorKind::Transient),
                ..good
            },
        }
    }
}

fn policy(dice: &mut Dice) -> Policy {
    let count = dice.between(1, 3);
    let mut classes = BTreeMap::new();
    let mut domains = BTreeMap::new();
    for n in 0..3 {
        let name = format!("d{n}");
        let threads = |dice: &mut Dice| usize::try_from(dice.between(2, 5)).expect("small");
        let bounds = DomainPolicy {
            threads: [threads(dice), threads(dice)],
            abandoned_max: [threads(dice) - 1, threads(dice) - 1],
        };
        if n >= count {
            continue;
        }
        let place = Place {
            class: name.clone(),
            domain: name.clone(),
            root: name.clone(),
            data_pool: None,
            namespace: None,
            identity: None,
        };
        classes.insert(name.clone(), ClassPolicy { place, qos: None });
        domains.insert(name, bounds);
    }
    let clone_depth = u32::try_from(dice.between(1, 4)).expect("small");
    Policy {
        caps: Caps {
            qos: true,
            encryption: true,
            import_raw: true,
            import_qcow2: false,
            chains: true,
            size_unit: 1,
        },
        classes,
        domains,
        import_dirs: Vec::new(),
        keys: ["key".to_owned()].into(),
        backlog: usize::try_from(dice.between(2, 50)).expect("small"),
        max_size_bytes: 1 << 40,
        max_volumes: dice.between(5, 60),
        clone_depth,
        clone_depth_max: clone_depth + 4,
        encrypt: 1,
        retry: RetryPolicy {
            attempts: u32::try_from(dice.between(2, 6)).expect("small"),
            base_ms: 500,
            cap_ms: dice.between(5_000, 300_000),
            hangs: u32::try_from(dice.between(1, 3)).expect("small"),
        },
        breaker_hangs: u32::try_from(dice.between(1, 4)).expect("small"),
        breaker_open_ms: 1_000,
        breaker_open_cap_ms: 5_000,
        trash_keep_ms: dice.below(3_600_000),
        trash_flatten: dice.chance(500),
        restart_after_ms: dice.between(10_000, 120_000),
    }
}
