//! What several of the test programs need. Not every one needs all of it.

#![allow(dead_code)]

pub mod conformance;
pub mod records;
