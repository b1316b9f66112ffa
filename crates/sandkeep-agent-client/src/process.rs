//! Running things in a box.

use std::time::Duration;

use http::{HeaderValue, StatusCode};
use sandkeep_agent_api::{
    Blob, CONNECT_JSON, encode_message,
    process::{
        Empty, EventResponse, Input, ListResponse, ProcessEvent, ProcessInfo, Pty, PtySize,
        SelectRequest, Selector, SendInputRequest, SendSignalRequest, Signal, StartRequest,
        UpdateRequest,
    },
};
use sandkeep_model::{Code, Error, Result};
use serde::Serialize;

use crate::{
    Agent, Frames, Limits, error,
    unary::{as_user, collect, post, refusal},
};

/// The life of a process, as it happens. Dropping it closes the connection; the process lives on.
#[derive(Debug)]
pub struct ProcessStream {
    frames: Frames,
}

impl ProcessStream {
    /// The next event; `None` after the stream has ended properly. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<ProcessEvent>> {
        let message = self.frames.next::<EventResponse>().await?;
        Ok(message.map(|message| message.event))
    }
}

impl Agent {
    /// Starts a process. When `timeout` is over the agent kills it and the stream ends
    /// with `DeadlineExceeded`.
    pub async fn start(
        self,
        request: &StartRequest,
        user: Option<&str>,
        timeout: Option<Duration>,
    ) -> Result<ProcessStream> {
        let frames = self
            .server_stream("process.Process/Start", user, request, timeout)
            .await?;
        Ok(ProcessStream { frames })
    }

    /// Listens to a process that runs already.
    pub async fn connect_process(self, process: Selector) -> Result<ProcessStream> {
        let request = SelectRequest {
            process: Some(process),
        };
        let frames = self
            .server_stream("process.Process/Connect", None, &request, None)
            .await?;
        Ok(ProcessStream { frames })
    }

    /// A Connect call with one question and many answers.
    pub async fn server_stream<Q: Serialize + Sync>(
        mut self,
        method: &str,
        user: Option<&str>,
        question: &Q,
        timeout: Option<Duration>,
    ) -> Result<Frames> {
        let until = self.until();
        let frame = encode_message(question).map_err(|e| Error::internal(e.message))?;
        let mut request = post(&format!("/{method}"), CONNECT_JSON, frame)?;
        as_user(&mut request, user)?;
        let headers = request.headers_mut();
        headers.insert("connect-protocol-version", HeaderValue::from_static("1"));
        let pause = HeaderValue::from(Limits::KEEPALIVE_SECONDS);
        headers.insert("keepalive-ping-interval", pause);
        if let Some(timeout) = timeout {
            // 0 would mean "never" to the agent.
            let ms = u64::try_from(timeout.as_millis())
                .unwrap_or(u64::MAX)
                .max(1);
            headers.insert("connect-timeout-ms", HeaderValue::from(ms));
        }
        let (parts, body) = self.head(request, until).await?.into_parts();
        if parts.status == StatusCode::OK {
            return Ok(Frames::new(body, self));
        }
        let limit = self.limits().unary_bytes;
        let bytes = tokio::time::timeout_at(until, collect(body, limit))
            .await
            .map_err(|_| error::late())??;
        Err(refusal(parts.status, &bytes))
    }

    pub async fn list_processes(&mut self) -> Result<Vec<ProcessInfo>> {
        let list: ListResponse = self.unary("process.Process/List", None, &Empty {}).await?;
        Ok(list.processes)
    }

    /// Writes to the process's stdin, or to its terminal.
    pub async fn send_input(&mut self, process: Selector, input: Input) -> Result<()> {
        let request = SendInputRequest {
            process: Some(process),
            input: Some(input),
        };
        let Empty {} = self
            .unary("process.Process/SendInput", None, &request)
            .await
            .map_err(not_open)?;
        Ok(())
    }

    pub async fn send_stdin(&mut self, process: Selector, bytes: &[u8]) -> Result<()> {
        self.send_input(process, Input::Stdin(Blob::from(bytes)))
            .await
    }

    pub async fn send_pty(&mut self, process: Selector, bytes: &[u8]) -> Result<()> {
        self.send_input(process, Input::Pty(Blob::from(bytes)))
            .await
    }

    pub async fn close_stdin(&mut self, process: Selector) -> Result<()> {
        let request = SelectRequest {
            process: Some(process),
        };
        let Empty {} = self
            .unary("process.Process/CloseStdin", None, &request)
            .await
            .map_err(not_open)?;
        Ok(())
    }

    pub async fn signal(&mut self, process: Selector, signal: Signal) -> Result<()> {
        let request = SendSignalRequest {
            process: Some(process),
            signal,
        };
        let Empty {} = self
            .unary("process.Process/SendSignal", None, &request)
            .await?;
        Ok(())
    }

    pub async fn resize(&mut self, process: Selector, cols: u32, rows: u32) -> Result<()> {
        let request = UpdateRequest {
            process: Some(process),
            pty: Some(Pty {
                size: Some(PtySize { cols, rows }),
            }),
        };
        let Empty {} = self.unary("process.Process/Update", None, &request).await?;
        Ok(())
    }
}

/// envd answers `internal` or `unknown` when there is no stdin to write to; that is no fault of ours.
fn not_open(error: Error) -> Error {
    if error.code != Code::Internal {
        return error;
    }
    Error::conflict(error.message)
        .hint("start the process with stdin, or write to its terminal if it has one")
}
