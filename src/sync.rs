//! The atomics of the slot, under a name that `tests/handover.rs` can replace.
//!
//! `slot.rs` takes its atomics from `crate::sync`. Here these are those of `std`; the model check
//! includes the same `slot.rs` by its path into a crate whose `sync` has those of `loom`.

pub use std::sync::atomic::{AtomicU64, Ordering, fence};
