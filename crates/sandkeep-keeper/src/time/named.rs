//! Which snapshot is meant by what somebody wrote. Everything that takes one asks here.
//!
//! An id is an id. A name belongs to the sandbox it was made of: the sandbox at hand comes first,
//! then what it descends from, and for reading alone a name that only one sandbox has. Whatever
//! else could be meant is listed and refused.

use std::collections::{BTreeSet, HashSet};

use sandkeep_model::{Error, Point, PointId, Result, SandboxId, point_not_found};

use crate::{Keeper, core::Core};

/// Candidates that an error lists.
const MOST_LISTED: usize = 4;
/// Fewer characters of a sandbox's id mean nothing.
const LEAST_OF_AN_ID: usize = 4;

/// What is to become of the snapshot that is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointUse {
    /// It is read: shown, exported, compared, or a new sandbox is made from it.
    Read,
    /// It is deleted, renamed or tagged. A name that several have means none of them.
    Change,
    /// The sandbox at hand is copied as it was then.
    Copy,
    /// The sandbox at hand becomes what it was then.
    Become {
        /// A snapshot of a sandbox it does not descend from is meant, too.
        foreign: bool,
    },
}

impl Keeper {
    /// The snapshot meant by an id, `NAME` or `SANDBOX:NAME`; `of`: the sandbox at hand.
    pub async fn named_point(
        &self,
        text: &str,
        of: Option<&SandboxId>,
        to: PointUse,
    ) -> Result<Point> {
        self.core.named_point(text, of, to).await
    }
}

impl Core {
    pub async fn named_point(
        &self,
        text: &str,
        of: Option<&SandboxId>,
        to: PointUse,
    ) -> Result<Point> {
        let not_found = || {
            let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
            point_not_found(&shown)
        };
        if let Ok(id) = text.parse::<PointId>() {
            let point = self.store.point(&id).await?.ok_or_else(not_found)?;
            self.check_own(&point, of, to).await?;
            return Ok(point);
        }
        let (owner, name) = match text.split_once(':') {
            Some((owner, name)) => (Some(owner), name),
            None => (None, text),
        };
        let mut named = self.store.points_named(name).await?;
        named.retain(|point| point.kind.stays());
        if let Some(owner) = owner {
            if owner.len() < LEAST_OF_AN_ID {
                return Err(not_found());
            }
            named.retain(|point| point.sandbox_id.as_str().starts_with(owner));
        } else if let Some(of) = of {
            let own = newest(&named, |point| point.sandbox_id == *of);
            if let Some(own) = own {
                return Ok(own);
            }
            let line = self.line_of(of).await?;
            if let Some(inherited) = newest(&named, |point| line.contains(&point.id)) {
                return Ok(inherited);
            }
            if !named.is_empty()
                && matches!(to, PointUse::Copy | PointUse::Become { foreign: false })
            {
                return Err(Error::conflict(format!(
                    "sandbox \"{of}\" has no snapshot called \"{name}\", other sandboxes have"
                ))
                .hint(match to {
                    PointUse::Copy => format!("say whose is meant: {}", listed(&named, to)),
                    _ => format!(
                        "to make it another sandbox: --foreign (`foreign`: true) with {}",
                        listed(&named, to)
                    ),
                }));
            }
        }
        let owners: BTreeSet<&SandboxId> = named.iter().map(|point| &point.sandbox_id).collect();
        if owners.len() > 1 || (to == PointUse::Change && named.len() > 1) {
            return Err(Error::conflict(format!(
                "{} snapshots are called \"{name}\"{}",
                named.len(),
                if owners.len() > 1 {
                    format!(", of {} sandboxes", owners.len())
                } else {
                    String::new()
                }
            ))
            .hint(format!("say which: {}", listed(&named, to))));
        }
        let point = named.pop().ok_or_else(not_found)?;
        self.check_own(&point, of, to).await?;
        Ok(point)
    }

    /// No sandbox becomes another without somebody having said so.
    async fn check_own(&self, point: &Point, of: Option<&SandboxId>, to: PointUse) -> Result<()> {
        let (PointUse::Become { foreign: false }, Some(of)) = (to, of) else {
            return Ok(());
        };
        if point.sandbox_id == *of || self.line_of(of).await?.contains(&point.id) {
            return Ok(());
        }
        Err(Error::conflict(format!(
            "snapshot \"{}\" is of sandbox \"{}\", which sandbox \"{of}\" does not descend from",
            point.id, point.sandbox_id
        ))
        .hint(format!(
            "to make it that one: --foreign (`foreign`: true); for a new sandbox: `sandkeep create --from-point {}`",
            point.id
        )))
    }

    /// The snapshots a sandbox descends from, its own among them.
    async fn line_of(&self, of: &SandboxId) -> Result<HashSet<PointId>> {
        let head = self
            .registry
            .find(of)
            .and_then(|entry| entry.with(|sandbox| sandbox.time.head.clone()));
        self.store.line_of(of, head.as_ref()).await
    }
}

fn newest(named: &[Point], which: impl Fn(&Point) -> bool) -> Option<Point> {
    named.iter().rev().find(|point| which(point)).cloned()
}

/// As they can be typed: by sandbox and name, or by id where that would still mean several.
fn listed(named: &[Point], to: PointUse) -> String {
    let mut ways: Vec<String> = Vec::new();
    for point in named.iter().rev() {
        let way = match &point.name {
            Some(name) if to != PointUse::Change => format!("{}:{name}", point.sandbox_id),
            _ => format!("{} (of {})", point.id, point.sandbox_id),
        };
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    let more = ways.len().saturating_sub(MOST_LISTED);
    ways.truncate(MOST_LISTED);
    let ways = ways.join(", ");
    match more {
        0 => ways,
        more => format!("{ways} and {more} more"),
    }
}
