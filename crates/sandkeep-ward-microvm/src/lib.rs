//! The microVM level: every box runs in a virtual machine of its own, on Linux of its own.
//!
//! One QEMU for each box, in a jail. No machine is booted for a box: it is a copy of one that
//! was booted ahead and waits, with memory that is shared until it is changed. Everything later
//! goes over the control socket of the QEMU or over the network of the box, so a server that
//! dies is not missed.

mod checks;
mod chosen;
mod clock;
mod config;
mod discard;
mod disk;
mod image;
mod jail;
mod kernel;
mod kvm;
mod laps;
mod launch;
mod machine;
mod memory;
mod network;
pub mod pages;
mod program;
mod qemu;
mod qmp;
mod record;
mod save;
mod start;
mod trial;
mod waiting;
mod ward;
mod warm;
mod watch;

pub use checks::look as check_host;
pub use config::{DEFAULT_ID_BASE, DEFAULT_ID_SLOTS, DEFAULT_KERNELS, MicrovmWardConfig};
pub use disk::DISK_FILE;
pub use jail::{Bounds, Ended, Jail, prepare_host};
pub use kernel::Kernel;
pub use kvm::offered as kvm_offered;
pub use program::is_installed;
pub use qemu::{Accel, host_pids};
pub use record::Record;
pub use ward::MicrovmWard;
