//! Durations as people write them: in the configuration, in queries, on the command line.

use thiserror::Error;

/// Why a text is no duration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadDuration {
    /// A number without a unit.
    #[error("{0:?} has no unit; write it as \"{0}s\" or \"{0}m\"")]
    NoUnit(String),
    /// The unit is not known.
    #[error("{0:?} is no unit of time; use ms, s, m, h or d, as in \"30s\", \"5m\" or \"1h30m\"")]
    Unit(String),
    /// Something else.
    #[error("it is no duration; write one such as \"30s\", \"5m\" or \"1h30m\"")]
    Form,
    /// Beyond what is sensible.
    #[error("a duration is at most 3650 days")]
    Huge,
}

/// The longest duration in milliseconds: ten years.
const MAX_MS: u64 = 3650 * 86_400_000;

/// Units, the biggest first, with their milliseconds.
const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// Milliseconds of a text such as `"30s"`, `"5m"`, `"1h30m"` or `"250ms"`.
///
/// # Errors
/// When it isn't whole numbers each with a unit, or is longer than ten years.
pub fn parse_duration(text: &str) -> Result<u64, BadDuration> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(BadDuration::Form);
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (number, after) = rest.split_at(digits);
        if number.is_empty() {
            return Err(BadDuration::Form);
        }
        let letters = after
            .find(|c: char| !c.is_ascii_alphabetic())
            .unwrap_or(after.len());
        let (unit, after) = after.split_at(letters);
        if unit.is_empty() {
            return Err(if after.is_empty() {
                BadDuration::NoUnit(number.chars().take(20).collect())
            } else {
                BadDuration::Form
            });
        }
        let unit_ms = UNITS
            .iter()
            .find(|(word, _)| *word == unit)
            .map(|(_, ms)| *ms)
            .ok_or_else(|| BadDuration::Unit(unit.chars().take(20).collect()))?;
        let number: u64 = number.parse().map_err(|_| BadDuration::Huge)?;
        total = number
            .checked_mul(unit_ms)
            .and_then(|ms| total.checked_add(ms))
            .filter(|ms| *ms <= MAX_MS)
            .ok_or(BadDuration::Huge)?;
        rest = after.trim_start();
    }
    Ok(total)
}

/// The same the other way: `90000` is `"1m30s"`, 0 is `"0s"`.
#[must_use]
pub fn show_duration(ms: u64) -> String {
    let mut rest = ms;
    let mut text = String::new();
    for (word, unit_ms) in UNITS {
        if rest >= unit_ms {
            text.push_str(&format!("{}{word}", rest / unit_ms));
            rest %= unit_ms;
        }
    }
    if text.is_empty() {
        "0s".to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_shown() {
        let table = [
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1h 30m", 5_400_000),
            ("250ms", 250),
            ("7d", 604_800_000),
            ("0s", 0),
        ];
        for (text, ms) in table {
            assert_eq!(parse_duration(text), Ok(ms), "{text}");
            assert_eq!(parse_duration(&show_duration(ms)), Ok(ms), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused_with_words() {
        assert_eq!(parse_duration("30"), Err(BadDuration::NoUnit("30".into())));
        assert_eq!(parse_duration("30x"), Err(BadDuration::Unit("x".into())));
        assert_eq!(parse_duration("99999d"), Err(BadDuration::Huge));
        assert!(parse_duration(&"9".repeat(400)).is_err());
        for text in ["", "-5s", "s", "1.5s", "5s!", "five", "10GiB-"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
