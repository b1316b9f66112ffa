//! Starting a box: afresh, or from an image of its memory.

use crate::{
    live::{self, Live},
    network,
    record::{Note, Record},
    runsc::{self, Runsc},
    spec::{self, Words, host_limits},
    stage::Stage,
    ward::Inner,
};
use rustix::pipe::{PipeFlags, pipe_with};
use sandkeep_agent_api::{
    channel::{PORT, TOKEN_LENGTH},
    host::LimitsRequest,
};
use sandkeep_agent_client::Agent;
use sandkeep_host::{
    cgroup::Cgroups,
    failure::Doing as _,
    files::{make_private_dir, remove_dir, write_token},
    idmap, netns,
    slots::Slot,
    stream::BoxStream,
    work::{blocking, lock},
};
use sandkeep_model::{Code, Error, Limits, Result, SandboxId, Secret, random_token};
use sandkeep_netlink::{AGENT_PORT, BOX_V4};
use sandkeep_ward::{BoxSpec, LiveBox};
use std::{
    ffi::OsStr,
    fs, io,
    net::SocketAddr,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::{Instant, sleep, timeout},
};

/// Until the agent listens. Starting takes half a second, on a busy host some.
const AGENT_DEADLINE: Duration = Duration::from_secs(60);
// The moat knows the agent's answers by it.
const _: () = assert!(AGENT_PORT == PORT);
/// An agent that is busy for longer is paused as it is.
const SETTLED_WITHIN: Duration = Duration::from_secs(2);
const LAST_WORDS: &[u8] = b"GET /health HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n";
const AGENT_PAUSE: Duration = Duration::from_millis(5);
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
const CGROUP_DEADLINE: Duration = Duration::from_secs(10);

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
    pub(crate) async fn start(&self, spec: BoxSpec, image: Option<&Path>) -> Result<LiveBox> {
        spec.check()?;
        let _starting = Starting::begin(self, &spec.id)?;
        let made = self.make(&spec, image).await;
        if made.is_err() {
            self.clear_half_made(&spec.id).await;
        }
        made
    }

    /// The half of it that runs, then its files.
    async fn clear_half_made(&self, id: &SandboxId) {
        let left = match self.held(id) {
            Some(_) => self.destroy(id).await,
            None => self.clear_unheld(id).await.map(drop),
        };
        if let Err(error) = left {
            tracing::warn!(%id, %error, "a box that did not start was not cleared away");
        }
    }

    async fn make(&self, spec: &BoxSpec, image: Option<&Path>) -> Result<LiveBox> {
        let runsc = Runsc {
            program: self.program().await?,
            dir: self.box_dir(&spec.id),
            name: spec.id.to_string(),
        };
        let slot = self.slots.take()?;
        let cgroups = self.tree.child(spec.id.as_str());
        let token = Secret::new(random_token(TOKEN_LENGTH));
        let netns = network::make().await?;
        let stage = {
            let (runsc, spec, cgroups) = (runsc.clone(), spec.clone(), cgroups.clone());
            let (number, first_id, netns) = (slot.number(), slot.first_id(), netns.as_raw_fd());
            let (token, agent) = (token.clone(), self.agent.clone());
            blocking(move || {
                prepare(&runsc, &spec, number, first_id, netns, &cgroups, &token)?;
                let tree = idmap::mapped_tree(&spec.root, first_id)?;
                let memory = runsc.dir.join("meminfo");
                Ok(Stage::new(&cgroups, tree, &agent, &memory)?)
            })
            .await?
        };
        let words: Vec<&OsStr> = match image {
            None => vec![OsStr::new("run")],
            Some(image) => vec![
                OsStr::new("restore"),
                OsStr::new("-image-path"),
                image.as_os_str(),
            ],
        };
        runsc.launch(&words, token_pipe(&token)?, stage).await?;
        let live = self.take_in(spec, &runsc, slot, cgroups, token).await?;
        // The sandbox is in it by now.
        drop(netns);
        network::open(live.netns()).await?;
        set_inner_limits(&live, &spec.limits, AGENT_DEADLINE).await?;
        Ok(LiveBox {
            id: spec.id.clone(),
            record: live.record.to_value()?,
        })
    }

    /// Finds what `runsc` started, notes it and begins to watch it.
    async fn take_in(
        &self,
        spec: &BoxSpec,
        runsc: &Runsc,
        slot: Slot,
        cgroups: Cgroups,
        token: Secret,
    ) -> Result<Arc<Live>> {
        let (id, dir, root) = (spec.id.clone(), runsc.dir.clone(), runsc.root());
        let live = blocking(move || {
            let record = Record::of_started(&root, slot.number(), cgroups.clone())?;
            Note {
                slot: slot.number(),
                cgroups,
                record: Some(record.clone()),
            }
            .write(&dir)?;
            let pidfd = live::find(&record)
                .ok_or_else(|| Error::internal("the box ended as soon as it was started"))?;
            Ok(Live::new(id, record, token, pidfd, Some(slot))?)
        })
        .await?;
        let live = Arc::new(live);
        self.hold(Arc::clone(&live));
        Ok(live)
    }

    /// The program, known to be new enough.
    pub(crate) async fn program(&self) -> Result<std::path::PathBuf> {
        self.engine().await?;
        runsc::find(self.runsc.as_deref()).ok_or_else(no_runsc)
    }
}

