//! volward provisions and deletes block volumes on a storage host, and never stalls.
//!
//! Modules in reading order.

pub mod model;

pub mod backend;
pub mod sched;

pub mod store;

pub mod spawn;

pub mod http;

pub mod duration;

pub mod config;

pub mod client;

pub mod cli;
