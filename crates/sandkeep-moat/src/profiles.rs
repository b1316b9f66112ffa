//! Policies with a name that people gave them: kept with all their versions, so that what a box
//! was made with can be read, and made again, after the profile has changed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use sandkeep_files::PrivateDir;
use sandkeep_model::{Error, Result, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::policy::{Policy, Profile, Registries};

const FIELD: &str = "network.profile";
const MOST_PROFILES: usize = 256;
/// The oldest are forgotten.
const MOST_VERSIONS: usize = 64;
const LONGEST_NAME: usize = 64;
/// Many times the largest set of versions.
const LARGEST_FILE: u64 = 64 << 20;
const ENDING: &str = ".json";

/// One version of a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfileVersion {
    pub version: u32,
    pub at: Timestamp,
    pub policy: Policy,
}

/// A profile as it is now.
#[derive(Debug, Clone)]
pub struct NamedProfile {
    pub name: String,
    /// `None`: built in, and computed from what this host is configured for.
    pub version: Option<u32>,
    pub at: Option<Timestamp>,
    /// What it opens, in words, of a built-in one.
    pub words: Option<&'static str>,
    pub policy: Policy,
}

#[derive(Serialize, Deserialize)]
struct Written {
    version: u32,
    at: Timestamp,
    policy: Value,
}

#[derive(Debug, Default)]
pub struct Profiles {
    /// `None`: only the built-in ones.
    dir: Option<PrivateDir>,
    /// The root whose package clients boxes use.
    base: Option<PathBuf>,
    kept: Mutex<BTreeMap<String, Vec<ProfileVersion>>>,
}

impl Profiles {
    /// `base`: the root of the template whose package clients say where they go by themselves.
    pub fn open(dir: &Path, base: Option<PathBuf>) -> Result<Self> {
        let dir = PrivateDir::open(dir)?;
        let mut kept = BTreeMap::new();
        for entry in dir.entries()? {
            let Some(name) = entry.strip_suffix(ENDING) else {
                continue;
            };
            if let Some(bytes) = dir.read(&entry, LARGEST_FILE)? {
                let versions = read(&bytes).map_err(|error| {
                    error.context(format!("reading the profile \"{}\"", name.escape_debug()))
                })?;
                kept.insert(name.to_owned(), versions);
            }
        }
        Ok(Self {
            dir: Some(dir),
            base,
            kept: Mutex::new(kept),
        })
    }

    /// The policy of `NAME` as it is now, or of `NAME@VERSION`.
    pub fn policy(&self, wanted: &str) -> Result<Policy> {
        let (name, version) = match wanted.split_once('@') {
            None => (wanted, None),
            Some((name, text)) => {
                let version = text.parse::<u32>().map_err(|_| {
                    Error::invalid(FIELD, "the version after @ is not a number")
                        .hint("write NAME or NAME@3")
                })?;
                (name, Some(version))
            }
        };
        if let Ok(profile) = name.parse::<Profile>()
            && version.is_none()
        {
            return Ok(self.built_in(profile));
        }
        let kept = self.kept();
        let versions = kept
            .get(name)
            .ok_or_else(|| self.unknown(name, kept.keys()))?;
        let found = match version {
            None => versions.last(),
            Some(version) => versions.iter().find(|one| one.version == version),
        };
        found.map(|one| one.policy.clone()).ok_or_else(|| {
            let there: Vec<String> = versions.iter().map(|one| one.version.to_string()).collect();
            Error::invalid(FIELD, format!("there is no such version of \"{name}\""))
                .hint(format!("there are: {}", there.join(", ")))
        })
    }

    fn unknown<'a>(&self, name: &str, own: impl Iterator<Item = &'a String>) -> Error {
        let built_in = Profile::ALL.map(Profile::name);
        let there: Vec<&str> = built_in
            .into_iter()
            .chain(own.map(String::as_str))
            .collect();
        let shown: String = name.chars().take(LONGEST_NAME).collect();
        Error::invalid(
            FIELD,
            format!("there is no profile \"{}\"", shown.escape_debug()),
        )
        .hint(format!("there are: {}", there.join(", ")))
    }

    /// Read anew each time: the operator may have changed a mirror.
    pub fn built_in(&self, profile: Profile) -> Policy {
        let registries = match profile {
            Profile::PackageRegistries => self.registries(),
            _ => Registries::default(),
        };
        Policy::of(profile, &registries)
    }

    /// Where package clients in boxes go.
    pub fn registries(&self) -> Registries {
        let found = Registries::of_this_host();
        match &self.base {
            Some(base) => found.or_defaults_in(base),
            None => found,
        }
    }

    /// The built-in ones first.
    pub fn all(&self) -> Vec<NamedProfile> {
        let built_in = Profile::ALL.into_iter().map(|profile| NamedProfile {
            name: profile.name().to_owned(),
            version: None,
            at: None,
            words: Some(profile.words()),
            policy: self.built_in(profile),
        });
        let kept = self.kept();
        let own = kept.iter().filter_map(|(name, versions)| {
            let last = versions.last()?;
            Some(NamedProfile {
                name: name.clone(),
                version: Some(last.version),
                at: Some(last.at),
                words: None,
                policy: last.policy.clone(),
            })
        });
        built_in.chain(own).collect()
    }

    /// All that is known of one of one's own, oldest first. Empty: there is none of this name.
    pub fn versions(&self, name: &str) -> Vec<ProfileVersion> {
        self.kept().get(name).cloned().unwrap_or_default()
    }

    /// Makes a profile or its next version. The same policy again is the same version. Waits for
    /// the disk.
    pub fn put(&self, name: &str, policy: Policy) -> Result<ProfileVersion> {
        let dir = self.writable()?;
        check_name(name)?;
        let mut kept = self.kept();
        let mut versions = kept.get(name).cloned().unwrap_or_default();
        if versions.is_empty() && kept.len() >= MOST_PROFILES {
            return Err(
                Error::conflict(format!("there are {MOST_PROFILES} profiles already"))
                    .hint("remove one that is not used"),
            );
        }
        let last = versions.last();
        if let Some(same) = last.filter(|last| last.policy == policy) {
            return Ok(same.clone());
        }
        let new = ProfileVersion {
            version: last.map_or(1, |last| last.version.saturating_add(1)),
            at: Timestamp::now(),
            policy,
        };
        versions.push(new.clone());
        let too_many = versions.len().saturating_sub(MOST_VERSIONS);
        versions.drain(..too_many);
        dir.write(&format!("{name}{ENDING}"), &written(&versions)?)?;
        kept.insert(name.to_owned(), versions);
        Ok(new)
    }

    /// Boxes made with it keep what they have. `false`: there was none. Waits for the disk.
    pub fn remove(&self, name: &str) -> Result<bool> {
        let dir = self.writable()?;
        check_name(name)?;
        let mut kept = self.kept();
        if !kept.contains_key(name) {
            return Ok(false);
        }
        dir.remove(&format!("{name}{ENDING}"))?;
        kept.remove(name);
        Ok(true)
    }

    fn writable(&self) -> Result<&PrivateDir> {
        self.dir.as_ref().ok_or_else(|| {
            Error::new(
                sandkeep_model::Code::NotImplemented,
                "this server keeps no profiles",
            )
            .hint("start it with `sandkeep serve`")
        })
    }

    fn kept(&self) -> MutexGuard<'_, BTreeMap<String, Vec<ProfileVersion>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// It is part of a file name and of an address.
