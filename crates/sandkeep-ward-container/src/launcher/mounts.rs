//! The file systems of a box.
//!
//! The root is hostile: a template may hold links anywhere. So it becomes the root first,
//! and only then other file systems are attached below it, each on a directory that is
//! opened without following links. The host's tree hangs on until then by a descriptor.

use super::{
    limits,
    own::{self, Own},
};
use crate::{
    failure::{Doing, Failure},
    sys::{change_mount_attributes, set_mount_attributes},
    tmpfs,
};
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, mkdirat, open, openat, openat2, symlinkat},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
        OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
        mount_change, move_mount, open_tree, unmount,
    },
    process::{chdir, fchdir, pivot_root},
};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

pub const NODEV: u64 = libc::MOUNT_ATTR_NODEV;
pub const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub const NOEXEC: u64 = libc::MOUNT_ATTR_NOEXEC;
pub const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
/// For what may be read and nothing else.
pub const STILL: u64 = RDONLY | NOSUID | NODEV | NOEXEC;
const STRICT: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// Device nodes every program expects, with their numbers; nothing that stores or reaches
/// anything.
pub const DEVICES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Terminals of a sandbox. The kernel has 4096 for the whole host.
pub const TERMINALS: u32 = 64;

/// Links that programs expect in /dev.
const DEV_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Files of /proc that tell about or command the whole host, or tell what others on it do:
/// the /dev/null of the sandbox is put over them.
pub const MASKED_FILES: [&str; 25] = [
    "kcore",
    "keys",
    "key-users",
    "timer_list",
    "timer_stats",
    "sched_debug",
    "latency_stats",
    "sysrq-trigger",
    "kmsg",
    "kpagecount",
    "kpageflags",
    "kpagecgroup",
    "kallsyms",
    "slabinfo",
    "locks",
    "diskstats",
    "partitions",
    "swaps",
    "interrupts",
    "softirqs",
    "schedstat",
    "zoneinfo",
    "buddyinfo",
    "pagetypeinfo",
    "cmdline",
];

/// Files of /proc that a sandbox has its own of, and which of [`own`] it is.
pub const REPLACED_FILES: [(&str, &str); 2] = [
    ("loadavg", own::LOADAVG),
    ("sys/kernel/random/boot_id", own::BOOT_ID),
];

/// Directories of /proc about the host: an empty one is put over them.
pub const MASKED_DIRS: [&str; 5] = ["acpi", "scsi", "driver", "fs", "pressure"];

/// Directories of /proc that may be read.
pub const READ_ONLY: [&str; 3] = ["sys", "irq", "bus"];

/// Where the agent's file is in the box; root there can neither write nor move it.
pub const AGENT: &str = "sandkeep-agent";

/// A copy of the mount at `path` that is attached nowhere.
pub fn detached(at: impl AsFd, path: impl AsRef<Path>) -> rustix::io::Result<OwnedFd> {
    open_tree(
        at,
        path.as_ref(),
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW,
    )
}

/// Made by the worker, which has the host's rights: the root with owners mapped into the box.
/// A device node in a template opens nothing. The pool is mounted `nosuid` on the host, where a
/// file that belongs to root of the sandbox would belong to root of the host; in the sandbox
/// sudo must work.
pub fn prepare_root(root: &Path, namespace: BorrowedFd<'_>) -> Result<OwnedFd, Failure> {
    let mount = detached(CWD, root).doing("opening the root of the sandbox")?;
    change_mount_attributes(mount.as_fd(), NODEV, NOSUID, Some(namespace))
        .doing("mapping the owners of the root (the file system must know idmapped mounts)")?;
    Ok(mount)
}

