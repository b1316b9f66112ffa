//! The ward's note about one box: in the ledger (given back at adoption) and in the directory
//! of the box (so that leftovers can be found without the ledger).

use sandkeep_host::{cgroup::Cgroups, failure::Doing as _, files::replace, proc};
use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
};

const FILE: &str = "box.json";

/// Where a running box is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub boot_id: String,
    pub slot: u32,
    /// The sandbox: the process that is the kernel of the box. It is in its network namespace.
    pub pid: i32,
    pub start_ticks: u64,
    /// The control socket of the sandbox.
    pub control: PathBuf,
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

/// What `runsc` noted, as far as it matters here.
#[derive(Deserialize)]
struct State {
    sandbox: Sandbox,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sandbox {
    pid: i32,
    control_socket_path: PathBuf,
}

impl Record {
    /// Reads what `runsc` left in its own directory.
    pub fn of_started(runsc_root: &Path, slot: u32, cgroups: Cgroups) -> Result<Self> {
        let state = fs::read_dir(runsc_root)
            .doing("reading the notes of runsc")?
            .filter_map(|entry| entry.ok())
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|end| end == "state"))
            .ok_or_else(|| Error::internal("runsc left no note about the box"))?;
        let bytes = fs::read(&state).doing("reading the notes of runsc")?;
        let state: State = serde_json::from_slice(&bytes)
            .map_err(|error| Error::internal(format!("the notes of runsc: {error}")))?;
        let pid = state.sandbox.pid;
        Ok(Self {
            boot_id: proc::boot_id(),
            slot,
            pid,
            start_ticks: proc::start_ticks(pid).doing("reading the start of the box")?,
            control: state.sandbox.control_socket_path,
            cgroups,
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
