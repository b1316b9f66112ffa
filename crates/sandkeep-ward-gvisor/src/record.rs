//! What is noted of a box beside what every box has.

use crate::runsc::Runsc;
use sandkeep_host::{cgroup::Cgroups, failure::Doing as _};
use sandkeep_model::{Error, Result};
use sandkeep_own_kernel::Kind;
use serde::{Deserialize, Serialize};
use std::{fs, path::PathBuf};

/// The boxes of this level: the process is the sandbox, the kernel of the box.
#[derive(Debug)]
pub struct Gvisor;

pub type Live = sandkeep_own_kernel::Live<Gvisor>;
pub type Record = sandkeep_own_kernel::Record<Noted>;
pub type Note = sandkeep_own_kernel::Note<Noted>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// The control socket of the sandbox.
    pub control: PathBuf,
    /// The release that runs it. (Those of earlier servers did not note it.)
    #[serde(default)]
    pub version: Option<String>,
}

impl Kind for Gvisor {
    type Noted = Noted;
    type Has = ();

    fn clear(noted: &Noted) {
        // With a long state directory it is not in the directory of the box.
        let _gone = fs::remove_file(&noted.control);
    }
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

/// Reads what `runsc` left in its own directory.
pub fn of_started(runsc: &Runsc, slot: u32, cgroups: Cgroups) -> Result<Record> {
    let state = fs::read_dir(runsc.root())
        .doing("reading the notes of runsc")?
        .filter_map(|entry| entry.ok())
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|end| end == "state"))
        .ok_or_else(|| Error::internal("runsc left no note about the box"))?;
    let bytes = fs::read(&state).doing("reading the notes of runsc")?;
    let State { sandbox } = serde_json::from_slice(&bytes)
        .map_err(|error| Error::internal(format!("the notes of runsc: {error}")))?;
    let noted = Noted {
        control: sandbox.control_socket_path,
        version: Some(runsc.release.version.clone()),
    };
    Record::of_started(sandbox.pid, slot, cgroups, noted)
}
