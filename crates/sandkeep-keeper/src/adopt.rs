//! Finding boxes again after the server was away.

use std::{collections::HashSet, sync::Arc};

use futures_util::StreamExt;
use sandkeep_model::{Error, GoneReason, PauseMode, Result, SandboxId, State, Timestamp};
use sandkeep_store::Record;
use sandkeep_ward::{Adoption, LiveBox, Ward};

use crate::{agent, core::Core, egress::Egress, meters, pool::Ready, registry::Entry, time::Rest};

/// Boxes looked at side by side.
const AT_ONCE: usize = 16;

/// A row of the ledger and what came of it.
struct Found {
    entry: Arc<Entry>,
    fate: Fate,
}

enum Fate {
    /// Its processes are there: it runs, or is frozen.
    Lives,
    /// Only its files are there, and that is right.
    Rests,
    Ends(GoneReason),
}

impl Core {
    /// Takes over what lives and clears away what does not. Gives the boxes that are somebody's
    /// and have no moat yet.
    pub async fn adopt(&self) -> Result<Vec<Arc<Entry>>> {
        let rows = self.store.live().await?;
        let cut_off: Vec<SandboxId> = rows
            .iter()
            .filter(|row| row.sandbox.state == State::Resuming)
            .map(|row| row.sandbox.id.clone())
            .collect();
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

        let (mut alive, mut resting, mut lost) = (Vec::new(), Vec::new(), Vec::new());
        for Found { entry, fate } in found {
            match fate {
                Fate::Lives => alive.push(entry),
                Fate::Rests => resting.push(entry),
                Fate::Ends(why) => lost.push((entry, why)),
            }
        }
        // What is left of the processes of boxes that rest goes with the rest.
        self.sweep(&alive).await;
        let rested = resting.len();
        alive.extend(resting);
        self.take_over(&alive).await?;
        self.sweep_points().await?;
        let ended = lost.len();
        futures_util::stream::iter(lost)
            .for_each_concurrent(AT_ONCE, |(entry, why)| self.clear_lost(entry, why))
            .await;
        // Only now: what was started before the sweep would have been swept.
        for id in cut_off {
            if let Some(entry) = self.registry.find(&id) {
                self.wake_later(&entry);
            }
        }
        if !alive.is_empty() || ended > 0 {
            tracing::info!(
                adopted = alive.len(),
                rested,
                ended,
                "boxes of an earlier run"
            );
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
        let fate = match state {
            State::Creating => Fate::Ends(GoneReason::CreateInterrupted),
            State::Stopping => Fate::Ends(reason.unwrap_or(GoneReason::Killed)),
            State::Paused | State::Resuming => self.look_for_resting(&entry, note).await,
            _ if self.is_alive(&entry, note).await => {
                if state == State::Pausing {
                    self.unpause(&entry).await;
                }
                Fate::Lives
            }
            _ => Fate::Ends(GoneReason::LostWhileServerWasDown),
        };
        Found { entry, fate }
    }

    async fn look_for_resting(&self, entry: &Arc<Entry>, note: Option<serde_json::Value>) -> Fate {
        let found = self.find_resting(entry, note).await;
        if let Err(error) = &found {
            // The ledger can not be written; what rests stays at rest all the same.
            tracing::warn!(id = %entry.id, %error, "a box that rests");
            entry.rests_unwritten();
        }
        match found {
            Ok(Rest::Frozen) => Fate::Lives,
            Ok(Rest::OnDisk) => Fate::Rests,
            Err(_) if frozen(entry) => Fate::Lives,
            Err(_) => Fate::Rests,
        }
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
            Ok(Adoption::Alive) => {
                // An earlier server may have held it for want of storage. One that was pausing
                // goes on when nobody writes it down any more.
                if entry.state() == State::Running {
                    let still = entry.ward.is_frozen(&entry.id).await.unwrap_or(false);
                    if still && self.storage.seen().low {
                        // It would take what is left before anybody looks.
                        entry.set_held(Some(Timestamp::now()));
                        return true;
                    }
                    let free = self.own_limit_again(entry).await;
                    if let Err(error) = free.and(entry.ward.thaw(&entry.id).await) {
                        tracing::warn!(id = %entry.id, %error, "thawing an adopted box");
                    }
                }
                true
            }
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
            if entry.state() != State::Paused {
                self.deadlines.moved(&entry.id, None, entry.end_at());
            }
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

    async fn clear_lost(&self, entry: Arc<Entry>, why: GoneReason) {
        let _turn = entry.turn.lock().await;
        // The ledger keeps the state it has until the end.
        entry.ending(why, false);
        if let Err(error) = self.clear_away(&entry).await {
            tracing::warn!(id = %entry.id, %error, "a box of an earlier run can not be ended yet");
        }
    }
}

fn frozen(entry: &Entry) -> bool {
    entry.with(|sandbox| {
        let pause = sandbox.time.pause.as_ref();
        pause.is_some_and(|pause| pause.mode == PauseMode::Ram)
    })
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
