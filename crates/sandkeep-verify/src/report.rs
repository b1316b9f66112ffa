//! What came of it: rows, and how they are shown.

mod json;
mod junit;
mod table;

use serde::Serialize;

use crate::{
    check::{Check, Class, Level, Verdict},
    fault::Fault,
    weakness::Weakness,
};

pub use json::{as_json, self_test_as_json};
pub use junit::as_junit;
pub use table::{Paint, as_table, listed, self_test_as_table};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Held,
    Broken,
    Untested,
}

/// One attack at one level.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub id: &'static str,
    pub class: Class,
    pub attack: &'static str,
    pub source: &'static str,
    pub level: Level,
    pub outcome: Outcome,
    /// What was seen, or why it cannot be tested here.
    pub detail: String,
    pub means: &'static str,
    pub todo: &'static str,
    pub seconds: f64,
}

impl Row {
    pub fn new(check: &Check, level: Level, came: Result<Verdict, Fault>, seconds: f64) -> Self {
        let (outcome, detail) = match came {
            Ok(Verdict::Held(detail)) => (Outcome::Held, detail),
            Ok(Verdict::Broken(detail)) => (Outcome::Broken, detail),
            Err(fault) => (Outcome::Untested, fault.to_string()),
        };
        Self {
            id: check.id,
            class: check.class,
            attack: check.attack,
            source: check.source,
            level,
            outcome,
            detail: printable(&detail),
            means: check.means,
            todo: check.todo,
            seconds,
        }
    }
}

/// One weakening, and whether the check it is for noticed.
#[derive(Debug, Clone, Serialize)]
pub struct SelfRow {
    pub weakness: Weakness,
    pub words: &'static str,
    pub id: &'static str,
    pub attack: &'static str,
    pub level: Level,
    pub noticed: Noticed,
    pub detail: String,
    pub seconds: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Noticed {
    #[serde(rename = "noticed")]
    Yes,
    #[serde(rename = "not_noticed")]
    No,
    #[serde(rename = "untested")]
    Untested,
}

/// A check at levels where nothing can make it say "broken".
#[derive(Debug, Clone, Serialize)]
pub struct Uncovered {
    pub id: &'static str,
    pub levels: Vec<Level>,
    pub why: &'static str,
}

impl Uncovered {
    pub fn new(check: &Check, levels: Vec<Level>) -> Self {
        let why = if check.weakened_by.is_empty() {
            "It never says broken, only held or no test"
        } else {
            "Nothing can be taken away from outside from a kernel of its own"
        };
        Self {
            id: check.id,
            levels,
            why,
        }
    }
}

/// Text that comes from a sandbox drives no terminal.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(600)
        .collect()
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Counts {
    pub held: usize,
    pub broken: usize,
    pub untested: usize,
}

pub fn counts(rows: &[Row]) -> Counts {
    let of = |outcome| rows.iter().filter(|row| row.outcome == outcome).count();
    Counts {
        held: of(Outcome::Held),
        broken: of(Outcome::Broken),
        untested: of(Outcome::Untested),
    }
}
