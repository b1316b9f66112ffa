//! Writing the memory of boxes to disk.

use crate::{
    criu::{self, Criu},
    elsewhere,
    launcher::protocol::{self, Restore, Save, Start},
    live::Live,
    seccomp::Filters,
    start::AGENT,
    ward::{CGROUP_DEADLINE, FREEZE_DEADLINE, Inner},
    writing,
};
use sandkeep_host::{
    failure::Doing as _,
    files::{Stamp, open_dir},
    proc,
    work::blocking,
};
use sandkeep_model::{Error, Result, SandboxId};
use sandkeep_ward::Engine;
use serde::{Deserialize, Serialize};
use std::{
    collections::HashSet,
    fs,
    io::{self, Read as _},
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// In an image, beside the files of CRIU (`*.img`): what we must know.
pub const NOTE: &str = "box.json";
const MOST_NOTE: u64 = 64 << 10;
/// The descriptor on which every agent listens.
const LISTENER: i32 = 3;
/// Bump it with the mounts, namespaces and descriptors of boxes.
const FORMAT: u32 = 2;
/// How the file with what CRIU knows of the kernel ends.
const KNOWN: &str = ".known";
const HANG_UP: Duration = Duration::from_secs(5);
/// A box in which somebody is in the middle of it for longer is refused by CRIU.
const PROGRAMS_START: Duration = Duration::from_secs(2);
#[cfg(target_arch = "x86_64")]
const MAKING_PROCESSES: &[libc::c_long] = &[libc::SYS_clone, libc::SYS_clone3, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const MAKING_PROCESSES: &[libc::c_long] = &[libc::SYS_clone, libc::SYS_clone3];

/// What must be known to read an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The inode of the agent's socket.
    listener: u64,
    /// What programs in it may have found that the processor can do, by name.
    #[serde(default)]
    pub processor: Vec<String>,
    /// Which start of which sandbox it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<Boot>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Boot {
    sandbox: SandboxId,
    id: String,
}

impl Note {
    pub fn read(image: &Path) -> Result<Self> {
        let mut text = Vec::new();
        fs::File::open(image.join(NOTE))
            .and_then(|file| file.take(MOST_NOTE).read_to_end(&mut text))
            .doing("reading the image")?;
        serde_json::from_slice(&text)
            .map_err(|error| Error::internal(format!("the image is not ours: {error}")))
    }
}

/// An image that can be read.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    note: Note,
    criu: protocol::Criu,
}

impl Image {
    pub fn agent(&self) -> PathBuf {
        self.path.join(AGENT)
    }

    /// What the sandbox had in `/proc/sys/kernel/random/boot_id`, if this is the memory of that
    /// very sandbox.
    pub fn boot_id_of(&self, sandbox: &SandboxId) -> Option<String> {
        let boot = self.note.boot.as_ref()?;
        (boot.sandbox == *sandbox && is_uuid(&boot.id)).then(|| boot.id.clone())
    }

    pub fn job(self, start: Start) -> Restore {
        Restore {
            start,
            criu: self.criu,
            image: self.path,
            listener: self.note.listener,
        }
    }
}

impl Inner {
    pub(crate) async fn engine(&self) -> Result<Engine> {
        let criu = self.criu().await?;
        // An image brings its seccomp programs along, and those of another list are refused.
        let list = Filters::compile()?.name();
        Ok(Engine {
            name: "criu".to_owned(),
            build: format!(
                "{} boxes-{FORMAT}-{list} {}",
                criu.version,
                std::env::consts::ARCH
            ),
        })
    }

    pub(crate) async fn criu(&self) -> Result<Criu> {
        let program = criu::find(self.criu.as_deref())
            .ok_or_else(|| criu::missing("CRIU is not installed"))?;
        let stamp = Stamp::of(&program)?;
        let mut known = self.engine.lock().await;
        if let Some((seen, criu)) = known.as_ref()
            && *seen == stamp
        {
            return Ok(criu.clone());
        }
        let criu = criu::look(&program).await?;
        *known = Some((stamp, criu.clone()));
        Ok(criu)
    }

