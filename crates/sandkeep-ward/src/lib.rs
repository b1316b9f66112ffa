//! The contract between the keeper and an isolation level.
//!
//! A *ward* starts boxes, finds them again after a crash of the server, reads and changes
//! their limits, and ends them. It knows nothing of HTTP, templates or clients; the keeper
//! knows nothing of namespaces.

mod channel;
mod check;
mod contract;
mod spec;

pub use channel::{Channel, ChannelIo};
pub use check::{Check, Verdict};
pub use contract::{Acceleration, Adoption, Engine, ImagesFrom, LiveBox, Swept, Ward, WardEvent};

pub use spec::BoxSpec;

#[cfg(feature = "conformance")]
pub mod conformance;
