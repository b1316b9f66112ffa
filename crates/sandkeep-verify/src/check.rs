//! What a check is, and what it can say.

use serde::{Deserialize, Serialize};
use std::fmt;

use crate::{bench::Bench, fault::Result, weakness::Weakness};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Container,
    Gvisor,
    Microvm,
}

impl Level {
    pub const ALL: [Self; 3] = [Self::Container, Self::Gvisor, Self::Microvm];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Gvisor => "gvisor",
            Self::Microvm => "microvm",
        }
    }

    /// Programs in the sandbox speak to a kernel that is not the host's. What they do to it
    /// breaks nothing as long as it is not felt outside.
    pub const fn own_kernel(self) -> bool {
        !matches!(self, Self::Container)
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

pub const EVERYWHERE: &[Level] = &Level::ALL;
pub const CONTAINER: &[Level] = &[Level::Container];
pub const GVISOR: &[Level] = &[Level::Gvisor];
pub const MICROVM: &[Level] = &[Level::Microvm];
pub const OWN_KERNEL: &[Level] = &[Level::Gvisor, Level::Microvm];
pub const SAVED: &[Level] = &[Level::Container, Level::Microvm];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    Escape,
    Kernel,
    Neighbours,
    Egress,
    Credentials,
    Exhaustion,
    Server,
}

impl Class {
    pub const ALL: [Self; 7] = [
        Self::Escape,
        Self::Kernel,
        Self::Neighbours,
        Self::Egress,
        Self::Credentials,
        Self::Exhaustion,
        Self::Server,
    ];

    pub const fn title(self) -> &'static str {
        match self {
            Self::Escape => "Escape to the host",
            Self::Kernel => "Kernel surface",
            Self::Neighbours => "Between sandboxes",
            Self::Egress => "Egress",
            Self::Credentials => "Credentials",
            Self::Exhaustion => "Exhaustion",
            Self::Server => "The server itself",
        }
    }
}

/// What an attempt showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The attack was really tried and did nothing; with what was seen.
    Held(String),
    /// The attack worked; with what was seen.
    Broken(String),
}

/// One attack, and what to tell about it.
pub struct Check {
    /// Stable, for `--only` and for programs: `class-words`.
    pub id: &'static str,
    pub class: Class,
    /// At most 44 characters: a row of the table.
    pub attack: &'static str,
    /// Where the attack is described: a scenario of SandboxEscapeBench, a finding, a row of
    /// docs/threats.md.
    pub source: &'static str,
    pub levels: &'static [Level],
    /// For a broken row: what it means.
    pub means: &'static str,
    /// For a broken row: what to do.
    pub todo: &'static str,
    /// What makes it say "broken" in the self-test, each by itself.
    pub weakened_by: &'static [Weakness],
    pub run: fn(&Bench, Level) -> Result<Verdict>,
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id)
    }
}

/// The words for a verdict that rests on a list of what was found wrong.
pub fn judged(wrong: &[String], held: impl Into<String>) -> Verdict {
    if wrong.is_empty() {
        Verdict::Held(held.into())
    } else {
        Verdict::Broken(wrong.join("; "))
    }
}
