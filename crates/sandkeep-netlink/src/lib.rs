//! Just enough netlink for the networks of boxes: messages built by hand.

mod messages;

pub use messages::{ACK, APPEND, CREATE, EXCLUSIVE, Messages, REPLACE, REQUEST};
