//! What the agent itself takes from the processes it starts, where the ward can not do it
//! from outside: in a box with a kernel of its own (gVisor).

use std::io;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use sandkeep_agent_api::host::LimitsRequest;

/// The limit of processes and threads of the whole box, in its own kernel.
const PIDS: &str = "/sys/fs/cgroup/pids/pids.max";

/// Set on every process between fork and exec.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Fence {
    open_files: Option<u64>,
    own_kernel: bool,
}

impl Fence {
    pub(crate) fn in_own_kernel() -> Self {
        Self {
            open_files: None,
            own_kernel: true,
        }
    }

    /// Takes the limits of the host.
    pub(crate) fn limit(&mut self, limits: &LimitsRequest) -> io::Result<()> {
        if !self.own_kernel {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the limits of this box are set from outside",
            ));
        }
        std::fs::write(PIDS, limits.pids.to_string())?;
        self.open_files = Some(limits.open_files);
        Ok(())
    }

    /// Safe between fork and exec, before the user is changed.
    pub(crate) fn apply(self) -> io::Result<()> {
        if let Some(most) = self.open_files {
            let both = Rlimit {
                current: Some(most),
                maximum: Some(most),
            };
            setrlimit(Resource::Nofile, both)?;
        }
        if self.own_kernel {
            // The agent has it to rename the box after a restore; nobody else needs it. That
            // nobody has as much as the agent also keeps everybody from tracing it.
            remove_capability_from_bounding_set(CapabilitySet::SYS_ADMIN)?;
        }
        Ok(())
    }
}
