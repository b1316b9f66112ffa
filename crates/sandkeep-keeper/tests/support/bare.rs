//! A ward without confinement: the real agent as a plain process of the host.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    os::{fd::OwnedFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rustix::process::{Pid, Signal};
use sandkeep_model::{Code, Error, Isolation, Limits, Result, SandboxId, Usage};
use sandkeep_ward::{Adoption, BoxSpec, Channel, Check, Engine, LiveBox, Swept, Ward, WardEvent};
use tokio::{
    net::UnixStream,
    sync::{Semaphore, mpsc},
};

/// Makes the next `n` calls of one kind fail.
#[derive(Default)]
pub struct Faults {
    pub start: AtomicUsize,
    /// Starts that panic when the process of the box runs already.
    pub panic: AtomicUsize,
    pub connect: AtomicUsize,
    pub destroy: AtomicUsize,
    pub set_limits: AtomicUsize,
    pub netns: AtomicUsize,
    pub freeze: AtomicUsize,
    pub save: AtomicUsize,
    pub restore: AtomicUsize,
}

fn strike(left: &AtomicUsize, what: &str) -> Result<()> {
    let hit = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
    match hit {
        Ok(_) => Err(Error::internal(format!("{what} was told to fail"))),
        Err(_) => Ok(()),
    }
}

pub const NETWORK_PERMITS: u32 = 64;

type Networks = Arc<Mutex<HashMap<SandboxId, Arc<OwnedFd>>>>;

pub struct BareWard {
    dir: PathBuf,
    agent: PathBuf,
    pub faults: Faults,
    /// The host lacks something.
    pub unusable: AtomicBool,
    /// Memory can be written: not really, but the note that stands for it is looked at.
    pub has_engine: AtomicBool,
    /// This file takes all the room of its disk when a box is frozen.
    pub full_when_frozen: Mutex<Option<PathBuf>>,
    /// The build the engine says it is.
    pub engine_build: AtomicUsize,
    pub restores: AtomicUsize,
    /// Starts wait for a permit; tests close the gate to look at a box in the making.
    pub gate: Semaphore,
    /// So do those who ask for the network of a box; it has [`NETWORK_PERMITS`].
    pub network_gate: Semaphore,
    /// The network namespaces of boxes, for tests that have a moat.
    networks: Networks,
    pub starts: AtomicUsize,
    pub limits: Mutex<BTreeMap<SandboxId, Limits>>,
    /// Processes whose end is no news.
    doomed: Arc<Mutex<HashSet<i32>>>,
    pids: Mutex<HashMap<SandboxId, i32>>,
    tell: mpsc::Sender<WardEvent>,
    events: Mutex<Option<mpsc::Receiver<WardEvent>>>,
}

fn new_namespace() -> OwnedFd {
    let made = std::thread::spawn(|| {
        // SAFETY: only the network namespace of this thread changes.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        fs::File::open("/proc/thread-self/ns/net").unwrap().into()
    });
    made.join().unwrap()
}

impl BareWard {
    pub fn network(&self, id: &SandboxId) -> Arc<OwnedFd> {
        let mut networks = self.networks.lock().unwrap();
        let network = networks
            .entry(id.clone())
            .or_insert_with(|| Arc::new(new_namespace()));
        Arc::clone(network)
    }

    /// A ward of the next server: it knows nothing, but the networks of boxes are still there.
    pub fn after(before: &Self) -> Arc<Self> {
        Self::over(&before.dir, Arc::clone(&before.networks))
    }

    pub fn new(dir: &Path) -> Arc<Self> {
        Self::over(dir, Networks::default())
    }

    fn over(dir: &Path, networks: Networks) -> Arc<Self> {
        let dir = dir.to_owned();
        fs::create_dir_all(&dir).unwrap();
        let test = std::env::current_exe().unwrap();
        let agent = test.ancestors().nth(2).unwrap().join("examples/bare_agent");
        assert!(
            agent.exists(),
            "{} is built by `cargo nextest run -p sandkeep-keeper`",
            agent.display()
        );
        let (tell, events) = mpsc::channel(64);
        Arc::new(Self {
            dir,
            agent,
            faults: Faults::default(),
            unusable: AtomicBool::new(false),
            has_engine: AtomicBool::new(false),
            full_when_frozen: Mutex::default(),
            engine_build: AtomicUsize::new(1),
            restores: AtomicUsize::new(0),
            gate: Semaphore::new(Semaphore::MAX_PERMITS >> 1),
            network_gate: Semaphore::new(NETWORK_PERMITS as usize),
            networks,
            starts: AtomicUsize::new(0),
            limits: Mutex::default(),
            doomed: Arc::default(),
            pids: Mutex::default(),
            tell,
            events: Mutex::new(Some(events)),
        })
    }

