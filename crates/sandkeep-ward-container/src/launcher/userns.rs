//! The user namespace of a box: its ids 0 to 65535 are a range of host ids of its own.

use crate::{
    failure::{Doing, Failure},
    slots::IDS_PER_BOX,
};
use std::{fs, os::fd::OwnedFd};

/// Writes the maps of a fresh user namespace from outside.
pub fn map_ids(pid: i32, first_id: u32) -> Result<(), Failure> {
    let map = format!("0 {first_id} {IDS_PER_BOX}\n");
    fs::write(format!("/proc/{pid}/uid_map"), &map).doing("mapping the user ids of the box")?;
    fs::write(format!("/proc/{pid}/gid_map"), &map).doing("mapping the group ids of the box")
}

/// The namespace as a descriptor, for mounts that map owners by it.
pub fn open(pid: i32) -> Result<OwnedFd, Failure> {
    fs::File::open(format!("/proc/{pid}/ns/user"))
        .map(OwnedFd::from)
        .doing("opening the user namespace of the box")
}
