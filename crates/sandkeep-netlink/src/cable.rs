//! The cable between a box with a network stack of its own and the host: who lays it (a ward)
//! and who serves it (the moat) must agree on these. They are the same for every box, so that a
//! copy of a box needs no new ones.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The name of the host's end.
pub const HOST_END: &str = "up0";
pub const HOST_MAC: [u8; 6] = [2, 0, 10, 0, 0, 1];
pub const HOST_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub const HOST_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xa, 0, 0, 0, 0, 0, 1);

/// Where the agent of such a box listens, on the address of its end.
pub const AGENT_PORT: u16 = 61_612;

/// The name of the box's end.
pub const BOX_END: &str = "eth0";
pub const BOX_MAC: [u8; 6] = [2, 0, 10, 0, 0, 2];
pub const BOX_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
pub const BOX_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xa, 0, 0, 0, 0, 0, 2);
/// What IPv6 makes of its card.
pub const BOX_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0x0aff, 0xfe00, 2);
