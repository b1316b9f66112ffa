//! The channel of an agent that listens on the network of its box instead of a socket that
//! the ward handed in.
//!
//! Everything in the box can reach its port, so a connection begins with a token that only
//! the host has: the agent reads it as one line from its standard input. It is read again
//! when a token does not fit, because a restored agent finds a new one there.

/// Where the agent listens, on every address of the box.
pub const PORT: u16 = 61_612;
/// A token is this long, of `[a-z0-9]`; a newline follows it in both places.
pub const TOKEN_LENGTH: usize = 64;
