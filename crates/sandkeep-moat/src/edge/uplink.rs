//! The edge of a box with a network stack of its own (gVisor, microVM): the namespace holds
//! the host's end of a cable to it, and everything the box sends arrives there.
//!
//! ```text
//! table inet sandkeep {
//!   chain divert { type nat hook prerouting priority -100
//!     tcp sport AGENT accept          # answers of the agent
//!     meta l4proto tcp redirect to :PORT
//!     udp dport 53 redirect to :PORT
//!   }
//!   chain close { type filter hook prerouting priority 0
//!     <the host's addresses> accept   # what was redirected goes to them now
//!     ip6 daddr ff00::/8 accept       # neighbours find each other by these
//!     reject with icmpx port-unreachable
//!   }
//! }
//! ```
//!
//! Answers of the agent look like first packets when its connection is older than the rules.
//! Whoever else in the box sends from that port gets no further than the host's addresses,
//! where nobody listens but us, and we refuse what was not diverted.

use std::{io, net::IpAddr};

use super::{
    netlink::{AGENT_PORT, CREATE, EXCLUSIVE, HOST_END, HOST_V4, HOST_V6, Messages},
    rules::{self, CLOSE, DIVERT},
    untracked,
};

const HOOK_PREROUTING: u32 = 0;

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

/// Writes the rules into the namespace of this thread, in the place of older ones of ours. All
/// of it is one transaction: there is no moment without rules.
pub fn install(port: u16) -> io::Result<()> {
    let mut messages = Messages::default();
    rules::begin(&mut messages);
    // Made if it is not there, so that deleting it can not fail.
    rules::table(&mut messages, rules::NEW_TABLE, CREATE);
    rules::table(&mut messages, rules::DELETE_TABLE, 0);
    rules::table(&mut messages, rules::NEW_TABLE, CREATE | EXCLUSIVE);
    rules::chain_at(&mut messages, DIVERT, "nat", HOOK_PREROUTING, -100);
    rules::chain_at(&mut messages, CLOSE, "filter", HOOK_PREROUTING, 0);
    rules::accept_from_port(&mut messages, DIVERT, AGENT_PORT);
    rules::divert_to(&mut messages, port);
    for (family, at, start) in [
        (
            rules::FAMILY_V4,
            rules::V4_DESTINATION,
            &HOST_V4.octets()[..],
        ),
        (
            rules::FAMILY_V6,
            rules::V6_DESTINATION,
            &HOST_V6.octets()[..],
        ),
        (rules::FAMILY_V6, rules::V6_DESTINATION, &[0xff]),
    ] {
        rules::accept_to(&mut messages, CLOSE, family, at, start);
    }
    // The one refusal that every network stack passes on to its programs.
    rules::reject_rest(&mut messages, rules::PORT_UNREACHABLE);
    untracked::add(&mut messages, untracked::Place::Cable);
    rules::end(&mut messages);
    messages.send(libc::NETLINK_NETFILTER)
}
