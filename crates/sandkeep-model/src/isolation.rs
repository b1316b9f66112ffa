//! How strongly a box is kept apart from the host.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

use crate::Error;

/// From weak to strong; the order is the meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Isolation {
    Process,
    Container,
    Gvisor,
    Microvm,
}

impl Isolation {
    pub const ALL: [Self; 4] = [Self::Process, Self::Container, Self::Gvisor, Self::Microvm];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Container => "container",
            Self::Gvisor => "gvisor",
            Self::Microvm => "microvm",
        }
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isolation {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|level| level.name() == text)
            .ok_or_else(|| {
                Error::invalid(
                    "isolation",
                    format!("\"{}\" is no isolation level", text.escape_debug()),
                )
                .hint("use auto, process, container, gvisor or microvm")
            })
    }
}

/// What a request asks for: a level, or the strongest one this host runs well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IsolationWish {
    #[default]
    Auto,
    Level(Isolation),
}

impl FromStr for IsolationWish {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        if text == "auto" {
            Ok(Self::Auto)
        } else {
            text.parse().map(Self::Level)
        }
    }
}

impl fmt::Display for IsolationWish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Level(level) => level.fmt(f),
        }
    }
}

impl Serialize for IsolationWish {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for IsolationWish {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_ordered_by_strength() {
        assert!(Isolation::ALL.is_sorted());
        assert_eq!(
            "auto".parse::<IsolationWish>().unwrap(),
            IsolationWish::Auto
        );
        assert_eq!(
            "gvisor".parse::<IsolationWish>().unwrap(),
            IsolationWish::Level(Isolation::Gvisor)
        );
        assert!("Container".parse::<IsolationWish>().is_err());
    }
}
