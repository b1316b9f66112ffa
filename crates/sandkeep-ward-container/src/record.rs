//! The ward's note about one box: in the ledger (given back at adoption) and beside its
//! socket (so that leftovers can be found without the ledger).

use crate::{cgroup::Cgroups, failure::Doing, launcher::protocol::Started, proc};
use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

const FILE: &str = "box.json";

/// Where a running box is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Of the host.
    pub boot_id: String,
    /// Of the sandbox: what programs in it find in `/proc/sys/kernel/random/boot_id`. Those of
    /// earlier versions had the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_boot_id: Option<String>,
    pub slot: u32,
    /// PID 1 of the box as the host numbers it; its network namespace is `/proc/PID/ns/net`.
    pub pid: i32,
    pub start_ticks: u64,
    pub(crate) cgroups: Cgroups,
}

/// What is known before the box runs: enough to keep its ids from being given out again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub slot: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<Record>,
}

impl Record {
    pub fn new(slot: u32, own_boot_id: String, started: Started) -> Self {
        Self {
            boot_id: proc::boot_id(),
            own_boot_id: Some(own_boot_id),
            slot,
            pid: started.pid,
            start_ticks: started.start_ticks,
            cgroups: started.cgroups,
        }
    }

    /// Reads a record out of [`sandkeep_ward::LiveBox::record`].
    pub fn parse(value: &serde_json::Value) -> Result<Self> {
        serde_json::from_value(value.clone())
            .map_err(|error| Error::internal(format!("the record of the box is not ours: {error}")))
    }

    pub fn to_value(&self) -> Result<serde_json::Value> {
        serde_json::to_value(self).map_err(|error| Error::internal(error.to_string()))
    }
}

impl Note {
    pub fn write(&self, box_dir: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|error| Error::internal(error.to_string()))?;
        // Renamed into place: a reader sees the old note or the new one, never half of it.
        let fresh = box_dir.join("box.json.new");
        fs::write(&fresh, text).doing("writing the note of the box")?;
        fs::rename(&fresh, box_dir.join(FILE)).doing("writing the note of the box")?;
        Ok(())
    }

    /// `None` when there is no note or it can not be read: then nothing is known.
    pub fn read(box_dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(box_dir.join(FILE)).ok()?).ok()
    }
}
