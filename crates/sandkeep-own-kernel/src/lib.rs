//! What the levels share whose boxes have a kernel of their own (gVisor, microVM).
//!
//! Such a box is one process of the host, in a cgroup and a network namespace of its own. Its
//! agent is reached over a cable, with a token. A level says what more there is to it by its
//! [`Kind`].

mod agent;
mod check;
mod live;
mod note;
mod roster;
mod sweep;

pub use agent::{answers, connect, dial, set_limits, settle};
pub use check::cable;
pub use live::Live;
pub use note::{Note, Record};
pub use roster::{Remains, Roster};

use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Debug;

/// What is particular to the boxes of one level.
pub trait Kind: Debug + Send + Sync + 'static {
    /// What a later server has to know of a box.
    type Noted: Debug + Clone + PartialEq + Send + Sync + Serialize + DeserializeOwned;
    /// What this server has of a box that runs.
    type Has: Debug + Send + Sync;

    /// Removes what a box that has ended left outside of its directory.
    fn clear(_noted: &Self::Noted) {}
}
