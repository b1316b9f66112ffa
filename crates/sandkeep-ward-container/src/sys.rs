//! Kernel calls that no library wraps, each in a safe function.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

/// Forks this single-threaded process. 0 in the child.
pub fn fork() -> io::Result<i32> {
    // SAFETY: launcher and worker have one thread only, so the child may do whatever the
    // parent could.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(pid)
}

/// The constant of the libc crate is too narrow.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What `clone3` gave to the parent.
pub struct Cloned {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

/// Clones this single-threaded process into new namespaces; `None` in the child.
pub fn clone_into(flags: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Option<Cloned>> {
    let mut pidfd: RawFd = -1;
    // SAFETY: all zeroes is a valid `clone_args`.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags | libc::CLONE_PIDFD as u64;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM this is a fork; the worker has one thread only. `args` lives
    // until the call returns.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw mut args,
            size_of::<libc::clone_args>(),
        )
    };
    match i32::try_from(pid) {
        Ok(0) => Ok(None),
        Ok(pid) if pid > 0 => Ok(Some(Cloned {
            pid,
            // SAFETY: the kernel has put a fresh descriptor there, owned by nobody else.
            pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
        })),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets mount attributes on the mount that `mount` is.
pub fn set_mount_attributes(
    mount: BorrowedFd<'_>,
    attributes: u64,
    idmap: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    change_mount_attributes(mount, attributes, 0, idmap)
}

/// The same for it and every mount below it.
pub fn set_mount_attributes_below(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    mount_setattr(mount, (attributes, 0), None, libc::AT_RECURSIVE)
}

/// Clones into new namespaces, the first of them a user namespace that belongs to `owner`.
///
/// What the kernel counts for a user of a namespace it counts for the owner of the namespace,
/// too: inotify, queues, pending signals, locked memory. With root as the owner of all of them
/// one sandbox could use up what all of them and the host have.
pub fn clone_owned_by(
    owner: u32,
    flags: u64,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Option<Cloned>> {
    // Capabilities stay: without them not every host lets a user make namespaces.
    set_securebits(SECBIT_NO_SETUID_FIXUP)?;
    set_effective_user(owner)?;
    let cloned = clone_into(flags, cgroup);
    if !matches!(cloned, Ok(None)) {
        set_effective_user(0)?;
        set_securebits(0)?;
    }
    cloned
}

const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 1 << 2;

fn set_securebits(bits: libc::c_ulong) -> io::Result<()> {
    // SAFETY: takes a number and touches no memory.
    match unsafe { libc::prctl(libc::PR_SET_SECUREBITS, bits, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set_effective_user(id: u32) -> io::Result<()> {
    let same = libc::uid_t::MAX;
    // SAFETY: takes numbers and touches no memory; this process has one thread only.
    match unsafe { libc::syscall(libc::SYS_setresuid, same, id, same) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Does something with the rights that a user has over the user namespaces that belong to it: all
/// of them, even those that root of this host lacks. In a thread of its own, as credentials are a
/// thread's.
pub fn as_owner<T: Send>(owner: u32, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: these take numbers and touch no memory.
            let dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0) };
            set_securebits(SECBIT_NO_SETUID_FIXUP)?;
            set_effective_user(owner)?;
            let done = work();
            set_effective_user(0)?;
            // A change of user takes it from the whole process.
            // SAFETY: as above.
            unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable, 0, 0, 0) };
            Ok(done)
        });
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread for it has panicked")))
    })
}

/// Who a user namespace belongs to, as the user namespace of this process numbers users.
pub fn owner_of(namespace: BorrowedFd<'_>) -> io::Result<u32> {
    const NS_GET_OWNER_UID: libc::c_ulong = 0xb704;
    let mut owner: libc::uid_t = 0;
    // SAFETY: the kernel writes one number there.
    let done = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID as _, &raw mut owner) };
    if done == 0 {
        Ok(owner)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Sets some and takes others away.
pub fn change_mount_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    clear: u64,
    idmap: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    mount_setattr(mount, (set, clear), idmap, 0)
}

fn mount_setattr(
    mount: BorrowedFd<'_>,
    (set, clear): (u64, u64),
    idmap: Option<BorrowedFd<'_>>,
    flags: libc::c_int,
) -> io::Result<()> {
    let mut attr = libc::mount_attr {
        attr_set: set,
        attr_clr: clear,
        propagation: 0,
        userns_fd: 0,
    };
    if let Some(namespace) = idmap {
        attr.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attr.userns_fd = namespace.as_raw_fd() as u64;
    }
    // SAFETY: the path is a terminated empty string and `attr` lives until the call returns.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Marks every descriptor from `first` on to be closed by exec.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    close_range(first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC)
}

/// Makes `number` a copy of `fd` that exec keeps.
pub fn place_at(fd: RawFd, number: RawFd) -> io::Result<()> {
    // SAFETY: only used right before exec; what was there is not used any more.
    let done = unsafe { libc::dup2(fd, number) };
    if done == number {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn close_range(first: u32, last: u32, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: callers name descriptors that no live Rust value owns, or only set a flag.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Ignores the end of children: the kernel reaps them by itself.
pub fn ignore_children() {
    // SAFETY: SIG_IGN is a valid action and no handler of ours is replaced.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// All signals as a fresh program expects them: default actions, none blocked.
pub fn reset_signals() -> io::Result<()> {
    for signal in 1..=libc::SIGRTMAX() {
        // KILL and STOP refuse, and some numbers belong to the C library: nothing is lost.
        // SAFETY: SIG_DFL is a valid action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: all zeroes is a valid set, and the call only reads it.
    let done = unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut())
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Runs the program that `program` is. Returns only on error.
pub fn execute(
    program: BorrowedFd<'_>,
    arguments: &[&std::ffi::CStr],
    environment: &[&std::ffi::CStr],
) -> io::Error {
    let list = |texts: &[&std::ffi::CStr]| {
        texts
            .iter()
            .map(|text| text.as_ptr())
            .chain([std::ptr::null()])
            .collect::<Vec<_>>()
    };
    let (argv, envp) = (list(arguments), list(environment));
    // SAFETY: both lists end with a null pointer and point to terminated strings that live
    // until the call returns or replaces this program.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// Switches the loopback interface of the current network namespace on.
pub fn loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    // SAFETY: all zeroes is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = (*from).cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        i16::try_from(libc::IFF_UP | libc::IFF_RUNNING).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: `request` is what SIOCSIFFLAGS takes and lives until the call returns.
    let done = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFFLAGS as _,
            &raw const request,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
