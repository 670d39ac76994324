//! The rules: each takes text and returns what is wrong with it, one sentence per finding. Knows
//! nothing of files and directories. Below each: a text that keeps it and one that breaks it.

use crate::read::{Source, has_word, is_word, take_apart};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// What a module may import from the crate. Modules at the outer edge are not listed.
const IMPORTS: [(&str, &[&str]); 11] = [
    ("model", &[]),
    ("backend", &["model"]),
    ("sched", &["model", "backend"]),
    ("store", &["model"]),
    ("sync", &[]),
    ("duration", &[]),
    ("clock", &["model"]),
    ("slot", &["model", "sync"]),
    ("config", &["model", "duration"]),
    (
        "pool",
        &["model", "backend", "clock", "slot", "spawn", "watchdog"],
    ),
    (
        "watchdog",
        &[
            "model",
            "clock",
            "heartbeat",
            "pool",
            "slot",
            "spawn",
            "sync",
        ],
    ),
];
/// What the core may not name: clocks, threads, files, sockets, chance, unordered maps.
const IMPURE: [&str; 12] = [
    "std::time",
    "std::thread",
    "std::fs",
    "std::net",
    "std::process",
    "std::env",
    "SystemTime",
    "Instant",
    "rand::",
    "rustix",
    "HashMap",
    "HashSet",
];
const UNSAFE_PLACES: [&str; 2] = ["src/backend/rbd/", "src/backend/file/lease.rs"];
const SQL: [&str; 8] = [
    "SELECT ",
    "INSERT INTO",
    "INSERT OR",
    "DELETE FROM",
    "CREATE TABLE",
    "CREATE INDEX",
    "PRAGMA ",
    "BEGIN IMMEDIATE",
];
const FILE_LINES: usize = 600;
const FUNCTION_LINES: usize = 70;
const REQUIRED: [&str; 9] = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "openapi.yaml",
    "deny.toml",
    ".ci/run",
    "scripts/run",
    "scripts/test",
];
/// In two pieces, so that this file passes.
const PLACES: [&str; 5] = [
    concat!("/wo", "rk/"),
    concat!("/tmp/", "tgt"),
    concat!("../", "shared"),
    concat!(".lib", "rary/"),
    concat!("/ro", "ot/"),
];

/// The words of code, line by line, that are in a list.
fn found(source: &Source, code: &str, words: &[&str], why: &str) -> Vec<String> {
    let lines = code.lines().enumerate();
    lines
        .flat_map(|(at, line)| {
            let hits = words.iter().filter(move |word| has_word(line, word));
            hits.map(move |word| format!("{}:{}: `{word}`: {why}", source.path, at + 1))
        })
        .collect()
}

/// The modules of the crate that code names, groups such as `crate::{a, b::{c, d}}` included.
fn named_modules(code: &str) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at]
            .chars()
            .next_back()
            .is_some_and(|c| is_word(c) || c == '$')
        {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            named.extend(group_heads(group));
        } else {
            named.insert(rest.chars().take_while(|&c| is_word(c)).collect());
        }
    }
    named
}

fn group_heads(group: &str) -> Vec<String> {
    let mut heads = vec![String::new()];
    let (mut depth, mut in_head) = (0, true);
    for c in group.chars() {
        match c {
            '}' if depth == 0 => break,
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                heads.push(String::new());
                in_head = true;
            }
            ':' if depth == 0 => in_head = false,
            c if depth == 0 && in_head && is_word(c) => {
                heads.last_mut().expect("never empty").push(c);
            }
            _ => {}
        }
    }
    heads.retain(|head| !head.is_empty());
    heads
}

pub fn imports(source: &Source) -> Vec<String> {
    let module = source.module().unwrap_or_default();
    let Some((_, allowed)) = IMPORTS.iter().find(|(name, _)| *name == module) else {
        return Vec::new();
    };
    let named = named_modules(&take_apart(source.shipped()).code);
    named
        .iter()
        .filter(|name| *name != module && !allowed.contains(&name.as_str()))
        .map(|name| format!("{}: `{module}` must not know `{name}`", source.path))
        .collect()
}

pub fn purity(source: &Source) -> Vec<String> {
    let code = take_apart(source.shipped()).code;
    found(
        source,
        &code,
        &IMPURE,
        "the core decides from its arguments alone",
    )
}

