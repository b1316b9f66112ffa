//! Storing secrets, for both APIs.

use std::{collections::BTreeMap, sync::Arc};

use sandkeep_model::{Code, Error, Result, Secret, SecretName};
use sandkeep_secrets::{SecretInfo, SecretStore};

use crate::state::Shared;

pub(crate) fn store(state: &Shared) -> Result<Arc<SecretStore>> {
    state.secrets.clone().ok_or_else(|| {
        Error::new(Code::NotImplemented, "this server keeps no secrets")
            .hint("start it with `sandkeep serve`")
    })
}

/// Writing waits for the disk.
pub(crate) async fn work<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Error::internal("storing a secret was broken off"))?
}

/// A new secret, or a new value of one.
pub(crate) async fn set(
    state: &Shared,
    name: SecretName,
    value: Secret,
    metadata: Option<BTreeMap<String, String>>,
) -> Result<SecretInfo> {
    let store = store(state)?;
    work(
        move || match store.update(&name, &value, metadata.clone()) {
            Err(error) if error.code == Code::NotFound => {
                store.create(name, &value, metadata.unwrap_or_default())
            }
            done => done,
        },
    )
    .await
}

pub(crate) async fn remove(state: &Shared, name: SecretName, force: bool) -> Result<SecretInfo> {
    let store = store(state)?;
    let mut bound = state.keeper.bound();
    bound.retain(|bound| bound.secret == name);
    if let Some(first) = bound.first()
        && !force
    {
        let more = match bound.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        return Err(Error::conflict(format!(
            "the secret {name} is bound: requests of sandbox {} to {}{more} need it",
            first.sandbox_id, first.host
        ))
        .hint("take it out of their network first, or remove it all the same with `--force` (?force=true): those requests then fail"));
    }
    work(move || store.delete(&name)).await
}
