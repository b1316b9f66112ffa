//! The packet rules of a sandbox, written for nf_tables:
//!
//! ```text
//! table inet sandkeep {
//!   map given4 { ipv4_addr : kinds }  # what our resolver gave, and by which rules (IPv6 alike)
//!   set closed4 { ranges }            # what cannot be reached; only where a rule names networks
//!   set denied4 { ranges }            # what an open policy takes out
//!   chain divert { type nat hook HOOK priority -100
//!     <own> accept                    # see Place
//!     dport 53 redirect to :PORT      # UDP and TCP
//!     10.0.0.1:80, 169.254.169.254:80 redirect to :PORT
//!     daddr @closed4 accept
//!     <network and ports> redirect to :PORT              # one for each rule that names one
//!     daddr @given4 has KIND, <ports> redirect to :PORT  # one for each kind of name rule
//!     daddr @denied4 accept; tcp redirect to :PORT       # where everything is open
//!   }
//!   chain close { type filter hook HOOK priority 0
//!     iifname eth0 drop               # at the end of a cable only
//!     <our listener> accept if it was diverted, else reset
//!     <own> accept                    # what was redirected goes there now
//!     tcp syn log group 1; tcp reject with tcp reset
//!     reject with icmpx
//!   }
//! }
//! ```
//!
//! What is not diverted is refused with its first packet. What is diverted only *can* be allowed:
//! the listener decides.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use super::{
    addresses::{BOX_V4, BOX_V6, INSIDE_V4},
    netlink::{
        ACK, AGENT_PORT, BOX_END, CREATE, EXCLUSIVE, HOST_V4, HOST_V6, Messages,
        nft::{
            self, Chain, DELETE_ELEMENTS, HOOK_OUTPUT, HOOK_PREROUTING, NEW_ELEMENTS, NEW_SET,
            Table,
            expressions::{self as e, Family},
        },
    },
    plan::{Kinds, Plan},
    untracked,
};
use crate::policy::{Addresses, Ranges};

/// Those who listen to this are told of refused connections.
pub const LOG_GROUP: u16 = 1;
/// Enough of a packet to see where it wanted to go.
pub const LOGGED_BYTES: u32 = 128;
/// Addresses of each family that may be given out at the same time.
pub const MOST_GIVEN: u32 = 1024;

const TABLE: Table = Table::inet("sandkeep");
const DIVERT: &str = "divert";
const CLOSE: &str = "close";

const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const DNS: u16 = 53;
const WEB: u16 = 80;
/// Elements in one message: a nest of attributes has less than 64 KiB.
const AT_ONCE: usize = 512;

/// Which end of the network the namespace is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The sandbox itself is in it: its programs send from here, and talk to each other on its
    /// own addresses.
    Inner,
    /// The host's end of a cable: everything a sandbox with a network stack of its own sends
    /// arrives here.
    Uplink,
}

impl Place {
    const fn hook(self) -> u32 {
        match self {
            Self::Inner => HOOK_OUTPUT,
            Self::Uplink => HOOK_PREROUTING,
        }
    }

    /// Where our listeners are, for a redirected packet goes there.
    fn listeners(self) -> [(Family, Vec<u8>); 2] {
        match self {
            Self::Inner => [
                (Family::V4, Ipv4Addr::LOCALHOST.octets().to_vec()),
                (Family::V6, Ipv6Addr::LOCALHOST.octets().to_vec()),
            ],
            Self::Uplink => [
                (Family::V4, HOST_V4.octets().to_vec()),
                (Family::V6, HOST_V6.octets().to_vec()),
            ],
        }
    }

    /// What every network stack passes on to its programs at once.
    const fn refusal(self) -> u8 {
        match self {
            Self::Inner => e::ADMIN_PROHIBITED,
            Self::Uplink => e::PORT_UNREACHABLE,
        }
    }
}

