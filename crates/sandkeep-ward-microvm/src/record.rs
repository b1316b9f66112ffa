//! The ward's note about one box: in the ledger (given back at adoption) and in the directory
//! of the box (so that leftovers can be found without the ledger).

use crate::qemu::Shape;
use sandkeep_host::{cgroup::Cgroups, files::replace};
use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

const FILE: &str = "box.json";

/// Where a running box is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub boot_id: String,
    pub slot: u32,
    /// The QEMU of the box. It is in its network namespace.
    pub pid: i32,
    pub start_ticks: u64,
    pub(crate) shape: Shape,
    /// The memory it shares with others, where that is a machine booted ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<String>,
    pub(crate) cgroups: Cgroups,
}

/// What is known before the box runs: its ids and its cgroups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub slot: u32,
    pub cgroups: Cgroups,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<Record>,
}

impl Record {
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
        replace(&box_dir.join(FILE), &text)
    }

    /// `None` when there is no note or it can not be read: then nothing is known.
    pub fn read(box_dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(box_dir.join(FILE)).ok()?).ok()
    }
}