pub fn unsafe_places(source: &Source) -> Vec<String> {
    if UNSAFE_PLACES
        .iter()
        .any(|place| source.path.starts_with(place))
    {
        return Vec::new();
    }
    let code = take_apart(&source.text).code;
    found(
        source,
        &code,
        &["unsafe"],
        "stands at the borders to C only",
    )
}

pub fn sql_places(source: &Source) -> Vec<String> {
    if source.module() == Some("store") {
        return Vec::new();
    }
    let parts = take_apart(source.shipped());
    let mut findings = found(source, &parts.code, &["rusqlite"], "belongs into the store");
    findings.extend(found(
        source,
        &parts.literals,
        &SQL,
        "SQL belongs into the store",
    ));
    findings
}

pub fn file_length(source: &Source) -> Vec<String> {
    let lines = source.shipped().lines().count();
    if lines <= FILE_LINES {
        return Vec::new();
    }
    let path = &source.path;
    vec![format!(
        "{path}: {lines} lines before its tests; at most {FILE_LINES}"
    )]
}

/// Whether a line starts a function, whatever stands before `fn`.
fn starts_function(line: &str) -> bool {
    let words = line.split(' ').take_while(|word| *word != "fn");
    let head = line.trim_start();
    (head.starts_with("fn ") || head.contains(" fn "))
        && words.filter(|word| !word.is_empty()).all(|word| {
            matches!(word, "const" | "async" | "unsafe" | "extern" | "pub" | "in")
                || word.starts_with("pub(")
                || word.starts_with('"')
                || word.ends_with(')')
        })
}

pub fn function_length(source: &Source) -> Vec<String> {
    let code = take_apart(source.shipped()).code;
    let lines: Vec<&str> = code.lines().collect();
    let mut findings = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let ended = line.trim_end().ends_with(['}', ';']);
        if !starts_function(line) || ended {
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let end = lines[start + 1..].iter().position(|line| {
            let rest = line.strip_prefix(indent).unwrap_or_default();
            rest.starts_with('}') || (rest.starts_with(')') && rest.trim_end().ends_with(';'))
        });
        let length = end.map_or(lines.len() - start, |end| end + 2);
        if length > FUNCTION_LINES {
            findings.push(format!(
                "{}:{}: {length} lines in one function; at most {FUNCTION_LINES}",
                source.path,
                start + 1
            ));
        }
    }
    findings
}

pub fn header(source: &Source) -> Vec<String> {
    if source.text.trim_start().starts_with("//!") {
        return Vec::new();
    }
    vec![format!("{}: no `//!` that says what it owns", source.path)]
}

pub fn test_manners(source: &Source) -> Vec<String> {
    let code = take_apart(source.tested()).code;
    let mut findings = found(
        source,
        &code,
        &["thread::sleep(", "sleep("],
        "orders nothing",
    );
    if code.contains(concat!("#[ig", "nore")) {
        findings.push(format!("{}: an ignored test", source.path));
    }
    findings
}

pub fn bounded_channels(source: &Source) -> Vec<String> {
    let words = [
        "unbounded(",
        "mpsc::channel(",
        "unbounded::<",
        "mpsc::channel::<",
    ];
    let code = take_apart(source.shipped()).code;
    found(source, &code, &words, "a channel without a bound")
}

pub fn unwraps(source: &Source) -> Vec<String> {
    let code = take_apart(source.shipped()).code;
    found(
        source,
        &code,
        &["unwrap()"],
        "say why it can't fail, or handle it",
    )
}

fn is_root(path: &str) -> bool {
    let in_tests = path.strip_prefix("tests/");
    path == "src/lib.rs"
        || path == "src/main.rs"
        || in_tests.is_some_and(|rest| !rest.contains('/'))
}

