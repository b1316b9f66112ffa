//! Points in the life of a box: what it was at one moment, kept to come back to.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

use crate::{
    BoxDefaults, Error, Isolation, KEEP_TAG, Limits, PointPolicy, PointReason, Result, SandboxId,
    TemplateName, Timestamp, random_token,
};

/// Longest name or tag of a point.
const LONGEST_NAME: usize = 64;
/// Most tags of one point.
pub const MOST_TAGS: usize = 16;
/// What [`check_point_name`] lets pass, as a regular expression.
pub const POINT_NAME_PATTERN: &str = "^[a-z0-9][a-z0-9_.-]{0,63}$";
/// How a snapshot is named: by its id, its name, or `SANDBOX:NAME`.
pub const POINT_PATTERN: &str = "^([a-z0-9]{4,21}:)?[a-z0-9][a-z0-9_.-]{0,63}$";

/// The name the server gives a point: `p` and twenty characters of `[a-z0-9]`.
///
/// It is safe in a path, and a valid template name: clients of E2B create from it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PointId(String);

impl PointId {
    pub const LENGTH: usize = 21;
    pub const PATTERN: &str = "^p[a-z0-9]{20}$";

    pub fn random() -> Self {
        Self(format!("p{}", random_token(Self::LENGTH - 1)))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PointId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let good = text.len() == Self::LENGTH
            && text.starts_with('p')
            && text
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if good {
            return Ok(Self(text.to_owned()));
        }
        let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
        Err(point_not_found(&shown))
    }
}

impl TryFrom<String> for PointId {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<PointId> for String {
    fn from(id: PointId) -> Self {
        id.0
    }
}

impl fmt::Display for PointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub fn point_not_found(id: &impl fmt::Display) -> Error {
    Error::not_found(format!("point \"{id}\" was not found"))
        .hint("list the points of a sandbox with `sandkeep timeline BOX` or GET /v1/points")
}

/// What a point was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PointKind {
    /// Somebody asked for it.
    Snapshot,
    /// The rule of its box asked for it.
    Auto,
    /// The memory of a paused box. It goes when the box runs again.
    Pause,
    /// What forks are made from. It goes when they are made.
    Fork,
    /// The files of a template after some of its steps, for the next build.
    Layer,
    /// What a template was when it was ready, with memory. It goes with the template.
    Template,
}

impl PointKind {
    pub const ALL: [Self; 6] = [
        Self::Snapshot,
        Self::Auto,
        Self::Pause,
        Self::Fork,
        Self::Layer,
        Self::Template,
    ];

    /// Whether it is part of the timeline. The others go when they have served.
    pub const fn stays(self) -> bool {
        matches!(self, Self::Snapshot | Self::Auto)
    }

    /// Whether its memory counts only once it was tried. What else is made from memory is begun from it
    /// at once, while there is still what it was made of.
    pub const fn is_tried(self) -> bool {
        matches!(self, Self::Snapshot | Self::Auto | Self::Pause)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "snapshot",
            Self::Auto => "auto",
            Self::Pause => "pause",
            Self::Fork => "fork",
            Self::Layer => "layer",
            Self::Template => "template",
        }
    }
}

impl FromStr for PointKind {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("\"{}\" is no kind of point", text.escape_debug()))
    }
}

/// What wrote the memory in a point; only the same can read it again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EngineBuild {
    pub name: String,
    pub build: String,
}

impl fmt::Display for EngineBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.build)
    }
}

/// One node of the tree of what was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    pub id: PointId,
    /// The box it was made of, which may be gone.
    pub sandbox_id: SandboxId,
    /// What that box came from when the point was made.
    pub parent: Option<PointId>,
    pub name: Option<String>,
    pub tags: Vec<String>,
    pub kind: PointKind,
    /// Why it was made, when nobody asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<PointReason>,
    /// Set when processes and memory are in it, too.
    pub engine: Option<EngineBuild>,
    /// Why they are not, when they were wished for.
    pub why_disk_only: Option<String>,
    pub created_at: Timestamp,
    /// What the box had written beyond what it came from, and the memory.
    pub bytes: u64,
    /// The part of that which is not in its parent: what goes with it, at most.
    #[serde(default)]
    pub added_bytes: u64,
    pub isolation: Isolation,
    pub template: TemplateName,
    pub limits: Limits,
}

impl Point {
    /// Whether a rule may remove it.
    pub fn may_go(&self) -> bool {
        self.kind == PointKind::Auto
            && self.name.is_none()
            && !self.tags.iter().any(|tag| tag == KEEP_TAG)
    }

    pub const fn has_memory(&self) -> bool {
        self.engine.is_some()
    }
}

/// How a box rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Processes and memory are on the disk; nothing is left of it in memory.
    Disk,
    /// Processes are frozen where they were and keep their memory.
    Ram,
    /// Processes ended; the files are there.
    Filesystem,
}

