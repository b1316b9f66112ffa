//! Running a command: the whole answer at once, or line by line as it happens.

use axum::{
    Json,
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, header};
use serde::Serialize;
use utoipa::ToSchema;

use super::{
    command::ExecRequest,
    run::{Channel, Exit, Happening, Run},
    text::{Capture, Piece, Pieces},
};
use crate::{
    error::{ErrorBody, ErrorDetail, NativeError},
    extract::{NativeId, NativeJson},
    state::Shared,
};

const NDJSON: &str = "application/x-ndjson";
/// How much of each output a whole answer holds.
const CAPTURE_BYTES: usize = 1024 * 1024;

/// A command that has ended.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExecResult {
    pid: u32,
    #[serde(flatten)]
    exit: Exit,
    #[serde(flatten)]
    output: ExecOutput,
}

/// A command whose end is not known or came too late, with what it wrote until then.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExecFailure {
    error: ErrorDetail,
    pid: u32,
    #[serde(flatten)]
    output: ExecOutput,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExecOutput {
    /// At most 1 MiB. Bytes that are no UTF-8 are shown as U+FFFD here.
    stdout: String,
    /// The very bytes, only when `stdout` could not hold them.
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    /// Whether there was more.
    stdout_truncated: bool,
    stderr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
    stderr_truncated: bool,
}

/// One line of the stream.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum ExecEvent {
    Started {
        pid: u32,
    },
    Stdout {
        #[serde(flatten)]
        piece: Piece,
    },
    Stderr {
        #[serde(flatten)]
        piece: Piece,
    },
    /// Nothing happened for a while; the command is still there.
    Keepalive,
    /// The last line of a command that ended.
    Exited {
        #[serde(flatten)]
        exit: Exit,
    },
    /// The last line when the end of the command is not known.
    Error {
        error: ErrorDetail,
    },
}

/// Runs a command.
///
/// Answers when it has ended; with `Accept: application/x-ndjson` answers line by line
/// while it runs. When the client goes away the command is killed, unless `detach` is set.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "exec",
    params(("id" = String, Path, description = "The sandbox")),
    request_body = ExecRequest,
    responses(
        (status = 200, description = "It has ended", content(
            (ExecResult = "application/json"),
            (ExecEvent = "application/x-ndjson"),
        )),
        (status = 504, description = "Its timeout_ms was over", body = ExecFailure),
    ))]
pub(crate) async fn exec(
    State(state): State<Shared>,
    id: NativeId,
    headers: HeaderMap,
    NativeJson(request): NativeJson<ExecRequest>,
) -> Result<Response, NativeError> {
    let run = Run::start(&state, &id, request.check()?).await?;
    if !wants_stream(&headers) {
        return Ok(whole(run).await);
    }
    let headers = [
        (header::CONTENT_TYPE, NDJSON),
        (header::CACHE_CONTROL, "no-store"),
    ];
    Ok((headers, Body::from_stream(lines(run, state))).into_response())
}

fn wants_stream(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|part| part.split(';').next())
        .any(|kind| kind.trim().eq_ignore_ascii_case(NDJSON))
}

async fn whole(mut run: Run) -> Response {
    let (mut stdout, mut stderr) = (Capture::new(CAPTURE_BYTES), Capture::new(CAPTURE_BYTES));
    let ended = loop {
        match run.next().await {
            Ok(Happening::Output(Channel::Stderr, bytes)) => stderr.push(&bytes),
            Ok(Happening::Output(_, bytes)) => stdout.push(&bytes),
            Ok(Happening::Keepalive) => {}
            Ok(Happening::Exited(exit)) => break Ok(exit),
            Err(error) => break Err(error),
        }
    };
    let (stdout, stderr) = (stdout.end(), stderr.end());
    let output = ExecOutput {
        stdout: stdout.text,
        stdout_base64: stdout.base64,
        stdout_truncated: stdout.truncated,
        stderr: stderr.text,
        stderr_base64: stderr.base64,
        stderr_truncated: stderr.truncated,
    };
    let pid = run.pid();
    match ended {
        Ok(exit) => Json(ExecResult { pid, exit, output }).into_response(),
        Err(error) => {
            let status = crate::error::status(&error);
            let ErrorBody { error } = error.into();
            (status, Json(ExecFailure { error, pid, output })).into_response()
        }
    }
}