/// The files that the `mod` lines of a source may mean.
fn children(source: &Source) -> Vec<String> {
    let path = Path::new(&source.path);
    let dir = path.parent().unwrap_or(Path::new(""));
    let own = if is_root(&source.path) || path.ends_with("mod.rs") {
        dir.to_owned()
    } else {
        path.with_extension("")
    };
    let mut named: Option<PathBuf> = None;
    let mut files = Vec::new();
    for line in source.text.lines().map(str::trim) {
        if let Some(given) = line.strip_prefix("#[path = \"") {
            named = Some(dir.join(given.trim_end_matches("\"]")));
        } else if let Some((before, name)) =
            line.strip_suffix(';').and_then(|l| l.split_once("mod "))
            && (before.is_empty() || before.starts_with("pub"))
        {
            match named.take() {
                Some(file) => files.push(file),
                None => files.extend([
                    own.join(format!("{name}.rs")),
                    own.join(name).join("mod.rs"),
                ]),
            }
        }
    }
    files.iter().map(|file| plain(file)).collect()
}

/// Without `..`.
fn plain(path: &Path) -> String {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain.to_string_lossy().into_owned()
}

pub fn dead_files(sources: &[Source]) -> Vec<String> {
    let rust: Vec<&Source> = sources.iter().filter(|source| source.is_rust()).collect();
    let mut reached: BTreeSet<String> = BTreeSet::new();
    let mut next: Vec<String> = rust
        .iter()
        .map(|s| s.path.clone())
        .filter(|p| is_root(p))
        .collect();
    while let Some(path) = next.pop() {
        if let Some(source) = rust.iter().find(|source| source.path == path)
            && reached.insert(path)
        {
            next.extend(children(source));
        }
    }
    let dead = rust.iter().filter(|source| {
        let tree = source.is_src() || source.path.starts_with("tests/");
        tree && !reached.contains(&source.path)
    });
    dead.map(|source| format!("{}: no `mod` line reaches it", source.path))
        .collect()
}

pub fn reasons(manifest: &str) -> Vec<String> {
    let mut in_dependencies = false;
    let mut findings = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            in_dependencies = line.contains("dependencies]");
            continue;
        }
        let reason = line
            .rsplit_once('#')
            .is_some_and(|(_, why)| !why.trim().is_empty());
        if in_dependencies && line.contains('=') && !reason {
            findings.push(format!("Cargo.toml: `{line}` doesn't say why it is there"));
        }
    }
    findings
}

pub fn missing(paths: &[&str]) -> Vec<String> {
    let missing = REQUIRED.iter().filter(|required| !paths.contains(required));
    missing
        .map(|required| format!("{required} is missing"))
        .collect()
}

pub fn places(source: &Source) -> Vec<String> {
    let lines = source.text.lines().enumerate();
    lines
        .flat_map(|(at, line)| {
            let hits = PLACES.iter().filter(move |place| line.contains(**place));
            hits.map(move |place| format!("{}:{}: names `{place}`", source.path, at + 1))
        })
        .collect()
}

pub fn registries(lock: &str) -> Vec<String> {
    const PUBLIC: &str = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
    let other = lock
        .lines()
        .filter(|line| line.starts_with("source = ") && *line != PUBLIC);
    other.map(|line| format!("Cargo.lock: {line}")).collect()
}

/// A rule keeps quiet at each of the first texts and speaks up at each of the second.
fn tried(rule: impl Fn(&Source) -> Vec<String>, path: &str, good: &[&str], bad: &[&str]) {
    for text in good {
        assert_eq!(
            rule(&Source::new(path, text)),
            Vec::<String>::new(),
            "{text}"
        );
    }
    for text in bad {
        assert!(
            !rule(&Source::new(path, text)).is_empty(),
            "not found: {text}"
        );
    }
}

#[test]
fn rules_about_places_find_what_they_look_for() {
    tried(
        imports,
        "src/sched/a.rs",
        &[
            "use crate::model::Lane;\n",
            "use crate::{backend::Error, model::{Lane, Step}};\n",
            "// crate::store\n",
        ],
        &[
            "use crate::store::Store;\n",
            "use crate::{model::Lane, pool};\n",
            "fn a() -> crate::http::A {}\n",
        ],
    );
    tried(
        imports,
        "src/model.rs",
        &["use serde::Serialize;\n"],
        &["use crate::backend::Error;\n"],
    );
    tried(
        purity,
        "src/sched.rs",
        &[
            "let a = 1; // Instant\n",
            "\"std::fs\";\n",
            "#[cfg(test)]\nmod tests {\nuse std::time;\n}\n",
        ],
        &[
            "use std::time::Duration;\n",
            "let now = Instant::now();\n",
            "std::fs::read(a);\n",
        ],
    );
    tried(
        unsafe_places,
        "src/pool.rs",
        &["#![allow(unsafe_code)]\n", "// unsafe\n"],
        &["unsafe { a() }\n"],
    );
    tried(
        unsafe_places,
        "src/backend/rbd/ffi.rs",
        &["unsafe { a() }\n"],
        &[],
    );
    tried(
        sql_places,
        "src/hub.rs",
        &["// SELECT a\n", "\"select one\";\n"],
        &["\"SELECT a FROM b\";\n", "use rusqlite::Connection;\n"],
    );
    tried(
        sql_places,
        "src/store/rows.rs",
        &["\"SELECT a FROM b\";\n"],
        &[],
    );
    tried(
        places,
        "README.md",
        &["at work/home"],
        &[concat!("cd /wo", "rk/main"), concat!("../", "shared/a.md")],
    );
}

