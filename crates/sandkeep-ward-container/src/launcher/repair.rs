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

/// Lets nothing through but what CRIU sends to restore a socket: see `let_only_ours_through` in
/// deploy/criu/wakes.patch. Programs cannot mark what they send.
const ONLY_CRIU: [libc::sock_filter; 4] = {
    const fn step(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        #[expect(clippy::cast_possible_truncation, reason = "codes have 16 bits")]
        let code = code as u16;
        libc::sock_filter { code, jt, jf, k }
    }
    const MARK_OF_PACKET: u32 = (-0x1000_i32 + 20).cast_unsigned();
    const MARK_OF_CRIU: u32 = 0xC114;
    [
        step(
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            0,
            0,
            MARK_OF_PACKET,
        ),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            MARK_OF_CRIU,
        ),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
};

/// Sets every connection of these processes going again.
pub fn end(pids: &[i32]) -> Result<(), Failure> {
    // First all can hear each other, then all speak.
    [let_in, set_going]
        .into_iter()
        .try_for_each(|step| pids.iter().try_for_each(|pid| each_socket(*pid, step)))
        .doing("setting the connections of the box going")
}

fn each_socket(pid: i32, step: fn(&OwnedFd) -> io::Result<()>) -> io::Result<()> {
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
                Ok(socket) => step(&socket)?,
                Err(rustix::io::Errno::BADF | rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Takes CRIU's filter off, and leaves those that programs have set.
fn let_in(socket: &OwnedFd) -> io::Result<()> {
    let mut found = [libc::sock_filter {
        code: 0,
        jt: 0,
        jf: 0,
        k: 0,
    }; ONLY_CRIU.len()];
    // Counts steps, not bytes.
    let mut length = libc::socklen_t::try_from(found.len()).unwrap_or(0);
    // SAFETY: the pointers are to live values, and the kernel writes `length` steps at most.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_GET_FILTER,
            found.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let same = |(one, other): (&libc::sock_filter, &libc::sock_filter)| {
        (one.code, one.jt, one.jf, one.k) == (other.code, other.jt, other.jf, other.k)
    };
    // A longer one is not ours either.
    if asked != 0
        || usize::try_from(length) != Ok(ONLY_CRIU.len())
        || !found.iter().zip(&ONLY_CRIU).all(same)
    {
        return Ok(());
    }
    let none: libc::c_int = 0;
    // SAFETY: the pointer is to a live value of the size that is given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DETACH_FILTER,
            (&raw const none).cast(),
            libc::socklen_t::try_from(size_of::<libc::c_int>()).unwrap_or(4),
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
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
