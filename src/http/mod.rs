//! HTTP, in and out of the process: the front that owns every connection, and what stands on it.

pub mod auth;
pub mod front;
pub mod park;
pub mod wire;

pub mod api;
pub mod health;
mod status;
