//! The ward the keeper talks to.

use crate::{
    checks,
    config::MicrovmWardConfig,
    disk,
    image::{self, Images},
    jail,
    machine::Machine,
    qemu::{Accel, Qemu, Shape},
    record::{Has, Live, Microvm},
    start,
    waiting::{self, CONTROL, Shelf, WAITING},
    warm::Warm,
    watch,
};
use async_trait::async_trait;
use sandkeep_host::{
    failure::Doing as _,
    files::{install_agent, make_private_dir},
    starting,
    work::{blocking, lock},
};
use sandkeep_model::{Error, Isolation, Limits, Result, SandboxId, Usage};
use sandkeep_own_kernel::{self as own_kernel, Roster};
use sandkeep_ward::{
    Acceleration, Adoption, BoxSpec, Channel, Check, Engine, ImagesFrom, LiveBox, Swept, Ward,
    WardEvent,
};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, atomic::AtomicBool},
    time::Duration,
};
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(300);
const USAGE_DEADLINE: Duration = Duration::from_secs(5);
const LIMITS_DEADLINE: Duration = Duration::from_secs(10);

/// The microVM level.
#[derive(Debug)]
pub struct MicrovmWard {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub roster: Roster<Microvm>,
    pub agent: PathBuf,
    pub machines_dir: PathBuf,
    pub kernel: Option<PathBuf>,
    pub program: Option<PathBuf>,
    /// Machines that are being booted ahead, by the names of their cgroups.
    pub building: Mutex<HashSet<String>>,
    /// Decided once: a server that runs keeps the QEMU it began with.
    pub qemu: tokio::sync::Mutex<Option<Arc<Qemu>>>,
    pub decided: OnceLock<Accel>,
    pub why_emulated: Mutex<Option<String>>,
    /// How long a machine may boot, and its agent take to carry out an order.
    pub boot: Option<Duration>,
    pub answers: Duration,
    /// By what they were made of and their shape.
    pub machines: tokio::sync::Mutex<HashMap<(String, Shape), Arc<Machine>>>,
    pub images: tokio::sync::Mutex<Images>,
    /// Whether machines are warmed up for templates; those in memory; and what was begun.
    pub warms: bool,
    pub warm: tokio::sync::Mutex<VecDeque<(String, Arc<Warm>)>>,
    pub warming: Mutex<HashSet<String>>,
    pub warming_turn: tokio::sync::Mutex<()>,
    /// How many QEMUs are to wait, and those that do.
    pub waiting: usize,
    pub shelf: Mutex<Shelf>,
    /// Set when the server ends.
    pub closed: AtomicBool,
}

impl MicrovmWard {
    /// Prepares the host's side: directories, cgroups, the agent's file. QEMU is only looked
    /// for when it is needed, so that it can be installed later.
    pub fn new(config: MicrovmWardConfig) -> Result<Arc<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::host_not_ready("the microVM level needs root")
                .hint("run `sandkeep serve` as root, or with sudo")
                .retryable(false));
        }
        make_private_dir(&config.state_dir)?;
        make_private_dir(&config.machines_dir)?;
        let state_dir = config
            .state_dir
            .canonicalize()
            .doing("finding the state directory")?;
        jail::prepare_host()?;
        let agent = install_agent(&config.agent, &state_dir, 0o444)?;
        let roster = Roster::new(state_dir, config.id_base, config.id_slots)?;
        waiting::clear_left(&roster.state_dir, &roster.tree);
        let inner = Inner {
            roster,
            agent,
            machines_dir: config.machines_dir,
            kernel: config.kernel,
            program: config.qemu,
            building: Mutex::default(),
            qemu: tokio::sync::Mutex::default(),
            decided: OnceLock::new(),
            why_emulated: Mutex::default(),
            boot: config.boot,
            answers: config.answers,
            machines: tokio::sync::Mutex::default(),
            images: tokio::sync::Mutex::default(),
            warms: config.warm,
            warm: tokio::sync::Mutex::default(),
            warming: Mutex::default(),
            warming_turn: tokio::sync::Mutex::default(),
            waiting: config.waiting,
            shelf: Mutex::default(),
            closed: AtomicBool::new(false),
        };
        Ok(Arc::new(Self {
            inner: Arc::new(inner),
        }))
    }

    /// How many QEMUs wait for a box.
    pub fn waiting(&self) -> usize {
        self.inner.count_waiting()
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
    /// Where the QEMU of a box answers.
    pub fn control(&self, id: &SandboxId) -> PathBuf {
        self.roster.box_dir(id).join(CONTROL)
    }

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
        let has = Has {
            memory: self.memory_again(remains.record.more.base.as_deref()).await,
            kills: Mutex::default(),
        };
        let Some(live) = self.roster.revive(remains, has).await? else {
            return Ok(Adoption::Gone);
        };
        self.look_if_frozen(&live).await?;
        self.hold(Arc::new(live));
        Ok(Adoption::Alive)
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        live.record.more.shape.check(limits)?;
        live.limit_outside(live.record.more.host_limits(limits))
            .await?;
        start::set_inner_limits(&live, limits, LIMITS_DEADLINE).await
    }

    async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept> {
        let building = lock(&self.building).clone();
        // Those that an earlier server left waiting were cleared away before this one began.
        let spared = move |name: &str| building.contains(name) || name.starts_with(WAITING);
        self.roster.sweep(known, spared).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        let live = self.roster.must_hold(id)?;
        let cgroups = live.record.cgroups.clone();
        let mut usage = blocking(move || cgroups.usage().map_err(Error::from)).await?;
        // Tasks of the host say nothing about processes of the machine; one that stands still
        // does not answer.
        if !live.moves() {
            return Ok(usage);
        }
        match start::inner_usage(&live, USAGE_DEADLINE).await {
            Ok(inner) => {
                usage.pids = inner.pids;
                usage.oom_kills = inner.oom_kills;
            }
            Err(error) => tracing::debug!(%id, %error, "the box does not count its processes"),
        }
        Ok(usage)
    }
}

