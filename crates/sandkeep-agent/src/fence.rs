//! What the agent itself takes from the processes it starts, where the ward can not do it
//! from outside: in a box with a kernel of its own.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use sandkeep_agent_api::host::{LimitsRequest, UsageResponse};
use sandkeep_agent_api::machine::GROUP;

use crate::hold;
use crate::users::read_bounded;

/// The limit of processes and threads of the whole box in gVisor's kernel.
const GVISOR_PIDS: &str = "/sys/fs/cgroup/pids/pids.max";

/// Whose kernel the box runs on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Kernel {
    #[default]
    Hosts,
    Gvisor,
    /// Linux in a virtual machine: root may do there whatever it likes.
    Machine,
}

/// Set on every process between fork and exec.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Fence {
    open_files: Option<u64>,
    kernel: Kernel,
}

impl Fence {
    pub(crate) fn in_gvisor() -> Self {
        Self {
            open_files: None,
            kernel: Kernel::Gvisor,
        }
    }

    pub(crate) fn in_machine() -> Self {
        Self {
            open_files: None,
            kernel: Kernel::Machine,
        }
    }

    /// Whether the box has a clock that nobody else sets.
    pub(crate) fn has_own_clock(self) -> bool {
        self.kernel == Kernel::Machine
    }

    /// Takes the limits of the host.
    pub(crate) fn limit(&mut self, limits: &LimitsRequest) -> io::Result<()> {
        match self.kernel {
            Kernel::Hosts => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the limits of this box are set from outside",
                ));
            }
            Kernel::Gvisor => std::fs::write(GVISOR_PIDS, limits.pids.to_string())?,
            Kernel::Machine => {
                std::fs::write(in_group("pids.max"), limits.pids.to_string())?;
                if let Some(bytes) = limits.memory_bytes {
                    std::fs::write(in_group("memory.max"), bytes.to_string())?;
                }
            }
        }
        self.open_files = Some(limits.open_files);
        Ok(())
    }

    /// What the kernel of the box counts.
    pub(crate) fn usage(self) -> io::Result<UsageResponse> {
        if self.kernel != Kernel::Machine {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "what this box uses is counted outside",
            ));
        }
        let read = |file| read_bounded(Path::new(&in_group(file)));
        let kills = read("memory.events")?
            .lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        Ok(UsageResponse {
            pids: read("pids.current")?.trim().parse().unwrap_or(0),
            oom_kills: kills.unwrap_or(0),
        })
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
        if self.kernel == Kernel::Machine
            && let Some(door) = hold::door()
        {
            // SAFETY: the agent never closes it, and this process has a copy of all it has.
            let door = unsafe { BorrowedFd::borrow_raw(door) };
            // Root of the machine may have removed the group: then it cannot be held.
            let _gone = rustix::io::write(door, b"0");
        }
        if self.kernel == Kernel::Gvisor {
            // The agent has it to rename the box after a restore; nobody else needs it. That
            // nobody has as much as the agent also keeps everybody from tracing it.
            remove_capability_from_bounding_set(CapabilitySet::SYS_ADMIN)?;
        }
        Ok(())
    }
}

fn in_group(file: &str) -> String {
    format!("{GROUP}/{file}")
}
