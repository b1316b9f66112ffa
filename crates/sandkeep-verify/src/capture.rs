//! Counts every packet that comes over the cable, by protocol, address and port.

use std::{
    ffi::CString,
    io, mem,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::Arc,
    thread,
};

use crate::{
    fault::{Doing as _, Result},
    world::{Seen, held},
};

const ALL_PROTOCOLS: u16 = 3;

/// In the network namespace of this thread.
pub fn start(device: &str, seen: Arc<Seen>) -> Result<()> {
    let socket = open(device).doing("watching the cable")?;
    thread::Builder::new()
        .name("capture".to_owned())
        .spawn(move || run(&socket, &seen))
        .doing("watching the cable")
        .map(drop)
}

fn open(device: &str) -> io::Result<OwnedFd> {
    let name = CString::new(device)?;
    // SAFETY: plain calls; the address is made by hand and as long as it says.
    unsafe {
        let index = libc::if_nametoindex(name.as_ptr());
        if index == 0 {
            return Err(io::Error::last_os_error());
        }
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        let socket = libc::socket(libc::AF_PACKET, kind, i32::from(ALL_PROTOCOLS.to_be()));
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(socket);
        let room: libc::c_int = 8 << 20;
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUF,
            (&raw const room).cast(),
            4,
        );
        let mut address: libc::sockaddr_ll = mem::zeroed();
        address.sll_family = 17;
        address.sll_protocol = ALL_PROTOCOLS.to_be();
        address.sll_ifindex = i32::try_from(index).map_err(io::Error::other)?;
        let size = u32::try_from(size_of::<libc::sockaddr_ll>()).map_err(io::Error::other)?;
        if libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(socket)
    }
}

fn run(socket: &OwnedFd, seen: &Seen) {
    let mut frame = [0_u8; 128];
    loop {
        // SAFETY: buffers are ours and as long as they say.
        let (size, direction) = unsafe {
            let mut from: libc::sockaddr_ll = mem::zeroed();
            let mut length = u32::try_from(size_of::<libc::sockaddr_ll>()).unwrap_or(20);
            let size = libc::recvfrom(
                socket.as_raw_fd(),
                frame.as_mut_ptr().cast(),
                frame.len(),
                0,
                (&raw mut from).cast(),
                &raw mut length,
            );
            (size, from.sll_pkttype)
        };
        let Ok(size) = usize::try_from(size) else {
            if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return;
        };
        // Our own answers go out over the same cable.
        if direction == libc::PACKET_OUTGOING {
            continue;
        }
        if let Some(found) = frame.get(..size).and_then(parsed) {
            *held(&seen.packets).entry(found).or_default() += 1;
        }
    }
}

fn parsed(frame: &[u8]) -> Option<(u8, IpAddr, u16)> {
    let kind = u16::from_be_bytes([*frame.get(12)?, *frame.get(13)?]);
    let packet = frame.get(14..)?;
    let (header, protocol, to): (usize, u8, IpAddr) = match kind {
        0x0800 => {
            let to: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
            let size = usize::from(packet.first()? & 15) * 4;
            (size, *packet.get(9)?, Ipv4Addr::from(to).into())
        }
        0x86dd => {
            let to: [u8; 16] = packet.get(24..40)?.try_into().ok()?;
            let to = Ipv6Addr::from(to);
            let protocol = *packet.get(6)?;
            let local = to.is_multicast() || (to.segments()[0] & 0xffc0) == 0xfe80;
            let cable = to.segments()[0] == 0xfd77;
            if matches!(protocol, 0 | 58) && (local || cable) {
                // Neighbours that look for each other.
                return None;
            }
            (40, protocol, to.into())
        }
        _ => return None,
    };
    let port = match protocol {
        6 | 17 => u16::from_be_bytes([*packet.get(header + 2)?, *packet.get(header + 3)?]),
        _ => 0,
    };
    Some((protocol, to, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_told_apart_and_short_ones_are_left() {
        let mut frame = vec![0; 14];
        frame[12] = 8;
        let mut packet = [0_u8; 24];
        packet[0] = 0x45;
        packet[9] = 17;
        packet[16..20].copy_from_slice(&[198, 18, 66, 6]);
        packet[22..24].copy_from_slice(&[0, 53]);
        frame.extend(packet);
        let to: IpAddr = "198.18.66.6".parse().unwrap();
        assert_eq!(parsed(&frame), Some((17, to, 53)));
        assert_eq!(parsed(&frame[..20]), None);
    }
}
