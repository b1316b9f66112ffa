//! What a token says.

use std::time::Duration;

use sandkeep_model::{Error, NamedTokens, Result, Sandbox, SandboxId, TemplateName, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{Audience, Label, Scopes};

/// How long a token is good: at least one second, at most a quarter of an hour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lifetime(u64);

impl Lifetime {
    pub const LONGEST: Self = Self(15 * 60);

    pub fn from_seconds(seconds: u64) -> Result<Self> {
        if (1..=Self::LONGEST.0).contains(&seconds) {
            return Ok(Self(seconds));
        }
        Err(Error::invalid(
            "lifetime",
            format!("a token can not live {seconds} seconds"),
        )
        .hint("ask for 1 to 900 seconds, and for a new token when it ends"))
    }

    pub const fn seconds(self) -> u64 {
        self.0
    }

    pub const fn duration(self) -> Duration {
        Duration::from_secs(self.0)
    }
}

impl Default for Lifetime {
    fn default() -> Self {
        Self::LONGEST
    }
}

/// Who a box is: fixed at create, shown to the box, part of every token of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoxIdentity {
    pub sandbox: SandboxId,
    pub template: TemplateName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub org: Option<Label>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<Label>,
    #[serde(default)]
    pub scopes: Scopes,
    /// The box this one was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SandboxId>,
    /// Tokens that can be asked for by a name.
    #[serde(default, skip_serializing_if = "NamedTokens::is_empty")]
    pub tokens: NamedTokens,
    pub created: Timestamp,
}

impl From<&Sandbox> for BoxIdentity {
    fn from(sandbox: &Sandbox) -> Self {
        let said = &sandbox.identity;
        Self {
            sandbox: sandbox.id.clone(),
            template: sandbox.template.clone(),
            org: said.org.clone(),
            task: said.task.clone(),
            scopes: said.scopes.clone(),
            parent: said.parent.clone(),
            tokens: said.tokens.clone(),
            // What it was while it waited in the pool is nobody's business.
            created: sandbox.started_at,
        }
    }
}

/// A token that was checked, or is to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    pub sandbox: SandboxId,
    pub template: TemplateName,
    pub org: Option<Label>,
    pub task: Option<Label>,
    pub scopes: Scopes,
    pub parent: Option<SandboxId>,
    pub audience: Audience,
    pub lifetime: Lifetime,
}

impl Claims {
    /// A token of this box for this audience, as long-lived as a token may be.
    pub fn of(identity: &BoxIdentity, audience: Audience) -> Self {
        Self {
            sandbox: identity.sandbox.clone(),
            template: identity.template.clone(),
            org: identity.org.clone(),
            task: identity.task.clone(),
            scopes: identity.scopes.clone(),
            parent: identity.parent.clone(),
            audience,
            lifetime: Lifetime::default(),
        }
    }
}

/// The claims as they stand in the token, times in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Payload {
    pub iss: String,
    pub sub: String,
    pub aud: Audience,
    pub iat: u64,
    pub nbf: u64,
    pub exp: u64,
    pub jti: String,
    pub sandbox: SandboxId,
    pub template: TemplateName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub org: Option<Label>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<Label>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub scope: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SandboxId>,
}

impl Payload {
    /// Names of all claims, for the discovery document.
    pub const NAMES: [&'static str; 13] = [
        "iss", "sub", "aud", "iat", "nbf", "exp", "jti", "sandbox", "template", "org", "task",
        "scope", "parent",
    ];

    pub fn into_claims(self) -> Result<Claims> {
        Ok(Claims {
            lifetime: Lifetime::from_seconds(self.exp.saturating_sub(self.iat))?,
            scopes: Scopes::from_claim(&self.scope)?,
            sandbox: self.sandbox,
            template: self.template,
            org: self.org,
            task: self.task,
            parent: self.parent,
            audience: self.aud,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lifetime_has_bounds() {
        assert!(Lifetime::from_seconds(0).is_err());
        assert!(Lifetime::from_seconds(901).is_err());
        assert_eq!(Lifetime::from_seconds(900).unwrap(), Lifetime::LONGEST);
    }
}
