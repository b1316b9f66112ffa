//! TCP connections that CRIU has stopped in order to read or write their state.
//!
//! In a box only the host may set them going: its network is the host's. And a CRIU that was
//! killed leaves them as they are.

use crate::failure::{Doing, Failure};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
};

const TCP_REPAIR: libc::c_int = 19;

/// Sets every connection of these processes going again.
pub fn end(pids: &[i32]) -> Result<(), Failure> {
    pids.iter()
        .try_for_each(|pid| end_of(*pid))
        .doing("setting the connections of the box going")
}

fn end_of(pid: i32) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        // It has ended.
        return Ok(());
    };
    let mut pidfd = None;
    for entry in entries.flatten() {
        let is_socket = fs::read_link(entry.path()).is_ok_and(|target| {
            target
                .as_os_str()
                .as_encoded_bytes()
                .starts_with(b"socket:")
        });
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let (true, Some(number)) = (is_socket, number) else {
            continue;
        };
        if pidfd.is_none() {
            let Some(pid) = Pid::from_raw(pid) else {
                return Ok(());
            };
            pidfd = Some(pidfd_open(pid, PidfdFlags::empty())?);
        }
        if let Some(pidfd) = &pidfd {
            match pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()) {
                Ok(socket) => set_going(&socket)?,
                Err(rustix::io::Errno::BADF | rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn set_going(socket: &OwnedFd) -> io::Result<()> {
    let mut value: libc::c_int = 0;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(4);
    // SAFETY: both pointers are to live values, and `length` is the size of `value`.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_TCP,
            TCP_REPAIR,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    // Not a TCP socket, or one that is well.
    if asked != 0 || value != 1 {
        return Ok(());
    }
    let off: libc::c_int = 0;
    // SAFETY: the pointer is to a live value of the size that is given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_TCP,
            TCP_REPAIR,
            (&raw const off).cast(),
            length,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
