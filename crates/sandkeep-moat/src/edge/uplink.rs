//! The edge of a box with a network stack of its own (gVisor, microVM): the namespace holds
//! the host's end of a cable to it, and everything the box sends arrives there.

use std::{fs, io, net::IpAddr};

use super::netlink::{HOST_END, HOST_V4, HOST_V6};

/// Whether the namespace of this thread has such a cable. The box can not make one: it has no
/// say over its namespace.
pub fn is_here() -> bool {
    let Ok(name) = std::ffi::CString::new(HOST_END) else {
        return false;
    };
    // SAFETY: the name is a terminated string that lives until the call returns.
    unsafe { libc::if_nametoindex(name.as_ptr()) > 0 }
}

/// Where listeners must be: a redirected packet goes to the address of the device it came by.
pub fn addresses() -> Vec<IpAddr> {
    vec![HOST_V4.into(), HOST_V6.into()]
}

/// Every refusal is told at once: by default a kernel tells one a second, and a program waits for
/// the others.
pub fn refuse_at_once() {
    for limit in [
        "/proc/sys/net/ipv4/icmp_ratelimit",
        "/proc/sys/net/ipv6/icmp/ratelimit",
    ] {
        // Without it refusals are only slower. It is of this namespace.
        if let Err(error) = fs::write(limit, "0") {
            note(limit, &error);
        }
    }
}

fn note(limit: &str, error: &io::Error) {
    if error.kind() != io::ErrorKind::NotFound {
        tracing::debug!(limit, %error, "refusals of packets stay limited");
    }
}
