//! What the operator and the server decide for this ward.

use std::path::PathBuf;

/// Host ids of boxes begin here: above those of the container level.
pub const DEFAULT_ID_BASE: u32 = 0x7000_0000 + 3000 * 65_536;

/// How many boxes can have ids of their own at the same time.
pub const DEFAULT_ID_SLOTS: u32 = 1000;

#[derive(Debug, Clone)]
pub struct GvisorWardConfig {
    /// `<state>/ward-gvisor`; made if missing, mode 0700.
    pub state_dir: PathBuf,
    /// The static agent binary on the host.
    pub agent: PathBuf,
    /// `None`: looked for in the usual places when it is needed.
    pub runsc: Option<PathBuf>,
    /// The first host id for boxes; box number n gets the 65 536 ids from `id_base + n * 65536`.
    pub id_base: u32,
    pub id_slots: u32,
}

impl GvisorWardConfig {
    /// A configuration with the usual id range and the `runsc` of this host.
    pub fn new(state_dir: PathBuf, agent: PathBuf) -> Self {
        Self {
            state_dir,
            agent,
            runsc: None,
            id_base: DEFAULT_ID_BASE,
            id_slots: DEFAULT_ID_SLOTS,
        }
    }
}
