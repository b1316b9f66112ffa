//! Recipes: how a template is made from another one, and what is remembered of it.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    Error, Isolation, IsolationWish, LimitsWish, Result, TemplateName, check_env, random_bytes,
};

/// A recipe with more steps than this is a mistake.
pub const MOST_STEPS: usize = 256;
/// What a shell takes as one word.
const LONGEST_COMMAND: usize = 128 * 1024 - 1;
const LONGEST_PATH: usize = 4096;
/// Longest wait for what a template starts.
pub const LONGEST_READY: Duration = Duration::from_secs(600);
const DEFAULT_READY_SECONDS: u64 = 60;

/// The name of one build, in the form of a UUID: clients of E2B insist on it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BuildId(String);

impl BuildId {
    pub fn random() -> Self {
        let mut bytes = random_bytes::<16>();
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!(
            "{}-{}-{}-{}-{}",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        ))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for BuildId {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let good = text.len() == 36
            && text.bytes().enumerate().all(|(at, b)| match at {
                8 | 13 | 18 | 23 => b == b'-',
                _ => b.is_ascii_digit() || (b'a'..=b'f').contains(&b),
            });
        if good {
            return Ok(Self(text.to_owned()));
        }
        let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
        Err(build_not_found(&shown))
    }
}

impl TryFrom<String> for BuildId {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<BuildId> for String {
    fn from(id: BuildId) -> Self {
        id.0
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub fn build_not_found(id: &impl fmt::Display) -> Error {
    Error::not_found(format!("build \"{id}\" was not found"))
        .hint("list the builds of a template with GET /v1/templates/{name}/builds")
}

/// What commands of a box get that say nothing themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BoxDefaults {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// A command for `bash -l -c`, run in every copy of a sandbox and after every rollback, before
    /// the sandbox is given to anybody: for programs that have to be told that they were copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_restore: Option<String>,
}

impl BoxDefaults {
    pub const fn is_empty(&self) -> bool {
        self.user.is_none() && self.workdir.is_none() && self.after_restore.is_none()
    }
}

/// One step of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// A command for `bash -l -c`.
    Run {
        command: String,
        user: Option<String>,
    },
    /// Files of the client, from an archive it sent before.
    Copy {
        /// Path or glob in the archive.
        from: String,
        to: String,
        user: Option<String>,
        mode: Option<String>,
        /// The key of the archive.
        files: String,
    },
    /// Variables for all later steps, the start command and the boxes.
    Env(BTreeMap<String, String>),
    Workdir(String),
    User(String),
}

impl Step {
    /// The step as people wrote it.
    pub fn words(&self) -> String {
        match self {
            Self::Run { command, .. } => format!("RUN {command}"),
            Self::Copy { from, to, .. } => format!("COPY {from} {to}"),
            // Values may be long, and private.
            Self::Env(map) => {
                let names: Vec<_> = map.keys().map(String::as_str).collect();
                format!("ENV {}", names.join(" "))
            }
            Self::Workdir(path) => format!("WORKDIR {path}"),
            Self::User(name) => format!("USER {name}"),
        }
    }
}

/// When what was started counts as ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    pub check: ReadyCheck,
    pub timeout_seconds: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadyCheck {
    /// A command that succeeds; it is tried again until it does.
    Command(String),
    /// Somebody listens there.
    Port(u16),
}

impl Ready {
    pub const fn of(check: ReadyCheck) -> Self {
        Self {
            check,
            timeout_seconds: DEFAULT_READY_SECONDS,
        }
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds).min(LONGEST_READY)
    }
}

/// How a template is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    pub from: TemplateName,
    pub steps: Vec<Step>,
    /// What runs in every box of it.
    pub start: Option<String>,
    pub ready: Option<Ready>,
    /// What runs in every copy of a sandbox of it.
    pub after_restore: Option<String>,
    /// What its boxes get that ask for nothing, and the box it is made in.
    pub limits: LimitsWish,
    /// Steps run at the first of these levels; it is warmed for each of them.
    pub isolation: Vec<IsolationWish>,
    /// No sandbox of it, and of no template built on it, is isolated less.
    pub isolation_minimum: Option<Isolation>,
}

impl Recipe {
    /// Refuses what could never be made.
    pub fn check(&self) -> Result<()> {
        if self.steps.len() > MOST_STEPS {
            return Err(Error::invalid(
                "steps",
                format!(
                    "{} steps are given, the limit is {MOST_STEPS}",
                    self.steps.len()
                ),
            ));
        }
        for (at, step) in self.steps.iter().enumerate() {
            check_step(step).map_err(|error| {
                let inner = error.field.clone().unwrap_or_default();
                error.field(format!("steps[{at}].{inner}"))
            })?;
        }
        if let Some(start) = &self.start {
            text("start", start, LONGEST_COMMAND)?;
        }
        if let Some(command) = &self.after_restore {
            text("after_restore", command, LONGEST_COMMAND)?;
        }
        match &self.ready {
            Some(_) if self.start.is_none() => {
                return Err(Error::invalid("ready", "there is nothing to wait for")
                    .hint("give a start command, or leave the ready check out"));
            }
            Some(ready) => {
                if let ReadyCheck::Command(command) = &ready.check {
                    text("ready.command", command, LONGEST_COMMAND)?;
                }
                if !(1..=LONGEST_READY.as_secs()).contains(&ready.timeout_seconds) {
                    return Err(Error::invalid(
                        "ready.timeout_seconds",
                        format!(
                            "timeout_seconds is {}, it must be from 1 to {}",
                            ready.timeout_seconds,
                            LONGEST_READY.as_secs()
                        ),
                    ));
                }
            }
            None => {}
        }
        Ok(())
    }
}

