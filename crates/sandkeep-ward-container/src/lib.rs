//! The container level: boxes made of namespaces, cgroups, capabilities and seccomp.
//!
//! The server ([`ContainerWard`]) is multi-threaded and must not fork; a small
//! single-threaded helper process ([`launcher_main`]) makes the boxes for it.

mod checks;
mod config;
mod criu;
mod elsewhere;
mod launcher;
mod live;
mod memory;
mod record;
mod seccomp;
mod start;
mod sweep;
mod sys;
mod tmpfs;
mod trial;
mod ward;
mod watch;
mod writing;

// Shared by all wards; here under the names this crate has always used.
use sandkeep_host::{cgroup, failure, proc, slots};

pub use checks::{all as check_host, memory as check_memory};
pub use config::{ContainerWardConfig, DEFAULT_ID_BASE, DEFAULT_ID_SLOTS};
pub use launcher::launcher_main;
pub use record::Record;
pub use sandkeep_host::cgroup::tree_name;
pub use seccomp::{RefusedCall, refused_calls};
pub use ward::ContainerWard;
