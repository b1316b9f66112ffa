//! Starting a box: afresh, or from an image of its memory.

use crate::{
    network,
    record::{self, Live, Note},
    runsc::Runsc,
    spec::{self, Words, host_limits},
    stage::Stage,
    ward::Inner,
};
use rustix::pipe::{PipeFlags, pipe_with};
use sandkeep_agent_api::{channel::TOKEN_LENGTH, host::LimitsRequest};
use sandkeep_host::{
    cgroup::Cgroups,
    failure::Doing as _,
    files::{make_private_dir, remove_dir, write_token},
    idmap,
    slots::Slot,
    work::blocking,
};
use sandkeep_model::{Code, Error, Limits, Result, Secret, random_token};
use sandkeep_own_kernel as own_kernel;
use sandkeep_ward::{BoxSpec, LiveBox};
use std::{
    ffi::OsStr,
    fs,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
    sync::Arc,
    time::Duration,
};

/// Until the agent listens. Starting takes half a second, on a busy host some.
const AGENT_DEADLINE: Duration = Duration::from_secs(60);
const CGROUP_DEADLINE: Duration = Duration::from_secs(10);

impl Inner {
    /// `image` is a directory written by [`Inner::save`].
    pub(crate) async fn start(&self, spec: BoxSpec, image: Option<&Path>) -> Result<LiveBox> {
        spec.check()?;
        let made = self.make(&spec, image).await;
        if made.is_err() {
            self.roster.clear_half_made(&spec.id).await;
        }
        made
    }

    async fn make(&self, spec: &BoxSpec, image: Option<&Path>) -> Result<LiveBox> {
        let runsc = Runsc {
            release: self.release().await?,
            dir: self.roster.box_dir(&spec.id),
            name: spec.id.to_string(),
        };
        let slot = self.roster.slots.take()?;
        let cgroups = self.roster.tree.child(spec.id.as_str());
        let token = Secret::new(random_token(TOKEN_LENGTH));
        let netns = network::make().await?;
        let stage = {
            let (runsc, spec, cgroups) = (runsc.clone(), spec.clone(), cgroups.clone());
            let (number, first_id, netns) = (slot.number(), slot.first_id(), netns.as_raw_fd());
            let (token, agent) = (token.clone(), Arc::clone(&self.agent));
            blocking(move || {
                prepare(&runsc, &spec, number, first_id, netns, &cgroups, &token)?;
                let tree = idmap::mapped_tree(&spec.root, first_id)?;
                let memory = runsc.dir.join("meminfo");
                Ok(Stage::new(&cgroups, tree, agent.mount()?, &memory)?)
            })
            .await?
        };
        let words: Vec<&OsStr> = match image {
            None => vec![OsStr::new("run")],
            Some(image) => [OsStr::new("restore")]
                .into_iter()
                .chain(runsc.release.restore_flags().iter().map(OsStr::new))
                .chain([OsStr::new("-image-path"), image.as_os_str()])
                .collect(),
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
        let (id, runsc) = (spec.id.clone(), runsc.clone());
        let live = blocking(move || {
            let record = record::of_started(&runsc, slot.number(), cgroups.clone())?;
            Note {
                slot: slot.number(),
                cgroups,
                record: Some(record.clone()),
            }
            .write(&runsc.dir)?;
            let pidfd = record
                .find()
                .ok_or_else(|| Error::internal("the box ended as soon as it was started"))?;
            Ok(Live::new(id, record, token, (), pidfd, Some(slot))?)
        })
        .await?;
        let live = Arc::new(live);
        self.hold(Arc::clone(&live));
        Ok(live)
    }

    pub(crate) fn no_runsc(&self) -> Error {
        let error = match &self.runsc {
            Some(given) => Error::host_not_ready(format!(
                "{} is not a file; the setting `runsc` names it",
                given.display()
            )),
            None => Error::host_not_ready("runsc is not installed"),
        };
        error
            .hint("`sandkeep doctor` tells where to get it")
            .retryable(false)
    }
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

/// Limits that only the kernel of the box can hold. Also waits for the agent.
pub(crate) async fn set_inner_limits(live: &Live, limits: &Limits, wait: Duration) -> Result<()> {
    let request = LimitsRequest {
        open_files: limits.open_files.into(),
        pids: limits.pids.into(),
        memory_bytes: None,
    };
    own_kernel::set_limits(live, &request, wait, ended_early).await
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