/// What the rules are made from.
#[derive(Debug, Clone, Copy)]
pub struct Ground {
    pub place: Place,
    pub port: u16,
    /// Whether somebody listens to what is refused.
    pub told: bool,
}

/// All rules, in the place of those that are there. It is one transaction: there is no moment
/// without rules.
pub fn all(ground: Ground, plan: &Plan, given: &HashMap<IpAddr, Kinds>) -> Messages {
    nft::transaction(|m| {
        TABLE.make_anew(m);
        sets(m, plan);
        chain(m, DIVERT, "nat", ground.place.hook(), -100);
        chain(m, CLOSE, "filter", ground.place.hook(), 0);
        divert(m, ground, plan);
        close(m, ground);
        if plan.has_names() {
            for family in Family::BOTH {
                let of_it = |(address, _): &(&IpAddr, &Kinds)| family_of(**address) == family;
                let elements: Vec<_> = given
                    .iter()
                    .filter(of_it)
                    .map(|(address, kinds)| (*address, *kinds))
                    .collect();
                mapped(m, NEW_ELEMENTS, family, &elements);
            }
        }
        let flows = match ground.place {
            Place::Inner => untracked::Place::Here(ground.port),
            Place::Uplink => untracked::Place::Cable,
        };
        untracked::add(m, flows);
    })
}

/// Changes what was given: the old value of each address (zero: none) and the new one.
pub fn change(changes: &[(IpAddr, Kinds, Kinds)]) -> Messages {
    nft::transaction(|m| {
        for family in Family::BOTH {
            let of_it = || {
                changes
                    .iter()
                    .filter(move |(address, ..)| family_of(*address) == family)
            };
            let old: Vec<_> = of_it()
                .filter(|(_, old, _)| *old != 0)
                .map(|(address, old, _)| (*address, *old))
                .collect();
            let new: Vec<_> = of_it()
                .filter(|(.., new)| *new != 0)
                .map(|(address, _, new)| (*address, *new))
                .collect();
            mapped(m, DELETE_ELEMENTS, family, &old);
            mapped(m, NEW_ELEMENTS, family, &new);
        }
    })
}

pub fn family_of(address: IpAddr) -> Family {
    match address {
        IpAddr::V4(_) => Family::V4,
        IpAddr::V6(_) => Family::V6,
    }
}

fn chain(m: &mut Messages, name: &str, kind: &str, hook: u32, priority: i32) {
    let chain = Chain {
        name,
        kind,
        hook,
        priority,
        policy: nft::ACCEPT,
        device: None,
    };
    TABLE.chain(m, chain);
}

fn rule(m: &mut Messages, chain: &str, expressions: impl FnOnce(&mut Messages)) {
    TABLE.rule(m, chain, expressions);
}

const fn name_of(set: Set, family: Family) -> &'static str {
    match (set, family) {
        (Set::Given, Family::V4) => "given4",
        (Set::Given, Family::V6) => "given6",
        (Set::Closed, Family::V4) => "closed4",
        (Set::Closed, Family::V6) => "closed6",
        (Set::Denied, Family::V4) => "denied4",
        (Set::Denied, Family::V6) => "denied6",
    }
}

#[derive(Debug, Clone, Copy)]
enum Set {
    Given,
    Closed,
    Denied,
}

fn sets(m: &mut Messages, plan: &Plan) {
    for family in Family::BOTH {
        if plan.has_names() {
            given_map(m, family);
        }
        for (set, addresses) in [(Set::Closed, &plan.closed), (Set::Denied, &plan.denied)] {
            let ranges = ranges_of(addresses, family);
            if !ranges.is_empty() {
                interval_set(m, name_of(set, family), family, ranges);
            }
        }
    }
}

const fn ranges_of(addresses: &Addresses, family: Family) -> &Ranges {
    match family {
        Family::V4 => &addresses.v4,
        Family::V6 => &addresses.v6,
    }
}

/// The numbers of types are for tools that list what is there.
const fn type_of(family: Family) -> u32 {
    match family {
        Family::V4 => 7,
        Family::V6 => 8,
    }
}

