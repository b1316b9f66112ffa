//! Secrets of this server: where their key is, how the edge gets at them, what is swept.

use std::{collections::HashSet, path::Path, sync::Arc, time::Duration};

use sandkeep_keeper::Keeper;
use sandkeep_moat::{
    BoxFuture, InterceptConfig, SecretSource, SecretUse, TlsInterceptor, Trust, policy::Source,
};
use sandkeep_model::{Audience, Error, Result, SandboxId, Secret, Timestamp};
use sandkeep_secrets::{KeySource, SecretStore};

/// Values without a name that no box has are looked for this often.
const SWEEP: Duration = Duration::from_secs(60);
/// A box that is being made is not known yet, but its values are stored.
const GRACE: Duration = Duration::from_secs(600);

/// Opens the secrets below the state directory. `command`: a program that prints their key,
/// split at white space; without it the key is a file beside them.
pub async fn open(state: &Path, command: Option<&str>) -> Result<Arc<SecretStore>> {
    let dir = state.join("secrets");
    let source = match command {
        Some(command) => {
            KeySource::Command(command.split_whitespace().map(str::to_owned).collect())
        }
        None => KeySource::File(state.join("keys").join("secrets.key")),
    };
    tokio::task::spawn_blocking(move || SecretStore::open(&dir, &source).map(Arc::new))
        .await
        .map_err(|_| Error::internal("opening the secrets was broken off"))?
        .map_err(|error| error.context("opening the secrets"))
}

/// Makes tokens of boxes for the edge to attach.
pub trait Tokens: Send + Sync {
    fn token<'a>(
        &'a self,
        id: &'a SandboxId,
        audience: &'a Audience,
    ) -> BoxFuture<'a, Result<Secret>>;
}

/// Told of every use of a secret or token, before the request leaves. It must not block.
pub trait Uses: Send + Sync {
    fn used(&self, occasion: &SecretUse<'_>);

    /// Waited for before a value is given out; `None`: there is room to write its use down.
    fn room(&self) -> Option<BoxFuture<'_, ()>> {
        None
    }
}

/// What the edge adds to requests.
#[derive(Clone)]
pub struct Edge {
    pub store: Arc<SecretStore>,
    pub tokens: Option<Arc<dyn Tokens>>,
    pub uses: Option<Arc<dyn Uses>>,
}

impl Edge {
    /// `more`: a file with certificate authorities that are trusted besides those of this host.
    pub fn interceptor(self, more: Option<&Path>) -> Result<TlsInterceptor> {
        let trust = match more {
            Some(file) => Trust::system_and(file)?,
            None => Trust::default(),
        };
        TlsInterceptor::new(InterceptConfig {
            trust,
            secrets: Arc::new(self),
        })
    }
}

impl SecretSource for Edge {
    fn value<'a>(&'a self, id: &'a SandboxId, source: &'a Source) -> BoxFuture<'a, Result<Secret>> {
        Box::pin(async move {
            if let Some(room) = self.uses.as_ref().and_then(|uses| uses.room()) {
                room.await;
            }
            match (source, &self.tokens) {
                (Source::Secret(name), _) => self.store.reveal(name),
                (Source::Token(audience), Some(tokens)) => tokens.token(id, audience).await,
                (Source::Token(_), None) => Err(Error::not_found("this server makes no tokens")),
            }
        })
    }

    fn used(&self, occasion: &SecretUse<'_>) {
        tracing::debug!(box_id = %occasion.id, source = %occasion.source.key(), host = %occasion.host, "a credential was added");
        if let Some(uses) = &self.uses {
            uses.used(occasion);
        }
    }
}

/// Forgets values that came with boxes which are gone, for ever.
pub async fn sweep(store: Arc<SecretStore>, keeper: Keeper) {
    let mut interval = tokio::time::interval(SWEEP);
    loop {
        interval.tick().await;
        let in_use: HashSet<_> = keeper
            .bound()
            .into_iter()
            .map(|bound| bound.secret)
            .collect();
        let grace = i64::try_from(GRACE.as_millis()).unwrap_or(i64::MAX);
        let since = Timestamp::from_millis(Timestamp::now().millis().saturating_sub(grace));
        let store = Arc::clone(&store);
        let swept = tokio::task::spawn_blocking(move || store.sweep_inline(&in_use, since)).await;
        if let Ok(1..) = swept {
            tracing::info!(?swept, "values of boxes that are gone were forgotten");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeMap, os::unix::fs::PermissionsExt};

    #[tokio::test]
    async fn the_key_is_a_private_file_or_what_a_command_prints() {
        let state = tempfile::tempdir().unwrap();
        let store = open(state.path(), None).await.unwrap();
        let key = state.path().join("keys/secrets.key");
        let mode = std::fs::metadata(&key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let name: sandkeep_model::SecretName = "github".parse().unwrap();
        store
            .create(name.clone(), &Secret::new("canary"), BTreeMap::new())
            .unwrap();
        drop(store);
        let command = format!("cat {}", key.display());
        let edge = Edge {
            store: open(state.path(), Some(&command)).await.unwrap(),
            tokens: None,
            uses: None,
        };
        let id = SandboxId::random();
        let value = edge.value(&id, &Source::Secret(name)).await.unwrap();
        assert_eq!(value, Secret::new("canary"));
        let token = Source::Token("https://vault.test".parse().unwrap());
        assert!(edge.value(&id, &token).await.is_err());
        assert!(open(state.path(), Some("false")).await.is_err());
    }
}
