//! What a QEMU finds when it starts: nothing but itself.
//!
//! It is process 1 of a pid namespace, alone in its network namespace (with the cable of its
//! box) and its own mount namespace, whose root holds the programs of the host, read-only, and
//! nothing else. It has an id that is nobody's, no rights, and every file it needs is handed
//! over open. A guest that took its QEMU over has no more than that.

use crate::discard::Pretence;
use rustix::{
    fs::{CWD, Gid, Mode, Uid},
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
        mount_remount, unmount,
    },
    process::{Resource, Rlimit, setrlimit},
    thread::{
        CapabilitySet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space,
        remove_capability_from_bounding_set, unshare_unsafe,
    },
};
use sandkeep_host::{
    cgroup::Cgroups,
    failure::{Doing as _, Failure},
};
use sandkeep_model::Result;
use std::{
    ffi::CStr,
    fs::{self, OpenOptions},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    process::Command,
};

/// The root of every jail, in the mount namespace of each; empty in the server's.
const PLACE: &str = "/run/sandkeep/microvm";
const PLACE_C: &CStr = c"/run/sandkeep/microvm";
/// The last capability a kernel of today knows is 40.
const CAPABILITIES: u32 = 63;
const MOST_FILES: u64 = 1024;

/// Makes the mount point.
pub fn prepare_host() -> Result<()> {
    fs::create_dir_all(PLACE).doing("making the place of machines")?;
    for dir in ["/run/sandkeep", PLACE] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
            .doing("opening the place of machines")?;
    }
    Ok(())
}

/// Everything opened before the fork; used after it by system calls alone.
#[derive(Debug)]
pub struct Jail {
    cgroups: Vec<OwnedFd>,
    netns: OwnedFd,
    /// Who it runs as.
    id: u32,
    /// What stays open across the start of the program.
    kept: Vec<RawFd>,
    pretence: Option<Pretence>,
    with_kvm: bool,
}

impl Jail {
    pub fn new(
        cgroups: &Cgroups,
        netns: OwnedFd,
        id: u32,
        with_kvm: bool,
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
        Ok(Self {
            cgroups: opened,
            netns,
            id,
            kept: Vec::new(),
            pretence: None,
            with_kvm,
        })
    }

    /// Has the program find this descriptor under the number it has here.
    pub fn keep(&mut self, fd: RawFd) {
        self.kept.push(fd);
    }

    /// Has the program believe that it gave memory back to all.
    pub(crate) fn pretend(&mut self, pretence: Pretence) {
        self.pretence = Some(pretence);
    }

    /// Starts the program in the jail and returns when it has been started. It is nobody's
    /// child; its number is in its cgroup.
    pub fn start(self, mut command: Command) -> std::result::Result<(), Failure> {
        // SAFETY: between fork and exec only `Jail::enter` runs, which makes system calls on
        // memory prepared before; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(move || self.enter()) };
        let ended = command.spawn().and_then(|mut child| child.wait());
        match ended.doing("starting QEMU")? {
            status if status.success() => Ok(()),
            status => Err(io::Error::other(format!("its jail was not made: {status}")))
                .doing("starting QEMU"),
        }
    }

    /// Between fork and exec. What returns from here is the grandchild.
    fn enter(&self) -> io::Result<()> {
        for procs in &self.cgroups {
            rustix::io::write(procs, b"0")?;
        }
        be_ordinary();
        move_into_link_name_space(self.netns.as_fd(), Some(LinkNameSpaceType::Network))?;
        let apart = UnshareFlags::NEWNS
            | UnshareFlags::NEWPID
            | UnshareFlags::NEWIPC
            | UnshareFlags::NEWUTS;
        // SAFETY: the process has one thread; its descriptors and memory stay as they are.
        unsafe { unshare_unsafe(apart) }?;
        // SAFETY: a fork of the only thread. The parent ends at once without running anything
        // else; the child makes system calls until it starts another program.
        match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()),
            0 => {}
            // SAFETY: ends this process alone; nothing of it is to be flushed.
            _ => unsafe { libc::_exit(0) },
        }
        self.furnish()?;
        for fd in &self.kept {
            // SAFETY: whoever gave the number keeps the descriptor open until the start.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?;
        }
        self.lose_rights()
    }

    fn furnish(&self) -> io::Result<()> {
        let quiet = MountFlags::NOSUID | MountFlags::NODEV;
        mount_change(
            c"/",
            MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
        )?;
        mount(
            c"jail",
            PLACE_C,
            c"tmpfs",
            quiet,
            Some(c"size=64k,mode=755"),
        )?;
        rustix::process::chdir(PLACE_C)?;
        let open = Mode::from_raw_mode(0o755);
        for dir in [c"usr", c"proc", c"dev", c"old"] {
            rustix::fs::mkdirat(CWD, dir, open)?;
        }
        mount_bind(c"/usr", c"usr")?;
        mount_remount(c"usr", MountFlags::BIND | MountFlags::RDONLY | quiet, c"")?;
        for (link, to) in [
            (c"lib", c"usr/lib"),
            (c"lib64", c"usr/lib64"),
            (c"bin", c"usr/bin"),
        ] {
            rustix::fs::symlinkat(to, CWD, link)?;
        }
        // Of processes it shows QEMU alone, and of the rest nothing where the kernel can.
        let flags = quiet | MountFlags::NOEXEC;
        if mount(c"proc", c"proc", c"proc", flags, Some(c"subset=pid")).is_err() {
            mount(c"proc", c"proc", c"proc", flags, None)?;
        }
        if self.with_kvm {
            let empty = rustix::fs::open(
                c"dev/kvm",
                rustix::fs::OFlags::CREATE
                    | rustix::fs::OFlags::WRONLY
                    | rustix::fs::OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            drop(empty);
            mount_bind(c"/dev/kvm", c"dev/kvm")?;
        }
        rustix::process::pivot_root(c".", c"old")?;
        rustix::process::chdir(c"/")?;
        unmount(c"/old", UnmountFlags::DETACH)?;
        rustix::fs::unlinkat(CWD, c"/old", rustix::fs::AtFlags::REMOVEDIR)?;
        mount_remount(c"/", MountFlags::BIND | MountFlags::RDONLY | quiet, c"")?;
        Ok(())
    }

    fn lose_rights(&self) -> io::Result<()> {
        for number in 0..=CAPABILITIES {
            let one = CapabilitySet::from_bits_retain(1 << number);
            // Beyond the last one the kernel knows it refuses.
            if remove_capability_from_bounding_set(one).is_err() {
                break;
            }
        }
        let (uid, gid) = (Uid::from_raw(self.id), Gid::from_raw(self.id));
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        // With the last id root's go the rights.
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        rustix::thread::set_no_new_privs(true)?;
        for (what, most) in [(Resource::Core, 0), (Resource::Nofile, MOST_FILES)] {
            setrlimit(
                what,
                Rlimit {
                    current: Some(most),
                    maximum: Some(most),
                },
            )?;
        }
        self.pretence.as_ref().map_or(Ok(()), Pretence::begin)
    }
}

/// A server that is protected from the kernel's killer must not pass that on.
fn be_ordinary() {
    let opened = rustix::fs::open(
        c"/proc/self/oom_score_adj",
        rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
        Mode::empty(),
    );
    if let Ok(file) = opened {
        let _written = rustix::io::write(&file, b"0");
    }
}
