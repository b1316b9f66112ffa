//! Which `runsc` there is: where, of what date, and what it can do beyond the oldest we take.

use sandkeep_host::failure::Doing as _;
use sandkeep_model::{Error, Result};
use std::{
    env,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{process::Command, time::timeout};

/// Older ones lose boxes that are written to disk while they run.
pub const OLDEST: u32 = 20_240_729;
/// Where script/server puts the one it built: newer than what distributions have.
const OURS: &str = "/usr/local/lib/sandkeep";
const DEADLINE: Duration = Duration::from_secs(20);

/// Where the operator said; else the one that script/server built, else the first of the PATH.
pub fn find(given: Option<&Path>) -> Option<PathBuf> {
    if let Some(given) = given {
        return given.is_file().then(|| given.to_owned());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    std::iter::once(PathBuf::from(OURS))
        .chain(env::split_paths(&path))
        // Services often have a short PATH.
        .chain(["/usr/local/bin", "/usr/bin", "/usr/sbin"].map(PathBuf::from))
        .map(|dir| dir.join("runsc"))
        .find(|file| file.is_file())
}

/// What a release can do that [`OLDEST`] cannot. It is asked, not told by its date: builds of
/// distributions and of operators have dates of their own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Programs get the rights of their owner (setuid), so `sudo` works.
    pub setuid: bool,
    /// A restore compares the bundle with the one of the image.
    pub compares_bundles: bool,
    /// A restored box runs while its memory is still being read.
    pub background: bool,
}

impl Abilities {
    fn of(flags: &str, restore: &str) -> Self {
        Self {
            setuid: has_flag(flags, "allow-suid"),
            compares_bundles: has_flag(flags, "restore-spec-validation"),
            background: has_flag(restore, "background"),
        }
    }
}

/// Whether a help text describes this flag: it begins a line.
fn has_flag(help: &str, flag: &str) -> bool {
    help.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        words
            .next()
            .and_then(|word| word.strip_prefix('-'))
            .is_some_and(|name| name == flag)
    })
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    pub program: PathBuf,
    /// As it says itself: `release-20260905.0`.
    pub version: String,
    pub abilities: Abilities,
}

impl Release {
    pub async fn ask(program: PathBuf) -> Result<Self> {
        let (version, flags, restore) = tokio::try_join!(
            said(&program, &["--version"]),
            said(&program, &["flags"]),
            said(&program, &["help", "restore"]),
        )?;
        Ok(Self {
            version: first_line(&version),
            abilities: Abilities::of(&flags, &restore),
            program,
        })
    }

    /// Whether it is new enough, or why that is not known.
    pub fn check_age(&self) -> Result<()> {
        let (path, version) = (self.program.display(), &self.version);
        let why = match date(version) {
            Some(date) if date >= OLDEST => return Ok(()),
            Some(_) => {
                format!("{path} is runsc {version}, which is too old: {OLDEST} or newer is needed")
            }
            // What a plain `go install` makes.
            None if version == "VERSION_MISSING" => format!(
                "{path} was built without a version (VERSION_MISSING), so its images could not \
                 be told from those of other builds"
            ),
            None => format!("{path} has the version {version:?}, in which there is no date"),
        };
        Err(Error::host_not_ready(why)
            .hint("`sandkeep doctor` tells where to get another one")
            .retryable(false))
    }

    /// Flags of every call.
    pub fn flags(&self) -> Vec<&'static str> {
        let mut flags = Vec::new();
        if self.abilities.setuid {
            flags.push("--allow-suid");
        }
        if self.abilities.compares_bundles {
            // A copy has limits, a name and a directory of its own, so its bundle is never the
            // image's. What must not differ, the mounts, is part of the engine's name.
            flags.push("--restore-spec-validation=ignore");
        }
        flags
    }

    /// Flags of `runsc restore`.
    pub fn restore_flags(&self) -> &'static [&'static str] {
        if self.abilities.background {
            &["-background"]
        } else {
            &[]
        }
    }

    /// What is odd in boxes on it, for `doctor`.
    pub fn odd(&self) -> Option<&'static str> {
        (!self.abilities.setuid)
            .then_some("sudo does not work in sandboxes, and `ls -l` on links prints errors")
    }
}

async fn said(program: &Path, words: &[&str]) -> Result<String> {
    let run = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(DEADLINE, run)
        .await
        .map_err(|_| Error::host_not_ready(format!("`runsc {}` does not end", words.join(" "))))?
        .doing(format_args!("running {}", program.display()))?;
    // Some say it on the one, some on the other.
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// Without the words before the number.
fn first_line(said: &str) -> String {
    said.lines()
        .next()
        .unwrap_or_default()
        .trim_start_matches("runsc version ")
        .trim()
        .to_owned()
}

/// The date in a version: `0.0~20240729.0`, `release-20240729.0`.
fn date(version: &str) -> Option<u32> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .find(|digits| digits.len() == 8)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release(version: &str, abilities: Abilities) -> Release {
        Release {
            program: PathBuf::from("/opt/runsc"),
            version: version.to_owned(),
            abilities,
        }
    }

    #[test]
    fn dates_of_versions() {
        assert_eq!(date("0.0~20240729.0"), Some(20_240_729));
        assert_eq!(date("release-20250101.0-12-gabcdef"), Some(20_250_101));
        assert_eq!(date("1.2.3"), None);
        assert_eq!(
            first_line("runsc version release-20260905.0\nspec: 1.2.1"),
            "release-20260905.0"
        );
    }

    #[test]
    fn a_build_without_a_version_is_named_so() {
        let refused = |version| {
            let release = release(version, Abilities::default());
            release.check_age().expect_err("it is refused").message
        };
        assert!(refused("VERSION_MISSING").contains("built without a version (VERSION_MISSING)"));
        assert!(refused("0.0~20221219.0").contains("too old: 20240729 or newer"));
        assert!(refused("1.2.3").contains("no date"));
        for version in ["0.0~20240729.0", "release-20260905.0"] {
            release(version, Abilities::default())
                .check_age()
                .expect("it is taken");
        }
    }

    #[test]
    fn flags_are_used_where_there_are_some() {
        let old = Abilities::of(
            "  -overlay2 value\n    \twrap mounts",
            "  -detach\n  -direct",
        );
        assert_eq!(old, Abilities::default());
        assert!(release("x", old).flags().is_empty());
        assert!(release("x", old).odd().is_some());
        let new = Abilities::of(
            "  -allow-suid\n    \tallows it\n  -restore-spec-validation value\n",
            "  -background\n    \tallow image loading to continue\n",
        );
        let all = Abilities {
            setuid: true,
            compares_bundles: true,
            background: true,
        };
        assert_eq!(new, all);
        assert_eq!(release("x", new).odd(), None);
        // Named in the description of another one is not there.
        assert_eq!(
            Abilities::of("  -x\n    \tsee -allow-suid", ""),
            Abilities::default()
        );
    }
}