fn new_set(m: &mut Messages, name: &str, family: Family, flags: u32) {
    TABLE.about(m, NEW_SET, CREATE | EXCLUSIVE);
    m.text(2, name);
    m.number(3, flags);
    m.number(4, type_of(family));
    m.number(5, u32::from(family == Family::V6) * 12 + 4);
    // A number for this transaction, which nothing here refers to.
    m.number(10, 1);
}

fn given_map(m: &mut Messages, family: Family) {
    const MAP: u32 = 8;
    const TYPE_MARK: u32 = 19;
    new_set(m, name_of(Set::Given, family), family, MAP);
    m.number(6, TYPE_MARK);
    m.number(7, 4);
    m.nested(9, |m| m.number(1, MOST_GIVEN));
}

fn interval_set(m: &mut Messages, name: &str, family: Family, ranges: &Ranges) {
    const INTERVAL: u32 = 4;
    const END: u32 = 1;
    new_set(m, name, family, INTERVAL);
    let last = if family == Family::V4 {
        u128::from(u32::MAX)
    } else {
        u128::MAX
    };
    let ends: Vec<(u128, bool)> = ranges
        .iter()
        .flat_map(|(low, high)| {
            let end = (high < last).then(|| (high + 1, true));
            std::iter::once((low, false)).chain(end)
        })
        .collect();
    for some in ends.chunks(AT_ONCE) {
        elements(m, NEW_ELEMENTS, name, |m| {
            for (number, is_end) in some {
                m.nested(1, |m| {
                    let bytes = number.to_be_bytes();
                    m.nested(1, |m| m.attribute(1, &bytes[16 - family.size()..]));
                    if *is_end {
                        m.number(3, END);
                    }
                });
            }
        });
    }
}

fn elements(m: &mut Messages, kind: u16, set: &str, fill: impl FnOnce(&mut Messages)) {
    let flags = if kind == NEW_ELEMENTS { CREATE } else { 0 };
    // Answered, because a batch of nothing else must be.
    TABLE.about(m, kind, flags | ACK);
    m.text(2, set);
    m.nested(3, fill);
}

fn mapped(m: &mut Messages, kind: u16, family: Family, given: &[(IpAddr, Kinds)]) {
    for some in given.chunks(AT_ONCE) {
        elements(m, kind, name_of(Set::Given, family), |m| {
            for (address, kinds) in some {
                m.nested(1, |m| {
                    m.nested(1, |m| match address {
                        IpAddr::V4(v4) => m.attribute(1, &v4.octets()),
                        IpAddr::V6(v6) => m.attribute(1, &v6.octets()),
                    });
                    m.nested(2, |m| m.attribute(1, &kinds.to_be_bytes()));
                });
            }
        });
    }
}

fn divert(m: &mut Messages, ground: Ground, plan: &Plan) {
    let port = ground.port;
    match ground.place {
        Place::Inner => own_addresses(m, DIVERT),
        // Answers of the agent look like first packets when its connection is older than the
        // rules. Whoever else in the sandbox sends from that port gets no further than `close`.
        Place::Uplink => rule(m, DIVERT, |m| {
            e::is_tcp(m);
            e::source_port_is(m, AGENT_PORT);
            e::accept(m);
        }),
    }
    for of_protocol in [e::is_udp, e::is_tcp] {
        rule(m, DIVERT, |m| {
            of_protocol(m);
            e::port_within(m, (DNS, DNS));
            e::redirect(m, port);
        });
    }
    for inside in [INSIDE_V4, METADATA] {
        rule(m, DIVERT, |m| {
            e::destination_starts(m, Family::V4, &inside.octets());
            e::is_tcp(m);
            e::port_within(m, (WEB, WEB));
            e::redirect(m, port);
        });
    }
    leave(m, Set::Closed, &plan.closed);
    for (net, ports) in &plan.nets {
        rule(m, DIVERT, |m| {
            let (family, network) = match net.network() {
                IpAddr::V4(v4) => (Family::V4, v4.octets().to_vec()),
                IpAddr::V6(v6) => (Family::V6, v6.octets().to_vec()),
            };
            e::destination_within(m, family, &network, net.prefix_len());
            e::is_tcp(m);
            e::port_within(m, *ports);
            e::redirect(m, port);
        });
    }
    for (at, kind) in plan.kinds.iter().enumerate() {
        for (family, ports) in Family::BOTH
            .into_iter()
            .flat_map(|family| kind.iter().map(move |ports| (family, ports)))
        {
            rule(m, DIVERT, |m| {
                e::destination_marked(m, family, name_of(Set::Given, family), 1 << at);
                e::is_tcp(m);
                e::port_within(m, *ports);
                e::redirect(m, port);
            });
        }
    }
    if plan.open {
        leave(m, Set::Denied, &plan.denied);
        rule(m, DIVERT, |m| {
            e::is_tcp(m);
            e::redirect(m, port);
        });
    }
}

