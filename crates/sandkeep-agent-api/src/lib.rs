//! What the host and the agent in a box say to each other.
//!
//! The agent speaks the envd protocol of the E2B SDKs (Connect RPC with the JSON codec) plus a few
//! calls for the host alone. Both sides use these types, and both sides treat what they read as
//! hostile: every decoder here is bounded.

pub mod channel;
mod error;
pub mod filesystem;
mod frame;
pub mod host;
mod json;
pub mod machine;
pub mod process;
mod timestamp;

pub use error::{Code, ConnectError, EndStream};
pub use frame::{
    DEFAULT_MAX_MESSAGE, DEFAULT_MAX_REQUEST, Decoder, FLAG_END, Frame, FrameError, HEADER_LEN,
    encode_end, encode_message,
};
pub use json::Blob;
pub use timestamp::Timestamp;

/// The port the E2B SDKs know the agent by.
pub const ENVD_PORT: u16 = 49_983;
/// The envd version we tell the SDKs: everything they gate on is implemented.
pub const ENVD_VERSION: &str = "0.6.13";
/// The exact content type of streaming calls; clients compare it literally.
pub const CONNECT_JSON: &str = "application/connect+json";
