//! Reads the repository, and takes Rust text apart as far as the rules need: comments and literals
//! apart from code, tests apart from what ships. Knows no rule.

use std::path::Path;

/// A text file of the repository.
#[derive(Debug, Clone)]
pub struct Source {
    /// Relative to the root, with slashes.
    pub path: String,
    pub text: String,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Source {
        Source {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub fn is_src(&self) -> bool {
        self.path.starts_with("src/")
    }

    /// The scheduler and the model: what decides.
    pub fn is_core(&self) -> bool {
        matches!(self.module(), Some("sched" | "model"))
    }

    /// Whether the whole file is tests.
    pub fn is_test_file(&self) -> bool {
        !self.is_src() || self.path.ends_with("/tests.rs") || self.path.ends_with("_tests.rs")
    }

    /// The top module of a file in `src`.
    pub fn module(&self) -> Option<&str> {
        let rest = self.path.strip_prefix("src/")?;
        Some(rest.split(['/', '.']).next().unwrap_or(rest))
    }

    /// The text before its test module.
    pub fn shipped(&self) -> &str {
        if self.is_test_file() {
            return "";
        }
        split_tests(&self.text).0
    }

    /// The tests: the test module at the end, or the whole of a test file.
    pub fn tested(&self) -> &str {
        if self.is_test_file() {
            return &self.text;
        }
        split_tests(&self.text).1
    }
}

/// Splits before the first `#[cfg(test)]` that opens a module in the same file.
fn split_tests(text: &str) -> (&str, &str) {
    let mut at = 0;
    let mut marked = None;
    for line in text.split_inclusive('\n') {
        if line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test") {
            marked = Some(at);
        } else if let Some(start) = marked
            && !line.starts_with("#[")
        {
            if line.starts_with("mod ") && line.trim_end().ends_with('{') {
                return text.split_at(start);
            }
            marked = None;
        }
        at += line.len();
    }
    (text, "")
}

/// Every text file of the repository, sorted; build output and Git's own files left out.
pub fn repository() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    walk(root, root, &mut sources);
    sources.sort_by(|a, b| a.path.cmp(&b.path));
    sources
}

fn walk(root: &Path, dir: &Path, sources: &mut Vec<Source>) {
    for entry in std::fs::read_dir(dir).expect("a readable directory") {
        let path = entry.expect("a readable entry").path();
        let name = path
            .file_name()
            .expect("an entry has a name")
            .to_string_lossy()
            .into_owned();
        if name == ".git" || name == "target" {
            continue;
        }
        if path.is_dir() {
            walk(root, &path, sources);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            let relative = path.strip_prefix(root).expect("below the root");
            sources.push(Source::new(&relative.to_string_lossy(), &text));
        }
    }
}

/// Rust text with its parts blanked out, line by line as before.
#[derive(Debug, Default)]
pub struct Parts {
    /// Without comments and without the insides of literals.
    pub code: String,
    /// Nothing but the insides of string literals.
    pub literals: String,
}

/// Takes Rust text apart.
pub fn take_apart(text: &str) -> Parts {
    let chars: Vec<char> = text.chars().collect();
    let mut parts = Parts::default();
    let mut at = 0;
    while at < chars.len() {
        let (end, kind) = token(&chars, at);
        for &c in &chars[at..end] {
            let keep = |kept: bool| if kept || c == '\n' { c } else { ' ' };
            parts.code.push(keep(kind == Kind::Code));
            parts.literals.push(keep(kind == Kind::Literal));
        }
        at = end;
    }
    parts
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// Where the piece that starts at `at` ends, and what it is.
fn token(chars: &[char], at: usize) -> (usize, Kind) {
    let next = |n: usize| chars.get(at + n).copied().unwrap_or('\0');
    let word_before = at > 0 && is_word(chars[at - 1]);
    match chars[at] {
        '/' if next(1) == '/' => (line_end(chars, at), Kind::Comment),
        '/' if next(1) == '*' => (block_end(chars, at), Kind::Comment),
        '"' => (string_end(chars, at + 1), Kind::Literal),
        'r' if !word_before && matches!(next(1), '"' | '#') => raw_end(chars, at),
        // A char, not a lifetime.
        '\'' if next(1) == '\\' => (char_end(chars, at + 3), Kind::Literal),
        '\'' if next(2) == '\'' => (at + 3, Kind::Literal),
        _ => (at + 1, Kind::Code),
    }
}

pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn line_end(chars: &[char], at: usize) -> usize {
    (at..chars.len())
        .find(|&i| chars[i] == '\n')
        .unwrap_or(chars.len())
}

fn block_end(chars: &[char], at: usize) -> usize {
    (at + 2..chars.len().saturating_sub(1))
        .find(|&i| chars[i] == '*' && chars[i + 1] == '/')
        .map_or(chars.len(), |i| i + 2)
}

fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(chars.len())
}

fn char_end(chars: &[char], at: usize) -> usize {
    (at..chars.len())
        .find(|&i| chars[i] == '\'')
        .map_or(chars.len(), |i| i + 1)
}

fn raw_end(chars: &[char], at: usize) -> (usize, Kind) {
    let hashes = chars[at + 1..].iter().take_while(|&&c| c == '#').count();
    if chars.get(at + 1 + hashes) != Some(&'"') {
        return (at + 1, Kind::Code); // a raw identifier
    }
    let end = (at + 2 + hashes..chars.len()).find(|&i| {
        chars[i] == '"'
            && chars[i + 1..].len() >= hashes
            && chars[i + 1..i + 1 + hashes].iter().all(|&c| c == '#')
    });
    (end.map_or(chars.len(), |i| i + 1 + hashes), Kind::Literal)
}

/// Whether `code` has `word` with no word character on either side that would make it another one.
pub fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        let ends_open = word.chars().next_back().is_some_and(|c| !is_word(c));
        before.is_none_or(|c| !is_word(c)) && (ends_open || after.is_none_or(|c| !is_word(c)))
    })
}

#[test]
fn comments_and_literals_are_told_from_code() {
    let parts =
        take_apart("let a = \"x // y\"; // \"z\"\nlet b = '\"'; let c: &'a str = r#\"q\"r\"#;");
    assert!(parts.code.contains("let b =") && parts.code.contains("&'a str"));
    assert!(!parts.code.contains('x') && !parts.code.contains('z') && !parts.code.contains('q'));
    assert!(parts.literals.contains("x // y") && parts.literals.contains("q\"r"));
    assert!(!parts.literals.contains('z'));
}

#[test]
fn a_test_module_is_split_off_and_a_test_file_is_all_tests() {
    let inline = Source::new("src/a.rs", "fn a() {}\n#[cfg(test)]\nmod tests {\n}\n");
    assert_eq!(inline.shipped(), "fn a() {}\n");
    let apart = Source::new("src/a.rs", "#[cfg(test)]\nmod tests;\nfn a() {}\n");
    assert_eq!(apart.tested(), "");
    assert_eq!(Source::new("src/a/tests.rs", "x").shipped(), "");
}

#[test]
fn words_are_whole() {
    assert!(has_word("a unsafe {", "unsafe") && !has_word("unsafe_code", "unsafe"));
    assert!(has_word("std::fs::read", "std::fs") && !has_word("std::fsx", "std::fs"));
}