    fn file(&self, id: &SandboxId, kind: &str) -> PathBuf {
        self.dir.join(format!("{id}.{kind}"))
    }

    pub fn pid(&self, id: &SandboxId) -> i32 {
        self.pids.lock().unwrap()[id]
    }

    /// Ids that have a process.
    pub fn alive(&self) -> Vec<SandboxId> {
        self.recorded()
            .into_iter()
            .filter(|(_, pid)| runs(*pid))
            .map(|(id, _)| id)
            .collect()
    }

    /// Ends what a test left running.
    pub fn end_all(&self) {
        for (_, pid) in self.recorded() {
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = rustix::process::kill_process_group(pid, Signal::KILL);
            }
        }
    }

    pub async fn say(&self, event: WardEvent) {
        self.tell.send(event).await.unwrap();
    }

    fn recorded(&self) -> Vec<(SandboxId, i32)> {
        let mut out = Vec::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|kind| kind == "pid")
                && let Some(id) = path.file_stem().and_then(|id| id.to_str())
                && let Ok(pid) = fs::read_to_string(&path)
            {
                out.push((id.parse().unwrap(), pid.parse().unwrap()));
            }
        }
        out
    }

    fn signal(&self, id: &SandboxId, signal: Signal) -> Result<()> {
        let pid = self.pids.lock().unwrap().get(id).copied();
        let pid = pid.ok_or_else(|| Error::sandbox_not_found(id))?;
        let pid = Pid::from_raw(pid).unwrap();
        rustix::process::kill_process_group(pid, signal).map_err(std::io::Error::from)?;
        Ok(())
    }

    async fn end(&self, id: &SandboxId, pid: i32) {
        if let Some(pid) = Pid::from_raw(pid) {
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        }
        // Whoever started it (perhaps an earlier ward of this test) collects it.
        while runs(pid) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        for kind in ["pid", "sock"] {
            let _ = fs::remove_file(self.file(id, kind));
        }
        self.pids.lock().unwrap().remove(id);
    }

    fn watch(&self, id: &SandboxId, mut child: std::process::Child) {
        let (id, tell, doomed) = (id.clone(), self.tell.clone(), Arc::clone(&self.doomed));
        let pid = i32::try_from(child.id()).unwrap();
        std::thread::spawn(move || {
            let _ = child.wait();
            if !doomed.lock().unwrap().contains(&pid) {
                let _ = tell.blocking_send(WardEvent::Exited {
                    id,
                    out_of_memory: false,
                });
            }
        });
    }
}

