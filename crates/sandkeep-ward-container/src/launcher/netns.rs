//! The network namespace of a box: made before its user namespace, so that it belongs to
//! the host and root in the box has no power over it.

use crate::failure::{Doing, Failure};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs;

/// Moves this single-threaded process into a fresh network namespace with nothing but `lo`.
pub fn enter_fresh() -> Result<(), Failure> {
    // SAFETY: a new network namespace does not touch memory or descriptors.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.doing("making the network namespace")?;
    crate::sys::loopback_up().doing("switching lo on")?;
    // The box has no capability here; ports below 1024 and ping are opened for everybody.
    fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
        .doing("opening the low ports of the box")?;
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")
        .doing("opening ping in the box")?;
    Ok(())
}
