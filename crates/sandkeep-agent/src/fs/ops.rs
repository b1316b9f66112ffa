//! The calls of `filesystem.Filesystem` that answer once. All of them block.

use super::entry::describe;
use super::error::{FileError, rpc_error};
use super::list::{self, ListError, MAX_ENTRIES};
use super::names::Names;
use super::open::make_directories;
use super::remove::remove_all;
use crate::State;
use crate::users::User;
use http::HeaderMap;
use rustix::io::Errno;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::filesystem::{
    EntryResponse, ListDirRequest, ListDirResponse, MoveRequest, PathRequest,
};
use std::io;
use std::path::{Path, PathBuf};

/// Who calls, and how its paths are read.
pub(crate) struct Caller {
    state: State,
    user: User,
}

impl Caller {
    pub(crate) fn of(state: &State, headers: &HeaderMap) -> Result<Self, ConnectError> {
        Ok(Self {
            state: state.clone(),
            user: state.user(headers, None)?,
        })
    }

    pub(crate) fn resolve(&self, path: &str) -> Result<PathBuf, ConnectError> {
        self.state.resolve(path, &self.user)
    }
}

pub(crate) fn stat(caller: &Caller, request: &PathRequest) -> Result<EntryResponse, ConnectError> {
    entry(&caller.resolve(&request.path)?)
}

pub(crate) fn make_dir(
    caller: &Caller,
    request: &PathRequest,
) -> Result<EntryResponse, ConnectError> {
    let path = caller.resolve(&request.path)?;
    if let Ok(meta) = std::fs::metadata(&path) {
        return Err(exists(&path, meta.is_dir()));
    }
    match make_directories(&path, &caller.user) {
        Ok(true) => entry(&path),
        Ok(false) => Err(exists(&path, true)),
        Err(error) => Err(io_error("create directory", &path, &error)),
    }
}

fn exists(path: &Path, is_dir: bool) -> ConnectError {
    let shown = path.display();
    if is_dir {
        ConnectError::already_exists(format!("directory already exists: {shown}"))
    } else {
        ConnectError::invalid_argument(format!(
            "path already exists but it is not a directory: {shown}"
        ))
    }
}

pub(crate) fn rename(
    caller: &Caller,
    request: &MoveRequest,
) -> Result<EntryResponse, ConnectError> {
    let source = caller.resolve(&request.source)?;
    let destination = caller.resolve(&request.destination)?;
    // Looked at first, so that a wrong source leaves no new directories.
    std::fs::symlink_metadata(&source).map_err(|error| io_error("find source", &source, &error))?;
    if let Some(parent) = destination.parent() {
        make_directories(parent, &caller.user)
            .map_err(|error| io_error("create parent directories of", &destination, &error))?;
    }
    match rustix::fs::rename(&source, &destination) {
        Ok(()) => entry(&destination),
        Err(Errno::NOENT) => Err(rpc_error("move", &source, Errno::NOENT)),
        Err(Errno::XDEV) => Err(ConnectError::failed_precondition(format!(
            "cannot move '{}' to '{}': they are on different file systems; copy and remove instead",
            source.display(),
            destination.display()
        ))),
        Err(error) => Err(rpc_error("move to", &destination, error)),
    }
}

pub(crate) fn remove(caller: &Caller, request: &PathRequest) -> Result<(), ConnectError> {
    let path = caller.resolve(&request.path)?;
    if path == Path::new("/") {
        return Err(ConnectError::invalid_argument(
            "the root directory cannot be removed",
        ));
    }
    remove_all(&path).map_err(|error| rpc_error("remove", &path, error))
}

/// The whole reply as JSON: with many entries even that takes time.
pub(crate) fn list_dir(caller: &Caller, request: &ListDirRequest) -> Result<Vec<u8>, ConnectError> {
    let path = caller.resolve(&request.path)?;
    let meta =
        std::fs::metadata(&path).map_err(|error| io_error("list directory", &path, &error))?;
    if !meta.is_dir() {
        let message = format!("path is not a directory: {}", path.display());
        return Err(ConnectError::invalid_argument(message));
    }
    let entries = list::list(&path, request.depth, &Names::load(), MAX_ENTRIES).map_err(
        |error| match error {
            ListError::Io(error) => io_error("list directory", &path, &error),
            ListError::TooMany => ConnectError::failed_precondition(format!(
                "'{}' has more than {MAX_ENTRIES} entries at this depth: \
                 list a smaller depth or its sub-directories one by one",
                path.display()
            )),
        },
    )?;
    serde_json::to_vec(&ListDirResponse { entries })
        .map_err(|error| ConnectError::internal(format!("cannot encode answer: {error}")))
}

fn entry(path: &Path) -> Result<EntryResponse, ConnectError> {
    let entry =
        describe(path, &Names::load()).map_err(|error| io_error("look at", path, &error))?;
    Ok(EntryResponse { entry })
}

pub(crate) fn io_error(action: &str, path: &Path, error: &io::Error) -> ConnectError {
    FileError::from_io(action, path, error).into()
}
