//! Reads typed values out of a TOML tree and collects what is wrong, each with its line.

use super::Fault;
use crate::duration::parse_duration;
use crate::model::parse_size;
use std::cell::RefCell;
use std::fmt::Display;
use std::ops::RangeInclusive;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The text, and the faults that were found in it so far.
#[derive(Debug)]
pub(super) struct Sheet<'t> {
    text: &'t str,
    faults: RefCell<Vec<Fault>>,
}

impl<'t> Sheet<'t> {
    pub fn new(text: &'t str) -> Sheet<'t> {
        Sheet {
            text,
            faults: RefCell::new(Vec::new()),
        }
    }

    /// The line of a byte offset, from 1.
    pub fn line(&self, offset: usize) -> usize {
        let end = offset.min(self.text.len());
        self.text.as_bytes()[..end]
            .iter()
            .filter(|b| **b == b'\n')
            .count()
            + 1
    }

    pub fn fault(&self, line: Option<usize>, key: impl Into<String>, message: impl Into<String>) {
        self.faults.borrow_mut().push(Fault {
            line,
            key: key.into(),
            message: message.into(),
        });
    }

    /// All faults, by line.
    pub fn into_faults(self) -> Vec<Fault> {
        let mut faults = self.faults.into_inner();
        faults.sort_by_key(|fault| fault.line);
        faults
    }
}

/// A value with the place where it stands.
#[derive(Debug)]
pub(super) struct Found<'s, 't> {
    sheet: &'s Sheet<'t>,
    pub key: String,
    pub line: usize,
    pub value: &'s DeValue<'t>,
}

impl Found<'_, '_> {
    /// The value as it is written, cut to one line.
    pub fn shown(&self) -> String {
        match self.value {
            DeValue::String(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
            DeValue::Integer(number) => number.as_str().to_owned(),
            DeValue::Float(number) => number.as_str().to_owned(),
            DeValue::Boolean(flag) => flag.to_string(),
            DeValue::Datetime(time) => time.to_string(),
            DeValue::Array(_) => "a list".to_owned(),
            DeValue::Table(_) => "a table".to_owned(),
        }
    }

    /// Records that this value is wrong.
    pub fn wrong(&self, message: impl Display) {
        let message = format!("{}: {message}", self.shown());
        self.sheet.fault(Some(self.line), self.key.clone(), message);
    }

    pub fn string(&self) -> Option<String> {
        match self.value {
            DeValue::String(text) if !text.is_empty() => Some(text.to_string()),
            DeValue::String(_) => {
                self.wrong("it is empty; give a value or leave the key out");
                None
            }
            _ => {
                self.wrong("a text is needed; put it in quotes");
                None
            }
        }
    }

    pub fn integer(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let (low, high) = (*range.start(), *range.end());
        let needed = format!("a whole number from {low} to {high} is needed");
        let DeValue::Integer(number) = self.value else {
            self.wrong(needed);
            return None;
        };
        match i64::from_str_radix(number.as_str(), number.radix()).map(u64::try_from) {
            Ok(Ok(number)) if range.contains(&number) => Some(number),
            _ => {
                self.wrong(needed);
                None
            }
        }
    }

    pub fn boolean(&self) -> Option<bool> {
        if let DeValue::Boolean(flag) = self.value {
            return Some(*flag);
        }
        self.wrong("true or false is needed, without quotes");
        None
    }

    /// Milliseconds.
    pub fn duration(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let text = match self.value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) => {
                let number = number.as_str();
                self.wrong(format!(
                    "a duration has a unit and stands in quotes; write it as \"{number}s\" or \
                     \"{number}m\""
                ));
                return None;
            }
            _ => {
                self.wrong("a duration is needed, such as \"30s\", \"5m\" or \"1h30m\"");
                return None;
            }
        };
        match parse_duration(&text) {
            Ok(ms) if range.contains(&ms) => Some(ms),
            Ok(_) => {
                let show = crate::duration::show_duration;
                let (low, high) = (show(*range.start()), show(*range.end()));
                self.wrong(format!("it must be from \"{low}\" to \"{high}\""));
                None
            }
            Err(error) => {
                self.wrong(error);
                None
            }
        }
    }

    /// Bytes.
    pub fn size(&self, range: RangeInclusive<u64>) -> Option<u64> {
        let DeValue::String(text) = self.value else {
            return self.integer(range);
        };
        match parse_size(text) {
            Ok(bytes) if range.contains(&bytes) => Some(bytes),
            Ok(_) => {
                let (low, high) = (range.start(), range.end());
                self.wrong(format!("it must be from {low} to {high} bytes"));
                None
            }
            Err(error) => {
                self.wrong(error);
                None
            }
        }
    }

    pub fn strings(&self) -> Option<Vec<String>> {
        let DeValue::Array(items) = self.value else {
            self.wrong("a list of texts is needed, such as [\"one\", \"two\"]");
            return None;
        };
        items.iter().map(|item| self.item(item).string()).collect()
    }