fn check_name(name: &str) -> Result<()> {
    let good = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    let bytes = name.as_bytes();
    let fits = (1..=LONGEST_NAME).contains(&bytes.len())
        && bytes.iter().all(good)
        && !name.starts_with('-');
    if !fits {
        return Err(Error::invalid("name", "a profile can not have this name")
            .hint("use 1 to 64 of a-z, 0-9 and -"));
    }
    if name.parse::<Profile>().is_ok() {
        return Err(
            Error::invalid("name", format!("the profile \"{name}\" is built in"))
                .hint("choose another name for your own"),
        );
    }
    Ok(())
}

fn written(versions: &[ProfileVersion]) -> Result<Vec<u8>> {
    let lines: Vec<Written> = versions
        .iter()
        .map(|one| Written {
            version: one.version,
            at: one.at,
            policy: one.policy.to_json(),
        })
        .collect();
    serde_json::to_vec_pretty(&lines)
        .map_err(|error| Error::internal(format!("a profile can not be written: {error}")))
}

fn read(bytes: &[u8]) -> Result<Vec<ProfileVersion>> {
    let lines: Vec<Written> = serde_json::from_slice(bytes)
        .map_err(|error| Error::internal(format!("the file is damaged: {error}")))?;
    lines
        .into_iter()
        .map(|line| {
            Ok(ProfileVersion {
                version: line.version,
                at: line.at,
                policy: Policy::from_json(&line.policy)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn allowing(host: &str) -> Policy {
        Policy::from_json(&json!({ "allow": [host] })).unwrap()
    }

    #[test]
    fn versions_are_kept_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Profiles::open(&dir.path().join("profiles"), None).unwrap();
        let profiles = open();
        assert_eq!(profiles.put("team", allowing("a.test")).unwrap().version, 1);
        assert_eq!(profiles.put("team", allowing("b.test")).unwrap().version, 2);
        assert_eq!(profiles.put("team", allowing("b.test")).unwrap().version, 2);
        drop(profiles);
        let profiles = open();
        assert_eq!(profiles.policy("team").unwrap(), allowing("b.test"));
        assert_eq!(profiles.policy("team@1").unwrap(), allowing("a.test"));
        assert_eq!(profiles.policy("open").unwrap(), Policy::open());
        let names: Vec<String> = profiles.all().into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["air-gapped", "package-registries", "open", "team"]);
        assert!(profiles.remove("team").unwrap());
        assert!(!profiles.remove("team").unwrap());
        assert!(open().policy("team").is_err());
    }

    #[test]
    fn many_versions_are_bounded_and_numbers_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let profiles = Profiles::open(&dir.path().join("profiles"), None).unwrap();
        for at in 0..70 {
            profiles
                .put("team", allowing(&format!("n{at}.test")))
                .unwrap();
        }
        let versions = profiles.versions("team");
        assert_eq!(versions.len(), MOST_VERSIONS);
        assert_eq!(versions.last().unwrap().version, 70);
        let error = profiles.policy("team@1").unwrap_err();
        assert_eq!(error.field.as_deref(), Some(FIELD));
    }

    #[test]
    fn names_and_mistakes() {
        let dir = tempfile::tempdir().unwrap();
        let profiles = Profiles::open(&dir.path().join("profiles"), None).unwrap();
        for bad in [
            "",
            "open",
            "deny",
            "../x",
            "A",
            "a/b",
            "-a",
            &"x".repeat(65),
        ] {
            let error = profiles.put(bad, Policy::open()).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("name"), "{bad}");
        }
        for bad in ["none", "none@1", "open@1", "team@x"] {
            let error = profiles.policy(bad).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(FIELD), "{bad}");
        }
        assert!(Profiles::default().put("a", Policy::open()).is_err());
    }
}
