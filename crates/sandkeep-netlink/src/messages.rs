//! Just enough netlink: messages are built by hand and sent in one write.
//!
//! A box waits for this, so starting `ip` and `nft` (some ten milliseconds) is out; a general
//! netlink library would be more code than the dozen messages needed here.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

pub const REQUEST: u16 = 0x1;
pub const ACK: u16 = 0x4;
pub const REPLACE: u16 = 0x100;
pub const EXCLUSIVE: u16 = 0x200;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;
/// Asks for everything there is.
pub const DUMP: u16 = 0x300;

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NESTED: u16 = 0x8000;

/// Messages for the kernel, one after the other.
#[derive(Debug, Default)]
pub struct Messages {
    bytes: Vec<u8>,
    start: usize,
    sequence: u32,
}

impl Messages {
    /// Starts the next message with its fixed part.
    pub fn begin(&mut self, kind: u16, flags: u16, fixed: &[u8]) {
        self.finish();
        self.start = self.bytes.len();
        self.sequence += 1;
        self.bytes.extend_from_slice(&0_u32.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes
            .extend_from_slice(&(flags | REQUEST).to_ne_bytes());
        self.bytes.extend_from_slice(&self.sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&0_u32.to_ne_bytes());
        self.bytes.extend_from_slice(fixed);
        self.pad();
    }

    pub fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(value.len() + 4).expect("attributes here are a few bytes");
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    /// Bytes that are no attribute, like the fixed part of a message in a nest.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.pad();
    }

    /// nf_tables writes numbers in network order.
    pub fn number(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_be_bytes());
    }

    /// nf_tables wants its names ended by a zero.
    pub fn text(&mut self, kind: u16, value: &str) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes);
    }

    pub fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(&0_u16.to_ne_bytes());
        self.bytes.extend_from_slice(&(kind | NESTED).to_ne_bytes());
        fill(self);
        let length = u16::try_from(self.bytes.len() - at).expect("a nest here is below 64 KiB");
        self.bytes[at..at + 2].copy_from_slice(&length.to_ne_bytes());
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(&mut self) {
        if self.bytes.len() > self.start {
            let length =
                u32::try_from(self.bytes.len() - self.start).expect("a message is below 4 GiB");
            self.bytes[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
        }
    }

    /// Sends all of them and reads the answers; the first refusal is the error.
    pub fn send(self, protocol: i32) -> io::Result<()> {
        self.send_on(&NetlinkSocket::open(protocol)?)
    }

    /// The same on a socket that stays open. At least one message must ask for an answer
    /// ([`ACK`]).
    pub fn send_on(mut self, socket: &NetlinkSocket) -> io::Result<()> {
        self.finish();
        socket.make_room(self.bytes.len());
        send_all(&socket.0, &self.bytes)?;
        read_answers(&socket.0)
    }

    /// Sends one question and gives the messages of the answer to `each`: the kind of each, and
    /// what follows its header.
    pub fn ask_on(
        mut self,
        socket: &NetlinkSocket,
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.finish();
        send_all(&socket.0, &self.bytes)?;
        socket.receive(0, &mut each).map(drop)
    }

    /// The same for a list.
    pub fn dump(mut self, protocol: i32, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        const NETLINK_GET_STRICT_CHK: i32 = 12;
        self.finish();
        let socket = NetlinkSocket::open(protocol)?;
        // The kernel filters, where it can: a machine may have a million routes.
        socket.option(libc::SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1);
        send_all(&socket.0, &self.bytes)?;
        loop {
            if socket.receive(0, &mut each)?.contains(&Heard::Done) {
                return Ok(());
            }
        }
    }
}

/// A message that is about the conversation, not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    Done,
    Acknowledged,
}

/// A netlink socket of the network namespace it was opened in, whichever thread uses it.
#[derive(Debug)]
pub struct NetlinkSocket(OwnedFd);

