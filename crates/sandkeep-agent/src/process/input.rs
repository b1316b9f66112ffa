//! Writing to a process.

use std::sync::Arc;

use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::process::Input;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;

use super::pty::Terminal;
use super::table::Process;

/// Where input of a process goes.
#[derive(Debug)]
pub(super) enum InputEnd {
    Disabled,
    Closed,
    Pipe(pipe::Sender),
    Terminal(Arc<Terminal>),
}

/// Writes all of it. A process that does not read holds the caller back; its end frees it. The
/// lock keeps inputs of several callers whole and in order.
pub(super) async fn write(process: &Process, input: Option<Input>) -> Result<(), ConnectError> {
    let input = input.ok_or_else(|| ConnectError::invalid_argument("the input is missing"))?;
    let mut end = process.input.lock().await;
    let writing = async {
        match (&mut *end, &input) {
            (InputEnd::Pipe(pipe), Input::Stdin(bytes)) => pipe.write_all(&bytes.0).await,
            (InputEnd::Terminal(terminal), Input::Pty(bytes)) => terminal.write_all(&bytes.0).await,
            (end, input) => return Err(refusal(end, input)),
        }
        .map_err(|error| ConnectError::internal(format!("cannot write to the process: {error}")))
    };
    tokio::select! {
        result = writing => result,
        () = process.exited() => {
            Err(ConnectError::internal("the process ended before it read its input"))
        }
    }
}

fn refusal(end: &InputEnd, input: &Input) -> ConnectError {
    ConnectError::internal(match (end, input) {
        (InputEnd::Terminal(_), _) => "the process has a terminal: send the input as pty",
        (_, Input::Pty(_)) => "the process has no terminal: send the input as stdin",
        (InputEnd::Closed, _) => "stdin of the process is closed",
        _ => "stdin of the process is not enabled: start it with stdin set to true",
    })
}

/// Ends the input, after what is being written. Twice is fine.
pub(super) async fn close(process: &Process) -> Result<(), ConnectError> {
    let mut end = process.input.lock().await;
    match *end {
        InputEnd::Terminal(_) => Err(ConnectError::unknown(
            "a terminal's input cannot be closed: send the end-of-file character (0x04)",
        )),
        InputEnd::Disabled | InputEnd::Closed => Ok(()),
        InputEnd::Pipe(_) => {
            *end = InputEnd::Closed;
            Ok(())
        }
    }
}
