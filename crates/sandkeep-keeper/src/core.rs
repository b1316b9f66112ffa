//! What all parts of the keeper share.

use std::sync::{Arc, Weak};

use sandkeep_model::{Error, Result};
use sandkeep_store::Store;
use sandkeep_vault::Vault;
use sandkeep_ward::Ward;
use tokio::sync::{Mutex, Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    KeeperConfig, build::Builds, expiry::Deadlines, idempotency::Flights, isolation::Levels,
    meters, pool::Pool, registry::Registry, storage::Storage,
};

/// Boxes started at the same time: more would only make each of them slower.
const STARTS_AT_ONCE: usize = 16;

pub struct Core {
    /// For work that goes on in the background.
    pub me: Weak<Self>,
    pub config: KeeperConfig,
    pub store: Store,
    pub vault: Vault,
    pub levels: Levels,
    pub registry: Registry,
    pub pool: Pool,
    pub deadlines: Deadlines,
    pub flights: Flights,
    pub builds: Builds,
    pub starts: Semaphore,
    /// Beside them: what is in a sandbox decides how long it takes to wake it, and no create waits for that.
    pub wakes: Semaphore,
    pub storage: Storage,
    /// Held by whoever makes another form of a template.
    pub forms: Mutex<()>,
    /// Cancelled when the keeper closes: background work ends, what is under way finishes.
    pub closing: CancellationToken,
    /// What must be finished before the process ends.
    pub tasks: TaskTracker,
}

impl Core {
    pub fn new(
        config: KeeperConfig,
        store: Store,
        vault: Vault,
        wards: Vec<Arc<dyn Ward>>,
    ) -> Result<Arc<Self>> {
        let levels = Levels::new(wards, config.isolation)?;
        Ok(Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            config,
            store,
            vault,
            levels,
            registry: Registry::default(),
            pool: Pool::default(),
            deadlines: Deadlines::default(),
            flights: Flights::default(),
            builds: Builds::default(),
            starts: Semaphore::new(STARTS_AT_ONCE),
            wakes: Semaphore::new(STARTS_AT_ONCE),
            storage: Storage::default(),
            forms: Mutex::default(),
            closing: CancellationToken::new(),
            tasks: TaskTracker::new(),
        }))
    }

    /// Adopts what is there and starts the background work.
    pub async fn open(self: &Arc<Self>) -> Result<()> {
        meters::describe();
        self.look_at_storage().await;
        // Sandboxes of an earlier run write while they are adopted.
        let attended = self.vault.attended();
        let (adopted, ()) = tokio::join!(self.adopt(), self.levels.look());
        drop(attended);
        self.tasks.spawn(Arc::clone(self).reattach(adopted?));
        for ward in self.levels.wards() {
            if let Some(events) = ward.events() {
                self.tasks.spawn(Arc::clone(self).listen(events));
            }
        }
        self.prepare_disks(&self.config.pool.template);
        self.tasks.spawn(Arc::clone(self).watch_storage());
        self.tasks.spawn(Arc::clone(self).expire());
        self.tasks.spawn(Arc::clone(self).keep_pool());
        self.tasks.spawn(Arc::clone(self).tell_denials());
        self.tasks.spawn(Arc::clone(self).sample());
        self.tasks.spawn(Arc::clone(self).upkeep());
        Ok(())
    }

    /// Runs work that must come to its end even when whoever asked for it has gone.
    pub async fn finish<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        if self.closing.is_cancelled() {
            return Err(Error::host_not_ready("the server is shutting down")
                .hint("try again when it is back"));
        }
        match self.tasks.spawn(work).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "a task of the keeper ended early");
                Err(Error::internal(
                    "the work ended early; the server's log tells more",
                ))
            }
        }
    }

    pub async fn close(&self) {
        self.closing.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        for ward in self.levels.wards() {
            ward.close().await;
        }
    }
}
