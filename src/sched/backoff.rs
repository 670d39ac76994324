//! How long to wait before the next attempt.

use super::policy::RetryPolicy;

/// A small seeded generator (SplitMix64: Steele, Lea and Flood, OOPSLA 2014), so that a
/// simulation replays.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// The longest wait for something in use: an hour.
pub const IN_USE_CAP_MS: u64 = 3_600_000;
/// The first wait for something in use. Watches of a dead client time out after 30 s in Ceph, so
/// anything shorter only makes noise.
pub const IN_USE_BASE_MS: u64 = 30_000;

/// `base·2ⁿ` for `n` = `failures` - 1, at most `cap`; a fifth of it is jitter, so that objects that
/// failed together don't come back together.
pub fn retry_ms(retry: &RetryPolicy, failures: u32, rng: &mut Rng) -> u64 {
    let ms = doubled(retry.base_ms, failures, retry.cap_ms);
    let jitter = ms / 5;
    if jitter == 0 {
        ms
    } else {
        ms - jitter + rng.next() % (jitter + 1)
    }
}

/// 30 s doubling to an hour, for the `waits`-th wait in a row.
pub fn in_use_ms(waits: u32) -> u64 {
    doubled(IN_USE_BASE_MS, waits, IN_USE_CAP_MS)
}

/// `base` doubled `nth` - 1 times, at most `cap`.
pub fn doubled(base: u64, nth: u32, cap: u64) -> u64 {
    let factor = 1u64.checked_shl(nth.saturating_sub(1)).unwrap_or(u64::MAX);
    base.saturating_mul(factor).min(cap)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_cap() {
        let waits: Vec<u64> = (1..=9).map(in_use_ms).collect();
        let minutes = [
            30_000, 60_000, 120_000, 240_000, 480_000, 960_000, 1_920_000, 3_600_000, 3_600_000,
        ];
        assert_eq!(waits, minutes);
        assert_eq!(in_use_ms(u32::MAX), IN_USE_CAP_MS);
    }

    #[test]
    fn jitter_stays_within_a_fifth_and_replays() {
        let retry = RetryPolicy {
            attempts: 5,
            base_ms: 1000,
            cap_ms: 60_000,
            hangs: 3,
        };
        let (mut one, mut two) = (Rng::new(7), Rng::new(7));
        for n in 1..20 {
            let ms = retry_ms(&retry, n, &mut one);
            let full = doubled(1000, n, 60_000);
            assert!(ms <= full && ms >= full - full / 5, "{n}: {ms} of {full}");
            assert_eq!(ms, retry_ms(&retry, n, &mut two));
        }
    }
}