/// Makes `root` the root of this process. The host's tree stays attached on top of it, in
/// reach only of the descriptor that is returned.
///
/// It is mounted over the root of the host's tree, seen by nobody else: this process has the
/// ids of the sandbox already, and can go no way that is closed to others.
pub fn enter_root(root: BorrowedFd<'_>) -> Result<OwnedFd, Failure> {
    mount_change(
        "/",
        MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
    )
    .doing("taking the mounts of the box apart from the host's")?;
    let host = open(
        "/",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening the host's root")?;
    move_mount(
        root,
        "",
        &host,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
    .doing("mounting the root")?;
    fchdir(root).doing("entering the root")?;
    pivot_root(".", ".").doing("changing the root")?;
    Ok(host)
}

/// Lets go of the host's tree: after this nothing of it can be named.
pub fn leave_host(host: OwnedFd) -> Result<(), Failure> {
    fchdir(&host).doing("leaving the host's tree")?;
    drop(host);
    unmount(".", UnmountFlags::DETACH).doing("detaching the host's tree")?;
    chdir("/").doing("entering the root")
}

/// Everything below the root.
pub fn populate(
    host: &OwnedFd,
    own: &Own,
    agent: BorrowedFd<'_>,
    memory: u64,
) -> Result<(), Failure> {
    let root = open(
        "/",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening the root")?;
    // Parts of it can only be taken while it is mounted in the namespace of who takes them. It goes
    // with the host's tree: to unmount it alone takes the kernel milliseconds.
    let aside = openat(
        host,
        "proc",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening the host's /proc")?;
    own.attach(&aside)
        .doing("mounting the files of the sandbox")?;
    let proc = fresh("proc", &[], STRICT)?;
    attach(&proc, &directory(&root, "proc", 0o555)?).doing("mounting /proc")?;
    // Opened before it becomes read-only.
    let sys_of_proc = openat(
        &proc,
        "sys",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening /proc/sys")?;
    devices(own, &root, memory)?;
    close_proc(&proc, own)?;
    let sys = directory(&root, "sys", 0o555)?;
    attach(own.part(own::SYSTEM, STILL)?, &sys).doing("mounting /sys")?;
    temporary(&root)?;
    let run = fresh(
        "tmpfs",
        &[
            ("mode", "755"),
            ("size", &tmpfs::run_bytes(memory).to_string()),
        ],
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
    )?;
    attach(&run, &directory(&root, "run", 0o755)?).doing("mounting /run")?;
    // Many programs expect it, and the /run of the image is covered.
    mkdirat(&run, "lock", Mode::from_raw_mode(0o1777)).doing("making /run/lock")?;
    chmod(&run, "lock", 0o1777)?;
    let place = file(&run, AGENT)?;
    attach(agent, &place).doing("mounting the agent")?;
    // Last: mounts that are attached nowhere yet count as namespaces.
    limits::of_this_user_namespace(&sys_of_proc)
}

fn devices(own: &Own, root: &OwnedFd, memory: u64) -> Result<(), Failure> {
    let dev = fresh(
        "tmpfs",
        &[("mode", "755"), ("size", "65536"), ("nr_inodes", "256")],
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )?;
    attach(&dev, &directory(root, "dev", 0o755)?).doing("mounting /dev")?;
    for (name, _, _) in DEVICES {
        let doing = format_args!("mounting /dev/{name}").to_string();
        let node = own.part(name, NOSUID | NOEXEC)?;
        attach(&node, &file(&dev, name)?).doing(&doing)?;
    }
    for (name, target) in DEV_LINKS {
        symlinkat(target, &dev, name).doing(format_args!("making /dev/{name}"))?;
    }
    let pts = fresh(
        "devpts",
        &[
            ("gid", "5"),
            ("mode", "620"),
            ("ptmxmode", "666"),
            ("max", &TERMINALS.to_string()),
        ],
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )?;
    attach(&pts, &directory(&dev, "pts", 0o755)?).doing("mounting /dev/pts")?;
    let shm = fresh(
        "tmpfs",
        &[
            ("mode", "1777"),
            ("size", &tmpfs::shm_bytes(memory).to_string()),
        ],
        STRICT,
    )?;
    attach(&shm, &directory(&dev, "shm", 0o755)?).doing("mounting /dev/shm")?;
    let mqueue = fresh("mqueue", &[], STRICT)?;
    attach(&mqueue, &directory(&dev, "mqueue", 0o755)?).doing("mounting /dev/mqueue")
}

/// Root in the box is nobody to the files of /proc that matter; this is the second wall.
fn close_proc(proc: &OwnedFd, own: &Own) -> Result<(), Failure> {
    let put = |part: &str, attributes: u64, name: &str| -> Result<(), Failure> {
        let Some(target) = there(proc, name)? else {
            return Ok(());
        };
        attach(&own.part(part, attributes)?, &target)
            .doing(format_args!("putting another file over /proc/{name}"))
    };
    for name in MASKED_FILES {
        put("null", NOSUID | NOEXEC, name)?;
    }
    for name in MASKED_DIRS {
        put(own::EMPTY, STILL, name)?;
    }
    for name in READ_ONLY {
        if let Some(target) = there(proc, name)? {
            let doing = format!("making /proc/{name} read-only");
            let copy = detached(proc, name).doing(&doing)?;
            set_mount_attributes(copy.as_fd(), STILL, None).doing(&doing)?;
            attach(&copy, &target).doing(&doing)?;
        }
    }
    // Some of them are in what became read-only.
    for (name, part) in REPLACED_FILES {
        put(part, STILL, name)?;
    }
    Ok(())
}

/// /tmp is part of the root and of its disk limit; an image may lack it.
fn temporary(root: &OwnedFd) -> Result<(), Failure> {
    match mkdirat(root, "tmp", Mode::from_raw_mode(0o1777)) {
        Ok(()) => chmod(root, "tmp", 0o1777),
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error).doing("making /tmp"),
    }
}

/// Past the umask.
fn chmod(at: &OwnedFd, name: &str, mode: u32) -> Result<(), Failure> {
    rustix::fs::chmodat(at, name, Mode::from_raw_mode(mode), AtFlags::empty())
        .doing(format_args!("changing the mode of {name}"))
}

/// A file system of the box's own, attached nowhere yet.
pub fn fresh(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> Result<OwnedFd, Failure> {
    let make = || {
        let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (key, value) in options {
            fsconfig_set_string(&context, *key, *value)?;
        }
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    make().doing(format_args!("making a {kind} for the box"))
}

fn attach(mount: impl AsFd, target: &OwnedFd) -> rustix::io::Result<()> {
    move_mount(
        mount,
        "",
        target,
        "",
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
    )
}

/// Opens a directory directly below `at`, made if missing; a link in its place is refused.
fn directory(at: &OwnedFd, name: &str, mode: u32) -> Result<OwnedFd, Failure> {
    match mkdirat(at, name, Mode::from_raw_mode(mode)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error).doing(format_args!("making the directory {name}")),
    }
    openat2(
        at,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH,
    )
    .doing(format_args!(
        "opening the directory {name} (it must be no link)"
    ))
}

/// An empty file in one of our own file systems, to mount another file on.
fn file(at: &OwnedFd, name: &str) -> Result<OwnedFd, Failure> {
    let make = || {
        drop(openat(
            at,
            name,
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o644),
        )?);
        openat(
            at,
            name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
    };
    make().doing(format_args!("making the file {name}"))
}

/// Opens what may not exist on this kernel.
fn there(at: &OwnedFd, name: &str) -> Result<Option<OwnedFd>, Failure> {
    match openat(
        at,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error).doing(format_args!("opening /proc/{name}")),
    }
}
