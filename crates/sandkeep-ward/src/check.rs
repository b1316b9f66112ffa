//! What `doctor` tells about a host.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// It works, with less than there could be.
    Warning,
    /// The level does not work until this is mended.
    Missing,
}

/// One thing looked at on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Short and stable: `cgroups`, `user namespaces`.
    pub name: String,
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do, when something is to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    pub fn ok(name: &str, found: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            verdict: Verdict::Ok,
            found: found.into(),
            fix: None,
        }
    }

    pub fn warning(name: &str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            verdict: Verdict::Warning,
            found: found.into(),
            fix: Some(fix.into()),
        }
    }

    pub fn missing(name: &str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            verdict: Verdict::Missing,
            found: found.into(),
            fix: Some(fix.into()),
        }
    }
}
