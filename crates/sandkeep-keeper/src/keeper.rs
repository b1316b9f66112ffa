use std::{
    io::Read,
    sync::{Arc, Weak},
};

use sandkeep_moat::{Denial, Moat, Traffic, policy::Policy};
use sandkeep_model::{
    CreateSandbox, Error, Event, EventKind, Expiry, GoneReason, HostMask, Isolation, IsolationWish,
    Latched, Limits, ListFilter, Page, PortAccess, Result, Sample, Sandbox, SandboxId, Secret,
    State, Template, TemplateName, Timestamp, Usage,
};
use sandkeep_store::Store;
use sandkeep_vault::{ImportLimits, TemplateInfo, Vault};
use sandkeep_ward::{Acceleration, Channel, Check, Ward};
use tokio::sync::broadcast;
use tokio_util::sync::DropGuard;

use crate::{
    BoundTo, Counts, Egress, EgressWish, Hold, KeeperConfig, StorageReport, agent, core::Core,
};

/// What a client may see of a box together with what it uses right now.
#[derive(Debug, Clone)]
pub struct BoxView {
    pub sandbox: Sandbox,
    pub usage: Option<Usage>,
    /// What runs it, where it is a machine that runs.
    pub acceleration: Option<Acceleration>,
    /// Since when it stands still because the storage is nearly full.
    pub held: Option<Timestamp>,
}

/// Looks up boxes without keeping the keeper alive, from memory.
#[derive(Clone)]
pub struct BoxFinder(Weak<Core>);

impl BoxFinder {
    /// A box that is somebody's and does not end yet.
    pub fn living(&self, id: &SandboxId) -> Option<Sandbox> {
        let entry = self.0.upgrade()?.registry.owned(id).ok()?;
        let sandbox = entry.sandbox();
        (!matches!(sandbox.state, State::Stopping | State::Gone)).then_some(sandbox)
    }
}

impl std::fmt::Debug for BoxFinder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BoxFinder")
    }
}

/// What `doctor` and `/v1/health` tell.
#[derive(Debug, Clone)]
pub struct HostReport {
    pub levels: Vec<LevelReport>,
    /// What a create gets that names no level; `None` when no level it may have works here.
    pub plain_level: Option<Isolation>,
    /// No sandbox is isolated less.
    pub isolation_minimum: Option<Isolation>,
    /// Boxes that exist for clients.
    pub boxes: usize,
    /// Boxes ready to be handed out.
    pub pooled: usize,
}

#[derive(Debug, Clone)]
pub struct LevelReport {
    pub level: Isolation,
    pub usable: bool,
    pub checks: Vec<Check>,
}

/// The keeper; clones share one. The background work ends with the last of them.
#[derive(Clone)]
pub struct Keeper {
    pub(crate) core: Arc<Core>,
    _ends_with_us: Arc<DropGuard>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keeper")
    }
}

impl Keeper {
    /// Adopts what runs, sweeps what was half made, and starts the background work.
    pub async fn open(
        config: KeeperConfig,
        store: Store,
        vault: Vault,
        wards: Vec<Arc<dyn Ward>>,
    ) -> Result<Self> {
        let core = Core::new(config, store, vault, wards)?;
        core.open().await?;
        let ends_with_us = core.closing.clone().drop_guard();
        Ok(Self {
            core,
            _ends_with_us: Arc::new(ends_with_us),
        })
    }

    /// Makes a box; returns when its agent answers. From the pool when the request allows it.
    /// A caller that goes away does not stop it half way.
    /// It may reach what this server's standing policy says.
    pub async fn create(&self, request: CreateSandbox) -> Result<Sandbox> {
        self.create_reaching(request, EgressWish::default()).await
    }

    /// Like [`Keeper::create`] with a policy of its own, and credentials. `NotEnforceable` where this host can
    /// not hold a box to it.
    pub async fn create_reaching(
        &self,
        request: CreateSandbox,
        network: EgressWish,
    ) -> Result<Sandbox> {
        self.core
            .finish(Arc::clone(&self.core).create(request, network))
            .await
    }

