//! What the operator and the server decide for this ward.

use std::{path::PathBuf, time::Duration};

/// Host ids of machines begin here: below those of the container level.
pub const DEFAULT_ID_BASE: u32 = 0x7000_0000 - 1000 * 65_536;

/// How many boxes can have an id of their own at the same time.
pub const DEFAULT_ID_SLOTS: u32 = 1000;

/// Where `script/server` and packages put the kernel of machines.
pub const DEFAULT_KERNELS: [&str; 2] = [
    "/usr/local/lib/sandkeep/kernel",
    "/usr/share/sandkeep/kernel",
];

/// A restore takes a tenth of a second, on a busy host some.
pub const ANSWERS: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct MicrovmWardConfig {
    /// `<state>/ward-microvm`; made if missing, mode 0700.
    pub state_dir: PathBuf,
    /// Where machines that were booted ahead are kept. On the file system of the images of
    /// boxes, those share its blocks.
    pub machines_dir: PathBuf,
    /// The static agent binary on the host.
    pub agent: PathBuf,
    /// A directory with `vmlinuz` and `drivers/*.ko`. `None`: one of [`DEFAULT_KERNELS`].
    pub kernel: Option<PathBuf>,
    /// `None`: looked for in the PATH when it is needed.
    pub qemu: Option<PathBuf>,
    /// The first host id for boxes; box number n runs as `id_base + n * 65536`.
    pub id_base: u32,
    pub id_slots: u32,
    /// How many QEMUs are started ahead and wait, for each of the memories that boxes began
    /// with last.
    pub waiting: usize,
    /// Whether machines are warmed up on the disks of templates.
    pub warm: bool,
    /// How long a machine may boot. `None`: what is enough on a busy host.
    pub boot: Option<Duration>,
    /// How long a machine may take for what it is told first.
    pub answers: Duration,
}

impl MicrovmWardConfig {
    /// A configuration with the usual ids, the QEMU of the PATH and the kernel of the package.
    pub fn new(state_dir: PathBuf, machines_dir: PathBuf, agent: PathBuf) -> Self {
        Self {
            state_dir,
            machines_dir,
            agent,
            kernel: None,
            qemu: None,
            id_base: DEFAULT_ID_BASE,
            id_slots: DEFAULT_ID_SLOTS,
            waiting: 0,
            warm: false,
            boot: None,
            answers: ANSWERS,
        }
    }
}
