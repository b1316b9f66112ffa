//! Sizes and spans of time as people write them: `50GiB`, `512M`, `90s`, `2h`, `never`.

use std::{str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer};

/// A number of bytes: `1048576`, `512M`, `50GiB`. Units are powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl Size {
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    pub const fn mib(self) -> u64 {
        self.0 >> 20
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("\"{text}\" is no size; write for example 512M or 50GiB");
        let (number, unit) = split_unit(text);
        let shift = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        let number: u64 = number.parse().map_err(|_| bad())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(bad)
    }
}

/// How long: `90`, `90s`, `15m`, `2h`, `7d`, or `never`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    Never,
    Seconds(u64),
}

impl Span {
    pub const fn duration(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::Seconds(seconds) => Some(Duration::from_secs(seconds)),
        }
    }

    pub const fn seconds(self) -> Option<u64> {
        match self {
            Self::Never => None,
            Self::Seconds(seconds) => Some(seconds),
        }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "never" {
            return Ok(Self::Never);
        }
        let bad =
            || format!("\"{text}\" is no span of time; write for example 90s, 15m, 2h or never");
        let (number, unit) = split_unit(text);
        let factor = match unit {
            "" | "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(bad()),
        };
        let number: u64 = number.parse().map_err(|_| bad())?;
        number
            .checked_mul(factor)
            .map(Self::Seconds)
            .ok_or_else(bad)
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    (&text[..end], text[end..].trim())
}

/// In the configuration file a bare number is as good as a text.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(u64),
    Text(String),
}

fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(from: D) -> Result<T, D::Error> {
    match NumberOrText::deserialize(from)? {
        NumberOrText::Number(number) => number.to_string().parse(),
        NumberOrText::Text(text) => text.parse(),
    }
    .map_err(serde::de::Error::custom)
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        parsed(from)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        parsed(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_every_dress() {
        assert_eq!("512M".parse(), Ok(Size(512 << 20)));
        assert_eq!("50 GiB".parse(), Ok(Size::gib(50)));
        assert_eq!("77".parse(), Ok(Size(77)));
        for bad in ["", "G", "1.5G", "-1", "5 parsecs", "99999999T"] {
            assert!(bad.parse::<Size>().is_err(), "{bad}");
        }
    }

    #[test]
    fn spans_in_every_dress() {
        assert_eq!("never".parse(), Ok(Span::Never));
        assert_eq!("90".parse(), Ok(Span::Seconds(90)));
        assert_eq!("2h".parse(), Ok(Span::Seconds(7200)));
        assert_eq!("7d".parse(), Ok(Span::Seconds(604_800)));
        for bad in ["", "soon", "1y", "-3s"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }
}
