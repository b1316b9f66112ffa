//! The way from outside to a port of a box.
//!
//! It shares a listener with the API: [`Gateway::target`] says which requests are for a
//! box, [`Gateway::serve`] carries them there. The agent (port 49983) is reached only
//! after the token or the signature was checked here, and only on envd's own paths;
//! every other port is a tunnel to whoever listens in the box.

mod access;
mod answer;
mod api_key;
mod body;
mod boxes;
mod command;
mod config;
mod cut;
mod gateway;
mod headers;
mod pool;
mod port_lock;
mod signature;
mod target;
mod to_agent;
mod to_port;

/// Among the extensions of a request: it came over a TLS connection of this server's own.
#[derive(Debug, Clone, Copy)]
pub struct OverTls;

pub use boxes::Boxes;
pub use config::GatewayConfig;
pub use cut::Cut;
pub use gateway::Gateway;
pub use signature::{FileQuery, Operation, sign};
pub use target::{BadTarget, Route, Target, route};

/// What the gateway answers with; an error in it makes hyper break the connection off.
pub type Body = sandkeep_agent_client::Body;
