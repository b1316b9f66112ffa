//! The ward the keeper talks to.

use crate::{
    cgroup::{Cgroups, layout::Layout, tree_name},
    checks,
    config::ContainerWardConfig,
    criu::Criu,
    elsewhere,
    failure::Doing,
    launcher::{client::Launcher, protocol::Setup},
    live::{self, Live},
    record::{Note, Record},
    slots::{Reserved, Slots},
    sys, tmpfs,
    trial::Trials,
    watch,
};
use async_trait::async_trait;
use sandkeep_host::{
    files::{Stamp, install_agent, make_private_dir, open_dir, remove_dir},
    first::{self, END_DEADLINE},
    starting::{self, Starting},
    work::{blocking, lock},
};
use sandkeep_model::{Code, Error, Isolation, Limits, Result, SandboxId, Usage, random_token};
use sandkeep_ward::{
    Adoption, BoxSpec, Channel, Check, Engine, ImagesFrom, LiveBox, Swept, Ward, WardEvent,
};
use std::{
    collections::{HashMap, HashSet},
    fs,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    net::UnixStream,
    runtime::Handle,
    sync::mpsc,
    task::{self, AbortHandle},
    time::timeout,
};

/// Workers held ready by the launcher.
const SPARES: usize = 4;
/// Events that nobody has taken yet; more wait in the tasks that have them.
const EVENTS: usize = 1024;
pub const CGROUP_DEADLINE: Duration = Duration::from_secs(5);
pub const FREEZE_DEADLINE: Duration = Duration::from_secs(10);
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// The container level.
#[derive(Debug)]
pub struct ContainerWard {
    inner: Arc<Inner>,
    events: Mutex<Option<mpsc::Receiver<WardEvent>>>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub state_dir: PathBuf,
    /// The agent for new boxes: executable, readable to nobody.
    pub agent: PathBuf,
    /// Where the operator says that CRIU is.
    pub criu: Option<PathBuf>,
    pub most_boxes: usize,
    /// The CRIU that was found last.
    pub engine: tokio::sync::Mutex<Option<(Stamp, Criu)>>,
    pub tree: Cgroups,
    pub launcher: Launcher,
    pub slots: Arc<Slots>,
    pub boxes: Mutex<HashMap<SandboxId, Held>>,
    pub starting: Starting,
    pub reserved: Reserved,
    /// Memory that trials take now.
    pub trials: Trials,
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

impl ContainerWard {
    /// Prepares the host's side: directories, cgroups, the agent's file, the launcher.
    pub fn new(config: ContainerWardConfig) -> Result<Arc<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::host_not_ready("the container level needs root")
                .hint("run `sandkeep serve` as root, or with sudo")
                .retryable(false));
        }
        make_private_dir(&config.state_dir)?;
        let state_dir = config
            .state_dir
            .canonicalize()
            .doing("finding the state directory")?;
        Inner::forget_other_boots(&state_dir);
        let agent = install_agent(&config.agent, &state_dir, 0o111)?;
        let tree = Cgroups::make_tree(&Layout::of_this_host()?, &tree_name(&state_dir))?;
        let slots = Slots::new(config.id_base, config.id_slots)?;
        let (events, receiver) = mpsc::channel(EVENTS);
        let inner = Arc::new(Inner {
            launcher: Launcher::new(
                config.launcher,
                config.launcher_args,
                Setup {
                    tree: tree.clone(),
                    agent: agent.clone(),
                    tag: random_token(8),
                    spares: SPARES,
                },
            ),
            reserved: Reserved::of(&state_dir, &slots, |directory| {
                Some(Note::read(directory)?.slot)
            }),
            state_dir,
            agent,
            criu: config.criu,
            most_boxes: config.most_boxes,
            engine: tokio::sync::Mutex::default(),
            tree,
            slots,
            boxes: Mutex::default(),
            starting: Starting::default(),
            trials: Trials::default(),
            events,
        });
        if let Ok(runtime) = Handle::try_current() {
            let warming = Arc::clone(&inner);
            runtime.spawn(async move {
                if let Err(error) = warming.launcher.warm().await {
                    tracing::error!(%error, "the launcher did not start");
                }
            });
        }
        Ok(Arc::new(Self {
            inner,
            events: Mutex::new(Some(receiver)),
        }))
    }

    async fn start_from(&self, spec: BoxSpec, image: Option<PathBuf>) -> Result<LiveBox> {
        let there = self.inner.held(&spec.id).is_some();
        let begun = self.inner.starting.begin(&spec.id, there)?;
        let (inner, unwanted) = (Arc::clone(&self.inner), Arc::clone(&self.inner));
        starting::born(
            begun,
            async move |abandoned| inner.start(spec, image.as_deref(), abandoned).await,
            move |id| async move { unwanted.destroy(&id).await },
        )
        .await
    }
}