#[async_trait]
impl Ward for MicrovmWard {
    fn level(&self) -> Isolation {
        Isolation::Microvm
    }

    /// An emulated machine that sleeps takes almost one percent of a core by itself; measured.
    fn cpu_at_rest_pct(&self) -> f64 {
        2.0
    }

    /// Everything runs; but emulated it is too slow to be picked for anybody who did not ask.
    fn suits_everything(&self) -> bool {
        self.inner.accel() == Some(Accel::Kvm)
    }

    fn acceleration(&self, id: &SandboxId) -> Option<Acceleration> {
        let accel = self.inner.roster.held(id)?.record.more.accel?;
        Some(match accel {
            Accel::Kvm => Acceleration::Kvm,
            Accel::Tcg => Acceleration::Emulated,
        })
    }

    async fn check(&self) -> Vec<Check> {
        // Who does not have it yet is told by the checks what is missing.
        let chosen = self.inner.qemu().await;
        if let Err(error) = &chosen {
            tracing::warn!(%error, "no machine can run here");
        }
        let runs = match chosen {
            Ok(qemu) => checks::Runs::Tried(qemu, self.inner.why_emulated()),
            Err(_) => checks::Runs::Unknown,
        };
        checks::all(
            self.inner.program.as_deref(),
            self.inner.kernel.as_deref(),
            runs,
        )
        .await
    }

    fn disk_form(&self) -> Option<&'static str> {
        Some("ext4")
    }

    fn disk_image(&self) -> Option<&'static str> {
        Some(disk::DISK_FILE)
    }

    async fn form_disk(&self, tree: &Path, into: &Path) -> Result<()> {
        let (tree, into) = (tree.to_owned(), into.to_owned());
        blocking(move || disk::make(&tree, &into)).await
    }

    /// With the first order, before the network of the box has moved a byte.
    fn introduces(&self) -> bool {
        true
    }

    /// The first box of a shape waits for a machine to be booted.
    fn patience(&self) -> Duration {
        PATIENCE
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

    async fn settle(&self, id: &SandboxId) -> Result<()> {
        let live = self.inner.roster.must_hold(id)?;
        // One that stands still writes nothing, and does not answer.
        if *live.frozen.lock().await {
            return Ok(());
        }
        start::settle(&live).await
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

    async fn engine_of(&self, id: &SandboxId) -> Result<Engine> {
        self.inner.engine_of(id).await
    }

    /// Pages and devices are read by QEMU in its jail; what is read outside is checked.
    fn images_from(&self) -> ImagesFrom {
        ImagesFrom::Anybody
    }

    async fn take_in(&self, image: &Path) -> Result<()> {
        let image = image.to_owned();
        blocking(move || image::take_in(&image)).await
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
        self.inner.sweep(known).await
    }

    async fn close(&self) {
        self.inner.close().await;
    }

    fn events(&self) -> Option<mpsc::Receiver<WardEvent>> {
        self.inner.roster.events()
    }
}
