//! Points that are made without anybody asking, and how long they are kept.

use serde::{Deserialize, Serialize};

use crate::{Error, Point, Result};

/// A point with this tag is never removed by a rule.
pub const KEEP_TAG: &str = "keep";
/// Most patterns of one box.
pub const MOST_PATTERNS: usize = 32;
pub const LONGEST_PATTERN: usize = 512;
/// More than this is no rule any more.
const MOST_KEPT: u32 = 10_000;
const DEFAULT_KEPT: u32 = 100;
const DAY: u64 = 24 * 3600;
/// How much of a command is written down with a point.
const LONGEST_COMMAND: usize = 300;

/// When points are made of a box by themselves. The default makes none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PointPolicy {
    /// Before every command that is started from outside.
    pub before_exec: bool,
    /// After every such command.
    pub after_exec: bool,
    /// Every so many seconds, while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_seconds: Option<u64>,
    /// Before commands that fit one of these: regular expressions, or the name of a list.
    pub before_matching: Vec<String>,
    /// With processes and memory, where that harms nobody.
    pub memory: bool,
    /// Not more often than this, except before commands that match.
    pub min_interval_seconds: u64,
    pub keep: Keep,
}

impl Default for PointPolicy {
    fn default() -> Self {
        Self {
            before_exec: false,
            after_exec: false,
            every_seconds: None,
            before_matching: Vec::new(),
            memory: false,
            min_interval_seconds: 1,
            keep: Keep::default(),
        }
    }
}

/// How many of the points that were made by themselves stay. Those with a name or the tag
/// `keep` always do, and are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Keep {
    /// The newest so many.
    pub count: u32,
    /// Those younger than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// The newest that together hold no more than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl Default for Keep {
    fn default() -> Self {
        Self {
            count: DEFAULT_KEPT,
            age_seconds: None,
            bytes: None,
        }
    }
}

impl PointPolicy {
    /// Whether it ever makes a point.
    pub const fn is_off(&self) -> bool {
        !self.before_exec
            && !self.after_exec
            && self.every_seconds.is_none()
            && self.before_matching.is_empty()
    }

    /// Refuses what makes no sense. Whether patterns can be read is for whoever reads them.
    pub fn check(&self, field: &str) -> Result<()> {
        let refuse = |name: &str, why: String| Err(Error::invalid(format!("{field}.{name}"), why));
        if let Some(seconds) = self.every_seconds
            && !(1..=365 * DAY).contains(&seconds)
        {
            return refuse(
                "every_seconds",
                format!("every_seconds is {seconds}, it must be from 1 to a year"),
            );
        }
        if self.min_interval_seconds > DAY {
            return refuse(
                "min_interval_seconds",
                format!("min_interval_seconds is more than a day ({DAY})"),
            );
        }
        if self.before_matching.len() > MOST_PATTERNS {
            return refuse(
                "before_matching",
                format!("there are more than {MOST_PATTERNS} patterns"),
            );
        }
        for pattern in &self.before_matching {
            if pattern.is_empty() || pattern.len() > LONGEST_PATTERN {
                return refuse(
                    "before_matching",
                    format!("a pattern must have from 1 to {LONGEST_PATTERN} bytes"),
                );
            }
        }
        if !(1..=MOST_KEPT).contains(&self.keep.count) {
            return refuse(
                "keep.count",
                format!("keep.count must be from 1 to {MOST_KEPT}"),
            );
        }
        if self.keep.age_seconds == Some(0) {
            return refuse("keep.age_seconds", "keep.age_seconds is 0".to_owned());
        }
        Ok(())
    }
}

/// Why a point was made without anybody asking.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PointReason {
    pub why: PointWhy,
    /// The command it was made for, cut where it is very long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The pattern the command fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
}

impl PointReason {
    pub const fn every() -> Self {
        Self {
            why: PointWhy::Every,
            command: None,
            pattern: None,
        }
    }

