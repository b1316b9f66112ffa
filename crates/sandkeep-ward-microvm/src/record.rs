//! What is noted and held of a box beside what every box has.

use crate::{
    image::Memory,
    qemu::{Accel, Shape, host_limits},
};
use sandkeep_model::Limits;
use sandkeep_own_kernel::Kind;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;

/// The boxes of this level: the process is the QEMU of the box.
#[derive(Debug)]
pub struct Microvm;

pub type Live = sandkeep_own_kernel::Live<Microvm>;
pub type Record = sandkeep_own_kernel::Record<Noted>;
pub type Note = sandkeep_own_kernel::Note<Noted>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    pub(crate) shape: Shape,
    /// What runs it; boxes of servers that did not note it say nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) accel: Option<Accel>,
    /// What has to read its memory when it is written down: the server may have another one by then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) build: Option<String>,
    /// The memory it shares with others, where that is a machine booted ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<String>,
    /// Of the memory it began with: what it may have to fill for others. Servers before did not note it.
    #[serde(default)]
    pub(crate) holes_bytes: u64,
}

impl Noted {
    /// Limits as the host's cgroups hold them.
    pub fn host_limits(&self, limits: &Limits) -> Limits {
        host_limits(limits, self.holes_bytes)
    }
}

#[derive(Debug)]
pub struct Has {
    /// `None`: this server does not have what the box began with.
    pub memory: Option<Memory>,
    /// Kills for want of memory that are no news; `None` until the machine was asked.
    pub kills: Mutex<Option<u64>>,
}

impl Kind for Microvm {
    type Noted = Noted;
    type Has = Has;
}
