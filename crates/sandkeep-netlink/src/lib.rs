//! Just enough netlink for the networks of boxes: messages built by hand.

mod cable;
mod filter;
mod link;
mod messages;
pub mod nft;
mod routes;

pub use cable::{
    AGENT_PORT, BOX_END, BOX_LINK_LOCAL, BOX_MAC, BOX_V4, BOX_V6, HOST_END, HOST_MAC, HOST_V4,
    HOST_V6,
};
pub use filter::{guard, guard_again};
pub use link::{
    AllHere, BOX_SIDE, HOST_SIDE, NEW_LINK, Side, configure, device, index_of, set_mac, switch_off,
};
pub use messages::{
    ACK, APPEND, CREATE, DUMP, EXCLUSIVE, Messages, NetlinkSocket, REPLACE, REQUEST, attributes,
};
pub use routes::{Found, address_changes, local_networks, route_to};
