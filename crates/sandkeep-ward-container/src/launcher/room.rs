//! The root that CRIU has while it saves or restores: its own, with nothing of the host in it
//! but what CRIU needs to run.
//!
//! CRIU follows paths that processes of the sandbox chose. So the worker makes a mount namespace
//! with a root in memory, read-only in the end: the programs and libraries of the host
//! (read-only, too), a fresh /proc, /dev/null, and a /run and a /tmp of its own. The image, the
//! disk of the sandbox and its agent are handed in as mounts. Everything else of the host is
//! detached before CRIU starts, so no path leads to it. The worker itself returns to the host's
//! tree as soon as CRIU runs, and keeps only a descriptor of that /run.
//!
//! CRIU examines the kernel for a tenth of a second at every start, unless it finds what it
//! saw last in a /run in memory. What it saw is kept by the ward between the runs.

use super::{
    mounts::{self, NOEXEC, NOSUID, RDONLY},
    protocol::Criu,
};
use crate::{
    failure::{Doing, Failure},
    sys,
};
use rustix::{
    fs::{CWD, Mode, OFlags, open, openat, readlink},
    mount::{
        MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
        UnmountFlags, mount, mount_change, mount_remount, move_mount, open_tree, unmount,
    },
    process::{chdir, fchdir, pivot_root},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use sandkeep_model::words;
use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::symlink,
    },
    path::{Path, PathBuf},
};

/// Where the image is mounted.
pub const IMAGE: &str = "/run/image";
pub const LOG: &str = "/run/criu.log";
/// The program itself, whichever one of the host it is.
pub const PROGRAM: &str = "/criu";
const RUN: &str = "/run";
/// What CRIU knows of the kernel; the name is its own.
const KNOWN: &str = "criu.kdat";
/// Programs and libraries, where systems have them. CRIU is linked with some, and has `tar`
/// write and read what is in memory file systems.
const SYSTEM: [&str; 10] = [
    "usr",
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "nix",
    "gnu",
    "etc/ld.so.cache",
];
/// What may be done with them.
const STILL: u64 = RDONLY | NOSUID | mounts::NODEV;
const NO_PROGRAMS: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// A mount namespace with such a root. This process is in it until [`Room::leave`].
pub struct Room {
    /// The mount namespace this process came from.
    home: File,
    inside: bool,
    /// Its /run, in reach from everywhere.
    run: OwnedFd,
    /// How the kernel names the mount namespace.
    name: String,
}

impl Room {
    /// Moves this single-threaded process into a new one.
    pub fn enter(criu: &Criu) -> Result<Self, Failure> {
        // All of the host that is needed is opened before its tree is left.
        let known = fs::read(&criu.known).ok();
        let things = Things::gather(criu)?;
        let home = File::open("/proc/self/ns/mnt").doing("opening the mounts of the host")?;
        // SAFETY: a new mount namespace touches neither memory nor descriptors.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.doing("making a mount namespace")?;
        // From here on it returns home when anything fails.
        let guard = Guard { home: Some(home) };
        mount_change(
            "/",
            MountPropagationFlags::REC | MountPropagationFlags::PRIVATE,
        )
        .doing("taking mounts apart from the host's")?;
        let run = things.furnish()?;
        if let Some(known) = known {
            fs::write(Path::new(RUN).join(KNOWN), known).doing("telling CRIU what it knows")?;
        }
        // The launcher lets the kernel reap; CRIU and we want to know how children ended.
        sys::reset_signals().doing("resetting signals")?;
        let name = readlink("/proc/self/ns/mnt", Vec::new())
            .doing("reading the name of the mount namespace")?;
        Ok(Self {
            home: guard.keep()?,
            inside: true,
            run,
            name: name.to_string_lossy().into_owned(),
        })
    }

    /// Takes this process back to the host's tree. What runs in the room stays there.
    pub fn leave(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.inside, false) {
            go_home(&self.home).doing("returning from the root of CRIU")?;
        }
        Ok(())
    }

    /// The link of its mount namespace, as /proc shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a file in its /run.
    pub fn open(&self, name: &str, flags: OFlags) -> Result<File, Failure> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        openat(&self.run, name, flags, Mode::empty())
            .map(File::from)
            .doing(format_args!("opening {name} of CRIU"))
    }

    fn read(&self, path: &str) -> Result<Vec<u8>, Failure> {
        let name = Path::new(path).file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        let mut bytes = Vec::new();
        self.open(&name, OFlags::RDONLY)?
            .read_to_end(&mut bytes)
            .doing(format_args!("reading {name} of CRIU"))?;
        Ok(bytes)
    }

    /// The log of the last run, as far as it is readable.
    pub fn log(&self) -> String {
        let bytes = self.read(LOG).unwrap_or_default();
        words::of_bytes(&bytes)
    }

    /// Keeps what CRIU has found out for the next time. Nothing is lost when this fails.
    pub fn remember(&self, criu: &Criu) {
        if criu.known.exists() {
            return;
        }
        let own = rustix::process::getpid().as_raw_nonzero();
        let fresh = criu.known.with_extension(own.to_string());
        let kept = self.read(KNOWN).is_ok_and(|known| {
            fs::write(&fresh, known)
                .and_then(|()| fs::rename(&fresh, &criu.known))
                .is_ok()
        });
        if !kept {
            let _gone = fs::remove_file(&fresh);
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // Whoever needs to know has left before.
        let _home = self.leave();
    }
}

