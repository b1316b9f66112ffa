//! When points are made by themselves, as people write it: `before=risky,every=10m,keep=50`.

use std::str::FromStr;

use sandkeep_model::PointPolicy;
use serde::{Deserialize, Deserializer, de::Error as _};

use crate::quantity::{Size, Span};

pub const AUTO_POINTS_HELP: &str = "\
Points that are made by themselves, words separated by commas:
  before-exec, after-exec   around every command
  before=PATTERN            before commands that fit a regular expression (the rest of the
                            argument), or before=risky: a list of what has cost people their work
  every=SPAN                every so often while the box runs
  memory                    with processes and memory, where nobody is connected
  interval=SPAN             around commands, not more often than this [default: 1s]
  keep=COUNT                the newest so many stay [default: 100]
  keep-for=SPAN             younger ones stay
  keep-size=SIZE            the newest that together added no more than this stay
  none                      no points
Points with a name or the tag `keep` always stay. May be repeated.";

/// One argument; several add up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AutoRule(pub PointPolicy, Vec<Said>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    BeforeExec,
    AfterExec,
    Before(String),
    Every(u64),
    Memory,
    Interval(u64),
    Keep(u32),
    KeepFor(u64),
    KeepSize(u64),
    None,
}

impl FromStr for AutoRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut said = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            if let Some(pattern) = rest.strip_prefix("before=") {
                // A pattern may hold commas; the name of the list holds none.
                let (pattern, after) = match pattern.split_once(',') {
                    Some(("risky", after)) => ("risky", after),
                    _ => (pattern, ""),
                };
                said.push(Said::Before(pattern.to_owned()));
                rest = after.trim_start();
                continue;
            }
            let (word, after) = rest.split_once(',').unwrap_or((rest, ""));
            said.push(read(word.trim())?);
            rest = after.trim_start();
        }
        if said.is_empty() {
            return Err("nothing is said; write for example before=risky,every=10m".to_owned());
        }
        Ok(Self(policy(&said), said))
    }
}

fn read(word: &str) -> Result<Said, String> {
    let span = |value: &str| match value.parse::<Span>()?.seconds() {
        Some(seconds) => Ok(seconds),
        None => Err(format!("\"{word}\": never is no span here")),
    };
    Ok(match word.split_once('=') {
        None => match word {
            "before-exec" => Said::BeforeExec,
            "after-exec" => Said::AfterExec,
            "memory" => Said::Memory,
            "none" => Said::None,
            _ => return Err(unknown(word)),
        },
        Some(("every", value)) => Said::Every(span(value)?),
        Some(("interval", value)) => Said::Interval(span(value)?),
        Some(("keep-for", value)) => Said::KeepFor(span(value)?),
        Some(("keep-size", value)) => Said::KeepSize(value.parse::<Size>()?.0),
        Some(("keep", value)) => Said::Keep(
            value
                .parse()
                .map_err(|_| format!("\"{value}\" is no number of points"))?,
        ),
        Some(_) => return Err(unknown(word)),
    })
}

fn unknown(word: &str) -> String {
    format!(
        "\"{}\" is not known; there are before-exec, after-exec, before=, every=, memory, interval=, keep=, keep-for=, keep-size= and none",
        word.escape_debug()
    )
}

fn policy(said: &[Said]) -> PointPolicy {
    let mut policy = PointPolicy::default();
    for one in said {
        match one {
            Said::BeforeExec => policy.before_exec = true,
            Said::AfterExec => policy.after_exec = true,
            Said::Before(pattern) => policy.before_matching.push(pattern.clone()),
            Said::Every(seconds) => policy.every_seconds = Some(*seconds),
            Said::Memory => policy.memory = true,
            Said::Interval(seconds) => policy.min_interval_seconds = *seconds,
            Said::Keep(count) => policy.keep.count = *count,
            Said::KeepFor(seconds) => policy.keep.age_seconds = Some(*seconds),
            Said::KeepSize(bytes) => policy.keep.bytes = Some(*bytes),
            Said::None => policy = PointPolicy::default(),
        }
    }
    policy
}

impl AutoRule {
    /// What several arguments say together.
    pub fn all(rules: &[Self]) -> Option<PointPolicy> {
        let said: Vec<Said> = rules.iter().flat_map(|rule| rule.1.clone()).collect();
        (!said.is_empty()).then(|| policy(&said))
    }
}

impl<'de> Deserialize<'de> for AutoRule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read() {
        let rule: AutoRule = "before=risky, every=10m,keep=5,keep-size=1GiB,memory"
            .parse()
            .unwrap();
        assert_eq!(rule.0.before_matching, ["risky"]);
        assert_eq!(rule.0.every_seconds, Some(600));
        assert_eq!((rule.0.keep.count, rule.0.keep.bytes), (5, Some(1 << 30)));
        assert!(rule.0.memory);
        let pattern: AutoRule = "after-exec,before=^a{1,2},b$".parse().unwrap();
        assert_eq!(pattern.0.before_matching, ["^a{1,2},b$"]);
        let both = AutoRule::all(&[rule, pattern]).unwrap();
        assert_eq!(both.before_matching, ["risky", "^a{1,2},b$"]);
        assert!(both.after_exec && both.memory);
        assert!("none".parse::<AutoRule>().unwrap().0.is_off());
        assert_eq!(AutoRule::all(&[]), None);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for bad in [
            "",
            "sometimes",
            "every=never",
            "every=x",
            "keep=-1",
            "keep-size=big",
        ] {
            assert!(bad.parse::<AutoRule>().is_err(), "{bad:?}");
        }
        assert!(
            "befor-exec"
                .parse::<AutoRule>()
                .unwrap_err()
                .contains("before-exec")
        );
    }
}
