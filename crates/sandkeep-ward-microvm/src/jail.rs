//! What a QEMU finds when it starts: nothing but itself. So do programs of the host that have to
//! look at what a box wrote.
//!
//! It is process 1 of a pid namespace, alone in its network namespace (with the cable of its
//! box) and its own mount namespace, whose root holds the programs of the host, read-only, and
//! nothing else. It has an id that is nobody's, no rights, and every file it needs is handed
//! over open. A guest that took its QEMU over has no more than that.

use crate::discard::Pretence;
use rustix::{
    fs::{CWD, FileType, Gid, Mode, Uid},
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change,
        mount_remount, unmount,
    },
    pipe::{PipeFlags, pipe_with},
    process::{Pid, PidfdFlags, Resource, Rlimit, Signal, pidfd_open, setrlimit},
    thread::{
        CapabilitySet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space,
        remove_capability_from_bounding_set, unshare_unsafe,
    },
};
use sandkeep_host::{
    cgroup::Cgroups,
    failure::{Doing as _, Failure},
    proc,
};
use sandkeep_model::Result;
use std::{
    ffi::CStr,
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::{fs::PermissionsExt as _, process::CommandExt as _},
    },
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

/// The root of every jail, in the mount namespace of each; empty in the server's.
const PLACE: &str = "/run/sandkeep/microvm";
const PLACE_C: &CStr = c"/run/sandkeep/microvm";
/// The last capability a kernel of today knows is 40.
const CAPABILITIES: u32 = 63;
/// The device of KVM has had this number since there is one.
const KVM: (u32, u32) = (10, 232);
const MOST_FILES: u64 = 1024;
const MOST_SAID: usize = 600;
/// Where `resize2fs` looks whether the kernel will fill the tables of a file system by itself.
/// That of the box does; to fill them here takes twice as long as all the rest.
const LEAVES_TABLES: &CStr = c"sys/fs/ext4/features/lazy_itable_init";

/// Makes the mount point.
pub fn prepare_host() -> Result<()> {
    fs::create_dir_all(PLACE).doing("making the place of machines")?;
    for dir in ["/run/sandkeep", PLACE] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755))
            .doing("opening the place of machines")?;
    }
    Ok(())
}

/// What a program that is to end may use before it does.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    pub memory: u64,
    /// No file it writes becomes longer.
    pub file: u64,
    pub cpu_seconds: u64,
    pub wait: Duration,
}

/// How a program in a jail ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    /// The beginning of what it complained about.
    pub said: String,
    /// It took too long and was ended.
    pub late: bool,
}

/// Everything opened before the fork; used after it by system calls alone.
#[derive(Debug)]
pub struct Jail {
    cgroups: Vec<OwnedFd>,
    /// `None`: an empty one that is nobody else's.
    netns: Option<OwnedFd>,
    /// Of a program that is to end, and is waited for.
    bounds: Option<Bounds>,
    /// Who it runs as.
    id: u32,
    /// What stays open across the start of the program.
    kept: Vec<RawFd>,
    pretence: Option<Pretence>,
    with_kvm: bool,
}