    /// What CRIU found out about the kernel is for this boot and this build alone.
    fn call(&self, criu: &Criu) -> protocol::Criu {
        let name = format!("criu-{}-{}{KNOWN}", criu.version, proc::boot_id());
        protocol::Criu {
            program: criu.program.clone(),
            known: self.state_dir.join(name),
            careful: criu.is_careful(),
        }
    }

    /// Clears away what CRIU knew in earlier boots.
    pub(crate) fn forget_other_boots(state_dir: &Path) {
        let this = format!("{}{KNOWN}", proc::boot_id());
        for entry in fs::read_dir(state_dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.ends_with(KNOWN)
                && !name.ends_with(&this)
                && let Err(error) = fs::remove_file(entry.path())
            {
                tracing::debug!(%error, name, "left for the next start");
            }
        }
    }

    pub(crate) async fn open_image(&self, path: &Path) -> Result<Image> {
        let criu = self.criu().await?;
        Ok(Image {
            path: path.to_owned(),
            note: Note::read(path)?,
            criu: self.call(&criu),
        })
    }

    pub(crate) async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let live = self.must_hold(id)?;
        let criu = self.criu().await?;
        let (directory, writing) = {
            let (live, image) = (Arc::clone(&live), image.to_owned());
            let box_dir = self.box_dir(id);
            let keeps_connections = criu.keeps_connections();
            blocking(move || prepare(&live, &box_dir, &image, keeps_connections)).await?
        };
        let job = Save {
            pid: live.record.pid,
            cgroups: live.record.cgroups.clone(),
            criu: self.call(&criu),
            image: image.to_owned(),
        };
        let box_dir = self.box_dir(id);
        let saved = self.launcher.save(job, &directory, writing).await;
        // Who was to write it may have been killed, and CRIU goes on.
        writing::wait(&box_dir, &live.record.cgroups, writing::DEADLINE).await?;
        saved
    }

    /// What a launcher of an earlier server left in the box is gone when this returns, and so is
    /// what was left of it beside the box.
    pub(crate) async fn released(&self, id: &SandboxId) -> Result<()> {
        let live = self.must_hold(id)?;
        let cgroups = &live.record.cgroups;
        let writers = writing::wait(&self.box_dir(id), cgroups, writing::DEADLINE).await?;
        match writers.cgroups() {
            Some(name) if !self.is_of_our_launcher(name) => {
                let left = self.tree.child(name);
                blocking(move || Ok(left.clear(CGROUP_DEADLINE).map(drop)?)).await
            }
            _ => Ok(()),
        }
    }
}

/// An image may be of another server.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<usize> = text.split('-').map(str::len).collect();
    groups == [8, 4, 4, 4, 12]
        && text
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

/// Everything of an image that is not CRIU's. Gives the directory of the box and the lock of whoever
/// writes it.
fn prepare(
    live: &Live,
    box_dir: &Path,
    image: &Path,
    keeps_connections: bool,
) -> Result<(OwnedFd, OwnedFd)> {
    if !live.first.runs() {
        return Err(Error::conflict(format!("box {} has ended", live.id)));
    }
    if !live.record.cgroups.is_frozen()? {
        return Err(
            Error::conflict(format!("box {} is not frozen", live.id)).hint("freeze it first")
        );
    }
    hang_up(live)?;
    let_programs_start(live)?;
    if !keeps_connections && connections(live.record.pid)? > 0 {
        return Err(criu::missing(
            "the box has TCP connections open, which this CRIU can not bring back",
        ));
    }
    open_to_the_box(image).doing("writing the image")?;
    let note = Note {
        listener: listener(live.record.pid).doing("finding the socket of the agent")?,
        processor: elsewhere::instructions(),
        boot: live.record.own_boot_id.clone().map(|id| Boot {
            sandbox: live.id.clone(),
            id,
        }),
    };
    let text = serde_json::to_vec(&note).map_err(|error| Error::internal(error.to_string()))?;
    fs::write(image.join(NOTE), text).doing("writing the image")?;
    // A box maps the file of its agent: without it the image would be worth nothing once
    // there is a newer one.
    fs::copy(box_dir.join(AGENT), image.join(AGENT)).doing("writing the image")?;
    Ok((open_dir(box_dir)?, writing::begin(box_dir)?))
}

