//! PID 1 of a box: processes, terminals, files, watches.
//!
//! The crate is a library so that tests and fuzz targets can call its parts; `main.rs` only calls
//! [`run`].

mod body;
pub mod connect;
mod family;
mod fence;
pub mod fs;
mod gate;
mod generation;
mod hold;
mod host;
mod host_keys;
mod log;
mod machine;
mod metrics;
mod oom;
pub mod paths;
pub mod ports;
mod process;
mod reap;
mod resident;
mod rest;
mod run;
mod server;
mod state;
mod trust;
mod tunnel;
pub mod users;
mod wipe;

pub use body::{Body, BodyError, bytes_body, channel_body, empty_body};
pub use run::run;
pub use state::State;