/// Whether a process is stopped by a signal, which comes a moment after it was sent.
pub fn stopped(pid: i32) -> bool {
    for _ in 0..500 {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat.rsplit(')').next().unwrap_or("").trim_start();
        if state.starts_with('T') {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Whether a process is there and not just waiting to be collected.
pub fn runs(pid: i32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let state = stat.rsplit(')').next().unwrap_or("").trim_start();
    !state.starts_with(['Z', 'X'])
}

#[async_trait]
impl Ward for BareWard {
    fn level(&self) -> Isolation {
        Isolation::Process
    }

    async fn check(&self) -> Vec<Check> {
        if self.unusable.load(Ordering::SeqCst) {
            return vec![Check::missing("moon", "it is new", "wait two weeks")];
        }
        vec![Check::ok("agent", "built")]
    }

    async fn start(&self, spec: BoxSpec) -> Result<LiveBox> {
        self.starts.fetch_add(1, Ordering::SeqCst);
        let _pass = self.gate.acquire().await.unwrap();
        strike(&self.faults.start, "start")?;
        assert!(spec.root.join("etc/passwd").exists(), "the disk is there");
        let socket = self.file(&spec.id, "sock");
        let child = Command::new(&self.agent)
            .arg("--listen")
            .arg(&socket)
            .current_dir(&spec.root)
            .process_group(0)
            .stdin(Stdio::null())
            .spawn()?;
        let pid = i32::try_from(child.id()).unwrap();
        fs::write(self.file(&spec.id, "pid"), pid.to_string())?;
        self.pids.lock().unwrap().insert(spec.id.clone(), pid);
        self.watch(&spec.id, child);
        strike(&self.faults.panic, "start").expect("a panic on purpose");
        while UnixStream::connect(&socket).await.is_err() {
            if !runs(pid) {
                return Err(Error::internal("the agent ended at once"));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        self.limits
            .lock()
            .unwrap()
            .insert(spec.id.clone(), spec.limits);
        Ok(LiveBox {
            id: spec.id,
            record: serde_json::json!({ "pid": pid }),
        })
    }

    async fn adopt(&self, live: &LiveBox) -> Result<Adoption> {
        let pid = live.record["pid"]
            .as_i64()
            .and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.ok_or_else(|| Error::internal("no pid in the record"))?;
        if runs(pid) {
            self.pids.lock().unwrap().insert(live.id.clone(), pid);
            return Ok(Adoption::Alive);
        }
        self.end(&live.id, pid).await;
        Ok(Adoption::Gone)
    }

    async fn connect(&self, id: &SandboxId) -> Result<Channel> {
        strike(&self.faults.connect, "connect")?;
        Ok(Box::new(UnixStream::connect(self.file(id, "sock")).await?))
    }

    async fn set_limits(&self, id: &SandboxId, limits: &Limits) -> Result<()> {
        strike(&self.faults.set_limits, "set_limits")?;
        self.limits.lock().unwrap().insert(id.clone(), *limits);
        Ok(())
    }

    async fn usage(&self, id: &SandboxId) -> Result<Usage> {
        let pid = self.pids.lock().unwrap().get(id).copied();
        let pid = pid.ok_or_else(|| Error::sandbox_not_found(id))?;
        let statm = fs::read_to_string(format!("/proc/{pid}/statm"))?;
        let pages: u64 = statm
            .split(' ')
            .nth(1)
            .and_then(|n| n.parse().ok())
            .unwrap();
        Ok(Usage {
            memory_bytes: pages * 4096,
            pids: 1,
            ..Usage::default()
        })
    }

    /// The process does not live in it, but it is as empty as that of a box.
    async fn netns(&self, id: &SandboxId) -> Result<OwnedFd> {
        let _permit = self.network_gate.acquire().await.unwrap();
        strike(&self.faults.netns, "looking for a network")?;
        Ok(self.network(id).try_clone()?)
    }

    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        if let Some(filler) = self.full_when_frozen.lock().unwrap().take() {
            let mut file = fs::File::create(filler).unwrap();
            while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
        }
        strike(&self.faults.freeze, "freeze")?;
        self.signal(id, Signal::STOP)
    }

    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.signal(id, Signal::CONT)
    }

    async fn engine(&self) -> Result<Engine> {
        if !self.has_engine.load(Ordering::SeqCst) {
            return Err(Error::new(Code::NotEnforceable, "no engine on this host"));
        }
        Ok(Engine {
            name: "bare".to_owned(),
            build: self.engine_build.load(Ordering::SeqCst).to_string(),
        })
    }

    async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        strike(&self.faults.save, "save")?;
        let pid = self.pid(id);
        assert!(stopped(pid), "only a frozen box is saved");
        fs::write(image.join("pages"), pid.to_string())?;
        Ok(())
    }

    async fn restore(&self, spec: BoxSpec, image: &Path) -> Result<LiveBox> {
        strike(&self.faults.restore, "restore")?;
        assert!(image.join("pages").exists(), "the image is there");
        self.restores.fetch_add(1, Ordering::SeqCst);
        self.start(spec).await
    }

    async fn destroy(&self, id: &SandboxId) -> Result<()> {
        strike(&self.faults.destroy, "destroy")?;
        let pid = self.pids.lock().unwrap().get(id).copied();
        if let Some(pid) = pid {
            self.doomed.lock().unwrap().insert(pid);
            self.end(id, pid).await;
        }
        Ok(())
    }

    async fn sweep(&self, known: &HashSet<SandboxId>) -> Result<Swept> {
        let mut swept = Swept::default();
        for (id, pid) in self.recorded() {
            if !known.contains(&id) {
                swept.processes += usize::from(runs(pid));
                self.end(&id, pid).await;
            }
        }
        Ok(swept)
    }

    fn events(&self) -> Option<mpsc::Receiver<WardEvent>> {
        self.events.lock().unwrap().take()
    }
}

/// Tests that fail must not leave agents behind.
impl Drop for BareWard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (_, pid) in self.recorded() {
                if let Some(pid) = Pid::from_raw(pid) {
                    let _ = rustix::process::kill_process_group(pid, Signal::KILL);
                }
            }
        }
    }
}
