//! Ids and names.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The unique id of a volume or a snapshot: a ULID (48 bits of time, 80 bits of randomness), so
/// that ids sort by age. A volume keeps it in the trash and when it is restored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Uid(pub u128);

impl Uid {
    /// A new id from a time in milliseconds since the Unix epoch and 80 bits of randomness.
    #[must_use]
    pub fn new(at_ms: u64, random: u128) -> Uid {
        Uid(ulid::Ulid::from_parts(at_ms, random).0)
    }

    /// Lower case, as it stands in image and file names.
    #[must_use]
    pub fn lower(self) -> String {
        self.to_string().to_ascii_lowercase()
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ulid::Ulid(self.0))
    }
}

impl fmt::Debug for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Uid {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Uid, BadName> {
        ulid::Ulid::from_string(text)
            .map(|ulid| Uid(ulid.0))
            .map_err(|_| BadName::Uid)
    }
}

impl Serialize for Uid {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Uid {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Uid, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The name that a user gives: `^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Name(String);

/// Why a text is no name or uid.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadName {
    /// It has no characters.
    #[error("a name has 1 to 63 characters; this one is empty")]
    Empty,
    /// It is too long; the number is its length in bytes.
    #[error("a name has 1 to 63 characters; this one has {0}")]
    Long(usize),
    /// It has a character that no name has.
    #[error(
        "a name has only a-z, 0-9, '.', '_' and '-', and begins and ends with a letter or digit; \
         {0:?} at position {1} doesn't fit"
    )]
    Character(char, usize),
    /// It is no uid.
    #[error("a uid has 26 characters of 0-9 and A-Z without I, L, O and U")]
    Uid,
}

/// The most characters of a name.
pub const NAME_MAX: usize = 63;

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Name, BadName> {
        if text.is_empty() {
            return Err(BadName::Empty);
        }
        let last = text.chars().count() - 1;
        for (at, c) in text.chars().enumerate() {
            let inner = at != 0 && at != last && matches!(c, '.' | '_' | '-');
            if !(c.is_ascii_lowercase() || c.is_ascii_digit() || inner) {
                return Err(BadName::Character(c, at + 1));
            }
        }
        if text.len() > NAME_MAX {
            return Err(BadName::Long(text.len()));
        }
        Ok(Name(text.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Which object: a volume (also as a trash entry or a carrier) or a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ObjectId {
    /// A volume, by uid; the same id while its image is in the trash.
    Volume(Uid),
    /// A snapshot, by uid.
    Snapshot(Uid),
}

impl ObjectId {
    /// The uid, whatever the kind.
    #[must_use]
    pub fn uid(self) -> Uid {
        match self {
            ObjectId::Volume(uid) | ObjectId::Snapshot(uid) => uid,
        }
    }

    /// `volume` or `snapshot`, as in the events and the metrics.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            ObjectId::Volume(_) => "volume",
            ObjectId::Snapshot(_) => "snapshot",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        let longest = "a".repeat(63);
        for good in ["a", "0", "db-01", "a.b_c-d", &longest] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        let long = "a".repeat(64);
        let huge = "a".repeat(10_000);
        let bad = [
            "", "-a", "a-", ".", "..", "../etc", "a/b", "a\0b", "A", "ä", "a b", &long, &huge,
        ];
        for bad in bad {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn uids_sort_by_age_and_are_read_back() {
        let (old, new) = (Uid::new(1, 77), Uid::new(2, 3));
        assert!(old < new && old.to_string() < new.to_string());
        assert_eq!(new.to_string().parse::<Uid>().unwrap(), new);
        assert_eq!(new.lower().parse::<Uid>().unwrap(), new);
        assert!("01JD".parse::<Uid>().is_err());
    }
}
