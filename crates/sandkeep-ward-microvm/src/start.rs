//! Starting a box: from a machine that waits, or from an image of a box.

use crate::{
    disk,
    image::{Memory, Origin},
    launch::{Launch, Started, start_ticks},
    live::{self, Live},
    machine::tell,
    memory::Mapped,
    network, pages,
    qemu::{Begin, Qemu, Shape, host_limits},
    record::{Note, Record},
    ward::Inner,
};
use rustix::fs::{MemfdFlags, memfd_create};
use sandkeep_agent_api::{
    channel::{PORT, TOKEN_LENGTH},
    host::{LimitsRequest, UsageResponse},
    machine::{ENTROPY_BYTES, Order},
};
use sandkeep_agent_client::Agent;
use sandkeep_host::{
    cgroup::Cgroups,
    failure::Doing as _,
    files::{make_private_dir, remove_dir, write_token},
    netns, proc,
    slots::Slot,
    stream::BoxStream,
    work::{blocking, lock},
};
use sandkeep_model::{Code, Error, Limits, Result, SandboxId, Secret, Timestamp, random_token};
use sandkeep_netlink::{AGENT_PORT, BOX_V4};
use sandkeep_ward::{BoxSpec, LiveBox};
use std::{
    fs::File,
    io::{self, Seek as _, Write as _},
    net::SocketAddr,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, sleep, timeout},
};

/// Until the agent answers. A restore takes a tenth of a second, on a busy host some.
const AGENT_DEADLINE: Duration = Duration::from_secs(60);
const AGENT_PAUSE: Duration = Duration::from_millis(5);
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
const CGROUP_DEADLINE: Duration = Duration::from_secs(10);
// The moat knows the agent's answers by it.
const _: () = assert!(AGENT_PORT == PORT);

/// Keeps a box from being swept or started twice while it is made.
struct Starting<'a> {
    inner: &'a Inner,
    id: SandboxId,
}

impl<'a> Starting<'a> {
    fn begin(inner: &'a Inner, id: &SandboxId) -> Result<Self> {
        let taken = inner.held(id).is_some() || !lock(&inner.starting).insert(id.clone());
        if taken {
            return Err(Error::conflict(format!("box {id} is there already"))
                .hint("end it first, or use another id"));
        }
        Ok(Self {
            inner,
            id: id.clone(),
        })
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        lock(&self.inner.starting).remove(&self.id);
    }
}

impl Inner {
    /// `image` is a directory written by [`Inner::save`].
    pub(crate) async fn start(
        self: &Arc<Self>,
        spec: BoxSpec,
        image: Option<&Path>,
    ) -> Result<LiveBox> {
        spec.check()?;
        let _starting = Starting::begin(self, &spec.id)?;
        let made = self.make(&spec, image).await;
        if made.is_err() {
            // The half of it that runs, then its files.
            let left = match self.held(&spec.id) {
                Some(_) => self.destroy(&spec.id).await,
                None => self.clear_unheld(&spec.id).await.map(drop),
            };
            if let Err(error) = left {
                tracing::warn!(id = %spec.id, %error, "a box that did not start was not cleared away");
            }
        }
        made
    }

    async fn make(self: &Arc<Self>, spec: &BoxSpec, image: Option<&Path>) -> Result<LiveBox> {
        let qemu = self.qemu().await?;
        let origin = match image {
            Some(image) => self.open_image(image).await?,
            None => {
                let machine = self.machine(Shape::of(&spec.limits)).await?;
                Origin {
                    memory: Memory::of(&machine.base),
                    devices: machine.devices.clone(),
                    changed: None,
                }
            }
        };
        origin.memory.base.shape.check(&spec.limits)?;
        let (netns, card) = network::make().await?;
        let birth = Birth {
            qemu,
            spec: spec.clone(),
            origin,
            fresh: image.is_none(),
            dir: self.box_dir(&spec.id),
            control: self.control(&spec.id),
            cgroups: self.tree.child(spec.id.as_str()),
            slot: self.slots.take()?,
            token: Secret::new(random_token(TOKEN_LENGTH)),
        };
        let live = Arc::new(blocking(move || birth.bear(netns, card)).await?);
        self.hold(Arc::clone(&live));
        set_inner_limits(&live, &spec.limits, AGENT_DEADLINE).await?;
        // A machine that was copied remembers what happened to the one before it.
        let kills = match image {
            Some(_) => inner_usage(&live, AGENT_DEADLINE).await?.oom_kills,
            None => 0,
        };
        *lock(&live.kills) = Some(kills);
        Ok(LiveBox {
            id: spec.id.clone(),
            record: live.record.to_value()?,
        })
    }
}

/// A box on its way.
struct Birth {
    qemu: Arc<Qemu>,
    spec: BoxSpec,
    origin: Origin,
    /// Whether the machine has not seen its disk yet.
    fresh: bool,
    dir: PathBuf,
    control: PathBuf,
    cgroups: Cgroups,
    slot: Slot,
    token: Secret,
}

