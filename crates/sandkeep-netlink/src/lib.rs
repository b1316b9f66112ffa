//! Just enough netlink for the networks of boxes: messages built by hand.

mod cable;
mod messages;

pub use cable::{AGENT_PORT, BOX_END, BOX_V4, BOX_V6, HOST_END, HOST_V4, HOST_V6};
pub use messages::{ACK, APPEND, CREATE, EXCLUSIVE, Messages, REPLACE, REQUEST};
