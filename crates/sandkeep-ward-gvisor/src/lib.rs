//! The gVisor level: every box runs on a kernel of its own in user space (`runsc`), so that
//! its processes never talk to the host's kernel themselves.
//!
//! The ward starts `runsc`, which leaves two processes behind: the sandbox, which is the
//! kernel of the box, and its helper for files. Everything later goes over the control socket
//! of the sandbox or over the network of the box, so a server that dies is not missed.

mod checks;
mod config;
mod control;
mod network;
mod record;
mod release;
mod runsc;
mod save;
mod spec;
mod stage;
mod start;
mod ward;
mod watch;

pub use checks::all as check_host;
pub use config::{DEFAULT_ID_BASE, DEFAULT_ID_SLOTS, GvisorWardConfig};
pub use record::Record;
pub use release::{OLDEST, find as find_runsc};
pub use spec::host_pids;
pub use ward::GvisorWard;
