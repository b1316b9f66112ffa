//! The note about one box: in the ledger (given back at adoption) and in the directory of the
//! box (so that leftovers can be found without the ledger).

use sandkeep_host::{cgroup::Cgroups, failure::Doing as _, files::replace, proc};
use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs, os::fd::OwnedFd, path::Path};

const FILE: &str = "box.json";

/// Where a running box is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record<N> {
    pub boot_id: String,
    pub slot: u32,
    /// The process that is the box. It is in its network namespace.
    pub pid: i32,
    pub start_ticks: u64,
    pub cgroups: Cgroups,
    #[serde(flatten)]
    pub more: N,
}

/// What is known before the box runs: its ids and its cgroups.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note<N> {
    pub slot: u32,
    pub cgroups: Cgroups,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub record: Option<Record<N>>,
}

// The derived default would ask the same of `N`.
fn none<T>() -> Option<T> {
    None
}

impl<N: Serialize + DeserializeOwned> Record<N> {
    /// Of a process that runs.
    pub fn of_started(pid: i32, slot: u32, cgroups: Cgroups, more: N) -> Result<Self> {
        Ok(Self {
            boot_id: proc::boot_id(),
            slot,
            pid,
            start_ticks: proc::start_ticks(pid).doing("reading the start of the box")?,
            cgroups,
            more,
        })
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

impl<N> Record<N> {
    /// Finds the process of the box again; `None` when it is gone.
    pub fn find(&self) -> Option<OwnedFd> {
        proc::find(&self.boot_id, self.pid, self.start_ticks)
    }
}

impl<N: Serialize + DeserializeOwned> Note<N> {
    pub fn write(&self, box_dir: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|error| Error::internal(error.to_string()))?;
        replace(&box_dir.join(FILE), &text)
    }

    /// `None` when there is no note or it can not be read: then nothing is known.
    pub fn read(box_dir: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(box_dir.join(FILE)).ok()?).ok()
    }
}
