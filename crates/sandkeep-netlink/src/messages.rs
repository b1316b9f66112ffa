//! Just enough netlink: messages are built by hand and sent in one write.
//!
//! A box waits for this, so starting `ip` and `nft` (some ten milliseconds) is out; a general
//! netlink library would be more code than the dozen messages needed here.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

pub const REQUEST: u16 = 0x1;
pub const ACK: u16 = 0x4;
pub const REPLACE: u16 = 0x100;
pub const EXCLUSIVE: u16 = 0x200;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
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
    pub fn send(mut self, protocol: i32) -> io::Result<()> {
        self.finish();
        let socket = open(protocol)?;
        send_all(&socket, &self.bytes)?;
        read_answers(&socket)
    }
}

fn open(protocol: i32) -> io::Result<OwnedFd> {
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
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
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
