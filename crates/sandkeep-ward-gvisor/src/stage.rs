//! What `runsc` finds when it starts: the box's cgroups, and a mount namespace of its own with
//! the box's disk in it. All of this goes away with the processes of the box.

use rustix::mount::{MountFlags, MoveMountFlags};
use sandkeep_host::{
    cgroup::Cgroups,
    failure::{Doing as _, Failure},
};
use sandkeep_model::Result;
use std::{
    ffi::CString,
    fs::{self, OpenOptions},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
        unix::fs::PermissionsExt as _,
    },
    path::Path,
};

/// The disk and the agent are mounted here, in the mount namespace of each box: the helper of
/// `runsc` has the box's ids only and could not walk into the server's private directories.
const PLACE: &str = "/run/sandkeep/gvisor";
pub const ROOT: &str = "/run/sandkeep/gvisor/root";
pub const AGENT: &str = "/run/sandkeep/gvisor/agent";

/// Makes the mount points; they stay empty in the namespace of the server.
pub fn prepare_host() -> Result<()> {
    fs::create_dir_all(ROOT).doing("making the mount points of boxes")?;
    for dir in ["/run/sandkeep", PLACE, ROOT] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
            .doing("opening the mount points of boxes")?;
    }
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(AGENT)
        .doing("making the mount points of boxes")?;
    Ok(())
}

/// Everything opened before the fork; used after it by system calls alone.
#[derive(Debug)]
pub struct Stage {
    cgroups: Vec<OwnedFd>,
    tree: OwnedFd,
    /// A mount of the agent that is attached nowhere.
    agent: OwnedFd,
    memory: CString,
}

impl Stage {
    /// `memory` is a file to stand for `/proc/meminfo`: `runsc` tells the box what it finds
    /// there, which shall be the box's limit.
    pub fn new(
        cgroups: &Cgroups,
        tree: OwnedFd,
        agent: OwnedFd,
        memory: &Path,
    ) -> std::result::Result<Self, Failure> {
        let opened = cgroups
            .branches
            .iter()
            .map(|branch| {
                let file = branch.dir.join("cgroup.procs");
                OpenOptions::new()
                    .write(true)
                    .open(&file)
                    .map(OwnedFd::from)
                    .doing(format_args!("opening {}", file.display()))
            })
            .collect::<std::result::Result<_, _>>()?;
        let text = |path: &Path| {
            CString::new(path.as_os_str().as_bytes())
                .map_err(io::Error::from)
                .doing("a path with a zero in it")
        };
        Ok(Self {
            cgroups: opened,
            tree,
            agent,
            memory: text(memory)?,
        })
    }

    /// Between fork and exec: only system calls on memory prepared before.
    pub fn enter(&self) -> io::Result<()> {
        for procs in &self.cgroups {
            rustix::io::write(procs, b"0")?;
        }
        raise_limits();
        // SAFETY: the process has one thread; its descriptors stay as they are.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
        rustix::mount::mount_change(
            c"/",
            rustix::mount::MountPropagationFlags::PRIVATE
                | rustix::mount::MountPropagationFlags::REC,
        )?;
        // `runsc` takes every namespace in which it sees these files for the host's own.
        rustix::mount::mount(
            c"none",
            c"/proc/sys/net",
            c"tmpfs",
            MountFlags::empty(),
            None,
        )?;
        rustix::mount::move_mount(
            self.tree.as_fd(),
            c"",
            rustix::fs::CWD,
            c"/run/sandkeep/gvisor/root",
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )?;
        rustix::mount::move_mount(
            self.agent.as_fd(),
            c"",
            rustix::fs::CWD,
            c"/run/sandkeep/gvisor/agent",
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )?;
        rustix::mount::mount_bind(self.memory.as_c_str(), c"/proc/meminfo")?;
        Ok(())
    }
}

/// Files the box has open are open in the sandbox, too. A server that is protected from the
/// kernel's killer must not pass that on.
fn raise_limits() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    // What can not be raised stays as it is.
    let _raised = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: most,
            maximum: most,
        },
    );
    let opened = rustix::fs::open(
        c"/proc/self/oom_score_adj",
        rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    );
    if let Ok(file) = opened {
        let _written = rustix::io::write(&file, b"0");
    }
}