pub(crate) fn no_runsc() -> Error {
    Error::host_not_ready("runsc is not installed")
        .hint("`sandkeep doctor` tells where to get it")
        .retryable(false)
}

/// Everything on the host that is there before the box is.
fn prepare(
    runsc: &Runsc,
    spec: &BoxSpec,
    slot: u32,
    first_id: u32,
    netns: i32,
    cgroups: &Cgroups,
    token: &Secret,
) -> Result<()> {
    // A box of this name that died with the server may have left something.
    remove_dir(&runsc.dir)?;
    cgroups.kill_all();
    cgroups.remove(CGROUP_DEADLINE)?;
    for dir in [&runsc.dir, &runsc.root(), &runsc.bundle()] {
        make_private_dir(dir)?;
    }
    // Written first: should the server die now, the next one knows the ids are used.
    Note {
        slot,
        cgroups: cgroups.clone(),
        record: None,
    }
    .write(&runsc.dir)?;
    write_token(&runsc.dir, token)?;
    let config = spec::config(&Words {
        hostname: &spec.hostname,
        first_id,
        limits: &spec.limits,
        netns: &format!("/proc/{}/fd/{netns}", std::process::id()),
    });
    fs::write(runsc.bundle().join("config.json"), config.to_string())
        .doing("writing the bundle of the box")?;
    fs::write(runsc.dir.join("meminfo"), spec::meminfo(&spec.limits))
        .doing("writing the size of the box")?;
    cgroups.create()?;
    cgroups.set_limits(&host_limits(&spec.limits))?;
    Ok(())
}

/// A pipe with the token in it; the agent reads it when first asked for one.
fn token_pipe(token: &Secret) -> Result<OwnedFd> {
    let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC).doing("making a pipe")?;
    let line = format!("{}\n", token.expose());
    // Far less than a pipe holds, so it is written whole and at once.
    rustix::io::write(&ours, line.as_bytes()).doing("writing the token of the agent")?;
    Ok(theirs)
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

/// Whether the agent answers within `wait`.
pub(crate) async fn answers(live: &Live, wait: Duration) -> bool {
    let asked = async {
        let mut agent = Agent::over(connect(live).await?).await?;
        agent.health().await
    };
    matches!(timeout(wait, asked).await, Ok(Ok(())))
}

/// Has the agent end every conversation with us, on both sides. What the network notes while its
/// kernel is written down may be written down by half: an agent that comes back from such an image
/// would wait for ever for the rest of a conversation (google/gvisor#14147).
pub(crate) async fn settle(live: &Live) {
    let last = async {
        let mut stream = connect(live).await?;
        stream.write_all(LAST_WORDS).await?;
        // It closes first, after all that came before.
        stream.read_to_end(&mut Vec::new()).await?;
        drop(stream);
        sleep(AGENT_PAUSE).await;
        Ok::<_, Error>(())
    };
    if !matches!(timeout(SETTLED_WITHIN, last).await, Ok(Ok(()))) {
        tracing::debug!(id = %live.id, "a box is paused though its agent did not settle");
    }
}

/// Limits that only the kernel of the box can hold. Also waits for the agent.
pub(crate) async fn set_inner_limits(live: &Live, limits: &Limits, wait: Duration) -> Result<()> {
    let request = LimitsRequest {
        open_files: limits.open_files.into(),
        pids: limits.pids.into(),
        memory_bytes: None,
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
    if live.record.cgroups.oom_kills().is_ok_and(|kills| kills > 0) {
        return Error::new(
            Code::ResourceExhausted,
            format!("box {} has too little memory to start", live.id),
        )
        .hint("give it more: limits.memory_mib");
    }
    Error::new(
        Code::BoxUnreachable,
        format!("box {} ended before its agent answered", live.id),
    )
}
