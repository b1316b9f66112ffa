//! What server, launcher and worker say to each other: one JSON value per packet, with
//! descriptors beside it.

use crate::cgroup::Cgroups;
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use sandkeep_model::Limits;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
};

/// No packet is larger; paths and limits are far below it.
const MOST_BYTES: usize = 64 * 1024;
const MOST_FDS: usize = 3;

/// The first packet to a launcher.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    /// The ward's cgroup tree.
    pub tree: Cgroups,
    /// The agent of new boxes, on the host.
    pub agent: PathBuf,
    /// Begins the name of every cgroup this launcher makes.
    pub tag: String,
    /// Workers to hold ready.
    pub spares: usize,
}

/// What a worker is to do. Beside it travel the socket for the answer and the box's directory,
/// in which the agent's file is; and for a box to write the lock that tells so.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Job {
    Start(Start),
    Restore(Restore),
    /// The same, and to end it before anything of it runs.
    Try(Restore),
    Save(Save),
}

/// A box to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    pub root: PathBuf,
    pub hostname: String,
    pub limits: Limits,
    /// The host id that is root in the box.
    pub first_id: u32,
    /// What the kernel of the sandbox calls the time since it started.
    pub boot_id: String,
    /// Whether root of the sandbox may open the agent's file. Only where the CRIU of this host
    /// can write no other sandbox.
    pub agent_is_readable: bool,
}

/// A box to bring back.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Restore {
    pub start: Start,
    pub criu: Criu,
    /// What CRIU wrote.
    pub image: PathBuf,
    /// The inode of the agent's socket in it.
    pub listener: u64,
}

/// A frozen box to write.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Save {
    pub pid: i32,
    pub cgroups: Cgroups,
    pub criu: Criu,
    /// An empty directory.
    pub image: PathBuf,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Criu {
    pub program: PathBuf,
    /// Where to keep what it has found out about the kernel.
    pub known: PathBuf,
    /// Whether it was built with our present patches: it brings deleted files back without following
    /// links of the sandbox, leaves out of the image what is to be wiped in copies, and makes user
    /// namespaces that belong to the root in them.
    pub careful: bool,
}

/// What a worker answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Answer {
    /// The agent runs; its pidfd is beside this.
    Started(Started),
    Saved,
    /// What was to be tried comes back.
    ComesBack,
    /// The box holds what can not be written.
    Refused {
        why: String,
    },
    Failed {
        message: String,
        errno: Option<i32>,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Started {
    pub pid: i32,
    pub start_ticks: u64,
    pub cgroups: Cgroups,
}

/// A packet as it came.
#[derive(Debug)]
pub struct Packet {
    pub bytes: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Packet {
    pub fn parse<T: DeserializeOwned>(&self) -> io::Result<T> {
        serde_json::from_slice(&self.bytes).map_err(io::Error::from)
    }
}

pub fn encode<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    let bytes = serde_json::to_vec(value)?;
    if bytes.len() > MOST_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the message is too long",
        ));
    }
    Ok(bytes)
}

/// Sends one packet; never half of it.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        match sendmsg(
            &socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Err(Errno::INTR) => {}
            other => return other.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives one packet; `None` when the other side has closed.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Packet>> {
    let mut bytes = vec![0_u8; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 && fds.is_empty() {
        return Ok(None);
    }
    bytes.truncate(received.bytes);
    Ok(Some(Packet { bytes, fds }))
}

/// A pair of sockets that keep packets whole.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_stay_whole_and_carry_descriptors() {
        let (a, b) = pair().unwrap();
        let (carried, other_end) = pair().unwrap();
        send(&a, b"one", &[carried.as_fd()]).unwrap();
        send(&a, b"two", &[]).unwrap();
        drop((a, carried));
        let first = receive(&b).unwrap().unwrap();
        assert_eq!((first.bytes.as_slice(), first.fds.len()), (&b"one"[..], 1));
        assert_eq!(receive(&b).unwrap().unwrap().bytes, b"two");
        assert!(receive(&b).unwrap().is_none());
        send(&first.fds[0], b"x", &[]).unwrap();
        assert_eq!(receive(&other_end).unwrap().unwrap().bytes, b"x");
    }

    #[test]
    fn a_message_that_no_packet_holds_is_refused() {
        assert!(encode(&"x".repeat(MOST_BYTES)).is_err());
    }
}
