//! Names people give, and the maps they attach.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};

use crate::{Error, Result};

/// Metadata or environment of one box, all keys and values together.
pub const MAX_METADATA_BYTES: usize = 64 * 1024;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NameError(String);

/// The name of a template: `[a-z0-9_-]`, one to 64 characters, starting with a letter or digit.
///
/// It becomes a directory name, so nothing that means something to a file system is in it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TemplateName(String);

impl TemplateName {
    /// What is taken for one, as a regular expression.
    pub const PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$";

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TemplateName {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        let lower = text.to_ascii_lowercase();
        let allowed =
            |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
        let starts_well = lower
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric());
        if starts_well && lower.len() <= 64 && lower.bytes().all(allowed) {
            return Ok(Self(lower));
        }
        let shown: String = text.chars().filter(|c| !c.is_control()).take(80).collect();
        Err(NameError(format!(
            "\"{shown}\" is no template name: 1 to 64 of a-z, 0-9, - and _, starting with a letter or digit"
        )))
    }
}

impl TryFrom<String> for TemplateName {
    type Error = NameError;
    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<TemplateName> for String {
    fn from(name: TemplateName) -> Self {
        name.0
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<NameError> for Error {
    fn from(error: NameError) -> Self {
        Self::invalid("template", error.0)
    }
}

/// Bounds on free-form metadata.
pub fn check_metadata(map: &BTreeMap<String, String>) -> Result<()> {
    check_size("metadata", map)
}

/// Bounds on environment variables: names without `=` and NUL, values without NUL.
pub fn check_env(map: &BTreeMap<String, String>) -> Result<()> {
    check_size("env", map)?;
    for (key, value) in map {
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(Error::invalid(
                "env",
                format!(
                    "\"{}\" is no name of an environment variable",
                    key.escape_debug()
                ),
            )
            .hint("a name is not empty and holds neither = nor NUL"));
        }
        if value.contains('\0') {
            return Err(Error::invalid(
                "env",
                format!("the value of {key} holds a NUL byte"),
            ));
        }
    }
    Ok(())
}

fn check_size(field: &str, map: &BTreeMap<String, String>) -> Result<()> {
    let size: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if size <= MAX_METADATA_BYTES {
        return Ok(());
    }
    Err(Error::new(
        crate::Code::TooLarge,
        format!("{field} is {size} bytes, the limit is {MAX_METADATA_BYTES}"),
    )
    .field(field)
    .hint("put large things into a file of the box"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_names_are_safe_in_a_path() {
        assert_eq!("Base".parse::<TemplateName>().unwrap().as_str(), "base");
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "a b",
            "-a",
            "é",
            "a\0",
            &"x".repeat(65),
        ] {
            assert!(bad.parse::<TemplateName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn environment_names_are_checked() {
        let map = |k: &str, v: &str| BTreeMap::from([(k.to_owned(), v.to_owned())]);
        assert!(check_env(&map("A", "b=c")).is_ok());
        assert!(check_env(&map("A=B", "")).is_err());
        assert!(check_env(&map("", "x")).is_err());
        assert!(check_env(&map("A", "\0")).is_err());
        assert_eq!(
            check_metadata(&map("A", &"x".repeat(MAX_METADATA_BYTES)))
                .unwrap_err()
                .code,
            crate::Code::TooLarge
        );
    }
}
