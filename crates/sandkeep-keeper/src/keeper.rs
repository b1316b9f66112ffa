use std::sync::Arc;

use sandkeep_model::{
    CreateSandbox, Error, Event, Expiry, GoneReason, Isolation, ListFilter, Page, Result, Sample,
    Sandbox, SandboxId, Secret, Template, Timestamp, Usage,
};
use sandkeep_store::Store;
use sandkeep_vault::Vault;
use sandkeep_ward::{Channel, Check, Ward};
use tokio::sync::broadcast;

use crate::KeeperConfig;

/// What a client may see of a box together with what it uses right now.
#[derive(Debug, Clone)]
pub struct BoxView {
    pub sandbox: Sandbox,
    pub usage: Option<Usage>,
}

/// What `doctor` and `/v1/health` tell.
#[derive(Debug, Clone)]
pub struct HostReport {
    pub levels: Vec<LevelReport>,
    pub boxes: usize,
    pub pooled: usize,
}

#[derive(Debug, Clone)]
pub struct LevelReport {
    pub level: Isolation,
    pub usable: bool,
    pub checks: Vec<Check>,
}

/// The keeper; clones share one.
#[derive(Clone)]
pub struct Keeper {
    inner: Arc<Inner>,
}

struct Inner;

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keeper")
    }
}

fn not_yet<T>() -> Result<T> {
    Err(Error::internal("not built yet"))
}

#[allow(unused_variables, clippy::unused_async)]
impl Keeper {
    /// Adopts what runs, sweeps what was half made, and starts the background work.
    pub async fn open(
        config: KeeperConfig,
        store: Store,
        vault: Vault,
        wards: Vec<Arc<dyn Ward>>,
    ) -> Result<Self> {
        not_yet()
    }

    /// Makes a box; returns when its agent answers. From the pool when the request allows it.
    pub async fn create(&self, request: CreateSandbox) -> Result<Sandbox> {
        not_yet()
    }

    /// A box that exists (any state but gone; pooled ones do not exist for clients). `NotFound` else.
    pub async fn get(&self, id: &SandboxId) -> Result<Sandbox> {
        not_yet()
    }

    /// Like [`Keeper::get`], but also finds boxes that are gone, with the reason, while their history is kept.
    pub async fn get_any(&self, id: &SandboxId) -> Result<Sandbox> {
        not_yet()
    }

    pub async fn view(&self, id: &SandboxId) -> Result<BoxView> {
        not_yet()
    }

    pub async fn list(&self, filter: &ListFilter) -> Result<Page<Sandbox>> {
        not_yet()
    }

    /// Ends a box. `NotFound` when it does not exist (any more).
    pub async fn kill(&self, id: &SandboxId, reason: GoneReason) -> Result<()> {
        not_yet()
    }

    /// Sets the end to now + expiry; may shorten.
    pub async fn set_expiry(&self, id: &SandboxId, expiry: Expiry) -> Result<Sandbox> {
        not_yet()
    }

    /// Moves the end to now + expiry unless it is later already.
    pub async fn extend(&self, id: &SandboxId, expiry: Expiry) -> Result<Sandbox> {
        not_yet()
    }

    /// A connection to the agent of a running box. `NotFound` when there is none, `BoxUnreachable` when it does not answer.
    pub async fn connect(&self, id: &SandboxId) -> Result<Channel> {
        not_yet()
    }

    /// Fires when the box is gone or paused: streams of it must be cut then.
    pub fn closed(&self, id: &SandboxId) -> impl Future<Output = ()> + Send + 'static {
        std::future::pending()
    }

    /// The access token of a running box, from memory: no I/O.
    pub fn access_token(&self, id: &SandboxId) -> Option<Secret> {
        None
    }

    /// All running boxes with their tokens, for file signatures that name no box.
    pub fn live_tokens(&self) -> Vec<(SandboxId, Secret)> {
        Vec::new()
    }

    /// Metrics of a box, oldest first; `from`/`to` are inclusive.
    pub async fn samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<Sample>> {
        not_yet()
    }

    /// Events after `seq`, oldest first, at most `limit`; optionally of one box.
    pub async fn events_after(
        &self,
        seq: i64,
        id: Option<&SandboxId>,
        limit: u32,
    ) -> Result<Vec<Event>> {
        not_yet()
    }

    /// Events from now on. A receiver that lags is told so and reads on with [`Keeper::events_after`].
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        broadcast::channel(1).1
    }

    pub async fn templates(&self) -> Result<Vec<Template>> {
        not_yet()
    }

    pub async fn report(&self) -> HostReport {
        HostReport {
            levels: Vec::new(),
            boxes: 0,
            pooled: 0,
        }
    }

    /// Stops the background work and finishes what is under way. Boxes go on.
    pub async fn shutdown(&self) {}
}
