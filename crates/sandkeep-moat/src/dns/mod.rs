//! Our resolver: the only one a box can reach, whatever address it asks.
//!
//! Names the policy does not allow never leave the host, so no data can be carried out in them.

mod answer;
mod names;
mod resolver;
mod serve;
mod upstream;

pub use answer::INSIDE_NAME;
pub use upstream::UpstreamDns;

pub(crate) use names::{Given, Names};
pub(crate) use resolver::{Looked, Resolver};
pub(crate) use serve::{datagrams, stream};
