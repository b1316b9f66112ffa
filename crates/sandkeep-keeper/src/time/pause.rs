//! Putting a box to rest.

use std::{fmt::Write as _, sync::Arc};

use sandkeep_model::{
    Error, EventKind, Pause, PauseMode, Point, PointKind, Result, Sandbox, State, Timestamp,
};
use sandkeep_store::{TimeStep, WardNote};

use super::snapshot::PointOrder;
use crate::{core::Core, registry::Entry};

impl Core {
    /// Pauses a running box, if `wanted` still says so when its turn has come.
    pub async fn pause_if(
        &self,
        entry: &Arc<Entry>,
        memory: bool,
        wanted: impl FnOnce(&Sandbox) -> bool + Send,
    ) -> Result<Sandbox> {
        let _turn = entry.turn.lock().await;
        match entry.state() {
            State::Running => {}
            State::Stopping | State::Gone => return Err(Error::sandbox_not_found(&entry.id)),
            state => {
                return Err(Error::conflict(format!(
                    "sandbox \"{}\" is {state} already",
                    entry.id
                )));
            }
        }
        if !entry.with(wanted) {
            return Ok(entry.sandbox());
        }
        if !memory {
            // What its own kernel keeps back is only written by one that runs.
            self.let_go(entry).await?;
            entry.ward.settle(&entry.id).await?;
        }
        self.begin_pausing(entry).await?;
        let paused = if memory {
            self.pause_with_memory(entry).await
        } else {
            self.rest(entry, files_only()).await
        };
        match paused {
            Ok(()) => Ok(entry.sandbox()),
            Err(error) => {
                self.go_on(entry).await;
                Err(error.context(format!("pausing sandbox \"{}\"", entry.id)))
            }
        }
    }

    /// `running -> pausing`, and nobody talks to it any more. The caller has the turn.
    pub async fn begin_pausing(&self, entry: &Entry) -> Result<()> {
        let written = self
            .store
            .transition(&entry.id, State::Running, State::Pausing)
            .await?;
        if written.is_none() {
            return Err(Error::internal(
                "the ledger had the sandbox in another state",
            ));
        }
        entry.became(State::Pausing);
        // Whoever pauses it freezes it, too, or lets it go on after that.
        // And whatever wakes it gives it no limit.
        if entry.held().is_some() || self.is_capped(&entry.id) {
            entry.set_held(None);
            self.own_limit_again(entry).await?;
        }
        entry.activity.cut().await;
        Ok(())
    }

    /// Tells the ledger that a box runs, or rests, after all: what could not be written when the
    /// disk was full. The caller has the turn.
    pub async fn tell_ledger(&self, entry: &Entry) {
        let (from, to) = (entry.written(), entry.state());
        let told = match (from, to) {
            (State::Pausing, State::Running) | (State::Resuming, State::Paused) => {
                self.store.transition(&entry.id, from, to).await
            }
            _ => return,
        };
        match told {
            Ok(Some(_)) => entry.became(to),
            Ok(None) => tracing::error!(id = %entry.id, "the ledger had the box in another state"),
            Err(error) => tracing::debug!(id = %entry.id, %error, "the ledger is still behind"),
        }
    }

    /// What could not be paused runs as before. The caller has the turn.
    pub async fn go_on(&self, entry: &Arc<Entry>) {
        if entry.state() != State::Pausing {
            return;
        }
        if let Err(error) = entry.ward.thaw(&entry.id).await {
            tracing::debug!(id = %entry.id, %error, "thawing a box");
        }
        self.attach_if_detached(entry).await;
        match self
            .store
            .transition(&entry.id, State::Pausing, State::Running)
            .await
        {
            Ok(Some(_)) => entry.became(State::Running),
            Ok(None) => tracing::error!(id = %entry.id, "the ledger had the box in another state"),
            // It runs all the same; the next start brings the ledger to it.
            Err(error) => {
                tracing::warn!(id = %entry.id, %error, "a box goes on without the ledger");
                entry.runs_unwritten();
            }
        }
    }

