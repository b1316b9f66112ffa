//! Finding boxes again after the server was away.

use std::{collections::HashSet, sync::Arc};

use futures_util::StreamExt;
use sandkeep_model::{Error, GoneReason, Result, SandboxId, State, Timestamp};
use sandkeep_store::Record;
use sandkeep_ward::{Adoption, LiveBox, Ward};

use crate::{agent, core::Core, egress::Egress, meters, pool::Ready, registry::Entry};

/// Boxes looked at side by side.
const AT_ONCE: usize = 16;

/// A row of the ledger and what came of it.
struct Found {
    entry: Arc<Entry>,
    /// Why it must end; `None` when it lives on.
    ends: Option<GoneReason>,
}

impl Core {
    /// Takes over what lives and clears away what does not. Gives the boxes that are somebody's
    /// and have no moat yet.
    pub async fn adopt(&self) -> Result<Vec<Arc<Entry>>> {
        let rows = self.store.live().await?;
        let mut known = Vec::with_capacity(rows.len());
        for row in rows {
            let ward = self.ward_of(&row)?;
            known.push((row, ward));
        }
        let found: Vec<Found> = futures_util::stream::iter(known)
            .map(|(row, ward)| self.look_for(row, ward))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;

        let (alive, lost): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|found| found.ends.is_none());
        let mut alive: Vec<_> = alive.into_iter().map(|found| found.entry).collect();
        self.sweep(&alive).await;
        self.take_over(&alive).await?;
        let ended = lost.len();
        futures_util::stream::iter(lost)
            .for_each_concurrent(AT_ONCE, |found| self.clear_lost(found))
            .await;
        if !alive.is_empty() || ended > 0 {
            tracing::info!(adopted = alive.len(), ended, "boxes of an earlier run");
        }
        alive.retain(|entry| !entry.pooled());
        Ok(alive)
    }

    fn ward_of(&self, row: &Record) -> Result<Arc<dyn Ward>> {
        let level = row.sandbox.isolation;
        self.levels.ward(level).map(Arc::clone).ok_or_else(|| {
            Error::host_not_ready(format!(
                "the ledger has boxes of isolation level {level}, which this server does not run"
            ))
            .hint(format!(
                "start it once with level {level} and kill those boxes, or keep the level"
            ))
            .retryable(false)
        })
    }

    async fn look_for(&self, row: Record, ward: Arc<dyn Ward>) -> Found {
        let Record {
            sandbox,
            pooled,
            ward: note,
            network,
        } = row;
        let state = sandbox.state;
        let reason = sandbox.gone.clone();
        let egress = stored(&sandbox.id, network.as_ref());
        let entry = Entry::new(sandbox, ward, pooled, egress);
        // More boxes than now allowed are no reason to lose any.
        self.registry.add_within(&entry, usize::MAX);
        let ends = match state {
            State::Creating => Some(GoneReason::CreateInterrupted),
            State::Stopping => Some(reason.unwrap_or(GoneReason::Killed)),
            _ if self.is_alive(&entry, note).await => None,
            _ => Some(GoneReason::LostWhileServerWasDown),
        };
        Found { entry, ends }
    }

    async fn is_alive(&self, entry: &Entry, note: Option<serde_json::Value>) -> bool {
        let Some(record) = note else {
            return false;
        };
        let live = LiveBox {
            id: entry.id.clone(),
            record,
        };
        match entry.ward.adopt(&live).await {
            Ok(Adoption::Alive) => true,
            Ok(Adoption::Gone) => false,
            Err(error) => {
                // Nobody can say what it is; what can not be reached must not linger.
                tracing::warn!(id = %entry.id, %error, "a box could not be adopted");
                false
            }
        }
    }

    /// Lets every ward clear away what belongs to no living box.
    async fn sweep(&self, alive: &[Arc<Entry>]) {
        for ward in self.levels.wards() {
            let known: HashSet<SandboxId> = alive
                .iter()
                .filter(|entry| entry.ward.level() == ward.level())
                .map(|entry| entry.id.clone())
                .collect();
            match ward.sweep(&known).await {
                Ok(swept) if swept == sandkeep_ward::Swept::default() => {}
                Ok(swept) => tracing::info!(level = %ward.level(), ?swept, "swept leftovers"),
                Err(error) => tracing::warn!(level = %ward.level(), %error, "sweeping leftovers"),
            }
        }
    }

    async fn take_over(&self, alive: &[Arc<Entry>]) -> Result<()> {
        let owned: Vec<_> = alive
            .iter()
            .filter(|entry| !entry.pooled())
            .map(|entry| entry.id.clone())
            .collect();
        self.store.note_adopted(&owned).await?;
        meters::adopted(owned.len());
        for entry in alive {
            // One whose time ran out meanwhile is the first the expiry task finds.
            self.deadlines.moved(&entry.id, None, entry.end_at());
        }
        let pooled: Vec<_> = alive.iter().filter(|entry| entry.pooled()).collect();
        if pooled.is_empty() {
            return Ok(());
        }
        let template = self.vault.template(&self.config.pool.template).await?;
        futures_util::stream::iter(pooled)
            .for_each_concurrent(AT_ONCE, |entry| {
                let newest = template.as_ref().map(|template| template.created_at);
                self.take_into_pool(entry, newest)
            })
            .await;
        Ok(())
    }

    /// Keeps a pooled box that answers and is not older than its template. The pool itself
    /// ends those it has no use for.
    async fn take_into_pool(&self, entry: &Arc<Entry>, template: Option<Timestamp>) {
        let made = entry.with(|sandbox| sandbox.created_at);
        let current = template.filter(|template| made >= *template);
        if let Some(made_from) = current
            && self.pool.len() < self.config.pool.size
        {
            let answer = async {
                let mut agent = agent::agent(entry.ward.as_ref(), &entry.id).await?;
                agent.health().await?;
                // Whoever claims it counts on it.
                self.attach(entry).await?;
                Ok::<_, Error>(agent)
            };
            match answer.await {
                Ok(agent) => {
                    self.pool.put(Ready {
                        entry: Arc::clone(entry),
                        agent: Some(agent),
                        made_from,
                    });
                    return;
                }
                Err(error) => {
                    tracing::warn!(id = %entry.id, %error, "a pooled box can not be kept");
                }
            }
        }
        self.discard(entry).await;
    }

    async fn clear_lost(&self, found: Found) {
        let Found { entry, ends } = found;
        let _turn = entry.turn.lock().await;
        let why = ends.unwrap_or(GoneReason::LostWhileServerWasDown);
        // The ledger keeps the state it has until the end.
        entry.ending(why, false);
        if let Err(error) = self.clear_away(&entry).await {
            tracing::warn!(id = %entry.id, %error, "a box of an earlier run can not be ended yet");
        }
    }
}

/// What can not be understood allows nothing.
fn stored(id: &SandboxId, network: Option<&serde_json::Value>) -> Egress {
    let Some(value) = network else {
        return Egress::default();
    };
    Egress::from_json(value).unwrap_or_else(|error| {
        tracing::error!(%id, %error, "the network of a box can not be read; it reaches nothing");
        Egress::default()
    })
}
