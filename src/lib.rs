//! volward.
