//! Watching directories: as a stream (`WatchDir`), or polled (`CreateWatcher`
//! and `GetWatcherEvents`).

mod engine;
mod network;
mod polled;

pub(crate) use polled::Watchers;

use super::entry::describe;
use super::names::Names;
use super::ops::{Caller, io_error};
use super::run_blocking;
use crate::connect::{FrameSink, call_timeout, keepalive_interval, server_stream};
use crate::{Body, State};
use engine::{Change, Watch};
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use rustix::io::Errno;
use sandkeep_agent_api::filesystem::{
    EventType, FilesystemEvent, WatchDirResponse, WatchRequest, WatcherRef,
};
use sandkeep_agent_api::process::Empty;
use sandkeep_agent_api::{Code, ConnectError};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

/// A call that never times out still needs a moment to wait for.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// A watch, and how its changes are told.
#[derive(Debug)]
struct Source {
    watch: Watch,
    include_entry: bool,
}

impl Source {
    /// Starts watching. Blocks.
    fn open(
        state: &State,
        headers: &HeaderMap,
        request: &WatchRequest,
    ) -> Result<Self, ConnectError> {
        let path = Caller::of(state, headers)?.resolve(&request.path)?;
        let meta = std::fs::metadata(&path).map_err(|error| io_error("watch", &path, &error))?;
        if !meta.is_dir() {
            let message = format!("path {} not a directory", path.display());
            return Err(ConnectError::invalid_argument(message));
        }
        if !request.allow_network_mounts {
            network::refuse(&path)?;
        }
        let watch =
            Watch::open(&path, request.recursive).map_err(|error| watch_error(&path, error))?;
        Ok(Self {
            watch,
            include_entry: request.include_entry,
        })
    }

    /// What happened since the last call, and whether there is more. Blocks.
    fn drain(&mut self) -> (Vec<FilesystemEvent>, bool) {
        let (changes, more) = self.watch.drain();
        if changes.is_empty() {
            return (Vec::new(), more);
        }
        let names = self.include_entry.then(Names::load);
        let root = self.watch.root();
        let events = changes
            .into_iter()
            .map(|change| event(root, &change, names.as_ref()))
            .collect();
        (events, more)
    }
}

fn event(root: &Path, change: &Change, names: Option<&Names>) -> FilesystemEvent {
    let still_there = matches!(
        change.kind,
        EventType::Create | EventType::Write | EventType::Chmod
    );
    let entry = names
        .filter(|_| still_there)
        .and_then(|names| describe(&root.join(&change.name), names).ok());
    FilesystemEvent {
        name: change.name.to_string_lossy().into_owned(),
        event_type: change.kind,
        entry,
    }
}

fn watch_error(path: &Path, error: Errno) -> ConnectError {
    let shown = path.display();
    match error {
        Errno::NOSPC => ConnectError::resource_exhausted(format!(
            "cannot watch '{shown}': too many directories; watch a smaller tree"
        )),
        Errno::MFILE | Errno::NFILE => ConnectError::resource_exhausted(format!(
            "cannot watch '{shown}': too many watches are open; remove some"
        )),
        error => super::error::rpc_error("watch", path, error),
    }
}

/// Becomes ready when there is something to drain.
fn readiness(fd: Arc<OwnedFd>) -> Result<AsyncFd<Arc<OwnedFd>>, ConnectError> {
    // SAFETY: an `Arc<OwnedFd>` gives the same descriptor as long as it lives,
    // and the `AsyncFd` keeps it alive.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }
        .map_err(std::io::Error::from)
        .map_err(|error| ConnectError::internal(format!("cannot wait for events: {error}")))
}

/// Waits until there is something to drain.
async fn ready(fd: &AsyncFd<Arc<OwnedFd>>) -> Result<(), ConnectError> {
    let mut guard = fd
        .readable()
        .await
        .map_err(|error| ConnectError::internal(format!("cannot wait for events: {error}")))?;
    // Before the draining: what comes meanwhile makes it ready anew.
    guard.clear_ready();
    Ok(())
}

/// Answers `CreateWatcher`.
pub(crate) async fn create(
    state: &State,
    headers: HeaderMap,
    request: WatchRequest,
) -> Result<WatcherRef, ConnectError> {
    let opener = state.clone();
    let source = run_blocking(move || Source::open(&opener, &headers, &request)).await??;
    let watcher_id = state.fs().watchers.add(source)?;
    Ok(WatcherRef { watcher_id })
}

/// Answers `WatchDir`.
pub(crate) async fn stream(state: State, request: Request<Incoming>) -> Response<Body> {
    server_stream(request, move |headers, message, sink| {
        run_stream(state, headers, message, sink)
    })
    .await
}

async fn run_stream(
    state: State,
    headers: HeaderMap,
    request: WatchRequest,
    sink: FrameSink,
) -> Result<(), ConnectError> {
    let deadline = Instant::now() + call_timeout(&headers).unwrap_or(FOR_EVER).min(FOR_EVER);
    let keepalive = keepalive_interval(&headers).min(FOR_EVER);
    let _place = state.fs().watchers.reserve_stream()?;
    let mut source = run_blocking(move || Source::open(&state, &headers, &request)).await??;
    let fd = readiness(source.watch.fd())?;
    sink.send(&WatchDirResponse::Start(Empty {})).await?;
    let mut last_sent = Instant::now();
    loop {
        tokio::select! {
            () = sink.closed() => return Ok(()),
            () = sleep_until(deadline) => {
                return Err(ConnectError::new(Code::DeadlineExceeded, "context deadline exceeded"));
            }
            () = sleep_until(last_sent + keepalive) => {
                sink.send(&WatchDirResponse::Keepalive(Empty {})).await?;
                last_sent = Instant::now();
            }
            ready = ready(&fd) => {
                ready?;
                loop {
                    let (events, more);
                    (source, events, more) = run_blocking(move || {
                        let (events, more) = source.drain();
                        (source, events, more)
                    })
                    .await?;
                    for event in events {
                        sink.send(&WatchDirResponse::Filesystem(event)).await?;
                        last_sent = Instant::now();
                    }
                    if !more {
                        break;
                    }
                }
            }
        }
    }
}
