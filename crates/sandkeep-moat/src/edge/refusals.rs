//! What the kernel tells of the connections it refused with their first packet.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::atomic::{AtomicU32, Ordering},
};

use super::{
    netlink::{ACK, Messages, NetlinkSocket, attributes},
    rules::{LOG_GROUP, LOGGED_BYTES},
};

const SUBSYSTEM_LOG: u16 = 4 << 8;
const PACKET: u16 = SUBSYSTEM_LOG;
const CONFIG: u16 = SUBSYSTEM_LOG | 1;
const BIND: u8 = 1;
const COPY_PACKET: u8 = 2;
const NUMBERED: u16 = 1;
const PAYLOAD: u16 = 9;
/// Before the attributes of a message of this kind.
const FIXED: usize = 4;
const SEQUENCE: u16 = 12;
/// The kernel gathers so many, for at most this many hundredths of a second.
const GATHERED: u32 = 32;
const GATHERED_FOR: u32 = 1;
/// What was not read by then is lost, and counted by the numbers that are missing.
const KEPT: i32 = 256 * 1024;
/// Reads in one go.
const READS: usize = 16;

/// Hears of refused connections in one namespace.
#[derive(Debug)]
pub struct Refusals {
    socket: NetlinkSocket,
    /// The number of the next one, if none is lost.
    next: AtomicU32,
}

/// What was heard in one go.
#[derive(Debug, Default)]
pub struct Heard {
    /// Where they wanted to go.
    pub refused: Vec<SocketAddr>,
    /// Those of which no more is known.
    pub lost: u64,
}

impl AsRawFd for Refusals {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl AsFd for Refusals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Refusals {
    /// In the namespace of this thread.
    pub fn listen() -> io::Result<Self> {
        let socket = NetlinkSocket::open(libc::NETLINK_NETFILTER)?;
        socket.keep_at_most(KEPT);
        let [high, low] = LOG_GROUP.to_be_bytes();
        let fixed = [0, 0, high, low];
        let mut messages = Messages::default();
        messages.begin(CONFIG, ACK, &fixed);
        messages.attribute(1, &[BIND]);
        messages.send_on(&socket)?;
        let mut messages = Messages::default();
        messages.begin(CONFIG, ACK, &fixed);
        let mut mode = LOGGED_BYTES.to_be_bytes().to_vec();
        mode.extend([COPY_PACKET, 0]);
        messages.attribute(2, &mode);
        messages.number(5, GATHERED);
        messages.number(4, GATHERED_FOR);
        messages.attribute(6, &NUMBERED.to_be_bytes());
        messages.send_on(&socket)?;
        Ok(Self {
            socket,
            next: AtomicU32::new(0),
        })
    }

    /// What has come; `WouldBlock` when nothing has.
    pub fn take_up(&self) -> io::Result<Heard> {
        let mut heard = Heard::default();
        for read in 0..READS {
            let outcome = self.socket.take_up(|kind, body| {
                if kind == PACKET
                    && let Some((_, message)) = body.split_at_checked(FIXED)
                {
                    self.count(message, &mut heard);
                }
            });
            match outcome {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && read > 0 => break,
                // Some were lost in a flood; the next number tells how many.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(heard)
    }

    fn count(&self, message: &[u8], heard: &mut Heard) {
        let found = |wanted| attributes(message).find(|(kind, _)| *kind == wanted);
        if let Some((_, number)) = found(SEQUENCE)
            && let Ok(number) = <[u8; 4]>::try_from(number)
        {
            let number = u32::from_be_bytes(number);
            let expected = self.next.swap(number.wrapping_add(1), Ordering::Relaxed);
            heard.lost += u64::from(number.wrapping_sub(expected));
        }
        match found(PAYLOAD).and_then(|(_, packet)| destination(packet)) {
            Some(to) => heard.refused.push(to),
            None => heard.lost += 1,
        }
    }
}

/// Where a TCP packet goes.
fn destination(packet: &[u8]) -> Option<SocketAddr> {
    let (address, header): (IpAddr, usize) = match packet.first()? >> 4 {
        4 => {
            let octets: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
            let length = usize::from(packet[0] & 15) * 4;
            (Ipv4Addr::from(octets).into(), length)
        }
        6 => {
            let octets: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            (Ipv6Addr::from(octets).into(), tcp_in_v6(packet)?)
        }
        _ => return None,
    };
    let port: [u8; 2] = packet.get(header + 2..header + 4)?.try_into().ok()?;
    Some(SocketAddr::new(address, u16::from_be_bytes(port)))
}

/// Behind the extension headers, which the sandbox may have put there.
fn tcp_in_v6(packet: &[u8]) -> Option<usize> {
    const OPTIONS: [u8; 4] = [0, 43, 60, 135];
    let (mut kind, mut at) = (*packet.get(6)?, 40);
    while OPTIONS.contains(&kind) {
        kind = *packet.get(at)?;
        at += (usize::from(*packet.get(at + 1)?) + 1) * 8;
    }
    (i32::from(kind) == libc::IPPROTO_TCP).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_of_packets() {
        let mut v4 = vec![0x46; 24];
        v4[16..20].copy_from_slice(&[192, 0, 2, 7]);
        v4.extend([0x12, 0x34, 0x01, 0xbb]);
        assert_eq!(destination(&v4), Some("192.0.2.7:443".parse().unwrap()));
        let mut v6 = vec![0x60; 40];
        v6[6] = 60;
        v6[24..40].copy_from_slice(&Ipv6Addr::LOCALHOST.octets());
        v6.extend([6, 0, 0, 0, 0, 0, 0, 0, 0x12, 0x34, 0, 80]);
        assert_eq!(destination(&v6), Some("[::1]:80".parse().unwrap()));
        for length in 0..v6.len() {
            assert_eq!(destination(&v6[..length]), None);
        }
    }
}
