//! How large the memory file systems of a box may grow.
//!
//! Their pages count as memory of the box, but no kill frees them: together they must stay
//! well below the limit, or a full /dev/shm would cost the box its agent.

use crate::failure::{Doing, Failure};
use rustix::{
    fs::{Mode, OFlags, ResolveFlags, open, openat2},
    mount::{FsPickFlags, fsconfig_reconfigure, fsconfig_set_string, fspick},
};
use std::os::fd::OwnedFd;

/// Size in bytes of /dev/shm for a box with this much memory.
pub const fn shm_bytes(memory: u64) -> u64 {
    memory / 2
}

/// Size in bytes of /run.
pub const fn run_bytes(memory: u64) -> u64 {
    memory / 8
}

/// Fits the sizes in a running box to a new memory limit.
pub fn resize(pid: i32, memory: u64) -> Result<(), Failure> {
    let root = open(
        format!("/proc/{pid}/root"),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening the root of the box")?;
    for (path, bytes) in [("dev/shm", shm_bytes(memory)), ("run", run_bytes(memory))] {
        resize_one(&root, path, bytes).doing(format_args!("changing the size of /{path}"))?;
    }
    Ok(())
}

fn resize_one(root: &OwnedFd, path: &str, bytes: u64) -> rustix::io::Result<()> {
    // The tree is the box's own: no link in it may lead us elsewhere.
    let target = openat2(
        root,
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS,
    )?;
    let context = fspick(
        target,
        "",
        FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC,
    )?;
    fsconfig_set_string(&context, "size", bytes.to_string())?;
    fsconfig_reconfigure(&context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn together_they_leave_room_for_the_agent() {
        let memory = 64 << 20;
        assert!(shm_bytes(memory) + run_bytes(memory) <= memory * 3 / 4);
    }
}
