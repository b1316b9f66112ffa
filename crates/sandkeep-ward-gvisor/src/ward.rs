//! The ward the keeper talks to.

use crate::{
    checks,
    config::GvisorWardConfig,
    control,
    record::{Gvisor, Live},
    release::Release,
    spec::host_limits,
    stage, start, watch,
};
use async_trait::async_trait;
use sandkeep_host::{
    failure::Doing as _,
    files::{Stamp, make_private_dir},
    lone_file::LoneFile,
    starting,
    work::blocking,
};
use sandkeep_model::{Error, Isolation, Limits, Result, SandboxId, Usage};
use sandkeep_own_kernel::{self as own_kernel, Roster};
use sandkeep_ward::{
    Adoption, BoxSpec, Channel, Check, Engine, ImagesFrom, LiveBox, Swept, Ward, WardEvent,
};
use std::{
    collections::HashSet,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::sync::mpsc;

const LIMITS_DEADLINE: Duration = Duration::from_secs(10);

/// The gVisor level.
#[derive(Debug)]
pub struct GvisorWard {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub roster: Roster<Gvisor>,
    /// The agent for all boxes.
    pub agent: Arc<LoneFile>,
    pub runsc: Option<PathBuf>,
    /// The release that was found last.
    pub release: tokio::sync::Mutex<Option<(Stamp, Arc<Release>)>>,
}

impl GvisorWard {
    /// Prepares the host's side: directories, cgroups, the agent's file. `runsc` is only looked
    /// for when it is needed, so that it can be installed later.
    pub fn new(config: GvisorWardConfig) -> Result<Arc<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::host_not_ready("the gVisor level needs root")
                .hint("run `sandkeep serve` as root, or with sudo")
                .retryable(false));
        }
        make_private_dir(&config.state_dir)?;
        let state_dir = config
            .state_dir
            .canonicalize()
            .doing("finding the state directory")?;
        stage::prepare_host()?;
        // Readable: it copies itself into the memory of the box.
        let agent = LoneFile::of(&config.agent, 0o555)?;
        let inner = Inner {
            roster: Roster::new(state_dir, config.id_base, config.id_slots)?,
            agent: Arc::new(agent),
            runsc: config.runsc,
            release: tokio::sync::Mutex::default(),
        };
        Ok(Arc::new(Self {
            inner: Arc::new(inner),
        }))
    }

    async fn start_from(&self, spec: BoxSpec, image: Option<PathBuf>) -> Result<LiveBox> {
        let begun = self.inner.roster.begin(&spec.id)?;
        let (inner, again) = (Arc::clone(&self.inner), Arc::clone(&self.inner));
        starting::born(
            begun,
            // One that nobody waits for is killed, and sees it.
            async move |_abandoned| inner.start(spec, image.as_deref()).await,
            async move |id| again.roster.destroy(&id).await,
        )
        .await
    }
}

impl Inner {
    /// Takes a running box in and begins to watch it.
    pub fn hold(&self, live: Arc<Live>) {
        self.roster.hold(live, watch::watch);
    }

    async fn adopt(&self, found: &LiveBox) -> Result<Adoption> {
        if self
            .roster
            .held(&found.id)
            .is_some_and(|live| live.first.runs())
        {
            return Ok(Adoption::Alive);
        }
        let Some(remains) = self.roster.find_again(found).await? else {
            return Ok(Adoption::Gone);
        };
        let Some(live) = self.roster.revive(remains, ()).await? else {
            return Ok(Adoption::Gone);
        };
        self.look_if_frozen(&live).await?;
        self.hold(Arc::new(live));
        Ok(Adoption::Alive)
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        live.limit_outside(host_limits(limits)).await?;
        start::set_inner_limits(&live, limits, LIMITS_DEADLINE).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        let live = self.roster.must_hold(id)?;
        let cgroups = live.record.cgroups.clone();
        let mut usage = blocking(move || cgroups.usage().map_err(Error::from)).await?;
        // Tasks of the host say little about processes of the box; a box that stands still does
        // not answer.
        if !live.moves() {
            return Ok(usage);
        }
        match control::processes(&live.record.more.control, id.as_str()).await {
            Ok(count) => usage.pids = count,
            Err(error) => tracing::debug!(%id, %error, "the box does not count its processes"),
        }
        Ok(usage)
    }
}

#[async_trait]
impl Ward for GvisorWard {
    fn level(&self) -> Isolation {
        Isolation::Gvisor
    }

    /// What is fast in a container is slow here, and a pause is felt: see ADR 26. With an old release
    /// `sudo` does not work either.
    fn suits_everything(&self) -> bool {
        false
    }

    /// The kernel of a box that sleeps takes four percent of a core by itself; measured.
    fn cpu_at_rest_pct(&self) -> f64 {
        8.0
    }

    /// The kernel of the box reads its image inside of its own walls.
    fn images_from(&self) -> ImagesFrom {
        ImagesFrom::Anybody
    }

    async fn check(&self) -> Vec<Check> {
        checks::all(self.inner.runsc.as_deref()).await
    }

    async fn start(&self, spec: BoxSpec) -> Result<LiveBox> {
        self.start_from(spec, None).await
    }

    async fn adopt(&self, live: &LiveBox) -> Result<Adoption> {
        self.inner.adopt(live).await
    }

    async fn connect(&self, id: &SandboxId) -> Result<Channel> {
        let live = self.inner.roster.must_hold(id)?;
        Ok(Box::new(own_kernel::connect(&live).await?))
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        self.inner.set_limits(id, limits).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        self.inner.usage(id).await
    }

    async fn netns(&self, id: &SandboxId) -> Result<OwnedFd> {
        let live = self.inner.roster.must_hold(id)?;
        live.share_netns()
    }

    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.inner.freeze(id).await
    }

    async fn is_frozen(&self, id: &SandboxId) -> Result<bool> {
        let live = self.inner.roster.must_hold(id)?;
        let frozen = live.frozen.lock().await;
        Ok(*frozen)
    }

    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.inner.thaw(id).await
    }

    async fn engine(&self) -> Result<Engine> {
        self.inner.engine().await
    }

    async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        self.inner.save(id, image).await
    }

    async fn restore(&self, spec: BoxSpec, image: &Path) -> Result<LiveBox> {
        self.start_from(spec, Some(image.to_owned())).await
    }

    async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let id = id.clone();
        // In a task of its own: once begun it goes to the end.
        tokio::spawn(async move { inner.roster.end(&id).await })
            .await
            .map_err(|error| Error::internal(format!("ending the box: {error}")))?
    }

    async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept> {
        self.inner.roster.sweep(known, |_| false).await
    }

    fn events(&self) -> Option<mpsc::Receiver<WardEvent>> {
        self.inner.roster.events()
    }
}