fn check_step(step: &Step) -> Result<()> {
    match step {
        Step::Run { command, user } => {
            text("run", command, LONGEST_COMMAND)?;
            user.as_deref().map_or(Ok(()), |user| name("user", user))
        }
        Step::Copy {
            from,
            to,
            user,
            mode,
            files,
        } => {
            text("copy", from, LONGEST_PATH)?;
            text("to", to, LONGEST_PATH)?;
            if from.starts_with('/') || from.split('/').any(|part| part == "..") {
                return Err(
                    Error::invalid("copy", format!("\"{from}\" leaves the context"))
                        .hint("give a path below the directory the files are taken from"),
                );
            }
            if let Some(owner) = user {
                owner.split(':').try_for_each(|part| name("user", part))?;
            }
            if let Some(mode) = mode {
                check_mode(mode)?;
            }
            check_files_key(files)
        }
        Step::Env(map) => check_env(map),
        Step::Workdir(path) => text("workdir", path, LONGEST_PATH),
        Step::User(user) => name("user", user),
    }
}

/// What is taken for a mode, as a regular expression.
pub const MODE_PATTERN: &str = "^[0-7]{3,4}$";

fn check_mode(mode: &str) -> Result<()> {
    let octal = |b: u8| (b'0'..=b'7').contains(&b);
    if (3..=4).contains(&mode.len()) && mode.bytes().all(octal) {
        return Ok(());
    }
    Err(Error::invalid("mode", format!("\"{mode}\" is no mode"))
        .hint("write it in octal, for example 0755"))
}

/// What [`check_files_key`] lets pass, as a regular expression.
pub const FILES_KEY_PATTERN: &str = "^[0-9a-f]{64}$";

/// The key of an archive of files: 64 hex digits, safe as a file name.
pub fn check_files_key(key: &str) -> Result<()> {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if key.len() == 64 && key.bytes().all(hex) {
        return Ok(());
    }
    Err(Error::invalid(
        "files",
        "the key of the files must be a SHA-256 in lower-case hex",
    ))
}

fn text(field: &str, value: &str, most: usize) -> Result<()> {
    if value.trim().is_empty() || value.contains('\0') {
        return Err(Error::invalid(
            field,
            format!("{field} is empty or holds a NUL byte"),
        ));
    }
    if value.len() > most {
        return Err(Error::invalid(
            field,
            format!("{field} is {} bytes, the limit is {most}", value.len()),
        ));
    }
    Ok(())
}

fn name(field: &str, value: &str) -> Result<()> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    if !value.is_empty()
        && value.len() <= 64
        && !value.starts_with('-')
        && value.bytes().all(allowed)
    {
        return Ok(());
    }
    let shown: String = value.chars().filter(|c| !c.is_control()).take(80).collect();
    Err(Error::invalid(field, format!("\"{shown}\" is no user")))
}

/// What a template built from a recipe remembers of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Built {
    pub build: BuildId,
    /// The hash of all that went into its files: what is built on it is cached by this.
    pub layer: String,
    pub from: TemplateName,
    pub steps: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub defaults: BoxDefaults,
    pub start: Option<String>,
    pub ready: Option<Ready>,
    pub limits: LimitsWish,
    /// The levels it is warmed for, if they can.
    pub levels: Vec<Isolation>,
    /// Why there is no memory of a level, when it was tried.
    pub cold: Vec<ColdLevel>,
    /// What the start command may reach while it is warmed.
    pub network: Option<serde_json::Value>,
    /// No sandbox of it is isolated less.
    #[serde(default)]
    pub isolation_minimum: Option<Isolation>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColdLevel {
    pub level: Isolation,
    pub why: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(step: Step) -> Recipe {
        Recipe {
            from: "base".parse().unwrap(),
            steps: vec![step],
            start: None,
            ready: None,
            after_restore: None,
            limits: LimitsWish::default(),
            isolation: vec![IsolationWish::Auto],
            isolation_minimum: None,
        }
    }

    #[test]
    fn a_build_has_the_form_of_a_uuid() {
        let id = BuildId::random();
        assert_eq!(id.as_str().parse::<BuildId>().unwrap(), id);
        assert_eq!(id.as_str().as_bytes()[14], b'4');
        for bad in ["", "../../x", &"a".repeat(36)] {
            assert!(bad.parse::<BuildId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn wrong_steps_are_named() {
        let copy = |from: &str, mode: &str| Step::Copy {
            from: from.to_owned(),
            to: "/app".to_owned(),
            user: None,
            mode: Some(mode.to_owned()),
            files: "0".repeat(64),
        };
        assert!(recipe(copy("app/*.py", "0755")).check().is_ok());
        for (step, field) in [
            (copy("../x", "0755"), "steps[0].copy"),
            (copy("/etc", "0755"), "steps[0].copy"),
            (copy("a", "u+x"), "steps[0].mode"),
            (Step::User("a b".to_owned()), "steps[0].user"),
            (
                Step::Run {
                    command: " ".to_owned(),
                    user: None,
                },
                "steps[0].run",
            ),
        ] {
            let error = recipe(step).check().unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field));
        }
        let mut waits = recipe(Step::Workdir("/x".to_owned()));
        waits.ready = Some(Ready::of(ReadyCheck::Port(80)));
        assert_eq!(waits.check().unwrap_err().field.as_deref(), Some("ready"));
    }
}