    /// What a box may reach, and what is added to its requests.
    #[expect(clippy::unused_async, reason = "other ledgers may have to ask")]
    pub async fn network(&self, id: &SandboxId) -> Result<Arc<Egress>> {
        Ok(self.core.registry.owned(id)?.reach.egress())
    }

    /// Where secrets are bound, over all boxes.
    pub fn bound(&self) -> Vec<BoundTo> {
        self.core.bound()
    }

    /// Changes what a running box may reach and what is added to its requests; connections
    /// that no longer fit are cut. Gives what holds now. `by` is who asked, for the records.
    pub async fn set_network(
        &self,
        id: &SandboxId,
        wish: EgressWish,
        by: Option<String>,
    ) -> Result<Arc<Egress>> {
        let (core, id) = (Arc::clone(&self.core), id.clone());
        self.core
            .finish(async move { core.set_network(&id, wish, by.as_deref()).await })
            .await
    }

    /// What a box was refused of late, newest first.
    #[expect(clippy::unused_async, reason = "other ledgers may have to ask")]
    pub async fn denials(&self, id: &SandboxId) -> Result<Vec<Denial>> {
        self.core.denials(id)
    }

    /// What a box has moved since it was attached.
    #[expect(clippy::unused_async, reason = "other ledgers may have to ask")]
    pub async fn traffic(&self, id: &SandboxId) -> Result<Traffic> {
        self.core.traffic(id)
    }

    /// What bounds the boxes of this server; `None` where the host can not have it.
    pub fn moat(&self) -> Option<&Arc<Moat>> {
        self.core.config.network.moat.as_ref()
    }

    /// What a build of a template that says nothing may reach.
    pub fn build_policy(&self) -> &Policy {
        &self.core.config.network.builds
    }

    /// What a box may reach whose create says nothing.
    pub fn standing_policy(&self) -> &Policy {
        &self.core.config.network.standing
    }

    /// A box that exists (any state but gone; pooled ones do not exist for clients). `NotFound` else.
    #[expect(clippy::unused_async, reason = "other ledgers may have to ask")]
    pub async fn get(&self, id: &SandboxId) -> Result<Sandbox> {
        Ok(self.core.registry.owned(id)?.sandbox())
    }

    /// Like [`Keeper::get`], but also finds boxes that are gone, with the reason, while their history is kept.
    pub async fn get_any(&self, id: &SandboxId) -> Result<Sandbox> {
        if let Ok(entry) = self.core.registry.owned(id) {
            return Ok(entry.sandbox());
        }
        self.core
            .store
            .get(id)
            .await?
            .filter(|record| !record.pooled)
            .map(|record| record.sandbox)
            .ok_or_else(|| Error::sandbox_not_found(id))
    }

    /// How many processes of a box the kernel has killed for memory, as it counts them now.
    pub async fn oom_kills(&self, id: &SandboxId) -> Result<u64> {
        let entry = self.core.registry.owned(id)?;
        let known = entry.with(|sandbox| sandbox.oom_kills);
        let usage = match entry.state() {
            State::Running => self.core.usage(&entry).await,
            _ => None,
        };
        let kills = usage.map_or(known, |usage| usage.oom_kills.max(known));
        if kills > known {
            self.core.starved(id, kills).await;
        }
        Ok(kills)
    }

    pub async fn view(&self, id: &SandboxId) -> Result<BoxView> {
        let entry = self.core.registry.owned(id)?;
        let usage = match entry.state() {
            State::Running => self.core.usage(&entry).await,
            _ => None,
        };
        Ok(BoxView {
            sandbox: entry.sandbox(),
            usage,
            acceleration: entry.ward.acceleration(&entry.id),
            held: entry.held(),
        })
    }

    pub async fn list(&self, filter: &ListFilter) -> Result<Page<Sandbox>> {
        self.core.store.list(filter).await
    }

    /// Ends a box. `NotFound` when it does not exist (any more).
    pub async fn kill(&self, id: &SandboxId, reason: GoneReason) -> Result<()> {
        self.kill_for(id, reason, None).await
    }

