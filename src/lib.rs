//! volward provisions and deletes block volumes on a storage host, and never stalls.
//!
//! Modules in reading order.

pub mod model;

pub mod backend;
pub mod sched;

pub mod store;

mod sync;

pub mod clock;
pub mod heartbeat;
pub mod slot;
pub mod spawn;

pub mod pool;
pub mod watchdog;

pub mod config;
pub mod duration;

mod log_setup;
pub mod metrics;

pub mod hub;

pub mod daemon;
pub mod http;

pub mod cli;
pub mod client;
