//! The ward the keeper talks to.

use crate::{
    checks,
    config::MicrovmWardConfig,
    disk,
    image::Images,
    jail,
    live::{self, Live},
    machine::Machine,
    qemu::{Accel, Qemu, Shape, host_limits},
    record::{Note, Record},
    start,
    waiting::{self, CONTROL, Shelf},
    warm::Warm,
    watch,
};
use async_trait::async_trait;
use sandkeep_host::{
    cgroup::{Cgroups, layout::Layout, tree_name},
    failure::Doing as _,
    files::{box_dirs, install_agent, make_private_dir, read_token, remove_dir},
    proc,
    slots::{Slot, Slots},
    work::{blocking, lock},
};
use sandkeep_model::{Code, Error, Isolation, Limits, Result, SandboxId, Usage};
use sandkeep_ward::{Adoption, BoxSpec, Channel, Check, Engine, LiveBox, Swept, Ward, WardEvent};
use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    task::AbortHandle,
    time::timeout,
};

/// Events that nobody has taken yet; more wait in the tasks that have them.
const EVENTS: usize = 1024;
pub(crate) const END_DEADLINE: Duration = Duration::from_secs(15);
const PATIENCE: Duration = Duration::from_secs(300);
const USAGE_DEADLINE: Duration = Duration::from_secs(5);
const LIMITS_DEADLINE: Duration = Duration::from_secs(10);

/// The microVM level.
#[derive(Debug)]
pub struct MicrovmWard {
    inner: Arc<Inner>,
    events: Mutex<Option<mpsc::Receiver<WardEvent>>>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub state_dir: PathBuf,
    pub agent: PathBuf,
    pub machines_dir: PathBuf,
    kernel: Option<PathBuf>,
    program: Option<PathBuf>,
    pub tree: Cgroups,
    pub slots: Arc<Slots>,
    pub boxes: Mutex<HashMap<SandboxId, Held>>,
    /// Boxes that are being made; nobody may sweep them away.
    pub starting: Mutex<HashSet<SandboxId>>,
    /// Ids of boxes that an earlier server left, until they are adopted or cleared away.
    pub reserved: Mutex<HashMap<SandboxId, Slot>>,
    /// Machines that are being booted ahead, by the names of their cgroups.
    pub building: Mutex<HashSet<String>>,
    /// Looked at once: a server that runs keeps the QEMU it began with.
    qemu: tokio::sync::Mutex<Option<Arc<Qemu>>>,
    /// Set when KVM was tried and did not run a machine.
    without_kvm: AtomicBool,
    pub machines: tokio::sync::Mutex<HashMap<Shape, Arc<Machine>>>,
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
    events: mpsc::Sender<WardEvent>,
}

/// A box and the task that watches it.
#[derive(Debug)]
pub(crate) struct Held {
    pub live: Arc<Live>,
    watcher: AbortHandle,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.watcher.abort();
    }
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
        let tree = Cgroups::make_tree(&Layout::of_this_host()?, &tree_name(&state_dir))?;
        waiting::clear_left(&state_dir, &tree);
        let slots = Slots::new(config.id_base, config.id_slots)?;
        let (events, receiver) = mpsc::channel(EVENTS);
        let inner = Inner {
            reserved: Mutex::new(reserved(&state_dir, &slots)),
            state_dir,
            agent,
            machines_dir: config.machines_dir,
            kernel: config.kernel,
            program: config.qemu,
            tree,
            slots,
            boxes: Mutex::default(),
            starting: Mutex::default(),
            building: Mutex::default(),
            qemu: tokio::sync::Mutex::default(),
            without_kvm: AtomicBool::new(false),
            machines: tokio::sync::Mutex::default(),
            images: tokio::sync::Mutex::default(),
            warms: config.warm,
            warm: tokio::sync::Mutex::default(),
            warming: Mutex::default(),
            warming_turn: tokio::sync::Mutex::default(),
            waiting: config.waiting,
            shelf: Mutex::default(),
            closed: AtomicBool::new(false),
            events,
        };
        Ok(Arc::new(Self {
            inner: Arc::new(inner),
            events: Mutex::new(Some(receiver)),
        }))
    }

    /// How many QEMUs wait for a box.
    pub fn waiting(&self) -> usize {
        self.inner.count_waiting()
    }

    async fn start_from(&self, spec: BoxSpec, image: Option<PathBuf>) -> Result<LiveBox> {
        let inner = Arc::clone(&self.inner);
        let (tell, told) = oneshot::channel();
        // In a task of its own: a caller that goes away must not leave half a box.
        tokio::spawn(async move {
            let id = spec.id.clone();
            let started = inner.start(spec, image.as_deref()).await;
            if let Err(Ok(_unwanted)) = tell.send(started)
                && let Err(error) = inner.destroy(&id).await
            {
                tracing::error!(%id, %error, "a box that nobody waited for was not ended");
            }
        });
        told.await
            .map_err(|_| Error::internal("the task that starts the box ended early"))?
    }
}