#[test]
fn rules_about_form_find_what_they_look_for() {
    let lines = |count: usize| "a();\n".repeat(count);
    let tests = format!(
        "{}#[cfg(test)]\nmod tests {{\n{}}}\n",
        lines(600),
        lines(50)
    );
    tried(
        file_length,
        "src/a.rs",
        &[&lines(600), &tests],
        &[&lines(601)],
    );

    let function = |count: usize| {
        format!(
            "impl A {{\n    pub(crate) fn a() {{\n{}    }}\n}}\n",
            "        b();\n".repeat(count)
        )
    };
    let declared = format!(
        "trait A {{\n    fn a(\n        b: u8,\n    ) -> u8;\n{}}}\n",
        "    // b\n".repeat(90)
    );
    tried(
        function_length,
        "src/a.rs",
        &[
            &function(68),
            &declared,
            &format!("fn a() {{}}\n{}", lines(90)),
        ],
        &[
            &function(69),
            &format!("fn a(\n    b: u8,\n) {{\n{}}}\n", lines(70)),
        ],
    );
    tried(header, "src/a.rs", &["//! Owns a.\n"], &["use a;\n", ""]);
    tried(
        test_manners,
        "tests/a.rs",
        &["// sleep(1)\n", "#[test]\nfn a() {}\n"],
        &[
            "thread::sleep(a);\n",
            concat!("#[test]\n#[ig", "nore]\nfn a() {}\n"),
        ],
    );
    tried(
        test_manners,
        "src/a.rs",
        &["thread::sleep(a);\n"],
        &["#[cfg(test)]\nmod tests {\nsleep(a);\n}\n"],
    );
    tried(
        bounded_channels,
        "src/a.rs",
        &["bounded(1);\n"],
        &["let a = unbounded();\n", "mpsc::channel();\n"],
    );
    tried(
        unwraps,
        "src/a.rs",
        &[
            "a.unwrap_or(1);\n",
            "#[cfg(test)]\nmod tests {\na.unwrap();\n}\n",
        ],
        &["a.unwrap();\n"],
    );
}

#[test]
fn rules_about_the_whole_find_what_they_look_for() {
    let tree = [
        Source::new("src/lib.rs", "pub mod a;\nmod b;\n"),
        Source::new(
            "src/a.rs",
            "#[path = \"c/x.rs\"]\nmod d;\n#[cfg(test)]\nmod tests;\n",
        ),
        Source::new("src/a/tests.rs", ""),
        Source::new("src/b/mod.rs", ""),
        Source::new("src/c/x.rs", ""),
    ];
    assert_eq!(dead_files(&tree), Vec::<String>::new());
    let mut more = tree.to_vec();
    more.push(Source::new("src/a/lost.rs", ""));
    assert_eq!(dead_files(&more).len(), 1);

    assert!(reasons("[dependencies]\na = \"1\" # for b\n[profile.dev]\nc = 1\n").is_empty());
    assert_eq!(reasons("[dev-dependencies]\na = \"1\"\n").len(), 1);
    assert!(missing(&REQUIRED).is_empty());
    assert_eq!(missing(&REQUIRED[1..]), ["README.md is missing"]);
    assert!(
        registries("source = \"registry+https://github.com/rust-lang/crates.io-index\"\n")
            .is_empty()
    );
    assert_eq!(
        registries("source = \"git+https://example.org/a\"\n").len(),
        1
    );
}
