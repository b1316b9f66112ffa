//! What a sandbox may take of what the kernel counts by user.
//!
//! The kernel counts some things for the user who takes them and for the owner of every user
//! namespace around. Each sandbox has an owner of its own (see [`crate::sys::clone_owned_by`]),
//! so that what it takes is taken from nobody else; here is how much that may be.

use crate::failure::{Doing, Failure};
use rustix::{
    fs::{Mode, OFlags, openat},
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use sandkeep_model::Limits;
use std::{
    fs::File,
    io::{self, Write as _},
    os::fd::{AsFd, OwnedFd},
};

const MEMLOCK_BYTES: u64 = 8 << 20;
/// Every timer holds one, too.
const PENDING_SIGNALS: u64 = 8192;
/// What the kernel gives everybody; about ten queues of the usual size.
const QUEUE_BYTES: u64 = 819_200;

/// Files of /proc/sys/user, with what is in them for a sandbox. The host's own limits hold for
/// each sandbox as well, so it never gets more than they allow.
const PER_NAMESPACE: [(&str, u32); 12] = [
    // Development servers and editors watch whole trees.
    ("max_inotify_instances", 512),
    ("max_inotify_watches", 524_288),
    ("max_fanotify_groups", 0),
    ("max_fanotify_marks", 0),
    // Second walls: the calls are filtered.
    ("max_user_namespaces", 0),
    ("max_pid_namespaces", 0),
    // CRIU makes some in the user namespace of a sandbox, to look at its mounts.
    ("max_mnt_namespaces", 16),
    ("max_net_namespaces", 0),
    ("max_ipc_namespaces", 0),
    ("max_uts_namespaces", 0),
    ("max_time_namespaces", 0),
    // The one it is in is made last.
    ("max_cgroup_namespaces", 1),
];

/// For the worker, which has the host's rights; the sandbox inherits them.
pub fn of_processes(limits: &Limits) -> Result<(), Failure> {
    of_namespaces_to_be()?;
    set(Resource::Nofile, limits.open_files.into()).doing("limiting open files")?;
    // With 1 the kernel neither writes a core file nor starts the host's core dump program;
    // with 0 it would still start the program.
    set(Resource::Core, 1).doing("switching core dumps off")
}

/// Those that the kernel keeps as the most for all of a user namespace when it is made.
pub fn of_namespaces_to_be() -> Result<(), Failure> {
    set(Resource::Memlock, MEMLOCK_BYTES).doing("limiting locked memory")?;
    set(Resource::Sigpending, PENDING_SIGNALS).doing("limiting pending signals")?;
    set(Resource::Msgqueue, QUEUE_BYTES).doing("limiting message queues")
}

fn set(resource: Resource, wanted: u64) -> rustix::io::Result<()> {
    let both = |value| Rlimit {
        current: Some(value),
        maximum: Some(value),
    };
    match setrlimit(resource, both(wanted)) {
        // Raising above the server's own limit needs a right that not every root has.
        Err(Errno::PERM) => {
            let most = getrlimit(resource).maximum.unwrap_or(wanted);
            setrlimit(resource, both(wanted.min(most)))
        }
        other => other,
    }
}

/// Sets those of the user namespace this process is in; `sys` is any /proc/sys. Nobody in a sandbox
/// can change them: it takes a capability that root there does not have.
pub fn of_this_user_namespace(sys: impl AsFd) -> Result<(), Failure> {
    for (name, most) in PER_NAMESPACE {
        let path = format!("user/{name}");
        let file = match openat(&sys, &path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
            // Not every kernel has all of them.
            Err(Errno::NOENT) => continue,
            other => other.doing(format_args!("opening /proc/sys/{path} of the sandbox"))?,
        };
        File::from(file)
            .write_all(most.to_string().as_bytes())
            .doing(format_args!("writing /proc/sys/{path} of the sandbox"))?;
    }
    Ok(())
}

/// The same for another one. The process that goes there can not come back.
pub fn of_user_namespace(namespace: &OwnedFd) -> Result<(), Failure> {
    let doing = "limiting what the sandbox takes of the kernel";
    let (ours, theirs) = super::protocol::pair().doing(doing)?;
    if crate::sys::fork().doing(doing)? == 0 {
        drop(ours);
        let done = enter(namespace).and_then(|sys| of_this_user_namespace(&sys));
        let word = match done {
            Ok(()) => b"done".to_vec(),
            Err(failure) => failure.to_string().into_bytes(),
        };
        // When nobody waits any more there is nobody to tell.
        let _told = super::protocol::send(&theirs, &word, &[]);
        std::process::exit(0);
    }
    drop(theirs);
    match super::protocol::receive(&ours).doing(doing)? {
        Some(packet) if packet.bytes == b"done" => Ok(()),
        Some(packet) => Err(io::Error::other(
            String::from_utf8_lossy(&packet.bytes).into_owned(),
        ))
        .doing(doing),
        None => Err(io::Error::from(io::ErrorKind::BrokenPipe)).doing(doing),
    }
}

fn enter(namespace: &OwnedFd) -> Result<OwnedFd, Failure> {
    let sys = rustix::fs::open(
        "/proc/sys",
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing("opening /proc/sys")?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::User))
        .doing("entering the user namespace of the sandbox")?;
    Ok(sys)
}