/// Processes read their image themselves when they come back, some as root of the host and some
/// as root of the box. Nobody else gets here: the way to it is closed.
pub fn open_to_the_box(image: &Path) -> io::Result<()> {
    fs::set_permissions(image, fs::Permissions::from_mode(0o755))
}

/// Lets the agent put down connections of ours that are over. It may have been frozen before it
/// saw their end; they are no part of the box and can not be written.
fn hang_up(live: &Live) -> Result<()> {
    let until = Instant::now() + HANG_UP;
    let open = || ours(live.record.pid).doing("looking at the connections of the agent");
    if !open()? {
        return Ok(());
    }
    live.record.cgroups.thaw();
    let mut still = true;
    while still && Instant::now() < until {
        thread::sleep(Duration::from_millis(2));
        still = open()?;
    }
    live.record.cgroups.freeze(FREEZE_DEADLINE)?;
    if still {
        return Err(criu::missing(
            "a connection to the agent of the box is open",
        ));
    }
    Ok(())
}

/// A process that starts another waits for it inside of the kernel, where CRIU can not stop it,
/// and the other stands still: nobody would ever go on (`vfork`). It takes a millisecond, so the
/// box is let go until nobody is in the middle of it.
fn let_programs_start(live: &Live) -> Result<()> {
    let until = Instant::now() + PROGRAMS_START;
    let cgroups = &live.record.cgroups;
    while Instant::now() < until && cgroups.processes().iter().any(|pid| starts_another(*pid)) {
        cgroups.thaw();
        thread::sleep(Duration::from_millis(2));
        cgroups.freeze(FREEZE_DEADLINE)?;
    }
    Ok(())
}

/// Whether a thread of a process that stands still is in a call that makes processes.
fn starts_another(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        // It has ended.
        return false;
    };
    threads.flatten().any(|thread| {
        fs::read_to_string(thread.path().join("syscall")).is_ok_and(|text| {
            let call = text.split_ascii_whitespace().next();
            call.and_then(|call| call.parse().ok())
                .is_some_and(|call: libc::c_long| MAKING_PROCESSES.contains(&call))
        })
    })
}

/// Whether a process has the other end of a connection that was made here: such sockets are of
/// our network namespace.
fn ours(pid: i32) -> io::Result<bool> {
    let known: HashSet<String> = fs::read_to_string("/proc/self/net/unix")?
        .lines()
        .skip(1)
        .filter_map(|line| line.split_ascii_whitespace().nth(6))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|link| link.to_str().is_some_and(|link| known.contains(link))))
}

/// The inode of the socket on which the agent listens.
fn listener(pid: i32) -> io::Result<u64> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{LISTENER}"))?;
    link.to_str()
        .and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']'))
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// TCP sockets in the network namespace of the box that are neither listening nor over.
fn connections(pid: i32) -> Result<usize> {
    const LISTENING: &str = "0A";
    const OVER: [&str; 2] = ["06", "07"];
    let mut count = 0;
    for file in ["tcp", "tcp6"] {
        let text = match fs::read_to_string(format!("/proc/{pid}/net/{file}")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other.doing("looking at the connections of the box")?,
        };
        count += text
            .lines()
            .skip(1)
            .filter_map(|line| line.split_ascii_whitespace().nth(3))
            .filter(|state| *state != LISTENING && !OVER.contains(state))
            .count();
    }
    Ok(count)
}
