//! The same key with the same request gives the same box.

use std::{
    collections::{HashMap, hash_map},
    sync::Mutex,
};

use sandkeep_model::{
    CreateSandbox, Error, Expiry, OnTimeout, PortAccess, Result, Sandbox, State, TimeWish,
};
use sandkeep_store::Idempotency;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use crate::{core::Core, egress::EgressWish, sync::lock};

const LONGEST_KEY: usize = 255;

/// Requests with a key that are being answered right now.
#[derive(Default)]
pub struct Flights {
    flying: Mutex<HashMap<String, Flight>>,
}

struct Flight {
    hash: String,
    /// Closes when the request has been answered, well or badly.
    landed: watch::Receiver<()>,
}

/// The right to answer requests with a key; ends when dropped.
pub struct Flying<'a> {
    flights: &'a Flights,
    pub given: Idempotency,
    _landing: watch::Sender<()>,
}

impl Drop for Flying<'_> {
    fn drop(&mut self) {
        lock(&self.flights.flying).remove(&self.given.key);
    }
}

impl Flights {
    /// Waits until nobody else answers this key.
    pub async fn take_off(&self, given: Idempotency) -> Result<Flying<'_>> {
        loop {
            let mut landed = {
                let mut flying = lock(&self.flying);
                match flying.entry(given.key.clone()) {
                    hash_map::Entry::Vacant(place) => {
                        let (landing, landed) = watch::channel(());
                        place.insert(Flight {
                            hash: given.hash.clone(),
                            landed,
                        });
                        drop(flying);
                        return Ok(Flying {
                            flights: self,
                            given,
                            _landing: landing,
                        });
                    }
                    hash_map::Entry::Occupied(other) if other.get().hash != given.hash => {
                        return Err(other_request(&given.key));
                    }
                    hash_map::Entry::Occupied(other) => other.get().landed.clone(),
                }
            };
            // An error is what we wait for: the sender is gone.
            let _ = landed.changed().await;
        }
    }
}

fn other_request(key: &str) -> Error {
    Error::conflict(format!(
        "the idempotency key \"{}\" was used for another request",
        key.escape_debug()
    ))
    .field("idempotency_key")
    .hint("repeat a request word for word, or use a new key")
}

/// The key with the hash of everything else in the request.
pub fn given(request: &CreateSandbox, network: &EgressWish) -> Result<Option<Idempotency>> {
    let Some(key) = &request.idempotency_key else {
        return Ok(None);
    };
    if key.is_empty() || key.len() > LONGEST_KEY {
        return Err(Error::invalid(
            "idempotency_key",
            format!("an idempotency key has 1 to {LONGEST_KEY} bytes"),
        )
        .hint("use a UUID"));
    }
    let mut asked = serde_json::json!([
        request.template,
        request.isolation,
        request.limits,
        match request.expiry {
            Expiry::Never => None,
            Expiry::After(time) => Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        },
        request.on_timeout == OnTimeout::Pause,
        request.env,
        request.metadata,
    ]);
    if let Some(list) = asked.as_array_mut() {
        if let Some(network) = network.to_json() {
            list.push(network);
        }
        if !request.identity.is_empty() {
            list.push(serde_json::json!({ "identity": request.identity }));
        }
        // Not for what every key of an earlier version meant.
        if request.ports == PortAccess::Private {
            list.push(serde_json::json!({ "ports": request.ports }));
        }
        if !request.e2b.is_empty() {
            list.push(serde_json::json!({ "e2b": request.e2b }));
        }
        // Only when it says something: keys of an earlier version keep their meaning.
        if request.time != TimeWish::default() {
            let time = &request.time;
            let mut said = serde_json::json!({
                "from_point": time.from_point,
                "auto_resume": time.auto_resume,
                "pause_files_only": time.pause_files_only,
                "idle_seconds": time.idle_seconds,
            });
            if let Some(limit) = time.paused_limit_seconds {
                said["paused_limit_seconds"] = limit.into();
            }
            if let Some(points) = &time.points {
                said["points"] = serde_json::json!(points);
            }
            list.push(said);
        }
    }
    let text = asked.to_string();
    let hash = Sha256::digest(text.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Ok(Some(Idempotency {
        key: key.clone(),
        hash,
    }))
}

impl Core {
    /// The box an earlier request with this key made.
    pub async fn made_before(&self, given: &Idempotency) -> Result<Option<Sandbox>> {
        let Some((record, hash)) = self.store.by_key(&given.key).await? else {
            return Ok(None);
        };
        if hash != given.hash {
            return Err(other_request(&given.key));
        }
        let sandbox = record.sandbox;
        if matches!(sandbox.state, State::Gone | State::Stopping) {
            let why = sandbox
                .gone
                .as_ref()
                .map_or_else(String::new, |why| format!(": {why}"));
            return Err(Error::conflict(format!(
                "the sandbox \"{}\" made with this idempotency key is gone{why}",
                sandbox.id
            ))
            .field("idempotency_key")
            .hint("use a new key for a new sandbox"));
        }
        Ok(Some(sandbox))
    }
}