/// The lines of a command. Nothing is read from the box before the client has taken what
/// was read already.
struct Lines {
    run: Run,
    state: Shared,
    stdout: Pieces,
    stderr: Pieces,
    started: bool,
    ended: bool,
}

fn lines(run: Run, state: Shared) -> impl Stream<Item = Result<Bytes, serde_json::Error>> {
    let lines = Lines {
        run,
        state,
        stdout: Pieces::default(),
        stderr: Pieces::default(),
        started: false,
        ended: false,
    };
    stream::unfold(lines, |mut lines| async move {
        let events = lines.next().await?;
        Some((to_lines(&events), lines))
    })
}

fn to_lines(events: &[ExecEvent]) -> Result<Bytes, serde_json::Error> {
    let mut text = Vec::new();
    for event in events {
        serde_json::to_writer(&mut text, event)?;
        text.push(b'\n');
    }
    Ok(Bytes::from(text))
}

impl Lines {
    /// The next events, at least one; `None` after the last.
    async fn next(&mut self) -> Option<Vec<ExecEvent>> {
        if self.ended {
            return None;
        }
        if !self.started {
            self.started = true;
            let pid = self.run.pid();
            return Some(vec![ExecEvent::Started { pid }]);
        }
        loop {
            let shutdown = self.state.shutdown.clone();
            let happening = tokio::select! {
                biased;
                happening = self.run.next() => happening,
                () = shutdown.cancelled() => Err(super::exec_ws::stopping()),
            };
            let event = match happening {
                Ok(Happening::Output(Channel::Stderr, bytes)) => self
                    .stderr
                    .push(&bytes)
                    .map(|piece| ExecEvent::Stderr { piece }),
                Ok(Happening::Output(_, bytes)) => self
                    .stdout
                    .push(&bytes)
                    .map(|piece| ExecEvent::Stdout { piece }),
                Ok(Happening::Keepalive) => Some(ExecEvent::Keepalive),
                Ok(Happening::Exited(exit)) => return Some(self.end(ExecEvent::Exited { exit })),
                Err(error) => {
                    let ErrorBody { error } = error.into();
                    return Some(self.end(ExecEvent::Error { error }));
                }
            };
            if let Some(event) = event {
                return Some(vec![event]);
            }
        }
    }

    fn end(&mut self, last: ExecEvent) -> Vec<ExecEvent> {
        self.ended = true;
        let stdout = self.stdout.end().map(|piece| ExecEvent::Stdout { piece });
        let stderr = self.stderr.end().map(|piece| ExecEvent::Stderr { piece });
        [stdout, stderr, Some(last)].into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_documented_shape() {
        let lines = to_lines(&[
            ExecEvent::Started { pid: 7 },
            ExecEvent::Stdout {
                piece: Piece::Text("hi\n".to_owned()),
            },
            ExecEvent::Stderr {
                piece: Piece::Base64("/w==".to_owned()),
            },
            ExecEvent::Keepalive,
            ExecEvent::Exited {
                exit: Exit {
                    exit_code: 0,
                    signal: None,
                    why: None,
                    refused_by_policy: 0,
                },
            },
        ])
        .unwrap();
        let wanted = r#"{"event":"started","pid":7}
{"event":"stdout","text":"hi\n"}
{"event":"stderr","base64":"/w=="}
{"event":"keepalive"}
{"event":"exited","exit_code":0,"signal":null}
"#;
        assert_eq!(std::str::from_utf8(&lines).unwrap(), wanted);
    }

    #[test]
    fn a_stream_must_be_asked_for() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, value.parse().unwrap());
            wants_stream(&headers)
        };
        assert!(with("application/json, Application/X-NDJSON;q=0.9"));
        assert!(!with("*/*"));
        assert!(!wants_stream(&HeaderMap::new()));
    }
}