    /// Gives a box that runs again its way out.
    pub async fn attach_if_detached(&self, entry: &Entry) {
        if entry.reach.attached() {
            return;
        }
        if let Err(error) = self.attach(entry).await {
            tracing::error!(id = %entry.id, %error, "a box that goes on has no network");
        }
    }

    async fn pause_with_memory(&self, entry: &Arc<Entry>) -> Result<()> {
        entry.ward.freeze(&entry.id).await?;
        // External connections end here; the box finds them closed when it wakes.
        entry.reach.hang_up();
        let order = PointOrder::of(PointKind::Pause);
        let made = match self.check_storage() {
            // What is left belongs to those who run.
            Err(low) => Err(low),
            Ok(()) => self.make_point(entry, order).await,
        };
        match made {
            Ok(point) => self.rest_at(entry, &point).await,
            Err(refused) => {
                // Never lost: what can not go to the disk stays in memory, or in swap.
                let mut why = refused.message;
                match entry.ward.push_out(&entry.id).await {
                    Ok(0) => {}
                    Ok(bytes) => {
                        let _infallible = write!(why, "; {} MiB went to swap", bytes >> 20);
                    }
                    Err(error) => {
                        tracing::warn!(id = %entry.id, %error, "memory was not moved to swap");
                    }
                }
                let pause = Pause {
                    mode: PauseMode::Ram,
                    why: Some(why),
                    point: None,
                    touched: false,
                    at: Timestamp::now(),
                };
                self.rest(entry, pause).await
            }
        }
    }

    async fn rest_at(&self, entry: &Arc<Entry>, point: &Point) -> Result<()> {
        let pause = Pause {
            mode: PauseMode::Disk,
            why: None,
            point: Some(point.id.clone()),
            touched: false,
            at: Timestamp::now(),
        };
        let rested = self.rest(entry, pause).await;
        if rested.is_err() {
            self.drop_point(point).await;
        }
        rested
    }

    /// `pausing -> paused` in the ledger, and only then the end of what is not needed.
    async fn rest(&self, entry: &Arc<Entry>, pause: Pause) -> Result<()> {
        let mode = pause.mode;
        let before = entry.sandbox();
        let mut time = before.time.clone();
        let at = pause.at;
        let also = Some(EventKind::Paused {
            mode,
            why: pause.why.clone(),
        });
        time.pause = Some(pause);
        let step = TimeStep {
            from: State::Pausing,
            to: State::Paused,
            time: &time,
            ward: match mode {
                PauseMode::Ram => WardNote::Keep,
                PauseMode::Disk | PauseMode::Filesystem => WardNote::Forget,
            },
            end_at: Some(at),
            also,
        };
        if mode == PauseMode::Ram {
            // A power cut takes its memory; its files are to be what they are now.
            self.vault.settle().await?;
        }
        if !self.store.step(&entry.id, step).await? {
            return Err(Error::internal(
                "the ledger had the sandbox in another state",
            ));
        }
        self.deadlines.moved(&entry.id, before.end_at, None);
        entry.amend(|sandbox| {
            sandbox.time = time;
            sandbox.end_at = Some(at);
        });
        entry.became(State::Paused);
        if mode != PauseMode::Ram {
            entry.reach.close();
            if let Err(error) = entry.ward.destroy(&entry.id).await {
                // Whoever wakes it tries again first.
                tracing::warn!(id = %entry.id, %error, "a paused box is not quite gone");
            }
        }
        if mode == PauseMode::Filesystem {
            // What its processes wrote to the very end is kept; a point is on the disk already.
            self.vault.settle().await?;
        }
        Ok(())
    }
}

fn files_only() -> Pause {
    Pause {
        mode: PauseMode::Filesystem,
        why: None,
        point: None,
        touched: false,
        at: Timestamp::now(),
    }
}
