//! `Start` and `Connect`: the calls that stream what a process does.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderMap;
use sandkeep_agent_api::host::LogLevel;
use sandkeep_agent_api::process::{
    Empty, EventResponse, ProcessConfig, ProcessEvent, SelectRequest, StartEvent, StartRequest,
};
use sandkeep_agent_api::{ConnectError, encode_message};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::input::InputEnd;
use super::output::{self, Outputs};
use super::signal::end_event;
use super::spawn::{Ends, Launch, Spawned, StdioKind, spawn};
use super::stream::{Fan, Item};
use super::table::{Found, Process};
use crate::State;
use crate::connect::{FrameSink, call_timeout, keepalive_interval};
use crate::reap::Exit;
use crate::users::User;

/// The tag of an ended process is kept for a while, so it must be short.
const MAX_TAG: usize = 4096;

pub(super) fn timed_out() -> ConnectError {
    ConnectError::deadline_exceeded("context deadline exceeded")
}

/// Starts a process and streams what it does. The caller's going away changes nothing for the
/// process; the caller's time limit ends both.
pub(super) async fn start(
    state: State,
    headers: HeaderMap,
    request: StartRequest,
    sink: FrameSink,
) -> Result<(), ConnectError> {
    let user = state.user(&headers, None)?;
    let deadline = call_timeout(&headers).map(|limit| Instant::now() + limit);
    let (process, outputs) = launch(&state, &user, request)?;
    let items = process.fan.attach();
    state.processes().add(&process);
    tokio::spawn(supervise(state.clone(), Arc::clone(&process), outputs));
    if let Some(deadline) = deadline {
        tokio::spawn(kill_at(deadline, state, Arc::clone(&process)));
    }
    let stream = forward(process.number(), items, &headers, &sink);
    match deadline {
        None => stream.await,
        // The kill waits for the same moment, and its end event can only come after it: so the
        // caller learns of the time limit, never of our kill.
        Some(deadline) => timeout_at(deadline, stream)
            .await
            .unwrap_or_else(|_| Err(timed_out())),
    }
}

/// Streams what a process does from now on, or only that it has ended.
pub(super) async fn connect(
    state: State,
    headers: HeaderMap,
    request: SelectRequest,
    sink: FrameSink,
) -> Result<(), ConnectError> {
    let (pid, items) = match state.processes().find(request.process.as_ref())? {
        Found::Live(process) => (process.number(), process.fan.attach()),
        Found::Ended(ended) => {
            let fan = Fan::default();
            drop(fan.finish(ended.end));
            (ended.pid, fan.attach())
        }
    };
    let stream = forward(pid, items, &headers, &sink);
    match call_timeout(&headers) {
        None => stream.await,
        Some(limit) => timeout_at(Instant::now() + limit, stream)
            .await
            .unwrap_or_else(|_| Err(timed_out())),
    }
}

async fn forward(
    pid: u32,
    mut items: mpsc::Receiver<Item>,
    headers: &HeaderMap,
    sink: &FrameSink,
) -> Result<(), ConnectError> {
    let keepalive = keepalive_interval(headers);
    sink.send(&event(ProcessEvent::Start(StartEvent { pid })))
        .await?;
    loop {
        // The timer is new in every round, so output puts it off.
        tokio::select! {
            biased;
            () = sink.closed() => return Ok(()),
            item = items.recv() => match item {
                Some(Item::Data(frame)) => sink.send_encoded(frame).await?,
                Some(Item::End(frame)) => return Ok(sink.send_encoded(frame).await?),
                None => return Err(ConnectError::resource_exhausted(
                    "the output was not read for too long while others were waiting for it",
                )),
            },
            () = sleep(keepalive) => sink.send(&event(ProcessEvent::Keepalive(Empty {}))).await?,
        }
    }
}

fn event(event: ProcessEvent) -> EventResponse {
    EventResponse { event }
}