/// What goes there is not diverted, so it is refused.
fn leave(m: &mut Messages, set: Set, addresses: &Addresses) {
    for family in Family::BOTH {
        if !ranges_of(addresses, family).is_empty() {
            rule(m, DIVERT, |m| {
                e::destination_in(m, family, name_of(set, family));
                e::accept(m);
            });
        }
    }
}

fn close(m: &mut Messages, ground: Ground) {
    if ground.place == Place::Uplink {
        // gVisor has both ends of the cable in this namespace and takes frames from its own by
        // itself. What the kernel makes of them as well is not from the sandbox but to it, and
        // must not be refused to the sender.
        rule(m, CLOSE, |m| {
            e::came_by(m, BOX_END);
            e::drop(m);
        });
    }
    // A program that dials the listener itself has no destination.
    for (family, address) in ground.place.listeners() {
        let to_listener = |m: &mut Messages| {
            e::destination_starts(m, family, &address);
            e::is_tcp(m);
            e::port_within(m, (ground.port, ground.port));
        };
        rule(m, CLOSE, |m| {
            to_listener(m);
            e::was_diverted(m);
            e::accept(m);
        });
        rule(m, CLOSE, |m| {
            to_listener(m);
            e::reset(m);
        });
    }
    match ground.place {
        Place::Inner => own_addresses(m, CLOSE),
        Place::Uplink => {
            for (family, start) in [
                (Family::V4, &HOST_V4.octets()[..]),
                (Family::V6, &HOST_V6.octets()[..]),
                // Neighbours find each other by these.
                (Family::V6, &[0xff]),
            ] {
                accept_to(m, CLOSE, family, start);
            }
        }
    }
    if ground.told {
        rule(m, CLOSE, |m| {
            e::is_tcp(m);
            e::is_syn(m);
            e::log_to(m, LOG_GROUP, LOGGED_BYTES);
        });
    }
    rule(m, CLOSE, |m| {
        e::is_tcp(m);
        e::reset(m);
    });
    rule(m, CLOSE, |m| e::reject(m, ground.place.refusal()));
}

/// Lets through what goes to an address that begins so.
fn accept_to(m: &mut Messages, chain: &str, family: Family, start: &[u8]) {
    rule(m, chain, |m| {
        e::destination_starts(m, family, start);
        e::accept(m);
    });
}

/// Programs of a sandbox talk to each other.
fn own_addresses(m: &mut Messages, chain: &str) {
    let loopback_v6 = Ipv6Addr::LOCALHOST.octets();
    for (family, start) in [
        // 127.0.0.0/8 by its first byte.
        (Family::V4, &[127_u8][..]),
        (Family::V4, &BOX_V4.octets()),
        (Family::V6, &loopback_v6),
        (Family::V6, &BOX_V6.octets()),
    ] {
        accept_to(m, chain, family, start);
    }
}
