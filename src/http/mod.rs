//! HTTP, in and out of the process.

pub mod wire;
