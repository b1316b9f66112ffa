//! `process.Process`: starting processes and everything about them.

mod input;
mod output;
mod pty;
mod signal;
mod spawn;
mod start;
mod stream;
mod table;

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use rustix::process::Signal as KernelSignal;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::host::{HostSignal, SignalRequest};
use sandkeep_agent_api::process::{
    Empty, ListResponse, SelectRequest, Selector, SendInputRequest, SendSignalRequest, Signal,
    StreamInputRequest, UpdateRequest,
};
use tokio::time::timeout;

use crate::connect::{self, RequestStream, call_timeout, error_response};
use crate::{Body, State};

pub(crate) use spawn::{Launch, StdioKind, spawn};
use table::Process;
pub(crate) use table::Table;

/// A killed process ends at once unless the kernel is busy for it.
const KILL_WAIT: Duration = Duration::from_secs(2);

/// Answers one call of `process.Process`.
pub(crate) async fn rpc(state: State, method: &str, request: Request<Incoming>) -> Response<Body> {
    match method {
        "Start" => {
            connect::server_stream(request, |headers, message, sink| {
                start::start(state, headers, message, sink)
            })
            .await
        }
        "Connect" => {
            connect::server_stream(request, |headers, message, sink| {
                start::connect(state, headers, message, sink)
            })
            .await
        }
        "List" => {
            connect::unary(request, |_, _: Empty| async move {
                Ok(ListResponse {
                    processes: state.processes().list(),
                })
            })
            .await
        }
        "Update" => connect::unary(request, |_, message| update(state, message)).await,
        "SendInput" => {
            connect::unary(request, |headers, message| async move {
                within_timeout(&headers, send_input(&state, message)).await
            })
            .await
        }
        "StreamInput" => {
            connect::client_stream(request, |headers, messages| async move {
                within_timeout(&headers, stream_input(&state, messages)).await
            })
            .await
        }
        "SendSignal" => connect::unary(request, |_, message| send_signal(state, message)).await,
        "CloseStdin" => {
            connect::unary(request, |_, message: SelectRequest| async move {
                let process = state.processes().find_live(message.process.as_ref())?;
                input::close(&process).await?;
                Ok(Empty {})
            })
            .await
        }
        _ => error_response(&ConnectError::unimplemented(format!(
            "process.Process has no method '{method}'"
        ))),
    }
}

async fn within_timeout<T>(
    headers: &HeaderMap,
    call: impl Future<Output = Result<T, ConnectError>>,
) -> Result<T, ConnectError> {
    match call_timeout(headers) {
        None => call.await,
        Some(limit) => timeout(limit, call)
            .await
            .unwrap_or_else(|_| Err(start::timed_out())),
    }
}

async fn update(state: State, message: UpdateRequest) -> Result<Empty, ConnectError> {
    let process = state.processes().find_live(message.process.as_ref())?;
    if let Some(size) = message.pty.and_then(|pty| pty.size) {
        let terminal = process
            .terminal
            .as_ref()
            .ok_or_else(|| ConnectError::internal("the process has no terminal to resize"))?;
        terminal
            .resize(size)
            .map_err(|error| ConnectError::internal(format!("cannot resize: {error}")))?;
    }
    Ok(Empty {})
}

async fn send_input(state: &State, message: SendInputRequest) -> Result<Empty, ConnectError> {
    let process = state.processes().find_live(message.process.as_ref())?;
    input::write(&process, message.input).await?;
    Ok(Empty {})
}

async fn stream_input(
    state: &State,
    mut messages: RequestStream<Incoming>,
) -> Result<Empty, ConnectError> {
    let mut process = None;
    while let Some(message) = messages.next_message().await? {
        match message {
            StreamInputRequest::Start(start) => {
                process = Some(state.processes().find_live(start.process.as_ref())?);
            }
            StreamInputRequest::Data(data) => {
                let process = process.as_ref().ok_or_else(|| {
                    ConnectError::invalid_argument("input came before the process was named")
                })?;
                input::write(process, data.input).await?;
            }
            StreamInputRequest::Keepalive(_) => {}
        }
    }
    Ok(Empty {})
}

async fn send_signal(state: State, message: SendSignalRequest) -> Result<Empty, ConnectError> {
    let how = match message.signal {
        Signal::Term => Deliver::Signal(KernelSignal::TERM),
        // What a killed shell had started goes with it.
        Signal::Kill => Deliver::End,
        Signal::Unspecified => {
            state.processes().find_live(message.process.as_ref())?;
            return Err(ConnectError::unimplemented(
                "the signal is missing or unknown",
            ));
        }
    };
    let process = deliver(&state, message.process.as_ref(), how)?;
    if message.signal == Signal::Kill {
        // Who kills a process expects it to be gone when told so.
        let _ = timeout(KILL_WAIT, process.exited()).await;
    }
    Ok(Empty {})
}

/// The host's own call, for signals that envd has no word for.
pub(crate) fn host_signal(state: &State, message: SignalRequest) -> Result<(), ConnectError> {
    let signal = match message.signal {
        HostSignal::Int => KernelSignal::INT,
        HostSignal::Quit => KernelSignal::QUIT,
        HostSignal::Hup => KernelSignal::HUP,
    };
    let process = Selector::Pid(message.pid);
    deliver(state, Some(&process), Deliver::Signal(signal)).map(drop)
}

/// What a process is to get.
#[derive(Debug, Clone, Copy)]
enum Deliver {
    Signal(KernelSignal),
    /// The end, with all that it started.
    End,
}

/// Sends a signal to a process that lives, and answers with the process.
fn deliver(
    state: &State,
    selector: Option<&Selector>,
    how: Deliver,
) -> Result<Arc<Process>, ConnectError> {
    let process = state.processes().find_live(selector)?;
    let sent = match how {
        Deliver::Signal(signal) => state.reaper().signal(process.pid, signal),
        Deliver::End => state.reaper().kill(process.pid),
    }
    .map_err(|error| ConnectError::internal(format!("cannot send the signal: {error}")))?;
    if sent {
        return Ok(process);
    }
    let pid = process.number();
    Err(ConnectError::not_found(format!(
        "process with pid {pid} not found"
    )))
}
