//! What a box is asked to be.

use sandkeep_agent_api::host::InitRequest;
use sandkeep_model::{Error, Limits, Result, SandboxId};
use std::path::PathBuf;

const LONGEST_HOSTNAME: usize = 63;

/// What a ward needs to start a box.
#[derive(Debug, Clone)]
pub struct BoxSpec {
    pub id: SandboxId,
    /// The box's own writable root directory, made by the vault, owners as inside (root is 0).
    pub root: PathBuf,
    pub limits: Limits,
    /// The host name seen inside.
    pub hostname: String,
    /// Who the box is, for levels that tell its agent themselves: see [`Ward::introduces`].
    ///
    /// [`Ward::introduces`]: crate::Ward::introduces
    pub introduction: Option<InitRequest>,
}

impl BoxSpec {
    /// Refuses what no ward can start.
    pub fn check(&self) -> Result<()> {
        let good_name = !self.hostname.is_empty()
            && self.hostname.len() <= LONGEST_HOSTNAME
            && self
                .hostname
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.');
        if !good_name {
            return Err(Error::invalid(
                "hostname",
                "the host name must be 1 to 63 letters, digits, dots and dashes",
            ));
        }
        if !self.root.is_absolute() || !self.root.is_dir() {
            return Err(Error::invalid(
                "root",
                format!("the root {} is no directory", self.root.display()),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_model::Limits;

    #[test]
    fn bad_roots_and_names_are_refused_before_anything_is_made() {
        let spec = |root: &str, hostname: &str| BoxSpec {
            id: SandboxId::random(),
            root: root.into(),
            limits: Limits::default(),
            hostname: hostname.to_owned(),
            introduction: None,
        };
        spec("/", "e2b.local").check().unwrap();
        for (root, name, field) in [
            ("tmp", "box", "root"),
            ("/no/such/dir", "box", "root"),
            ("/", "", "hostname"),
            ("/", "a b", "hostname"),
            ("/", &"x".repeat(64), "hostname"),
        ] {
            let error = spec(root, name).check().unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field));
        }
    }
}