    /// Like [`Keeper::kill`], with who asked for it, for the records.
    pub async fn kill_for(
        &self,
        id: &SandboxId,
        reason: GoneReason,
        by: Option<String>,
    ) -> Result<()> {
        let entry = self.core.registry.owned(id)?;
        let core = Arc::clone(&self.core);
        self.core
            .finish(async move { core.stop_if(&entry, reason, by.as_deref(), |_| true).await })
            .await
    }

    /// Finds boxes for those who live as long as the keeper's own parts.
    pub fn finder(&self) -> BoxFinder {
        BoxFinder(Arc::downgrade(&self.core))
    }

    /// Sets the end to now + expiry; may shorten.
    pub async fn set_expiry(&self, id: &SandboxId, expiry: Expiry) -> Result<Sandbox> {
        let (core, id) = (Arc::clone(&self.core), id.clone());
        self.core
            .finish(async move { core.move_end(&id, expiry, false).await })
            .await
    }

    /// Moves the end to now + expiry unless it is later already.
    pub async fn extend(&self, id: &SandboxId, expiry: Expiry) -> Result<Sandbox> {
        let (core, id) = (Arc::clone(&self.core), id.clone());
        self.core
            .finish(async move { core.move_end(&id, expiry, true).await })
            .await
    }

    /// A connection to the agent of a running box, or of one that wakes by itself. `NotFound` when there is none, `BoxUnreachable` when it does not answer.
    pub async fn connect(&self, id: &SandboxId) -> Result<Channel> {
        self.connect_counting(id, Counts::Words).await
    }

    /// Like [`Keeper::connect`], with what counts as somebody wanting something of the box.
    pub async fn connect_counting(&self, id: &SandboxId, counts: Counts) -> Result<Channel> {
        let entry = self.core.registry.owned(id)?;
        loop {
            let visit = entry.activity.enter(counts);
            match entry.state() {
                State::Running if entry.held().is_some() => return Err(self.core.held(id)),
                State::Running => {
                    let channel = agent::channel(entry.ward.as_ref(), id).await?;
                    return Ok(visit.over(channel));
                }
                State::Stopping | State::Gone => return Err(Error::sandbox_not_found(id)),
                State::Creating => {
                    return Err(Error::conflict(format!("sandbox \"{id}\" is being made"))
                        .hint("try again when it runs")
                        .retryable(true));
                }
                State::Pausing | State::Paused | State::Resuming => {}
            }
            // Who waits must not be waited for.
            drop(visit);
            self.awake(id).await?;
        }
    }

    /// Fires when the box is gone or paused: streams of it must be cut then.
    pub fn closed(&self, id: &SandboxId) -> Latched<()> {
        let token = self
            .core
            .registry
            .owned(id)
            .ok()
            .map(|entry| entry.activity.gate());
        Latched::new(async move {
            if let Some(token) = token {
                token.cancelled_owned().await;
            }
        })
    }

    /// Somebody waits for an answer of the box as long as this is kept: it is not idle.
    pub fn hold(&self, id: &SandboxId) -> Option<Hold> {
        let entry = self.core.registry.owned(id).ok()?;
        Some(entry.activity.hold())
    }

