//! Pseudo-terminals.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use sandkeep_agent_api::process::PtySize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::users::User;

const DEFAULT_SIZE: PtySize = PtySize { cols: 80, rows: 24 };

/// The agent's end of a terminal.
#[derive(Debug)]
pub(crate) struct Terminal(AsyncFd<OwnedFd>);

impl Terminal {
    /// Makes a terminal and returns the process's end, which belongs to the user.
    pub(super) fn open(size: Option<PtySize>, user: &User) -> io::Result<(Self, OwnedFd)> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty())?;
        // So that programs may reopen their terminal by name.
        let owner = rustix::fs::Uid::from_raw(user.uid);
        rustix::fs::fchown(&slave, Some(owner), None)?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // SAFETY: the descriptor is open, owned by the wrapper, and never replaced or closed before it.
        let terminal = Self(unsafe { AsyncFd::register(master) }?);
        terminal.resize(size.unwrap_or(DEFAULT_SIZE))?;
        Ok((terminal, slave))
    }

    pub(super) fn resize(&self, size: PtySize) -> io::Result<()> {
        let clamp = |wanted: u32, default: u32| {
            let wanted = if wanted == 0 { default } else { wanted };
            u16::try_from(wanted).unwrap_or(u16::MAX)
        };
        let size = Winsize {
            ws_col: clamp(size.cols, DEFAULT_SIZE.cols),
            ws_row: clamp(size.rows, DEFAULT_SIZE.rows),
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        Ok(tcsetwinsize(self.0.get_ref(), size)?)
    }

    /// What the process wrote; 0 when nobody has the other end open any more.
    pub(super) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let result = self
            .0
            .async_io(Interest::READABLE, |fd| {
                Ok(rustix::io::read(fd, &mut *buffer)?)
            })
            .await;
        match result {
            // How a terminal says that the other side was closed.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(0),
            result => result,
        }
    }

    /// Reads what is there without waiting; 0 when there is nothing.
    pub(super) fn read_available(&self, buffer: &mut [u8]) -> usize {
        rustix::io::read(self.0.get_ref(), buffer).unwrap_or(0)
    }

    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = self
                .0
                .async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?))
                .await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }
}
