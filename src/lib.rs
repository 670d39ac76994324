//! volward provisions and deletes block volumes on a storage host, and never stalls.
//!
//! Modules in reading order.

pub mod model;

pub mod backend;

pub mod sched;

pub mod store;
