//! Which secret goes where.

use http::HeaderName;
use sandkeep_model::{Error, Result, SandboxId, Secret};

use crate::{
    hooks::BoxFuture,
    policy::{Host, HttpRule},
};

/// How a value is put into a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// The header is replaced by `before` + value + `after`.
    Header {
        name: HeaderName,
        before: String,
        after: String,
    },
    /// `Authorization: Basic` with this user and the value as its password.
    Basic { user: String },
    /// The parameter is replaced.
    Query { name: String },
    /// This text, wherever it stands in a header, is replaced.
    Placeholder { text: String },
}

/// A secret bound to one host. It holds the name of the secret, never its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credential {
    pub secret: String,
    /// Exactly this host: no wildcard can widen where a secret goes.
    pub host: Host,
    pub port: u16,
    /// Empty: with every request. Else with these only.
    pub only: Vec<HttpRule>,
    pub place: Placement,
}

impl Credential {
    /// `Authorization: Bearer`, with every request over HTTPS to this host.
    pub fn bearer(secret: impl Into<String>, host: Host) -> Self {
        Self {
            secret: secret.into(),
            host,
            port: 443,
            only: Vec::new(),
            place: Placement::Header {
                name: http::header::AUTHORIZATION,
                before: "Bearer ".to_owned(),
                after: String::new(),
            },
        }
    }

    pub fn is_for(&self, host: &Host, port: u16) -> bool {
        self.host == *host && self.port == port
    }

    pub fn goes_with(&self, method: &str, path: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|rule| rule.matches(method, path))
    }
}

/// A secret went out with a request.
#[derive(Debug)]
pub struct SecretUse<'a> {
    pub id: &'a SandboxId,
    pub secret: &'a str,
    pub host: &'a Host,
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
}

/// Where values come from, at the moment they are needed.
pub trait SecretSource: Send + Sync {
    /// The value for this box: a stored secret, or a token made for the occasion.
    fn value<'a>(&'a self, id: &'a SandboxId, secret: &'a str) -> BoxFuture<'a, Result<Secret>>;

    /// Told before the request leaves. Do not block.
    fn used(&self, occasion: &SecretUse<'_>);
}

/// For servers without secrets.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoSecrets;

impl SecretSource for NoSecrets {
    fn value<'a>(&'a self, _: &'a SandboxId, secret: &'a str) -> BoxFuture<'a, Result<Secret>> {
        Box::pin(async move { Err(Error::not_found(format!("there is no secret \"{secret}\""))) })
    }

    fn used(&self, _: &SecretUse<'_>) {}
}
