//! The daemon: one loop thread that owns the scheduler and the store, and the start and end of
//! everything around it.
//!
//! The loop takes a batch of events, opens a transaction, steps the scheduler with the stored rows
//! that each event names, applies the writes, commits once, and only then does the rest. It has no
//! policy of its own: one arm per command. It never calls the backend, never waits for a worker, a
//! client or the backend.

mod backends;
mod engine;
mod rebuild;
mod serve;

pub use rebuild::rebuild;
pub use serve::serve;
