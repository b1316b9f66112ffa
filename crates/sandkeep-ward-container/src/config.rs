//! What the operator and the server decide for this ward.

use std::path::PathBuf;

/// Host ids given to boxes begin here: the range that systemd's list of ids leaves free.
pub const DEFAULT_ID_BASE: u32 = 0x7000_0000;

/// How many boxes can have ids of their own at the same time; the ids above are gVisor's.
pub const DEFAULT_ID_SLOTS: u32 = 3000;

#[derive(Debug, Clone)]
pub struct ContainerWardConfig {
    /// `<state>/ward-container`; made if missing, mode 0700.
    pub state_dir: PathBuf,
    /// The static agent binary on the host.
    pub agent: PathBuf,
    /// The program to run as launcher; it must call [`crate::launcher_main`] first of all.
    pub launcher: PathBuf,
    pub launcher_args: Vec<String>,
    /// `criu`, when it is not where it is looked for.
    pub criu: Option<PathBuf>,
    /// The first host id for boxes; box number n gets the 65 536 ids from `id_base + n * 65536`.
    pub id_base: u32,
    pub id_slots: u32,
    /// How many sandboxes the server allows: what the host must have enough for.
    pub most_boxes: usize,
}

impl ContainerWardConfig {
    /// A configuration with the usual id range.
    pub fn new(state_dir: PathBuf, agent: PathBuf, launcher: PathBuf) -> Self {
        Self {
            state_dir,
            agent,
            launcher,
            launcher_args: Vec::new(),
            criu: None,
            id_base: DEFAULT_ID_BASE,
            id_slots: DEFAULT_ID_SLOTS,
            most_boxes: 1,
        }
    }
}