    /// An item of this list.
    pub fn item<'s>(&'s self, item: &'s Spanned<DeValue<'_>>) -> Found<'s, 's> {
        Found {
            sheet: self.sheet,
            key: self.key.clone(),
            line: self.sheet.line(item.span().start),
            value: item.get_ref(),
        }
    }
}

/// One table; remembers which keys were asked for, so that the others are unknown.
#[derive(Debug)]
pub(super) struct Section<'s, 't> {
    pub sheet: &'s Sheet<'t>,
    /// The dotted name, empty for the whole file.
    path: String,
    /// Where its header stands.
    pub line: Option<usize>,
    table: Option<&'s DeTable<'t>>,
    known: RefCell<Vec<String>>,
}

impl<'s, 't> Section<'s, 't> {
    pub fn root(sheet: &'s Sheet<'t>, table: &'s DeTable<'t>) -> Section<'s, 't> {
        Section {
            sheet,
            path: String::new(),
            line: None,
            table: Some(table),
            known: RefCell::default(),
        }
    }

    /// The dotted name of a key in it.
    pub fn key(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    pub fn get(&self, name: &str) -> Option<Found<'s, 't>> {
        self.known.borrow_mut().push(name.to_owned());
        let (key, value) = self.table?.iter().find(|(key, _)| key.get_ref() == name)?;
        Some(Found {
            sheet: self.sheet,
            key: self.key(name),
            line: self.sheet.line(key.span().start),
            value: value.get_ref(),
        })
    }

    /// A table in it; one that isn't there is empty.
    pub fn section(&self, name: &str) -> Section<'s, 't> {
        let found = self.get(name);
        let line = found.as_ref().map(|found| found.line);
        let table = found.and_then(|found| match found.value {
            DeValue::Table(table) => Some(table),
            _ => {
                found.wrong(format!("it is a section; write [{}]", found.key));
                None
            }
        });
        Section {
            sheet: self.sheet,
            path: self.key(name),
            line,
            table,
            known: RefCell::default(),
        }
    }

    /// The names of everything in it, for sections whose keys are the user's.
    pub fn names(&self) -> Vec<String> {
        let names = self.table.into_iter().flat_map(|table| table.keys());
        names.map(|key| key.get_ref().to_string()).collect()
    }

    /// Records a fault of a key in it, whether it is there or not.
    pub fn wrong(&self, name: &str, message: impl Into<String>) {
        let line = self.get(name).map(|found| found.line).or(self.line);
        self.sheet.fault(line, self.key(name), message);
    }

    pub fn string(&self, name: &str) -> Option<String> {
        self.get(name)?.string()
    }

    pub fn integer(&self, name: &str, default: u64, range: RangeInclusive<u64>) -> u64 {
        let found = self.get(name);
        found
            .and_then(|found| found.integer(range))
            .unwrap_or(default)
    }

    pub fn boolean(&self, name: &str, default: bool) -> bool {
        let found = self.get(name);
        found.and_then(|found| found.boolean()).unwrap_or(default)
    }

    pub fn duration(&self, name: &str, default: u64, range: RangeInclusive<u64>) -> u64 {
        let found = self.get(name);
        found
            .and_then(|found| found.duration(range))
            .unwrap_or(default)
    }

    pub fn size(&self, name: &str, default: u64, range: RangeInclusive<u64>) -> u64 {
        let found = self.get(name);
        found.and_then(|found| found.size(range)).unwrap_or(default)
    }

    pub fn strings(&self, name: &str) -> Vec<String> {
        let found = self.get(name);
        found.and_then(|found| found.strings()).unwrap_or_default()
    }

    /// Records every key that nobody asked for, with the nearest one that exists.
    pub fn finish(self) {
        let known = self.known.borrow();
        for (key, _) in self.table.into_iter().flatten() {
            let name = key.get_ref();
            if known.iter().any(|known| known == name) {
                continue;
            }
            let mend = match nearest(name, known.iter().map(String::as_str)) {
                Some(near) => format!("did you mean {near:?}?"),
                None => {
                    let mut all: Vec<&str> = known.iter().map(String::as_str).collect();
                    all.sort_unstable();
                    all.dedup();
                    format!("known keys here are {}", all.join(", "))
                }
            };
            let line = self.sheet.line(key.span().start);
            self.sheet
                .fault(Some(line), self.key(name), format!("unknown key; {mend}"));
        }
    }
}

/// The word that a mistyped one most likely means.
pub(super) fn nearest<'w>(word: &str, words: impl Iterator<Item = &'w str>) -> Option<&'w str> {
    let word: String = word.chars().take(40).collect();
    let near = words.map(|known| (distance(&word, known), known)).min()?;
    (near.0 <= 1 + word.chars().count() / 3).then_some(near.1)
}

/// How many letters differ (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