impl Inner {
    pub fn box_dir(&self, id: &SandboxId) -> PathBuf {
        self.state_dir.join(id.as_str())
    }

    /// Where the QEMU of a box answers.
    pub fn control(&self, id: &SandboxId) -> PathBuf {
        self.box_dir(id).join(CONTROL)
    }

    /// What runs machines here, as far as it is known.
    pub fn accel(&self) -> Accel {
        if self.without_kvm.load(Ordering::Acquire) {
            Accel::Tcg
        } else {
            Accel::offered()
        }
    }

    pub async fn give_up_kvm(&self) {
        self.without_kvm.store(true, Ordering::Release);
        *self.qemu.lock().await = None;
    }

    /// The QEMU of this host, known to be new enough.
    pub async fn qemu(&self) -> Result<Arc<Qemu>> {
        let mut known = self.qemu.lock().await;
        if let Some(qemu) = known.as_ref() {
            return Ok(Arc::clone(qemu));
        }
        let (program, kernel) = (self.program.clone(), self.kernel.clone());
        let accel = self.accel();
        let found =
            blocking(move || Qemu::look(program.as_deref(), kernel.as_deref(), accel)).await?;
        let qemu = Arc::new(found);
        *known = Some(Arc::clone(&qemu));
        Ok(qemu)
    }

    pub fn held(&self, id: &SandboxId) -> Option<Arc<Live>> {
        lock(&self.boxes).get(id).map(|held| Arc::clone(&held.live))
    }

    pub fn must_hold(&self, id: &SandboxId) -> Result<Arc<Live>> {
        self.held(id).ok_or_else(|| Error::sandbox_not_found(id))
    }

    /// Takes a running box in and begins to watch it.
    pub fn hold(&self, live: Arc<Live>) {
        let watcher =
            tokio::spawn(watch::watch(Arc::clone(&live), self.events.clone())).abort_handle();
        lock(&self.boxes).insert(live.id.clone(), Held { live, watcher });
    }

    async fn adopt(&self, found: &LiveBox) -> Result<Adoption> {
        if self.held(&found.id).is_some_and(|live| live.runs()) {
            return Ok(Adoption::Alive);
        }
        let record = Record::parse(&found.record)?;
        let Some(pidfd) = live::find(&record) else {
            self.clear_record(&found.id, record).await?;
            return Ok(Adoption::Gone);
        };
        let slot = lock(&self.reserved)
            .remove(&found.id)
            .filter(|slot| slot.number() == record.slot)
            .or_else(|| self.slots.reclaim(record.slot));
        if slot.is_none() {
            tracing::warn!(id = %found.id, slot = record.slot, "the ids of the box are held twice");
        }
        let token = read_token(&self.box_dir(&found.id))?;
        let watched = pidfd.try_clone().doing("watching the box")?;
        let memory = self.memory_again(record.base.as_deref()).await;
        let live = match Live::new(found.id.clone(), record.clone(), token, memory, pidfd, slot) {
            Ok(live) => live,
            // One that is about to end has lost its namespaces before it is seen to be dead.
            Err(failure) => {
                if !blocking(move || Ok(proc::ended_within(&watched, END_DEADLINE))).await? {
                    return Err(failure.into());
                }
                self.clear_record(&found.id, record).await?;
                return Ok(Adoption::Gone);
            }
        };
        self.look_if_frozen(&live).await?;
        self.hold(Arc::new(live));
        Ok(Adoption::Alive)
    }