impl AsRawFd for NetlinkSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for NetlinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl NetlinkSocket {
    pub fn open(protocol: i32) -> io::Result<Self> {
        // SAFETY: a plain system call; the result is checked before it is owned.
        let raw = unsafe {
            libc::socket(
                libc::AF_NETLINK,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                protocol,
            )
        };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `raw` was just made by the kernel for us and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Hears what the kernel tells these groups (a bit each, `RTMGRP_*`).
    pub fn listening(protocol: i32, groups: u32) -> io::Result<Self> {
        let socket = Self::open(protocol)?;
        // SAFETY: `sockaddr_nl` is plain data for which zeroes are a value.
        let mut own: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        own.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        own.nl_groups = groups;
        // SAFETY: the pointer is to a live value of the length given.
        let bound = unsafe {
            libc::bind(
                socket.0.as_raw_fd(),
                (&raw const own).cast(),
                size_of::<libc::sockaddr_nl>() as libc::socklen_t,
            )
        };
        if bound == 0 {
            Ok(socket)
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// How many bytes the kernel keeps for us that were not read yet.
    pub fn keep_at_most(&self, bytes: i32) {
        // A different size only means that more or less is lost in a flood.
        self.option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes);
    }

    /// A batch goes in one write, so it must fit.
    fn make_room(&self, bytes: usize) {
        const USUAL: usize = 64 * 1024;
        if bytes > USUAL {
            // The kernel counts its own overhead, too. Too little is told by the write.
            self.option(
                libc::SOL_SOCKET,
                libc::SO_SNDBUFFORCE,
                i32::try_from(bytes.saturating_mul(2)).unwrap_or(i32::MAX),
            );
        }
    }

    fn option(&self, level: i32, name: i32, value: i32) {
        // SAFETY: the pointer is to a live value of the length given.
        let _set = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
    }

    /// One read of what has come; `WouldBlock` when nothing has. The kernel may have had more to
    /// tell than was kept: then the error is `ENOBUFS`.
    pub fn take_up(&self, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.receive(libc::MSG_DONTWAIT, &mut each).map(drop)
    }

    fn receive(&self, flags: i32, each: &mut dyn FnMut(u16, &[u8])) -> io::Result<Vec<Heard>> {
        let mut buffer = vec![0_u8; 32 * 1024];
        // SAFETY: the buffer is live and as long as said.
        let got = unsafe {
            libc::recv(
                self.0.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                flags,
            )
        };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        walk(&buffer[..got], each)
    }
}

fn walk(mut rest: &[u8], each: &mut dyn FnMut(u16, &[u8])) -> io::Result<Vec<Heard>> {
    let mut heard = Vec::new();
    while rest.len() >= HEADER {
        let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
        let Some(body) = rest.get(HEADER..length.max(HEADER)) else {
            break;
        };
        match u16::from_ne_bytes([rest[4], rest[5]]) {
            NLMSG_DONE => heard.push(Heard::Done),
            NLMSG_ERROR if body.len() >= 4 => {
                match i32::from_ne_bytes([body[0], body[1], body[2], body[3]]) {
                    0 => heard.push(Heard::Acknowledged),
                    code => return Err(io::Error::from_raw_os_error(-code)),
                }
            }
            kind => each(kind, body),
        }
        rest = rest
            .get(length.next_multiple_of(4).max(HEADER)..)
            .unwrap_or(&[]);
    }
    Ok(heard)
}

/// The attributes in a message, one after the other: what each is, and its value.
pub fn attributes(mut rest: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes([*rest.first()?, *rest.get(1)?]));
        let kind = u16::from_ne_bytes([*rest.get(2)?, *rest.get(3)?]) & !NESTED;
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    })
}

fn send_all(socket: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: `sockaddr_nl` is plain data for which zeroes are a value: the kernel.
    let mut kernel: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    kernel.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    // SAFETY: both pointers are to live values of the lengths given.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            0,
            (&raw const kernel).cast(),
            size_of::<libc::sockaddr_nl>() as libc::socklen_t,
        )
    };
    match usize::try_from(sent) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Netlink answers before the send returns, so what is there now is all there will be.
fn read_answers(socket: &OwnedFd) -> io::Result<()> {
    let mut buffer = [0_u8; 8192];
    let mut heard = false;
    loop {
        // SAFETY: the buffer is live and as long as said.
        let got = unsafe {
            libc::recv(
                socket.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                libc::MSG_DONTWAIT,
            )
        };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock if heard => Ok(()),
                io::ErrorKind::WouldBlock => {
                    Err(io::Error::other("the kernel did not acknowledge"))
                }
                _ => Err(error),
            };
        };
        let mut rest = &buffer[..got];
        while rest.len() >= HEADER + 4 {
            let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            if u16::from_ne_bytes([rest[4], rest[5]]) == NLMSG_ERROR {
                let code = i32::from_ne_bytes([rest[16], rest[17], rest[18], rest[19]]);
                if code != 0 {
                    return Err(io::Error::from_raw_os_error(-code));
                }
                heard = true;
            }
            let step = length.next_multiple_of(4).max(HEADER);
            rest = rest.get(step..).unwrap_or(&[]);
        }
    }
}
