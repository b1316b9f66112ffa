//! The agent's file as sandboxes see it: one copy in memory for all of them.

use super::mounts::RDONLY;
use crate::{
    failure::{Doing, Failure},
    start::AGENT as STORED,
    sys::change_mount_attributes,
};
use rustix::fs::{Mode, OFlags, openat};
use sandkeep_host::lone_file::{LoneFile, device};
use std::{
    fs::File,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::Path,
};

/// It can be run and not read: nobody can watch it, lock it, or look into who runs it.
const MODE: u32 = 0o111;

/// The agent of new sandboxes.
pub struct Agents(LoneFile);

/// The agent for one sandbox: a mount of its file that is attached nowhere.
pub struct Agent {
    pub mount: OwnedFd,
    /// Its file system as `mountinfo` has it.
    pub device: String,
}

impl Agents {
    pub fn install(source: &Path) -> Result<Self, Failure> {
        LoneFile::of(source, MODE).map(Self)
    }

    /// The agent for the sandbox with this directory. Nobody can change it through this mount.
    /// Root in a sandbox is nobody to it, unless the file is given `to` the sandbox whose root
    /// has the id `first`.
    pub fn for_sandbox(
        &self,
        directory: &OwnedFd,
        to: Option<BorrowedFd<'_>>,
        first: u32,
    ) -> Result<Agent, Failure> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let stored = openat(directory, STORED, flags, Mode::empty()).doing("opening the agent")?;
        let stored = File::from(stored);
        let copy = || {
            let owner = to.is_some().then_some(first);
            Agent::from(&LoneFile::copy(&stored, MODE, owner)?, None)
        };
        // A sandbox that comes back may have an older one.
        if !self.0.is_of(&stored)? {
            return copy();
        }
        match Agent::from(&self.0, to) {
            // This kernel does not map the owners of files in memory.
            Err(_) if to.is_some() => copy(),
            other => other,
        }
    }
}

impl Agent {
    fn from(file: &LoneFile, to: Option<BorrowedFd<'_>>) -> Result<Self, Failure> {
        let mount = file.mount()?;
        if to.is_some() {
            change_mount_attributes(mount.as_fd(), RDONLY, 0, to)
                .doing("giving the agent to the sandbox")?;
        }
        let device = device(&mount)?;
        Ok(Self { mount, device })
    }
}