    pub fn of_command(why: PointWhy, command: &str, pattern: Option<String>) -> Self {
        Self {
            why,
            command: Some(short_command(command)),
            pattern,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PointWhy {
    BeforeExec,
    AfterExec,
    BeforeMatching,
    Every,
}

impl PointWhy {
    pub const fn name(self) -> &'static str {
        match self {
            Self::BeforeExec => "before_exec",
            Self::AfterExec => "after_exec",
            Self::BeforeMatching => "before_matching",
            Self::Every => "every",
        }
    }
}

fn short_command(command: &str) -> String {
    let mut text: String = command
        .chars()
        .take(LONGEST_COMMAND)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if command.chars().nth(LONGEST_COMMAND).is_some() {
        text.push('…');
    }
    text
}

impl Keep {
    /// Those of `points` (of one box, oldest first) that the rule no longer keeps.
    pub fn surplus<'a>(&self, points: &'a [Point], now: crate::Timestamp) -> Vec<&'a Point> {
        let mut count = 0_u32;
        let mut bytes = 0_u64;
        let mut surplus = Vec::new();
        for point in points.iter().rev().filter(|point| point.may_go()) {
            count = count.saturating_add(1);
            bytes = bytes.saturating_add(point.added_bytes);
            let age = now.millis().saturating_sub(point.created_at.millis());
            let too_old = self
                .age_seconds
                .is_some_and(|most| u64::try_from(age).unwrap_or(0) / 1000 >= most);
            // The newest stays even where it alone is too large: it is what somebody needs.
            let too_much = self.bytes.is_some_and(|most| bytes > most) && count > 1;
            if count > self.count || too_old || too_much {
                surplus.push(point);
            }
        }
        surplus.reverse();
        surplus
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isolation, Limits, PointId, PointKind, SandboxId, Timestamp};

    fn point(at_seconds: i64, added_bytes: u64) -> Point {
        Point {
            id: PointId::random(),
            sandbox_id: SandboxId::random(),
            parent: None,
            name: None,
            tags: Vec::new(),
            kind: PointKind::Auto,
            reason: Some(PointReason::every()),
            engine: None,
            why_disk_only: None,
            created_at: Timestamp::from_millis(at_seconds * 1000),
            bytes: added_bytes,
            added_bytes,
            isolation: Isolation::Container,
            template: "base".parse().unwrap(),
            limits: Limits::default(),
        }
    }

    fn gone(keep: Keep, points: &[Point], now: i64) -> Vec<i64> {
        keep.surplus(points, Timestamp::from_millis(now * 1000))
            .iter()
            .map(|point| point.created_at.millis() / 1000)
            .collect()
    }

    #[test]
    fn the_newest_stay_by_count_age_and_bytes() {
        let points: Vec<Point> = (1..=5).map(|at| point(at, 10)).collect();
        let by_count = Keep {
            count: 2,
            ..Keep::default()
        };
        assert_eq!(gone(by_count, &points, 6), [1, 2, 3]);
        let by_age = Keep {
            age_seconds: Some(3),
            ..Keep::default()
        };
        assert_eq!(gone(by_age, &points, 6), [1, 2, 3]);
        let by_bytes = Keep {
            bytes: Some(25),
            ..Keep::default()
        };
        assert_eq!(gone(by_bytes, &points, 6), [1, 2, 3]);
        let tight = Keep {
            bytes: Some(1),
            ..Keep::default()
        };
        assert_eq!(gone(tight, &points, 6), [1, 2, 3, 4]);
    }

    #[test]
    fn what_somebody_named_or_made_is_neither_counted_nor_removed() {
        let mut points: Vec<Point> = (1..=5).map(|at| point(at, 10)).collect();
        points[0].name = Some("mine".to_owned());
        points[1].tags = vec![KEEP_TAG.to_owned()];
        points[4].kind = PointKind::Snapshot;
        let keep = Keep {
            count: 1,
            ..Keep::default()
        };
        assert_eq!(gone(keep, &points, 6), [3]);
    }

    #[test]
    fn rules_are_bounded_and_old_rows_can_be_read() {
        assert!(PointPolicy::default().is_off());
        let wrong = |json: &str| {
            let policy: PointPolicy = serde_json::from_str(json).unwrap();
            policy.check("auto_points").unwrap_err().field.unwrap()
        };
        for (json, field) in [
            (r#"{"every_seconds":0}"#, "auto_points.every_seconds"),
            (r#"{"before_matching":[""]}"#, "auto_points.before_matching"),
            (r#"{"keep":{"count":0}}"#, "auto_points.keep.count"),
            (
                r#"{"min_interval_seconds":99999999}"#,
                "auto_points.min_interval_seconds",
            ),
        ] {
            assert_eq!(wrong(json), field);
        }
        let policy: PointPolicy =
            serde_json::from_str(r#"{"before_exec":true,"keep":{"bytes":5}}"#).unwrap();
        assert!(policy.check("auto_points").is_ok());
        assert_eq!(policy.keep.count, DEFAULT_KEPT);
    }

    #[test]
    fn long_commands_are_cut_and_harmless() {
        let reason = PointReason::of_command(PointWhy::BeforeExec, "a\nb\u{1b}[31m", None);
        assert_eq!(reason.command.as_deref(), Some("a b [31m"));
        let long = PointReason::of_command(PointWhy::AfterExec, &"é".repeat(1000), None);
        assert_eq!(long.command.unwrap().chars().count(), LONGEST_COMMAND + 1);
    }
}