impl Birth {
    fn bear(self, netns: OwnedFd, card: OwnedFd) -> Result<Live> {
        self.prepare()?;
        // Beside the start of QEMU, which does not look at it before the machine runs.
        let sized = {
            let (fresh, spec) = (self.fresh, self.spec.clone());
            thread::spawn(move || {
                if fresh {
                    disk::size(&spec.root, &spec.limits)?;
                }
                Ok::<_, Error>(())
            })
        };
        let Started {
            pid,
            mut qmp,
            mut port,
        } = Launch {
            qemu: &self.qemu,
            shape: self.origin.memory.base.shape,
            cgroups: &self.cgroups,
            netns,
            card,
            id: self.slot.first_id(),
            ram: self.origin.memory.ram.fd(),
            disk: disk::open(&self.spec.root)?,
            control: &self.control,
            begin: Begin::Wait,
        }
        .start()?;
        let shape = self.origin.memory.base.shape;
        if let Some(changed) = &self.origin.changed {
            // Before the devices: they look at the memory when they are read.
            let mapped = Mapped::find(pid, shape.ram_bytes())?;
            pages::read(changed, shape.ram_bytes(), |run, bytes| {
                mapped.write(run, bytes)
            })?;
        }
        qmp.load_devices(in_memory(&self.origin.devices)?.as_fd())?;
        sized
            .join()
            .map_err(|_| Error::internal("the disk was not sized"))??;
        // It is there when the machine begins to run: the agent's first deed.
        tell(&mut port, &self.order()?)?;
        qmp.go_on()?;
        self.take_in(pid)
    }

    /// Everything on the host that is there before the box is.
    fn prepare(&self) -> Result<()> {
        // A box of this name that died with the server may have left something.
        remove_dir(&self.dir)?;
        self.cgroups.kill_all();
        self.cgroups.remove(CGROUP_DEADLINE)?;
        make_private_dir(&self.dir)?;
        // Written first: should the server die now, the next one knows the ids are used.
        Note {
            slot: self.slot.number(),
            cgroups: self.cgroups.clone(),
            record: None,
        }
        .write(&self.dir)?;
        write_token(&self.dir, &self.token)?;
        self.cgroups.create()?;
        self.cgroups.set_limits(&host_limits(&self.spec.limits))?;
        Ok(())
    }

    fn order(&self) -> Result<String> {
        let mut entropy = [0; ENTROPY_BYTES];
        io::Read::read_exact(
            &mut File::open("/dev/urandom").doing("drawing random bytes")?,
            &mut entropy,
        )
        .doing("drawing random bytes")?;
        Order {
            token: self.token.expose().to_owned(),
            entropy: crate::kernel::hex(&entropy),
            timestamp_ms: Timestamp::now().millis(),
            hostname: self.spec.hostname.clone(),
        }
        .to_line()
        .map_err(|error| Error::internal(error.to_string()))
    }

    fn take_in(self, pid: i32) -> Result<Live> {
        let memory = self.origin.memory;
        let record = Record {
            boot_id: proc::boot_id(),
            slot: self.slot.number(),
            pid,
            start_ticks: start_ticks(pid)?,
            shape: memory.base.shape,
            // One that was put together is not there again after a restart.
            base: memory.carried.is_empty().then(|| memory.base.id.clone()),
            cgroups: self.cgroups.clone(),
        };
        Note {
            slot: self.slot.number(),
            cgroups: self.cgroups,
            record: Some(record.clone()),
        }
        .write(&self.dir)?;
        let pidfd = live::find(&record)
            .ok_or_else(|| Error::internal("the box ended as soon as it was started"))?;
        Ok(Live::new(
            self.spec.id,
            record,
            self.token,
            Some(memory),
            pidfd,
            Some(self.slot),
        )?)
    }
}

/// A file that is nowhere, for QEMU to read.
fn in_memory(bytes: &[u8]) -> Result<File> {
    let made = || {
        let fd = memfd_create("sandkeep-devices", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        file.write_all(bytes)?;
        file.rewind()?;
        Ok::<_, io::Error>(file)
    };
    made().doing("reading the machine").map_err(Error::from)
}

/// A connection on which the agent listens to us.
pub(crate) async fn connect(live: &Live) -> Result<BoxStream> {
    let dialled = async {
        let agent = SocketAddr::from((BOX_V4, PORT));
        let mut stream = netns::dial(live.netns(), agent).await?;
        let line = format!("{}\n", live.token.expose());
        stream.write_all(line.as_bytes()).await?;
        Ok(BoxStream::new(stream, live.over.clone()))
    };
    timeout(CONNECT_DEADLINE, dialled)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        .map_err(|error: Error| {
            Error::new(
                Code::BoxUnreachable,
                format!(
                    "the agent of box {} does not take connections: {}",
                    live.id, error.message
                ),
            )
            .hint("the box may be ending or overloaded; try again")
        })
}

/// What only the kernel of the machine counts.
pub(crate) async fn inner_usage(live: &Live, wait: Duration) -> Result<UsageResponse> {
    let asked = async {
        let mut agent = Agent::over(connect(live).await?).await?;
        agent.usage().await
    };
    timeout(wait, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// Limits that only the kernel of the machine can hold. Also waits for the agent.
pub(crate) async fn set_inner_limits(live: &Live, limits: &Limits, wait: Duration) -> Result<()> {
    let request = LimitsRequest {
        open_files: limits.open_files.into(),
        pids: limits.pids.into(),
        memory_bytes: Some(limits.memory_bytes()),
    };
    let until = Instant::now() + wait;
    loop {
        let attempt = async {
            let mut agent = Agent::over(connect(live).await?).await?;
            agent.set_limits(&request).await
        };
        match timeout(CONNECT_DEADLINE * 2, attempt).await {
            Ok(Ok(())) => return Ok(()),
            _ if !live.runs() => return Err(ended_early(live)),
            Ok(Err(error)) if Instant::now() >= until => return Err(error),
            Err(_) if Instant::now() >= until => {
                return Err(Error::new(
                    Code::BoxUnreachable,
                    format!("the agent of box {} does not answer", live.id),
                ));
            }
            _ => sleep(AGENT_PAUSE).await,
        }
    }
}

fn ended_early(live: &Live) -> Error {
    Error::new(
        Code::BoxUnreachable,
        format!("box {} ended before its agent answered", live.id),
    )
    .hint("its disk may be damaged, or the host out of memory")
}
