//! The container level: boxes made of namespaces, cgroups, capabilities and seccomp.
//!
//! The server ([`ContainerWard`]) is multi-threaded and must not fork; a small
//! single-threaded helper process ([`launcher_main`]) makes the boxes for it.

mod cgroup;
mod checks;
mod config;
mod failure;
mod launcher;
mod live;
mod proc;
mod record;
mod seccomp;
mod slots;
mod start;
mod sweep;
mod sys;
mod tmpfs;
mod ward;
mod watch;

pub use cgroup::tree_name;
pub use checks::all as check_host;
pub use config::{ContainerWardConfig, DEFAULT_ID_BASE, DEFAULT_ID_SLOTS};
pub use launcher::launcher_main;
pub use record::Record;
pub use seccomp::{RefusedCall, refused_calls};
pub use ward::ContainerWard;
