//! volward provisions and deletes block volumes on a storage host, and never stalls.
//!
//! Modules in reading order.

pub mod model;

pub mod backend;

pub mod clock;
pub mod heartbeat;
pub mod pool;
pub mod slot;
pub mod spawn;
mod sync;
pub mod watchdog;