    pub async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let Some(live) = self.held(id) else {
            return self.clear_unheld(id).await.map(drop);
        };
        live.begin_end();
        {
            let live = Arc::clone(&live);
            blocking(move || live.kill().map_err(Error::from)).await?;
        }
        timeout(END_DEADLINE, live.ended())
            .await
            .map_err(|_| {
                Error::new(Code::DeadlineExceeded, format!("box {id} does not die"))
                    .hint("a process of it hangs in the kernel; look at /proc/PID/stack")
            })?
            .doing("waiting for the box to end")?;
        live.over.cancel();
        let cgroups = live.record.cgroups.clone();
        let directory = self.box_dir(id);
        drop(live);
        blocking(move || {
            // Stragglers that were made while the rest was killed.
            cgroups.kill_all();
            cgroups.remove(END_DEADLINE)?;
            remove_dir(&directory)
        })
        .await?;
        lock(&self.boxes).remove(id);
        Ok(())
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        let live = self.must_hold(id)?;
        if !live.runs() {
            return Err(Error::conflict(format!("box {id} has ended")));
        }
        live.record.shape.check(limits)?;
        let (cgroups, outer) = (live.record.cgroups.clone(), host_limits(limits));
        blocking(move || {
            cgroups.set_limits(&outer).map_err(|failure| {
                let busy = failure.source.kind() == io::ErrorKind::ResourceBusy;
                let error = Error::from(failure);
                if busy {
                    Error::conflict(error.message).hint("the box uses more memory than that now")
                } else {
                    error
                }
            })
        })
        .await?;
        if *live.frozen.lock().await {
            return Err(Error::conflict(format!("box {id} is frozen")).hint("resume it first"));
        }
        start::set_inner_limits(&live, limits, LIMITS_DEADLINE).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        let live = self.must_hold(id)?;
        let cgroups = live.record.cgroups.clone();
        let mut usage = blocking(move || cgroups.usage().map_err(Error::from)).await?;
        // Tasks of the host say nothing about processes of the machine; one that stands still
        // does not answer.
        let frozen = live.frozen.try_lock();
        if !matches!(frozen, Ok(frozen) if !*frozen) {
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
        self.inner.accel() == Accel::Kvm
    }

    async fn check(&self) -> Vec<Check> {
        self.inner.try_kvm().await;
        checks::all(
            self.inner.program.as_deref(),
            self.inner.kernel.as_deref(),
            self.inner.accel(),
        )
        .await
    }

    fn disk_form(&self) -> Option<&'static str> {
        Some("ext4")
    }

    async fn form_disk(&self, tree: &Path, into: &Path) -> Result<()> {
        let (tree, into) = (tree.to_owned(), into.to_owned());
        blocking(move || disk::make(&tree, &into)).await
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
        let live = self.inner.must_hold(id)?;
        Ok(Box::new(start::connect(&live).await?))
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        self.inner.set_limits(id, limits).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        self.inner.usage(id).await
    }

    async fn netns(&self, id: &SandboxId) -> Result<OwnedFd> {
        let live = self.inner.must_hold(id)?;
        live.netns()
            .try_clone()
            .doing("keeping the network namespace of the box")
            .map_err(Error::from)
    }

    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.inner.freeze(id).await
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
        tokio::spawn(async move { inner.destroy(&id).await })
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
        lock(&self.events).take()
    }
}

/// The ids of every box that has a directory here.
fn reserved(state_dir: &Path, slots: &Arc<Slots>) -> HashMap<SandboxId, Slot> {
    box_dirs(state_dir)
        .into_iter()
        .filter_map(|(id, directory)| {
            let slot = slots.reclaim(Note::read(&directory)?.slot)?;
            Some((id, slot))
        })
        .collect()
}
