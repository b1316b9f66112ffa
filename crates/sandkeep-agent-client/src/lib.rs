//! The host's side of the conversation with the agent of a box.
//!
//! Plain HTTP/1.1 over whatever byte stream the ward gives. Everything the agent says
//! is taken for hostile: every size is bounded, every wait has an end, every text is
//! cleaned before it reaches an error message.

mod body;
mod connection;
mod error;
mod files;
mod frames;
mod host;
mod limits;
mod process;
mod tunnel;
mod unary;

pub use body::{Body, BoxError, empty, full, stream};
pub use connection::{Agent, Unsent};
pub use files::{FileRange, FileStream};
pub use frames::Frames;
pub use limits::Limits;
pub use process::ProcessStream;
pub use tunnel::{Tunnel, TunnelError, tunnel};
