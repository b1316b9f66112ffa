//! An agent that is its own copy in memory.
//!
//! A box that is written to disk with its memory maps the program of its PID 1. Were that a
//! file of the host, the box could only come back where that very build lies in that very
//! place; as a file in memory it is part of what is written.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::MemfdFlags;

const MARK: &str = "SANDKEEP_RESIDENT";

/// Goes on as a copy in memory; returns at once in the copy.
pub(crate) fn settle(arguments: &[OsString]) -> io::Result<()> {
    if std::env::var_os(MARK).is_some() {
        return Ok(());
    }
    let copy: OwnedFd = rustix::fs::memfd_create("sandkeep-agent", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(copy);
    io::copy(&mut File::open("/proc/self/exe")?, &mut file)?;
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
    let mut argv = vec![text(b"sandkeep-agent")?];
    for argument in arguments {
        argv.push(text(argument.as_bytes())?);
    }
    let mut envp = vec![text(format!("{MARK}=1").as_bytes())?];
    for (name, value) in std::env::vars_os() {
        envp.push(text(&[name.as_bytes(), b"=", value.as_bytes()].concat())?);
    }
    let pointers = |texts: &[CString]| {
        texts
            .iter()
            .map(|text| text.as_ptr())
            .chain([std::ptr::null()])
            .collect::<Vec<_>>()
    };
    let (argv_pointers, envp_pointers) = (pointers(&argv), pointers(&envp));
    // SAFETY: both lists end with a null pointer and point to terminated strings that live
    // until the call returns or replaces this program.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            argv_pointers.as_ptr(),
            envp_pointers.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    Err(io::Error::last_os_error())
}