    /// Fires when connections to the box that are not in use are wanted back.
    pub fn wanted_back(&self, id: &SandboxId) -> impl Future<Output = ()> + Send + 'static + use<> {
        let entry = self.core.registry.owned(id).ok();
        async move {
            if let Some(entry) = entry {
                Arc::clone(&entry.activity).wanted_back().await;
            }
        }
    }

    /// The access token of a running box, from memory: no I/O.
    pub fn access_token(&self, id: &SandboxId) -> Option<Secret> {
        self.core.registry.token(id)
    }

    /// Who reaches the ports of a sandbox, from memory: no I/O.
    pub fn port_access(&self, id: &SandboxId) -> Option<PortAccess> {
        self.core.registry.port_access(id)
    }

    /// The host that programs of a sandbox are asked by, where it is not the one of the request.
    pub fn host_mask(&self, id: &SandboxId) -> Option<HostMask> {
        self.core.registry.host_mask(id)
    }

    /// Writes down that a client sent the server's API key to a sandbox.
    pub async fn note_api_key_refused(&self, id: &SandboxId, port: u16) {
        if self.core.registry.owned(id).is_err() {
            return;
        }
        let event = EventKind::ApiKeyRefused { port };
        if let Err(error) = self.core.store.note(&[(id, event)]).await {
            tracing::warn!(%id, port, %error, "noting that an API key was refused");
        }
    }

    /// All running boxes with their tokens, for file signatures that name no box.
    pub fn live_tokens(&self) -> Vec<(SandboxId, Secret)> {
        self.core.registry.tokens()
    }

    /// Metrics of a box, oldest first; `from`/`to` are inclusive.
    pub async fn samples(
        &self,
        id: &SandboxId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<Sample>> {
        self.core.samples(id, from, to).await
    }

    /// The most any sandbox may ask for.
    pub fn most_limits(&self) -> &Limits {
        &self.core.config.limits.most
    }

    /// Events after `seq`, oldest first, at most `limit`; optionally of one box.
    pub async fn events_after(
        &self,
        seq: i64,
        id: Option<&SandboxId>,
        limit: u32,
    ) -> Result<Vec<Event>> {
        self.core.store.events_after(seq, id, limit).await
    }

    /// The number of the newest event there ever was.
    pub async fn last_event(&self) -> Result<i64> {
        self.core.store.last_event().await
    }

    /// Events from now on. A receiver that lags is told so and reads on with [`Keeper::events_after`].
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.core.store.subscribe()
    }

    pub async fn templates(&self) -> Result<Vec<Template>> {
        let found = self.core.vault.templates().await?;
        Ok(found.into_iter().map(template).collect())
    }

    /// Makes a template from a tar of a root file system (plain, gzip or zstd), within the
    /// same bounds as an import without a server. Nothing is left when `archive` fails.
    pub async fn import_template(
        &self,
        name: &TemplateName,
        archive: impl Read + Send + 'static,
    ) -> Result<Template> {
        let (core, name) = (Arc::clone(&self.core), name.clone());
        self.core
            .finish(async move {
                let limits = ImportLimits::default();
                let made = core.vault.import_reader(&name, archive, limits, |_| {});
                made.await.map(template)
            })
            .await
    }

    /// Removes a template; boxes made from it live on. `Conflict` for the one the pool needs.
    pub async fn remove_template(&self, name: &TemplateName) -> Result<()> {
        if *name == self.core.config.pool.template {
            return Err(Error::conflict(format!(
                "template \"{name}\" is what this server makes its boxes from"
            ))
            .field("template")
            .hint("let the operator choose another pool template first"));
        }
        let (core, name) = (Arc::clone(&self.core), name.clone());
        self.core
            .finish(async move {
                core.vault.remove_template(&name).await?;
                core.drop_layers_of(&name).await;
                core.drop_unused_warmth().await
            })
            .await
    }

    /// What the last look at the host found (at most a minute ago), and how many boxes there are.
    #[expect(clippy::unused_async, reason = "a fresh look may be wanted one day")]
    pub async fn report(&self) -> HostReport {
        HostReport {
            levels: self.core.levels.reports(),
            plain_level: self
                .core
                .levels
                .choose(IsolationWish::Auto, [])
                .ok()
                .map(|ward| ward.level()),
            isolation_minimum: self.core.levels.rule().minimum,
            boxes: self.core.registry.owned_count(),
            pooled: self.core.pool.len(),
        }
    }

    /// How it is with the storage, as of the last look, which is less than a second ago.
    pub fn storage(&self) -> StorageReport {
        self.core.storage.report(&self.core.registry)
    }

    /// Stops the background work and finishes what is under way. Boxes go on.
    pub async fn shutdown(&self) {
        self.core.close().await;
    }
}

pub(crate) fn template(found: TemplateInfo) -> Template {
    Template {
        name: found.name,
        created_at: found.created_at,
        size_bytes: found.size_bytes,
        origin: found.origin,
        built: found.built,
        public: found.public,
    }
}
