//! The egress proxy: every TCP connection of a box ends here and goes on only if its policy
//! says so.

mod clean;
mod connection;
mod copy;
mod dial;
mod first_words;
mod hello;
mod http;
mod meter;
mod peek;
mod pipe;
pub mod refusal;
mod seam;
mod stream;
mod verdict;

pub use dial::DialError;
pub use hello::{Hello, parse as parse_client_hello};
pub use seam::{Intercepted, Wayout};
pub use stream::BoxStream;

pub(crate) use clean::{refuse_ambiguous_framing, strip_expectations, strip_for_narrowed};
pub(crate) use connection::take_on;
pub(crate) use http::{MAX_HEAD, named_host, server, shown_host, upgrades_to_other_than_websocket};
pub(crate) use refusal::Words;
