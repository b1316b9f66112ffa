//! Ending a box.

use std::{sync::Arc, time::Duration};

use sandkeep_model::{Error, GoneReason, Result, Sandbox, State};

use crate::{core::Core, meters, registry::Entry};

const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

impl Core {
    /// Ends a box, if `wanted` still says so when its turn has come, and waits until nothing is
    /// left of it. `NotFound` when somebody else did. `by` is who asked.
    pub async fn stop_if(
        &self,
        entry: &Arc<Entry>,
        why: GoneReason,
        by: Option<&str>,
        wanted: impl FnOnce(&Sandbox) -> bool + Send,
    ) -> Result<()> {
        let _turn = entry.turn.lock().await;
        match entry.state() {
            State::Gone => return Err(Error::sandbox_not_found(&entry.id)),
            // An earlier attempt failed: try again now.
            State::Stopping => {}
            from => {
                if !entry.with(wanted) {
                    return Ok(());
                }
                self.begin_stop(entry, from, why, by).await;
            }
        }
        self.clear_away(entry).await
    }

    async fn begin_stop(&self, entry: &Entry, from: State, why: GoneReason, by: Option<&str>) {
        let mut written = false;
        if !entry.pooled() {
            match self.store.begin_stop(&entry.id, from, &why, by).await {
                Ok(done) => written = done.is_some(),
                // Ending boxes is how room is made on a full disk: go on without the ledger,
                // it hears of it at the end.
                Err(error) => {
                    tracing::warn!(id = %entry.id, %error, "ending a box without the ledger");
                }
            }
        }
        entry.ending(why, written);
    }

    /// Ends a pooled box.
    pub async fn discard(&self, entry: &Arc<Entry>) {
        let _turn = entry.turn.lock().await;
        if !entry.pooled() || entry.state() == State::Gone {
            return;
        }
        entry.ending(GoneReason::Killed, false);
        if let Err(error) = self.clear_away(entry).await {
            tracing::warn!(id = %entry.id, %error, "a pooled box could not be ended yet");
        }
    }

    /// Ward, vault, ledger, memory, in this order: whatever fails leaves the rest known and
    /// to be tried again, which happens in the background. The caller has the turn and the
    /// box is `stopping`.
    pub async fn clear_away(&self, entry: &Arc<Entry>) -> Result<()> {
        entry.activity.close();
        entry.reach.close();
        self.deadlines.moved(&entry.id, entry.end_at(), None);
        if let Err(error) = self.take_apart(entry).await {
            meters::cleanup_failed();
            self.show_stopping(entry).await;
            self.retry(entry);
            return Err(error);
        }
        if let Err(error) = self.write_off(entry).await {
            // The box is gone; only the ledger does not know it yet.
            tracing::warn!(id = %entry.id, %error, "the end of a box is not in the ledger yet");
            self.retry(entry);
            return Ok(());
        }
        self.registry.remove(&entry.id);
        if let Some(moat) = &self.config.network.moat {
            moat.forget(&entry.id);
        }
        if self.registry.len() + 1 == self.config.max_boxes {
            // The server was full: the pool may have found no room.
            self.pool.nudge();
        }
        Ok(())
    }

    async fn take_apart(&self, entry: &Entry) -> Result<()> {
        let id = &entry.id;
        entry.ward.destroy(id).await.map_err(|error| {
            error
                .context(format!("ending sandbox \"{id}\""))
                .hint("it is tried again in the background")
                .retryable(true)
        })?;
        if let Err(error) = self.vault.remove_disk(id).await {
            if !self.vault.is_read_only() {
                return Err(error
                    .context(format!("removing the disk of sandbox \"{id}\""))
                    .hint("it is tried again in the background")
                    .retryable(true));
            }
            // Nothing of it runs. Its disk is nobody's then, and goes once it can.
            tracing::warn!(%id, "the storage is read-only: a disk stays until it is repaired");
        }
        self.drop_all_but_kept(id).await;
        Ok(())
    }

    async fn write_off(&self, entry: &Entry) -> Result<()> {
        let why = entry.with(|sandbox| sandbox.gone.clone());
        let why = why.unwrap_or(GoneReason::Killed);
        if entry.pooled() {
            self.store.forget_pooled(&entry.id).await?;
        } else {
            let written = entry.written();
            if self.store.finish(&entry.id, written, &why).await?.is_none() {
                tracing::error!(id = %entry.id, %written, "the ledger had the box in another state");
            }
            meters::gone(label(&why));
        }
        entry.became(State::Gone);
        Ok(())
    }

    /// A box that can not be ended yet is seen as such.
    async fn show_stopping(&self, entry: &Entry) {
        let written = entry.written();
        if entry.pooled() || written == State::Stopping {
            return;
        }
        let why = entry.with(|sandbox| sandbox.gone.clone());
        let why = why.unwrap_or(GoneReason::Killed);
        // Who asked is forgotten by now if the first try did not reach the ledger.
        match self.store.begin_stop(&entry.id, written, &why, None).await {
            Ok(Some(_)) => entry.ending(why, true),
            Ok(None) => {}
            Err(error) => tracing::warn!(id = %entry.id, %error, "telling the ledger"),
        }
    }

    /// Ends a box in the background, again and again until it works.
    fn retry(&self, entry: &Arc<Entry>) {
        let Some(core) = self.me.upgrade() else {
            return;
        };
        if !entry.begin_retries() {
            return;
        }
        let entry = Arc::clone(entry);
        self.tasks.spawn(async move {
            let mut pause = FIRST_RETRY;
            loop {
                tokio::select! {
                    () = core.closing.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                let _turn = entry.turn.lock().await;
                if entry.state() == State::Gone {
                    return;
                }
                if let Err(error) = core.clear_away(&entry).await {
                    tracing::warn!(id = %entry.id, %error, "a box still can not be ended");
                }
                pause = (pause * 2).min(LAST_RETRY);
            }
        });
    }
}

const fn label(why: &GoneReason) -> &'static str {
    match why {
        GoneReason::Killed => "killed",
        GoneReason::Expired => "expired",
        GoneReason::Exited => "exited",
        GoneReason::OutOfMemory => "out_of_memory",
        GoneReason::CreateFailed { .. } => "create_failed",
        GoneReason::CreateInterrupted => "create_interrupted",
        GoneReason::PausedTooLong => "paused_too_long",
        GoneReason::LostWhileServerWasDown => "lost_while_server_was_down",
    }
}
