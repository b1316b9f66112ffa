//! Connections to agents that wait for the next request.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandkeep_agent_client::Agent;
use sandkeep_keeper::Counts;
use sandkeep_model::{Code, Error, Latched, Result, SandboxId};
use tokio::time::{Instant, timeout};

use crate::{Boxes, GatewayConfig};

struct Waiting {
    agent: Agent,
    since: Instant,
}

/// Clones share one.
pub(crate) struct Pool<K> {
    boxes: K,
    config: Arc<GatewayConfig>,
    waiting: Arc<Mutex<HashMap<SandboxId, Vec<Waiting>>>>,
}

impl<K: Clone> Clone for Pool<K> {
    fn clone(&self) -> Self {
        Self {
            boxes: self.boxes.clone(),
            config: Arc::clone(&self.config),
            waiting: Arc::clone(&self.waiting),
        }
    }
}

impl<K: Boxes> Pool<K> {
    pub(crate) fn new(boxes: K, config: Arc<GatewayConfig>) -> Self {
        Self {
            boxes,
            config,
            waiting: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Vec<Waiting>>> {
        // Nothing in here can panic half-way through a change.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection that was used before and may have gone stale since.
    pub(crate) fn take(&self, id: &SandboxId) -> Option<Agent> {
        let mut waiting = self.lock();
        let of_box = waiting.get_mut(id)?;
        // The youngest is the likeliest to be alive.
        while let Some(Waiting { agent, since }) = of_box.pop() {
            if !agent.is_closed() && since.elapsed() < self.config.idle_for {
                return Some(agent);
            }
        }
        None
    }

    /// A new connection.
    pub(crate) async fn fresh(&self, id: &SandboxId) -> Result<Agent> {
        Agent::over(self.channel(id, Counts::Words).await?).await
    }

    pub(crate) async fn channel(&self, id: &SandboxId, counts: Counts) -> Result<K::Channel> {
        timeout(self.config.connect_deadline, self.boxes.connect(id, counts))
            .await
            .unwrap_or_else(|_| {
                Err(Error::new(
                    Code::DeadlineExceeded,
                    "the box did not accept a connection in time",
                ))
            })
    }

    /// Keeps a connection whose last answer was read to its end.
    pub(crate) fn put(&self, id: &SandboxId, agent: Agent) {
        if agent.is_closed() {
            return;
        }
        let mut waiting = self.lock();
        let first = !waiting.contains_key(id);
        let of_box = waiting.entry(id.clone()).or_default();
        if of_box.len() < self.config.idle_per_box {
            let since = Instant::now();
            of_box.push(Waiting { agent, since });
        }
        drop(waiting);
        if first {
            let pool = self.clone();
            let id = id.clone();
            tokio::spawn(async move { pool.tend(id).await });
        }
    }

    /// Lives as long as the box has connections here; closes old ones, and all when it ends.
    async fn tend(&self, id: SandboxId) {
        let mut closed: Latched<()> = self.boxes.closed(&id);
        loop {
            tokio::select! {
                () = &mut closed => {
                    self.lock().remove(&id);
                    return;
                }
                () = self.boxes.wanted_back(&id) => {
                    self.lock().remove(&id);
                    return;
                }
                () = tokio::time::sleep(self.config.idle_for) => {}
            }
            let mut waiting = self.lock();
            let Some(of_box) = waiting.get_mut(&id) else {
                return;
            };
            of_box.retain(|kept| {
                !kept.agent.is_closed() && kept.since.elapsed() < self.config.idle_for
            });
            if of_box.is_empty() {
                waiting.remove(&id);
                return;
            }
        }
    }
}
