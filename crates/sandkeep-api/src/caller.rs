//! Who asks, for the records.

use std::{convert::Infallible, fmt::Write as _};

use axum::extract::FromRequestParts;
use http::request::Parts;
use sandkeep_audit::{Action, Actor, Entry};
use sandkeep_model::{Secret, SecretName};
use sandkeep_secrets::SecretInfo;
use sha2::{Digest as _, Sha256};

use crate::state::ApiState;

/// Enough to tell the keys of a server apart, far too little to find one again.
const ID_BYTES: usize = 6;

/// `key:` and the id of the key that was shown. Never the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller(pub String);

impl Caller {
    pub(crate) fn of_key(key: &Secret) -> Self {
        let hash = Sha256::digest(key.expose().as_bytes());
        let mut id = "key:".to_owned();
        for byte in &hash[..ID_BYTES] {
            // Writing to a String can not fail.
            let _ = write!(id, "{byte:02x}");
        }
        Self(id)
    }
}

impl Caller {
    /// Puts on record what was done. It is done, so a log that can not be written is told to
    /// the operator and not to the client.
    pub(crate) async fn did(&self, state: &ApiState, action: Action) {
        let Some(audit) = &state.audit else {
            return;
        };
        let entry = Entry::now(Actor::named(Some(&self.0)), None, action);
        if let Err(error) = audit.append(entry).await {
            tracing::error!(%error, "what a client did is not in the audit log");
        }
    }

    /// A secret has a new value.
    pub(crate) async fn set_secret(&self, state: &ApiState, info: &SecretInfo) {
        let name = info.name.as_str().into();
        let action = match info.version {
            1 => Action::SecretCreated { name },
            version => Action::SecretChanged { name, version },
        };
        self.did(state, action).await;
    }

    pub(crate) async fn removed_secret(&self, state: &ApiState, name: &SecretName) {
        let name = name.as_str().into();
        self.did(state, Action::SecretDeleted { name }).await;
    }
}

/// Put into every request whose key was found right.
impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let known = parts.extensions.get::<Self>().cloned();
        Ok(known.unwrap_or_else(|| Self("nobody".to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_tells_keys_apart_and_holds_none() {
        let one = Caller::of_key(&Secret::new("e2b_0123456789"));
        assert_eq!(one, Caller::of_key(&Secret::new("e2b_0123456789")));
        assert_ne!(one, Caller::of_key(&Secret::new("e2b_0123456780")));
        assert_eq!(one.0.len(), "key:".len() + 2 * ID_BYTES);
        assert!(!one.0.contains("0123"));
    }
}
