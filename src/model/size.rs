//! Sizes as people write them.

use thiserror::Error;

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadSize {
    /// It does not begin with digits.
    #[error("a size is a whole number of bytes, or a number with a unit such as \"10GiB\"")]
    Number,
    /// The unit is not known.
    #[error("{0:?} is no unit of size; use B, kB, MB, GB, TB, PB or KiB, MiB, GiB, TiB, PiB")]
    Unit(String),
    /// It is beyond 2^63 - 1 bytes.
    #[error("a size is at most 9223372036854775807 bytes")]
    Huge,
}

/// Bytes of a text such as `"10GiB"`, `"500MB"`, `"1.5TiB"` or `"1024"`. Decimal units are powers
/// of 1000, binary ones of 1024; a fraction must come out as whole bytes.
///
/// # Errors
/// When the number or the unit isn't one, or the size is over 2^63 - 1 bytes.
pub fn parse_size(text: &str) -> Result<u64, BadSize> {
    let split = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit_bytes: u128 = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1000u128.pow(2),
        "gb" => 1000u128.pow(3),
        "tb" => 1000u128.pow(4),
        "pb" => 1000u128.pow(5),
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1 << 40,
        "pib" | "p" => 1 << 50,
        _ => return Err(BadSize::Unit(unit.trim_start().chars().take(16).collect())),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || (number.contains('.') && fraction.is_empty()) {
        return Err(BadSize::Number);
    }
    if fraction.len() > 9 {
        return Err(BadSize::Number);
    }
    let whole: u128 = whole.parse().map_err(|_| BadSize::Huge)?;
    let scale = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| BadSize::Number)?);
    let fraction: u128 = if fraction.is_empty() {
        0
    } else {
        fraction.parse().map_err(|_| BadSize::Number)?
    };
    let scaled = whole.checked_mul(unit_bytes).ok_or(BadSize::Huge)?;
    let part = fraction * unit_bytes;
    if !part.is_multiple_of(scale) {
        return Err(BadSize::Number);
    }
    let bytes = scaled.checked_add(part / scale).ok_or(BadSize::Huge)?;
    u64::try_from(bytes)
        .ok()
        .filter(|b| *b <= i64::MAX as u64)
        .ok_or(BadSize::Huge)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_every_unit() {
        let table = [
            ("0", 0),
            ("1024", 1024),
            ("1B", 1),
            ("2kB", 2000),
            ("1KiB", 1024),
            ("500MB", 500_000_000),
            ("10GiB", 10_737_418_240),
            ("1.5TiB", 1_649_267_441_664),
            ("10 GiB", 10_737_418_240),
            ("1PiB", 1 << 50),
            ("9223372036854775807", i64::MAX as u64),
        ];
        for (text, bytes) in table {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size() {
        for text in [
            "", "GiB", "-1", "+1", "1.GiB", ".5GiB", "1..5GiB", "0.3B", "1e9", "ten", "1XiB",
        ] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        for text in [
            "18446744073709551616",
            "9223372036854775808",
            "9999999PiB",
            &"9".repeat(10_000),
        ] {
            assert_eq!(parse_size(text), Err(BadSize::Huge), "{text:.20}");
        }
    }
}
