//! The files a sandbox sees that are not on its disk: device nodes, /sys, and what stands in
//! for files of /proc that tell about the host.
//!
//! They are inodes of the sandbox alone. On an inode that two sandboxes see, or the host, each
//! could watch the other (inotify) and signal to it (flock). A worker makes them before it has
//! a job, with the host's rights: device nodes open nothing on a file system that was mounted
//! by a user namespace.

use super::{
    mounts::{self, DEVICES},
    processors::Processors,
};
use crate::{
    failure::{Doing, Failure},
    sys::set_mount_attributes,
};
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, linkat, makedev, mkdirat, mknodat, openat},
    mount::{MountAttrFlags, MoveMountFlags, move_mount},
};
use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

/// Files that stand in for those of /proc with the same names.
pub const LOADAVG: &str = "loadavg";
pub const BOOT_ID: &str = "boot_id";
/// An empty directory, to hide others.
pub const EMPTY: &str = "empty";
/// What becomes /sys.
pub const SYSTEM: &str = "sys";
/// Below it.
pub const PROCESSORS: &str = "devices/system/cpu";

/// The load of the host tells what others do. A sandbox has no number of its own.
const NO_LOAD: &str = "0.00 0.00 0.00 1/1 1\n";
/// Room for the files of some hundred processors.
const BYTES: &str = "8388608";
const INODES: &str = "16384";

/// A file system in memory with all of them, mounted nowhere yet.
pub struct Own {
    mount: OwnedFd,
    boot_id: OwnedFd,
}

impl Own {
    pub fn make(processors: &Processors) -> Result<Self, Failure> {
        let mount = mounts::fresh(
            "tmpfs",
            &[("mode", "755"), ("size", BYTES), ("nr_inodes", INODES)],
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
        )?;
        // What a mode says must be what a file gets.
        let umask = rustix::process::umask(Mode::empty());
        let filled = fill(mount.as_fd(), processors);
        rustix::process::umask(umask);
        let boot_id = filled.doing("making the files of the sandbox")?;
        Ok(Self { mount, boot_id })
    }

    pub fn set_boot_id(&self, id: &str) -> Result<(), Failure> {
        let write = || -> io::Result<()> {
            let mut file = File::from(self.boot_id.try_clone()?);
            writeln!(file, "{id}")
        };
        write().doing("naming this start of the sandbox")
    }

    /// Attaches all of it at a directory.
    pub fn attach(&self, target: impl AsFd) -> rustix::io::Result<()> {
        move_mount(
            &self.mount,
            "",
            target,
            "",
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH,
        )
    }

    /// One of them as a mount that is nowhere yet. All of it must be attached in the mount
    /// namespace of this process.
    pub fn part(&self, name: &str, attributes: u64) -> Result<OwnedFd, Failure> {
        let doing = format!("taking the sandbox's own {name}");
        let part = mounts::detached(&self.mount, name).doing(&doing)?;
        set_mount_attributes(part.as_fd(), attributes, None).doing(&doing)?;
        Ok(part)
    }

    /// Its file system as `mountinfo` has it, `major:minor`.
    pub fn device(&self) -> Result<String, Failure> {
        sandkeep_host::lone_file::device(&self.mount)
    }
}

/// Gives the file that is to hold the boot id.
fn fill(root: BorrowedFd<'_>, processors: &Processors) -> io::Result<OwnedFd> {
    for (name, major, minor) in DEVICES {
        mknodat(
            root,
            name,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            makedev(major, minor),
        )?;
    }
    mkdirat(root, EMPTY, Mode::from_raw_mode(0o555))?;
    write(root, LOADAVG, NO_LOAD)?;
    mkdirat(root, SYSTEM, Mode::from_raw_mode(0o555))?;
    let mut at = Path::new(SYSTEM).to_owned();
    for name in Path::new(PROCESSORS) {
        at.push(name);
        mkdirat(root, &at, Mode::from_raw_mode(0o555))?;
    }
    // A page for each text, not for each file: most of them are the same.
    let mut known: HashMap<&str, &Path> = HashMap::new();
    for directory in &processors.directories {
        mkdirat(root, at.join(directory), Mode::from_raw_mode(0o555))?;
    }
    for (path, text) in &processors.files {
        match known.get(text.as_str()) {
            Some(same) => linkat(root, at.join(same), root, at.join(path), AtFlags::empty())?,
            None => {
                write(root, at.join(path), text)?;
                known.insert(text, path);
            }
        }
    }
    write(root, BOOT_ID, "")
}

fn write(root: BorrowedFd<'_>, path: impl AsRef<Path>, text: &str) -> io::Result<OwnedFd> {
    let file = openat(
        root,
        path.as_ref(),
        OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::from_raw_mode(0o444),
    )?;
    let mut file = File::from(file);
    file.write_all(text.as_bytes())?;
    Ok(file.into())
}
