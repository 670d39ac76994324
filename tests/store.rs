//! The store as the daemon uses it: real files, real processes, real kills.

#![allow(clippy::unwrap_used)] // In a test a panic is the answer, in its helpers as well.

#[path = "store/damage.rs"]
mod damage;
#[path = "store/full.rs"]
mod full;
#[path = "store/kill.rs"]
mod kill;
#[path = "store/reading.rs"]
mod reading;
#[path = "store/rows.rs"]
mod rows;
#[path = "store/writing.rs"]
mod writing;
