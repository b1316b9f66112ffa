//! `sandkeep verify`: the user's own proof.
//!
//! A battery of attacks is tried in throw-away sandboxes of a private server, on this host, at every
//! isolation level it has. A check says "held" only when the attack was really tried and what it is
//! made of is known to work; everything else is "cannot be tested here", with the reason.

mod api;
mod bait;
mod battery;
mod bench;
mod capture;
mod certs;
mod check;
mod checks;
mod dns;
mod enter;
mod fault;
mod origin;
mod prepare;
mod report;
mod room;
mod sandbox;
mod server;
mod stop;
mod tables;
mod weakness;
mod world;

pub use battery::{Options, run};
pub use check::Level;
pub use prepare::{cgroup_trees, find_cgroups, remove_cgroup_tree};
