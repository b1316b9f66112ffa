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
    mount_setattr(mount, attributes, idmap, 0)
}

/// The same for it and every mount below it.
pub fn set_mount_attributes_below(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    mount_setattr(mount, attributes, None, libc::AT_RECURSIVE)
}

fn mount_setattr(
    mount: BorrowedFd<'_>,
    attributes: u64,
    idmap: Option<BorrowedFd<'_>>,
    flags: libc::c_int,
) -> io::Result<()> {
    let mut attr = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
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