impl Jail {
    pub fn new(cgroups: &Cgroups, netns: OwnedFd, id: u32) -> std::result::Result<Self, Failure> {
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
            netns: Some(netns),
            bounds: None,
            id,
            kept: Vec::new(),
            pretence: None,
            with_kvm: false,
        })
    }

    /// For a program that does one thing and ends; in the server's cgroup.
    pub const fn for_one_task(id: u32, bounds: Bounds) -> Self {
        Self {
            cgroups: Vec::new(),
            netns: None,
            bounds: Some(bounds),
            id,
            kept: Vec::new(),
            pretence: None,
            with_kvm: false,
        }
    }

    /// Has the program find KVM.
    #[must_use]
    pub fn with_kvm(mut self) -> Self {
        self.with_kvm = true;
        self
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

    /// Runs a program in the jail of a task to its end, or to the end of its time.
    pub fn run(self, mut command: Command) -> std::result::Result<Ended, Failure> {
        let wait = self.bounds.map_or(Duration::ZERO, |bounds| bounds.wait);
        let (said, says) = pipe_with(PipeFlags::CLOEXEC).doing("making a pipe")?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(says));
        // SAFETY: as in `start`.
        unsafe { command.pre_exec(move || self.enter()) };
        let run = || -> io::Result<Ended> {
            let mut child = command.spawn()?;
            // Ours would keep the pipe open.
            drop(command);
            let pid = Pid::from_child(&child);
            let late = match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(pidfd) => !proc::ended_within(&pidfd, wait),
                Err(_) => true,
            };
            if late {
                // The program ends with the one that waits for it.
                child.kill()?;
            }
            Ok(Ended {
                status: child.wait()?,
                said: heard(&mut File::from(said)).unwrap_or_default(),
                late,
            })
        };
        run().doing("running a program in a jail")
    }

    /// Between fork and exec. What returns from here is the grandchild.
    fn enter(&self) -> io::Result<()> {
        for procs in &self.cgroups {
            rustix::io::write(procs, b"0")?;
        }
        be_ordinary();
        let mut apart = UnshareFlags::NEWNS
            | UnshareFlags::NEWPID
            | UnshareFlags::NEWIPC
            | UnshareFlags::NEWUTS;
        match &self.netns {
            Some(netns) => {
                move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            None => apart |= UnshareFlags::NEWNET,
        }
        // SAFETY: the process has one thread; its descriptors and memory stay as they are.
        unsafe { unshare_unsafe(apart) }?;
        // SAFETY: a fork of the only thread. The parent makes system calls until it ends, without
        // running anything else; the child makes system calls until it starts another program.
        match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()),
            0 => {}
            child => {
                let code = match self.bounds {
                    Some(_) => outlive(child),
                    None => 0,
                };
                // SAFETY: ends this process alone; nothing of it is to be flushed.
                unsafe { libc::_exit(code) }
            }
        }
        self.furnish()?;
        proc::close_all_on_exec()?;
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
            self.make_kvm()?;
        }
        if self.bounds.is_some() {
            for dir in [c"sys", c"sys/fs", c"sys/fs/ext4", c"sys/fs/ext4/features"] {
                rustix::fs::mkdirat(CWD, dir, open)?;
            }
            make_empty(LEAVES_TABLES)?;
        }
        rustix::process::pivot_root(c".", c"old")?;
        rustix::process::chdir(c"/")?;
        unmount(c"/old", UnmountFlags::DETACH)?;
        rustix::fs::unlinkat(CWD, c"/old", rustix::fs::AtFlags::REMOVEDIR)?;
        mount_remount(c"/", MountFlags::BIND | MountFlags::RDONLY | quiet, c"")?;
        Ok(())
    }

    /// A node of its own: the one of the host is for root and a group that nobody in here is in.
    fn make_kvm(&self) -> io::Result<()> {
        let quiet = MountFlags::NOSUID | MountFlags::NOEXEC;
        mount(c"dev", c"dev", c"tmpfs", quiet, Some(c"size=4k,mode=755"))?;
        let mode = Mode::RUSR | Mode::WUSR;
        let (major, minor) = KVM;
        rustix::fs::mknodat(
            CWD,
            c"dev/kvm",
            FileType::CharacterDevice,
            mode,
            rustix::fs::makedev(major, minor),
        )?;
        let (uid, gid) = (Uid::from_raw(self.id), Gid::from_raw(self.id));
        rustix::fs::chown(c"dev/kvm", Some(uid), Some(gid))?;
        mount_remount(c"dev", MountFlags::BIND | MountFlags::RDONLY | quiet, c"")?;
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
            limit(what, most)?;
        }
        if let Some(bounds) = self.bounds {
            for (what, most) in [
                (Resource::As, bounds.memory),
                (Resource::Fsize, bounds.file),
                (Resource::Cpu, bounds.cpu_seconds),
            ] {
                limit(what, most)?;
            }
            // The kernel forgets it when ids change, so after them.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        self.pretence.as_ref().map_or(Ok(()), Pretence::begin)
    }
}

fn limit(what: Resource, most: u64) -> rustix::io::Result<()> {
    let both = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    setrlimit(what, both)
}

/// Waits for the program in the jail, holding nothing of the server open, and ends as it did.
fn outlive(child: libc::pid_t) -> i32 {
    const FAILED: i32 = 127;
    let mut status = 0;
    // SAFETY: closes what is open in this process, which uses none of it any more; `status` is
    // written by the kernel and lives as long as the call.
    let waited = unsafe {
        libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0);
        libc::waitpid(child, &raw mut status, 0)
    };
    if waited == child && libc::WIFEXITED(status) {
        libc::WEXITSTATUS(status)
    } else {
        FAILED
    }
}

/// What a program that ended has said into a pipe, as far as it was not taken out.
pub fn heard(said: &mut File) -> Option<String> {
    let flags = rustix::fs::fcntl_getfl(&*said).ok()?;
    rustix::fs::fcntl_setfl(&*said, flags | rustix::fs::OFlags::NONBLOCK).ok()?;
    let mut text = vec![0; 4096];
    let count = said.read(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text[..count]);
    let short: String = text.trim().chars().take(MOST_SAID).collect();
    (!short.is_empty()).then_some(short)
}

fn make_empty(path: &CStr) -> rustix::io::Result<()> {
    use rustix::fs::OFlags;
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::ROTH).map(drop)
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
