//! What wards notice by themselves.

use std::sync::Arc;

use sandkeep_model::{GoneReason, PauseMode, Sandbox, SandboxId, State};
use sandkeep_ward::WardEvent;
use tokio::sync::mpsc;

use crate::{core::Core, meters};

impl Core {
    /// Listens to one ward, for ever.
    pub async fn listen(self: Arc<Self>, mut events: mpsc::Receiver<WardEvent>) {
        loop {
            let event = tokio::select! {
                () = self.closing.cancelled() => return,
                event = events.recv() => event,
            };
            match event {
                None => return,
                Some(WardEvent::Exited { id, out_of_memory }) => self.exited(&id, out_of_memory),
                Some(WardEvent::OutOfMemory { id, kills }) => self.starved(&id, kills).await,
            }
        }
    }

    /// Does not wait: the box may be in the middle of something else.
    fn exited(self: &Arc<Self>, id: &SandboxId, out_of_memory: bool) {
        let Some(entry) = self.registry.find(id) else {
            return;
        };
        self.pool.drop_dead(&entry);
        let why = if out_of_memory {
            GoneReason::OutOfMemory
        } else {
            GoneReason::Exited
        };
        tracing::info!(%id, %why, "a box ended by itself");
        let core = Arc::clone(self);
        self.tasks.spawn(async move {
            // News of an earlier life of a box that rests on its disk by now is no news.
            let dead = |sandbox: &Sandbox| {
                let pause = sandbox.time.pause.as_ref();
                pause.is_none_or(|pause| pause.mode == PauseMode::Ram)
            };
            if let Err(error) = core.stop_if(&entry, why, None, dead).await {
                tracing::debug!(id = %entry.id, %error, "clearing away a box that ended");
            }
        });
    }

    /// Needs no turn: it changes nothing in the box's life.
    pub async fn starved(&self, id: &SandboxId, kills: u64) {
        let Some(entry) = self.registry.find(id) else {
            return;
        };
        if entry.pooled() || entry.state() == State::Gone {
            return;
        }
        match self.store.set_oom_kills(id, kills).await {
            Ok(Some(_)) => {
                let before = entry.with(|sandbox| sandbox.oom_kills);
                meters::oom_kills(kills.saturating_sub(before));
                entry.amend(|sandbox| sandbox.oom_kills = kills);
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%id, %error, "noting processes killed for memory"),
        }
    }
}
