//! Where the values of bindings come from.

use sandkeep_model::{Error, Result, SandboxId, Secret};

use crate::{
    hooks::BoxFuture,
    policy::{Host, Source},
};

/// A value went out with a request.
#[derive(Debug)]
pub struct SecretUse<'a> {
    pub id: &'a SandboxId,
    pub source: &'a Source,
    pub host: &'a Host,
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
}

/// Gives values at the moment they are needed, so that none is kept at the edge.
pub trait SecretSource: Send + Sync {
    /// The value for this box: a stored secret, or a token made for the occasion. Asked for each
    /// request.
    fn value<'a>(&'a self, id: &'a SandboxId, source: &'a Source) -> BoxFuture<'a, Result<Secret>>;

    /// Told before the request leaves. Do not block.
    fn used(&self, occasion: &SecretUse<'_>);
}

/// For servers without secrets.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoSecrets;

impl SecretSource for NoSecrets {
    fn value<'a>(&'a self, _: &'a SandboxId, source: &'a Source) -> BoxFuture<'a, Result<Secret>> {
        let error = Error::not_found(format!("there is no \"{}\"", source.key()));
        Box::pin(std::future::ready(Err(error)))
    }

    fn used(&self, _: &SecretUse<'_>) {}
}
