//! A file for sandboxes that tells nothing of the host.
//!
//! A mount of a file of the host shows its path on the host, and `statfs` of it what is free on
//! the host's disk. So the file is copied into a small file system in memory that holds nothing
//! else, and every sandbox gets a mount of that: it costs its memory once. The file system is the
//! root of a mount namespace that no process is in. So nothing of it is seen on the host, nothing
//! of the host is held there, and it is gone with this and the last mount of it.

use crate::failure::{Doing, Failure};
use rustix::{
    fs::{CWD, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, major, minor, open},
    io::Errno,
    mount::{
        MountFlags, MountPropagationFlags, OpenTreeFlags, UnmountFlags, mount, mount_change,
        mount_remount, open_tree, unmount,
    },
    process::{chdir, fchdir, pivot_root},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use std::{
    ffi::CString,
    fs::File,
    io::{self, Seek as _},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// The file's name in its file system.
pub const NAME: &str = "agent";
/// A directory on every system, to hold the file system until it becomes the root.
const STEP: &str = "/proc";
const BLOCK: u64 = 4096;
/// Starting a program takes a moment, on a busy host a longer one.
const PATIENCE: Duration = Duration::from_secs(10);

/// A file system in memory with one file.
#[derive(Debug)]
pub struct LoneFile {
    /// The mount namespace in which it is the root.
    namespace: File,
    source: Identity,
}

/// Which file it was, and which state of it.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: i64,
    changed: (i64, u64),
}

impl Identity {
    fn of(file: impl AsFd) -> io::Result<Self> {
        let found = fstat(file)?;
        Ok(Self {
            device: found.st_dev,
            inode: found.st_ino,
            size: found.st_size,
            changed: (found.st_mtime, found.st_mtime_nsec),
        })
    }
}

impl LoneFile {
    pub fn of(path: &Path, mode: u32) -> Result<Self, Failure> {
        let file = File::open(path).doing(format_args!("opening {}", path.display()))?;
        Self::copy(&file, mode, None)
    }

    /// `owner` is a user of the host; without one it is root's.
    pub fn copy(source: &File, mode: u32, owner: Option<u32>) -> Result<Self, Failure> {
        let identity = Identity::of(source).doing("looking at a file for sandboxes")?;
        let namespace = beside(|| fill(source, mode, owner))
            .doing("copying a file for sandboxes into memory")?;
        Ok(Self {
            namespace,
            source: identity,
        })
    }

    /// Whether it is a copy of this file as it is now, by whatever name.
    pub fn is_of(&self, file: impl AsFd) -> Result<bool, Failure> {
        let found = Identity::of(file).doing("looking at a file for sandboxes")?;
        Ok(found == self.source)
    }

    /// A mount of the file that is attached nowhere.
    pub fn mount(&self) -> Result<OwnedFd, Failure> {
        let take = || {
            // SAFETY: this thread gets a root and a working directory of its own, for it changes
            // them; memory and descriptors are not touched.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
            let tree = open_tree(
                CWD,
                Path::new("/").join(NAME),
                OpenTreeFlags::OPEN_TREE_CLONE
                    | OpenTreeFlags::OPEN_TREE_CLOEXEC
                    | OpenTreeFlags::AT_SYMLINK_NOFOLLOW,
            )?;
            Ok(tree)
        };
        beside(take).doing("taking a mount of a file for sandboxes")
    }
}

/// The file system of a mount as `mountinfo` has it, `major:minor`.
pub fn device(mount: impl AsFd) -> Result<String, Failure> {
    let device = fstat(mount).doing("looking at a mount")?.st_dev;
    Ok(format!("{}:{}", major(device), minor(device)))
}

/// In a thread of its own, which may go into other namespaces: it does not come back.
fn beside<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, work)?;
        thread
            .join()
            .map_err(|_| io::Error::other("the thread for it ended early"))?
    })
}

/// Makes this thread's root a file system with the file, in a mount namespace that it gives.
fn fill(source: &File, mode: u32, owner: Option<u32>) -> io::Result<File> {
    // SAFETY: this thread gets mounts, a root and a working directory of its own; memory and
    // descriptors are not touched.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    // By the thread's own name: `self` is the whole process.
    let namespace = File::open("/proc/thread-self/ns/mnt")?;
    mount_change(
        "/",
        MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
    )?;
    // No room beside the one file.
    let bytes = (source.metadata()?.len().div_ceil(BLOCK) + 1) * BLOCK;
    let options = CString::new(format!("mode=755,nr_inodes=8,size={bytes}"))?;
    // When it was run last tells what others do.
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    mount("tmpfs", STEP, "tmpfs", flags, Some(options.as_c_str()))?;
    let root = open(
        STEP,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    fchdir(&root)?;
    pivot_root(".", ".")?;
    // What was the root is on top now.
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")?;
    let create = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut target = File::from(open(Path::new("/").join(NAME), create, Mode::empty())?);
    let mut source = source;
    source.rewind()?;
    io::copy(&mut source, &mut target)?;
    if let Some(owner) = owner {
        fchown(
            &target,
            Some(Uid::from_raw(owner)),
            Some(Gid::from_raw(owner)),
        )?;
    }
    fchmod(&target, Mode::from_raw_mode(mode))?;
    // A program that is open for writing can not be run.
    drop(target);
    make_read_only(flags)?;
    Ok(namespace)
}

/// All mounts taken of the root are as it is then.
///
/// A program that another thread starts has what was just written open until it runs: the kernel
/// refuses while anybody can write, and afterwards nobody can.
fn make_read_only(flags: MountFlags) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        match mount_remount("/", flags | MountFlags::BIND | MountFlags::RDONLY, c"") {
            Err(Errno::BUSY) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            made => return made.map_err(io::Error::from),
        }
    }
}