impl PauseMode {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Ram => "ram",
            Self::Filesystem => "filesystem",
        }
    }
}

/// A pause: how deep it went, and what the box wakes up from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    pub mode: PauseMode,
    /// Why it is not the mode that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What it wakes up from; `None`: from its own disk, or it is only frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub point: Option<PointId>,
    /// The disk may have moved on from `point`: it is taken from there again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub touched: bool,
    pub at: Timestamp,
}

/// What a box is told about time when it is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TimeWish {
    /// Made from this point and not from the template.
    pub from_point: Option<PointId>,
    /// A request to the paused box wakes it.
    pub auto_resume: bool,
    /// A pause at its timeout keeps the files only.
    pub pause_files_only: bool,
    /// Nobody wants anything of it for so many seconds: it is paused.
    pub idle_seconds: Option<u64>,
    /// It is ended when it was paused for so many seconds.
    pub paused_limit_seconds: Option<u64>,
    /// When points are made of it by themselves; `None`: as the server does for all.
    pub points: Option<PointPolicy>,
}

/// What a box knows about time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoxTime {
    pub auto_resume: bool,
    pub pause_files_only: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
    /// It is ended when it was paused for so many seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_limit_seconds: Option<u64>,
    /// The time it was given last; a box that wakes by itself gets it again. `None`: no end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_seconds: Option<u64>,
    /// When points are made of it by themselves; `None`: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub points: Option<PointPolicy>,
    /// The point it came from or went through last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head: Option<PointId>,
    /// What had been written to its disk when it went through `head`; 0 where the disk began
    /// there.
    #[serde(skip_serializing_if = "is_zero")]
    pub head_written: u64,
    /// Set while it is paused or on its way out of a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// What its template said. Its own copy: templates change.
    #[serde(skip_serializing_if = "BoxDefaults::is_empty")]
    pub defaults: BoxDefaults,
}

const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A name somebody gives a point: safe as a template name and as a tag.
pub fn check_point_name(field: &str, name: &str) -> Result<()> {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
    let starts_well = name
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphanumeric());
    if starts_well && name.len() <= LONGEST_NAME && name.bytes().all(allowed) {
        if field == "name" && name.parse::<PointId>().is_ok() {
            // An id is an id: nobody would ever find a snapshot by such a name.
            return Err(Error::invalid(
                field,
                format!("the name \"{name}\" reads like the id of a snapshot"),
            )
            .hint("choose another name"));
        }
        return Ok(());
    }
    let shown: String = name.chars().filter(|c| !c.is_control()).take(80).collect();
    Err(Error::invalid(
        field,
        format!("\"{shown}\" can not be the {field} of a point"),
    )
    .hint(format!(
        "use 1 to {LONGEST_NAME} of a-z, 0-9, - _ and ., starting with a letter or digit"
    )))
}

pub fn check_point_tags(tags: &[String]) -> Result<()> {
    if tags.len() > MOST_TAGS {
        return Err(Error::invalid(
            "tags",
            format!(
                "{} tags are given, a point has at most {MOST_TAGS}",
                tags.len()
            ),
        ));
    }
    tags.iter()
        .try_for_each(|tag| check_point_name("tags", tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_names_of_templates_but_not_of_boxes() {
        let id = PointId::random();
        assert_eq!(id.as_str().parse::<PointId>().unwrap(), id);
        assert!(id.as_str().parse::<TemplateName>().is_ok());
        assert!(id.as_str().parse::<SandboxId>().is_err());
        for bad in ["", "p", "../../etc/passwd12345", "pABCDEFGHIJ0123456789"] {
            assert!(bad.parse::<PointId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_old_row_reads_as_a_box_without_wishes() {
        assert_eq!(
            serde_json::from_str::<BoxTime>("{}").unwrap(),
            BoxTime::default()
        );
        let paused = BoxTime {
            pause: Some(Pause {
                mode: PauseMode::Ram,
                why: Some("because".to_owned()),
                point: None,
                touched: false,
                at: Timestamp::from_millis(5),
            }),
            ..BoxTime::default()
        };
        let text = serde_json::to_string(&paused).unwrap();
        assert_eq!(serde_json::from_str::<BoxTime>(&text).unwrap(), paused);
    }

    #[test]
    fn names_are_plain() {
        assert!(check_point_name("name", "before-upgrade_2.1").is_ok());
        for bad in ["", "-a", "A", "a b", "a/b", "é", &"x".repeat(65)] {
            assert_eq!(
                check_point_name("name", bad).unwrap_err().field.as_deref(),
                Some("name"),
                "{bad:?}"
            );
        }
        assert!(check_point_tags(&vec!["a".to_owned(); 17]).is_err());
    }
}