impl Inner {
    pub fn box_dir(&self, id: &SandboxId) -> PathBuf {
        self.state_dir.join(id.as_str())
    }

    pub fn held(&self, id: &SandboxId) -> Option<Arc<Live>> {
        lock(&self.boxes).get(id).map(|held| Arc::clone(&held.live))
    }

    pub fn must_hold(&self, id: &SandboxId) -> Result<Arc<Live>> {
        self.held(id).ok_or_else(|| Error::sandbox_not_found(id))
    }

    /// Takes a running box in and begins to watch it. `kills` is what is already known.
    pub fn hold(&self, live: Arc<Live>, kills: u64) {
        let watcher = tokio::spawn(watch::watch(Arc::clone(&live), kills, self.events.clone()))
            .abort_handle();
        lock(&self.boxes).insert(live.id.clone(), Held { live, watcher });
    }

    async fn adopt(&self, found: &LiveBox) -> Result<Adoption> {
        if self.held(&found.id).is_some_and(|live| live.first.runs()) {
            return Ok(Adoption::Alive);
        }
        let record = Record::parse(&found.record)?;
        let Some(pidfd) = live::find(&record) else {
            self.clear_record(&found.id, record).await?;
            return Ok(Adoption::Gone);
        };
        let slot = self.reserved.hand_over(&found.id, record.slot);
        let directory = open_dir(&self.box_dir(&found.id))?;
        let kills = record.cgroups.oom_kills().unwrap_or(0);
        let live = Live::new(found.id.clone(), record, pidfd, directory, slot)?;
        self.hold(Arc::new(live), kills);
        Ok(Adoption::Alive)
    }

    pub async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let Some(live) = self.held(id) else {
            return self.clear_unheld(id).await.map(drop);
        };
        live.first.end(id, &live.record.cgroups).await?;
        let cgroups = live.record.cgroups.clone();
        let directory = self.box_dir(id);
        drop(live);
        blocking(move || {
            cgroups.remove(CGROUP_DEADLINE)?;
            remove_dir(&directory)
        })
        .await?;
        lock(&self.boxes).remove(id);
        Ok(())
    }

    /// Clears a box away of which only files may be left.
    pub async fn clear_unheld(&self, id: &SandboxId) -> Result<Swept> {
        let directory = self.box_dir(id);
        if !directory.exists() {
            self.reserved.give_back(id);
            return Ok(Swept::default());
        }
        match Note::read(&directory).and_then(|note| note.record) {
            Some(record) => self.clear_record(id, record).await,
            None => {
                blocking(move || remove_dir(&directory)).await?;
                self.reserved.give_back(id);
                Ok(Swept {
                    files: 1,
                    ..Swept::default()
                })
            }
        }
    }

    async fn clear_record(&self, id: &SandboxId, record: Record) -> Result<Swept> {
        let directory = self.box_dir(id);
        let swept = blocking(move || {
            let processes = live::clear(&record, END_DEADLINE)?;
            let cgroups = record.cgroups.remove(CGROUP_DEADLINE)?;
            let files = usize::from(directory.exists());
            remove_dir(&directory)?;
            Ok(Swept {
                processes,
                cgroups,
                files,
            })
        })
        .await?;
        self.reserved.give_back(id);
        lock(&self.boxes).remove(id);
        Ok(swept)
    }
}

#[async_trait]
impl Ward for ContainerWard {
    fn level(&self) -> Isolation {
        Isolation::Container
    }

    async fn check(&self) -> Vec<Check> {
        let state_dir = self.inner.state_dir.clone();
        let most_boxes = self.inner.most_boxes;
        let mut checks = task::spawn_blocking(move || checks::all(&state_dir, most_boxes))
            .await
            .unwrap_or_default();
        checks.push(checks::memory(self.inner.criu.as_deref()).await);
        checks
    }

    async fn start(&self, spec: BoxSpec) -> Result<LiveBox> {
        self.start_from(spec, None).await
    }

    async fn adopt(&self, live: &LiveBox) -> Result<Adoption> {
        self.inner.adopt(live).await
    }

    async fn released(&self, id: &SandboxId) -> Result<()> {
        self.inner.released(id).await
    }

    async fn connect(&self, id: &SandboxId) -> Result<Channel> {
        let live = self.inner.must_hold(id)?;
        let unreachable = |error: &dyn std::fmt::Display| {
            Error::new(
                Code::BoxUnreachable,
                format!("the agent of box {id} does not take connections: {error}"),
            )
            .hint("the box may be ending or overloaded; try again")
        };
        match timeout(CONNECT_DEADLINE, UnixStream::connect(live.socket())).await {
            Ok(Ok(stream)) => Ok(Box::new(stream)),
            Ok(Err(error)) => Err(unreachable(&error)),
            Err(late) => Err(unreachable(&late)),
        }
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        let live = self.inner.must_hold(id)?;
        let limits = *limits;
        blocking(move || set_limits(&live, &limits)).await
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        let live = self.inner.must_hold(id)?;
        blocking(move || live.record.cgroups.usage().map_err(Error::from)).await
    }