/// Starts the process without anybody reading yet.
fn launch(
    state: &State,
    user: &User,
    request: StartRequest,
) -> Result<(Arc<Process>, Outputs), ConnectError> {
    let config = request.process.unwrap_or_default();
    if config.cmd.is_empty() {
        return Err(ConnectError::invalid_argument("the command is missing"));
    }
    if request.tag.as_ref().is_some_and(|tag| tag.len() > MAX_TAG) {
        return Err(ConnectError::invalid_argument(format!(
            "the tag is longer than {MAX_TAG} bytes"
        )));
    }
    let stdio = match request.pty {
        Some(pty) => StdioKind::Terminal(pty),
        None => StdioKind::Pipes {
            stdin: request.stdin.unwrap_or(true),
        },
    };
    let cwd = working_directory(state, user, &config)?;
    let box_envs = state.settings().environment();
    let score = state.child_score();
    let launch = Launch {
        config: &config,
        user,
        box_envs: &box_envs,
        cwd: &cwd,
        stdio,
        score,
        fence: state.fence(),
    };
    let spawned = spawn(state.reaper(), &launch).map_err(|error| {
        ConnectError::invalid_argument(format!("cannot start '{}': {error}", config.cmd))
    })?;
    state
        .log()
        .add(LogLevel::Info, started_message(&config, &spawned, user));
    let (input, terminal, outputs) = match spawned.ends {
        Ends::Terminal(terminal) => {
            let terminal = Arc::new(terminal);
            let outputs = Outputs::Terminal(Some(Arc::clone(&terminal)));
            (
                InputEnd::Terminal(Arc::clone(&terminal)),
                Some(terminal),
                outputs,
            )
        }
        Ends::Pipes {
            stdin,
            stdout,
            stderr,
        } => {
            let outputs = Outputs::Pipes {
                stdout: Some(stdout),
                stderr: Some(stderr),
            };
            (
                stdin.map_or(InputEnd::Disabled, InputEnd::Pipe),
                None,
                outputs,
            )
        }
        Ends::Nothing => (
            InputEnd::Disabled,
            None,
            Outputs::Pipes {
                stdout: None,
                stderr: None,
            },
        ),
    };
    let process = Process {
        pid: spawned.pid,
        tag: request.tag,
        config,
        input: tokio::sync::Mutex::new(input),
        terminal,
        fan: Fan::default(),
        exit: spawned.exit,
    };
    Ok((Arc::new(process), outputs))
}

/// The directory asked for must exist. The default one may be missing (not every user has a
/// home); then the process starts in the root directory.
fn working_directory(
    state: &State,
    user: &User,
    config: &ProcessConfig,
) -> Result<PathBuf, ConnectError> {
    let asked = config.cwd.as_deref().unwrap_or_default();
    let path = state.resolve(asked, user)?;
    match (path.is_dir(), asked.is_empty()) {
        (true, _) => Ok(path),
        (false, true) => Ok(Path::new("/").to_path_buf()),
        (false, false) if path.exists() => Err(ConnectError::invalid_argument(format!(
            "cwd '{}' is not a directory",
            path.display()
        ))),
        (false, false) => Err(ConnectError::invalid_argument(format!(
            "cwd '{}' does not exist",
            path.display()
        ))),
    }
}

fn started_message(config: &ProcessConfig, spawned: &Spawned, user: &User) -> String {
    let mut words = vec![config.cmd.as_str()];
    words.extend(config.args.iter().map(String::as_str));
    // Only the start is kept; do not build megabytes for it.
    let command: String = words.join(" ").chars().take(400).collect();
    format!(
        "process {} started by {}: {command}",
        spawned.pid, user.name
    )
}

/// Follows a process to its end and tells it.
async fn supervise(state: State, process: Arc<Process>, mut outputs: Outputs) {
    let mut exit = process.exit.clone();
    let exit = output::pump(&mut outputs, &mut exit, &process.fan).await;
    let end = end_event(exit);
    let level = if matches!(exit, Exit::Code(_)) {
        LogLevel::Info
    } else {
        LogLevel::Warn
    };
    state.log().add(
        level,
        format!("process {} ended: {}", process.pid, end.status),
    );
    // A struct of strings and numbers always becomes JSON.
    let frame = encode_message(&event(ProcessEvent::End(end))).unwrap_or_default();
    state.processes().end(&process, frame.clone());
    let delivery = process.fan.finish(frame);
    tokio::spawn(output::discard(outputs));
    delivery.await;
}

async fn kill_at(deadline: Instant, state: State, process: Arc<Process>) {
    tokio::select! {
        () = process.exited() => {}
        () = sleep_until(deadline) => {
            // Failing means that it has just ended.
            let _ = state.reaper().kill(process.pid);
        }
    }
}
