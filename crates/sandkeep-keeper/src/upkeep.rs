//! What must be done now and then.

use std::{sync::Arc, time::Duration};

use sandkeep_model::Timestamp;
use tokio::time::MissedTickBehavior;

use crate::core::Core;

const EVERY: Duration = Duration::from_secs(60);

impl Core {
    /// The first round is right after the start.
    pub async fn upkeep(self: Arc<Self>) {
        let mut tick = tokio::time::interval(EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut first = true;
        loop {
            tokio::select! {
                () = self.closing.cancelled() => return,
                _ = tick.tick() => {}
            }
            self.forget_history().await;
            if let Err(error) = self.store.checkpoint().await {
                tracing::warn!(%error, "bringing the ledger to the disk");
            }
            self.remove_orphan_disks().await;
            self.thin_all_out().await;
            if let Err(error) = self.vault.attend_at_rest().await {
                tracing::warn!(%error, "looking after the storage");
            }
            if let Err(error) = self.vault.tidy().await {
                tracing::warn!(%error, "tidying the vault");
            }
            if !first {
                self.levels.look().await;
            }
            self.keep_warm().await;
            first = false;
        }
    }

    async fn forget_history(&self) {
        let kept = i64::try_from(self.config.keep_history.as_millis()).unwrap_or(i64::MAX);
        let before = Timestamp::from_millis(Timestamp::now().millis().saturating_sub(kept));
        match self.store.prune(before).await {
            Ok(0) => {}
            Ok(boxes) => tracing::debug!(boxes, "forgot boxes long gone"),
            Err(error) => tracing::warn!(%error, "pruning the ledger"),
        }
    }

    /// Disks of no box. A box is registered before its disk is made and for as long as it
    /// has one, so what the vault lists and the registry does not know is nobody's.
    pub async fn remove_orphan_disks(&self) {
        if self.vault.is_read_only() {
            return;
        }
        let disks = match self.vault.disks().await {
            Ok(disks) => disks,
            Err(error) => {
                tracing::warn!(%error, "listing disks");
                return;
            }
        };
        for id in disks {
            if self.registry.find(&id).is_some() {
                continue;
            }
            match self.vault.remove_disk(&id).await {
                Ok(()) => tracing::info!(%id, "removed the disk of no box"),
                Err(error) => tracing::warn!(%id, %error, "removing the disk of no box"),
            }
        }
    }
}