    async fn netns(&self, id: &SandboxId) -> Result<OwnedFd> {
        let live = self.inner.must_hold(id)?;
        blocking(move || live.netns().map_err(Error::from)).await
    }

    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        let live = self.inner.must_hold(id)?;
        blocking(move || {
            live.record.cgroups.freeze(FREEZE_DEADLINE)?;
            // One that had ended just before looks frozen, too.
            if live.first.runs() {
                return Ok(());
            }
            Err(Error::conflict(format!("box {} has ended", live.id)))
        })
        .await
    }

    async fn is_frozen(&self, id: &SandboxId) -> Result<bool> {
        let live = self.inner.must_hold(id)?;
        blocking(move || live.record.cgroups.is_frozen().map_err(Error::from)).await
    }

    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        let live = self.inner.must_hold(id)?;
        blocking(move || {
            // A server that died while it pushed memory out has left the way open.
            live.record.cgroups.keep_out_of_swap()?;
            live.record.cgroups.thaw();
            Ok(())
        })
        .await
    }

    async fn push_out(&self, id: &SandboxId) -> Result<u64> {
        let live = self.inner.must_hold(id)?;
        blocking(move || live.record.cgroups.push_out().map_err(Error::from)).await
    }

    async fn engine(&self) -> Result<Engine> {
        self.inner.engine().await
    }

    /// CRIU builds the box with the rights of the host, as the image says.
    fn images_from(&self) -> ImagesFrom {
        ImagesFrom::KnownServers
    }

    async fn take_in(&self, image: &Path) -> Result<()> {
        let image = image.to_owned();
        blocking(move || elsewhere::take_in(&image)).await
    }

    async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        self.inner.save(id, image).await
    }

    fn tries_images(&self) -> bool {
        true
    }

    async fn try_image(&self, spec: BoxSpec, image: &Path) -> Result<()> {
        let begun = self.inner.starting.begin(&spec.id, false)?;
        let (inner, image) = (Arc::clone(&self.inner), image.to_owned());
        starting::born(
            begun,
            async move |abandoned| inner.try_image(&spec, &image, &abandoned).await,
            // Nothing is left of a trial.
            async |_| Ok(()),
        )
        .await
    }

    async fn restore(&self, spec: BoxSpec, image: &Path) -> Result<LiveBox> {
        self.start_from(spec, Some(image.to_owned())).await
    }

    async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        let id = id.clone();
        // In a task of its own: once begun it goes to the end.
        tokio::spawn(async move {
            let destroy = || inner.destroy(&id);
            inner.starting.end(&id, destroy).await
        })
        .await
        .map_err(|error| Error::internal(format!("ending the box: {error}")))?
    }

    async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept> {
        self.inner.sweep(known).await
    }

    fn events(&self) -> Option<mpsc::Receiver<WardEvent>> {
        lock(&self.events).take()
    }
}

pub fn set_limits(live: &Live, limits: &Limits) -> Result<()> {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    if !live.first.runs() {
        return Err(Error::conflict(format!("box {} has ended", live.id)));
    }
    // A full /dev/shm can not shrink; the limit of the cgroup holds all the same.
    if let Err(failure) = tmpfs::resize(live.record.pid, limits.memory_bytes()) {
        tracing::warn!(id = %live.id, %failure, "the memory file systems keep their size");
    }
    first::limit(&live.record.cgroups, limits)?;
    let wanted = u64::from(limits.open_files);
    let both = |value| Rlimit {
        current: Some(value),
        maximum: Some(value),
    };
    let pid = Pid::from_raw(live.record.pid);
    // Processes started from now on get it; raising above the limit the box was made with
    // needs a right that not every root has.
    let set = || match prlimit(pid, Resource::Nofile, both(wanted)) {
        Err(rustix::io::Errno::PERM) => {
            let most = hard_limit(live.record.pid).unwrap_or(wanted);
            prlimit(pid, Resource::Nofile, both(wanted.min(most)))
        }
        other => other,
    };
    let done = match set() {
        // So does changing the limits of others at all, but for who owns their user namespace.
        Err(rustix::io::Errno::PERM) => {
            let namespace = fs::File::open(format!("/proc/{}/ns/user", live.record.pid))
                .doing("opening the user namespace of the box")?;
            let owner = sys::owner_of(namespace.as_fd()).doing("limiting open files")?;
            sys::as_owner(owner, set).doing("limiting open files")?
        }
        other => other,
    };
    done.map(drop)
        .doing("limiting open files")
        .map_err(Error::from)
}

/// The hard limit of open files in `/proc/PID/limits`.
fn hard_limit(pid: i32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("Max open files"))?;
    line.split_ascii_whitespace().nth(4)?.parse().ok()
}