/// Goes home when the way into the room ends early.
struct Guard {
    home: Option<File>,
}

impl Guard {
    fn keep(mut self) -> Result<File, Failure> {
        self.home
            .take()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
            .doing("opening the mounts of the host")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            let _back = go_home(&home);
        }
    }
}

fn go_home(home: &File) -> rustix::io::Result<()> {
    move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Mount))?;
    chdir("/")
}

/// What of the host is in every room.
struct Things {
    /// Where each goes, and whether it is a directory.
    mounts: Vec<(PathBuf, OwnedFd, bool)>,
    links: Vec<(PathBuf, PathBuf)>,
}

impl Things {
    fn gather(criu: &Criu) -> Result<Self, Failure> {
        let mut all = Self {
            mounts: Vec::new(),
            links: Vec::new(),
        };
        for name in SYSTEM {
            let at = Path::new("/").join(name);
            let doing = format!("opening {} for CRIU", at.display());
            match fs::symlink_metadata(&at) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).doing(doing),
                Ok(found) if found.is_symlink() => {
                    all.links
                        .push((name.into(), fs::read_link(&at).doing(doing)?));
                }
                Ok(found) => {
                    let tree = whole(&at).doing(&doing)?;
                    sys::set_mount_attributes_below(tree.as_fd(), STILL).doing(doing)?;
                    all.mounts.push((name.into(), tree, found.is_dir()));
                }
            }
        }
        let null = mounts::detached(CWD, "/dev/null").doing("opening /dev/null for CRIU")?;
        sys::set_mount_attributes(null.as_fd(), RDONLY | NOSUID | NOEXEC, None)
            .doing("opening /dev/null for CRIU")?;
        all.mounts.push(("dev/null".into(), null, false));
        let program = fs::canonicalize(&criu.program).doing("finding CRIU")?;
        let program = mounts::detached(CWD, program).doing("opening CRIU")?;
        sys::set_mount_attributes(program.as_fd(), STILL, None).doing("opening CRIU")?;
        all.mounts
            .push((PROGRAM.trim_start_matches('/').into(), program, false));
        Ok(all)
    }

    /// Makes a root of them the root of this process, with nothing of the host's left behind
    /// it, and gives its /run.
    fn furnish(self) -> Result<OwnedFd, Failure> {
        // Over the /run of this namespace: that is a directory everywhere.
        memory(RUN, c"mode=755,size=1m", NO_PROGRAMS)?;
        let root = directory(RUN)?;
        fchdir(&root).doing("entering the root of CRIU")?;
        pivot_root(".", ".").doing("changing the root")?;
        // What was the root is on top now.
        unmount(".", UnmountFlags::DETACH).doing("detaching the host's tree")?;
        chdir("/").doing("entering the root of CRIU")?;
        for (at, tree, is_dir) in self.mounts {
            let at = Path::new("/").join(at);
            if let Some(parent) = at.parent() {
                fs::create_dir_all(parent).doing("making the root of CRIU")?;
            }
            attach(&tree, &at, !is_dir)?;
        }
        for (at, target) in self.links {
            symlink(target, Path::new("/").join(at)).doing("making the root of CRIU")?;
        }
        for name in ["/proc", RUN, "/tmp", "/dev/pts"] {
            fs::create_dir(name).doing("making the root of CRIU")?;
        }
        mount(
            "proc",
            "/proc",
            "proc",
            MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC,
            None,
        )
        .doing("mounting /proc for CRIU")?;
        // CRIU asks whether the terminals of the sandbox are those of the host.
        mount(
            "devpts",
            "/dev/pts",
            "devpts",
            MountFlags::NOSUID | MountFlags::NOEXEC,
            Some(c"mode=600,ptmxmode=000,max=1"),
        )
        .doing("mounting /dev/pts for CRIU")?;
        // Root of the sandbox makes the places for its mounts there.
        memory("/tmp", c"mode=1777,size=16m", NO_PROGRAMS)?;
        memory(
            RUN,
            c"mode=755,size=16m",
            // The question is a script.
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV,
        )?;
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        mount_remount("/", flags, c"").doing("making the root of CRIU read-only")?;
        directory(RUN)
    }
}

fn directory(path: &str) -> Result<OwnedFd, Failure> {
    open(
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening the root of CRIU")
}

/// A copy of the mounts at a place and below it, attached nowhere.
fn whole(at: &Path) -> rustix::io::Result<OwnedFd> {
    open_tree(
        CWD,
        at,
        OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE
            | OpenTreeFlags::AT_SYMLINK_NOFOLLOW,
    )
}

/// A small file system in memory.
pub fn memory(
    at: &str,
    options: &std::ffi::CStr,
    attributes: MountAttrFlags,
) -> Result<(), Failure> {
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if attributes.contains(MountAttrFlags::MOUNT_ATTR_NOEXEC) {
        flags |= MountFlags::NOEXEC;
    }
    mount("tmpfs", at, "tmpfs", flags, Some(options)).doing(format_args!("mounting {at} for CRIU"))
}

/// Attaches a detached mount at a fresh directory or file.
pub fn attach(tree: &OwnedFd, at: impl AsRef<Path>, is_file: bool) -> Result<(), Failure> {
    let at = at.as_ref();
    let made = if is_file {
        fs::write(at, "")
    } else {
        fs::create_dir(at)
    };
    made.and_then(|()| {
        move_mount(tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(io::Error::from)
    })
    .doing(format_args!("mounting {} for CRIU", at.display()))
}
