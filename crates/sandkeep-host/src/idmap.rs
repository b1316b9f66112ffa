//! A user namespace with the ids of one box, and a disk seen through it.

use crate::{
    failure::{Doing as _, Failure},
    slots::IDS_PER_BOX,
};
use rustix::{
    mount::{OpenTreeFlags, open_tree},
    process::{Pid, WaitOptions, waitpid},
};
use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
    path::Path,
};

/// The disk of a box as a mount that is nowhere yet, its owners mapped to the box's ids: what
/// is root's on the disk belongs to `first_id` for everybody who comes by this mount.
pub fn mapped_tree(root: &Path, first_id: u32) -> Result<OwnedFd, Failure> {
    let namespace = user_namespace(first_id)?;
    let tree = open_tree(
        rustix::fs::CWD,
        root,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )
    .doing(format_args!("opening the root {}", root.display()))?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: namespace.as_raw_fd() as u64,
    };
    // SAFETY: the path is a terminated empty string and `attributes` lives until the call
    // returns.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 {
        Ok(tree)
    } else {
        Err(io::Error::last_os_error()).doing("mapping the owners of the disk")
    }
}

/// A process has to be in it while its maps are written; the descriptor keeps it afterwards.
pub fn user_namespace(first_id: u32) -> Result<OwnedFd, Failure> {
    let (theirs, ours) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).doing("making a pipe")?;
    let waits = theirs.as_raw_fd();
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    // SAFETY: without CLONE_VM this is a fork of this thread alone. The child makes system
    // calls on plain numbers and ends; it touches no lock and no memory of other threads.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags as libc::c_long, 0, 0, 0, 0) };
    if pid == 0 {
        let mut byte = 0_u8;
        // SAFETY: as above; `byte` is on the child's own copy of the stack. The read ends when
        // the parent closes the other end, in whatever way. All else that was open is closed:
        // two such children made at once would hold each other's pipes open and wait for ever,
        // with the locks of the server in their hands.
        unsafe {
            if waits > 0 {
                libc::syscall(libc::SYS_close_range, 0, waits - 1, 0);
            }
            libc::syscall(libc::SYS_close_range, waits + 1, libc::c_uint::MAX, 0);
            libc::read(waits, (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    let child = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .filter(|_| pid > 0)
        .ok_or_else(io::Error::last_os_error)
        .doing("making a user namespace")?;
    drop(theirs);
    let made = map_and_open(child, first_id);
    drop(ours);
    // It ends by itself now; that somebody else reaped it is as good.
    let _ended = waitpid(Some(child), WaitOptions::empty());
    made
}

fn map_and_open(child: Pid, first_id: u32) -> Result<OwnedFd, Failure> {
    let map = format!("0 {first_id} {IDS_PER_BOX}\n");
    let of = |file: &str| format!("/proc/{}/{file}", child.as_raw_nonzero());
    fs::write(of("uid_map"), &map).doing("mapping the user ids of the box")?;
    fs::write(of("gid_map"), &map).doing("mapping the group ids of the box")?;
    fs::File::open(of("ns/user"))
        .map(OwnedFd::from)
        .doing("opening the user namespace of the box")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_made_at_once_do_not_wait_for_each_other() {
        let makers: Vec<_> = (0..8)
            .map(|at| {
                std::thread::spawn(move || {
                    for _ in 0..100 {
                        user_namespace((at + 1) * 1_000_000).expect("a namespace");
                    }
                })
            })
            .collect();
        for maker in makers {
            maker.join().expect("it ends");
        }
    }
}
