//! The rules that a compiler can't hold: who may import whom, what the core may not call, where
//! `unsafe` and SQL may stand, how long things may be, what must be there and what must not.
//!
//! Each rule is a function from text to findings, and is itself tried on a text that keeps it and
//! on one that breaks it. The rules read code as `rustfmt` leaves it.

// What it reads are our own files.
#![allow(clippy::unwrap_used)]

#[path = "tidy/read.rs"]
mod read;
#[path = "tidy/rules.rs"]
mod rules;

use read::{Source, repository};

fn assert_tidy(findings: &[String]) {
    assert!(
        findings.is_empty(),
        "{} untidy:\n  {}",
        findings.len(),
        findings.join("\n  ")
    );
}

/// Applies a rule to each Rust file that `which` picks.
fn each(which: impl Fn(&Source) -> bool, rule: impl Fn(&Source) -> Vec<String>) {
    let sources = repository();
    let picked: Vec<&Source> = sources
        .iter()
        .filter(|source| source.is_rust() && which(source))
        .collect();
    assert!(!picked.is_empty(), "the rule looked at no file");
    assert_tidy(&picked.into_iter().flat_map(rule).collect::<Vec<_>>());
}

#[test]
fn imports_point_one_way() {
    each(Source::is_src, rules::imports);
}

#[test]
fn the_core_is_pure() {
    each(Source::is_core, rules::purity);
}

#[test]
fn unsafe_stands_at_the_borders_only() {
    each(|_| true, rules::unsafe_places);
}

#[test]
fn sql_stands_in_the_store_only() {
    each(Source::is_src, rules::sql_places);
}

#[test]
fn files_fit_a_sitting() {
    each(Source::is_src, rules::file_length);
}

#[test]
fn functions_fit_a_screen() {
    each(Source::is_src, rules::function_length);
}

#[test]
fn every_file_says_what_it_owns() {
    each(|_| true, rules::header);
}

#[test]
fn tests_neither_sleep_nor_get_ignored() {
    each(|_| true, rules::test_manners);
}

#[test]
fn channels_are_bounded() {
    each(Source::is_src, rules::bounded_channels);
}

#[test]
fn nothing_unwraps_outside_tests() {
    each(Source::is_src, rules::unwraps);
}

#[test]
fn no_file_is_dead() {
    assert_tidy(&rules::dead_files(&repository()));
}

#[test]
fn every_dependency_says_why() {
    let sources = repository();
    let manifest = sources.iter().find(|source| source.path == "Cargo.toml");
    assert_tidy(&rules::reasons(&manifest.expect("Cargo.toml").text));
}

#[test]
fn what_must_be_there_is_there() {
    let sources = repository();
    let paths: Vec<&str> = sources.iter().map(|source| source.path.as_str()).collect();
    assert_tidy(&rules::missing(&paths));
}

#[test]
fn nothing_points_at_one_machine() {
    assert_tidy(
        &repository()
            .iter()
            .flat_map(rules::places)
            .collect::<Vec<_>>(),
    );
}

#[test]
fn packages_come_from_the_public_registry() {
    let sources = repository();
    let lock = sources.iter().find(|source| source.path == "Cargo.lock");
    assert_tidy(&rules::registries(&lock.expect("Cargo.lock").text));
}
