//! Reading what a process writes, until it has ended and said everything.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::ioctl_fionread;
use sandkeep_agent_api::encode_message;
use sandkeep_agent_api::process::{EventResponse, Output, ProcessEvent};
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep_until};

use super::pty::Terminal;
use super::stream::Fan;
use crate::reap::{Exit, ExitReceiver};

const PIPE_CHUNK: usize = 32 << 10;
const TERMINAL_CHUNK: usize = 16 << 10;
const DISCARD_CHUNK: usize = 4 << 10;
/// How long after the end of a process its children may keep its output open.
const GRACE: Duration = Duration::from_millis(100);

/// What a process writes to.
#[derive(Debug)]
pub(super) enum Outputs {
    Pipes {
        stdout: Option<pipe::Receiver>,
        stderr: Option<pipe::Receiver>,
    },
    Terminal(Option<Arc<Terminal>>),
}

#[derive(Debug, Clone, Copy)]
enum Source {
    Stdout,
    Stderr,
    Terminal,
}

impl Outputs {
    pub(super) fn chunk(&self) -> usize {
        match self {
            Self::Pipes { .. } => PIPE_CHUNK,
            Self::Terminal(_) => TERMINAL_CHUNK,
        }
    }

    /// The next bytes; `None` when everything is closed.
    async fn next(&mut self, buffer: &mut [u8]) -> Option<(Source, usize)> {
        match self {
            Self::Terminal(open) => {
                let terminal = open.as_ref()?;
                match terminal.read(buffer).await {
                    Ok(length) if length > 0 => Some((Source::Terminal, length)),
                    _ => {
                        *open = None;
                        None
                    }
                }
            }
            Self::Pipes { stdout, stderr } => loop {
                if stdout.is_none() && stderr.is_none() {
                    return None;
                }
                let (source, pipe) = tokio::select! {
                    () = readable(stdout.as_ref()) => (Source::Stdout, &mut *stdout),
                    () = readable(stderr.as_ref()) => (Source::Stderr, &mut *stderr),
                };
                match pipe.as_ref().map(|pipe| pipe.try_read(buffer)) {
                    Some(Ok(length)) if length > 0 => return Some((source, length)),
                    Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                    _ => *pipe = None,
                }
            },
        }
    }

    /// How many bytes wait at this moment, by source.
    fn waiting(&self) -> [(Source, u64); 2] {
        let count = |pipe: &Option<pipe::Receiver>| {
            pipe.as_ref()
                .and_then(|pipe| ioctl_fionread(pipe).ok())
                .unwrap_or(0)
        };
        match self {
            Self::Pipes { stdout, stderr } => [
                (Source::Stdout, count(stdout)),
                (Source::Stderr, count(stderr)),
            ],
            // A terminal tells no count; its buffer is far smaller than this.
            Self::Terminal(_) => [(Source::Terminal, 1 << 16), (Source::Terminal, 0)],
        }
    }

    /// Reads without waiting; 0 when there is nothing.
    fn read_available(&self, source: Source, buffer: &mut [u8]) -> usize {
        let pipe = match (self, source) {
            (Self::Pipes { stdout, .. }, Source::Stdout) => stdout,
            (Self::Pipes { stderr, .. }, Source::Stderr) => stderr,
            (Self::Terminal(Some(terminal)), _) => return terminal.read_available(buffer),
            _ => return 0,
        };
        // Not `try_read`: that trusts a readiness the runtime may not have learnt yet.
        pipe.as_ref()
            .and_then(|pipe| rustix::io::read(pipe, buffer).ok())
            .unwrap_or(0)
    }
}

async fn readable(pipe: Option<&pipe::Receiver>) {
    match pipe {
        // A failure shows again when reading.
        Some(pipe) => drop(pipe.readable().await),
        None => std::future::pending().await,
    }
}

/// Publishes the output of a process until it has ended. Children of it that keep the output
/// open delay the end by no more than [`GRACE`].
pub(super) async fn pump(outputs: &mut Outputs, exit: &mut ExitReceiver, fan: &Fan) -> Exit {
    let mut buffer = vec![0; outputs.chunk()];
    let mut ended: Option<(Exit, Instant)> = None;
    loop {
        let give_up = ended.map(|(_, at)| at + GRACE);
        tokio::select! {
            exit = wait_for(exit), if ended.is_none() => ended = Some((exit, Instant::now())),
            () = sleep_until(give_up.unwrap_or_else(Instant::now)), if give_up.is_some() => break,
            read = outputs.next(&mut buffer) => match read {
                Some((source, length)) => publish(fan, source, &buffer[..length]).await,
                None => break,
            },
        }
    }
    let exit = match ended {
        Some((exit, _)) => exit,
        None => wait_for(exit).await,
    };
    // What the process itself wrote is in the pipes by now; what comes later is not its own.
    for (source, mut left) in outputs.waiting() {
        while left > 0 {
            let length = outputs.read_available(source, &mut buffer);
            if length == 0 {
                break;
            }
            left = left.saturating_sub(length as u64);
            publish(fan, source, &buffer[..length]).await;
        }
    }
    exit
}

/// Goes on reading for children that still write, so that they do not die of a closed pipe.
pub(super) async fn discard(mut outputs: Outputs) {
    let mut buffer = vec![0; DISCARD_CHUNK];
    while outputs.next(&mut buffer).await.is_some() {}
}

async fn wait_for(exit: &mut ExitReceiver) -> Exit {
    match exit.wait_for(Option::is_some).await.map(|exit| *exit) {
        Ok(Some(exit)) => exit,
        // The reaper lives as long as the agent, so this is never seen.
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

async fn publish(fan: &Fan, source: Source, bytes: &[u8]) {
    if !fan.has_readers() {
        return;
    }
    let output = match source {
        Source::Stdout => Output::Stdout(bytes.into()),
        Source::Stderr => Output::Stderr(bytes.into()),
        Source::Terminal => Output::Pty(bytes.into()),
    };
    // Bytes always become base64.
    if let Ok(frame) = encode_message(&EventResponse {
        event: ProcessEvent::Data(output),
    }) {
        fan.publish(frame).await;
    }
}
