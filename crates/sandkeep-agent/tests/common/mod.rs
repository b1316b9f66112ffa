//! A real agent and a small client for it.
#![allow(dead_code)] // Each test file uses its own part.
#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustix::process::Signal;
use sandkeep_agent_api::process::{EndEvent, EventResponse, Output, ProcessEvent};
use sandkeep_agent_api::{ConnectError, Decoder, EndStream, Frame, encode_message};
use serde_json::{Value, json};
use tokio::net::UnixStream;

/// Longer than anything a test waits for: a test that hangs fails.
const GUARD: Duration = Duration::from_secs(30);
pub const AGENT: &str = env!("CARGO_BIN_EXE_sandkeep-agent");

/// An agent of its own for one test. Its socket exists before it starts, so there is nothing to
/// wait for.
pub struct Agent {
    pub child: Child,
    pub directory: tempfile::TempDir,
    stop: Signal,
}

impl Agent {
    pub fn start() -> Self {
        let mut agent = Self::start_as(|_| Command::new(AGENT));
        agent.stop = Signal::TERM;
        agent
    }

    /// Takes over an agent that listens on `socket` in the directory.
    pub fn adopt(child: Child, directory: tempfile::TempDir) -> Self {
        Self {
            child,
            directory,
            stop: Signal::TERM,
        }
    }

    /// Starts the agent by another command, which must hand on its descriptor 3 and take the
    /// agent along when killed.
    pub fn start_as(command: impl FnOnce(&tempfile::TempDir) -> Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener =
            std::os::unix::net::UnixListener::bind(directory.path().join("socket")).unwrap();
        let mut command = command(&directory);
        command
            .env("SANDKEEP_LISTEN_FD", "3")
            .env("AGENT_SECRET", "x");
        let fd = listener.as_raw_fd();
        // SAFETY: dup2 and fcntl are async-signal-safe and touch only descriptors of the child.
        unsafe {
            command.pre_exec(move || {
                let done = if fd == 3 {
                    libc::fcntl(3, libc::F_SETFD, 0)
                } else {
                    libc::dup2(fd, 3)
                };
                if done < 0 {
                    Err(std::io::Error::last_os_error())
                } else {
                    Ok(())
                }
            });
        }
        let child = command.spawn().unwrap();
        Self {
            child,
            directory,
            stop: Signal::KILL,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// One connection; requests on it go one after the other.
    pub async fn connect(&self) -> SendRequest<Full<Bytes>> {
        let stream = UnixStream::connect(self.socket()).await.unwrap();
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    pub async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        self.connect().await.send_request(request).await.unwrap()
    }

    /// A request with a body, answered by status and body.
    pub async fn http(&self, method: &str, path: &str, body: impl Into<Bytes>) -> (u16, Bytes) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "box");
        let response = self
            .send(request.body(Full::new(body.into())).unwrap())
            .await;
        let status = response.status().as_u16();
        (
            status,
            response.into_body().collect().await.unwrap().to_bytes(),
        )
    }

    pub async fn get_json(&self, path: &str) -> Value {
        let (status, body) = self.http("GET", path, "").await;
        assert_eq!(status, 200, "{path}");
        serde_json::from_slice(&body).unwrap()
    }

    /// A unary call of `process.Process`.
    pub async fn call(&self, method: &str, message: Value) -> (u16, Value) {
        let path = format!("/process.Process/{method}");
        let (status, body) = self.http("POST", &path, message.to_string()).await;
        (status, serde_json::from_slice(&body).unwrap())
    }

    /// A server-streaming call of `process.Process`.
    pub async fn stream(&self, method: &str, headers: &[(&str, &str)], message: Value) -> Stream {
        let mut request = Request::builder()
            .method("POST")
            .uri(format!("/process.Process/{method}"))
            .header("host", "box")
            .header("content-type", "application/connect+json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let frame = encode_message(&message).unwrap();
        let response = self.send(request.body(Full::new(frame)).unwrap()).await;
        assert_eq!(response.status(), 200);
        assert_eq!(
            response.headers()["content-type"],
            "application/connect+json"
        );
        Stream {
            body: response.into_body(),
            decoder: Decoder::new(1 << 20),
            unread: Vec::new(),
        }
    }

    /// Starts a shell command and waits for its start event.
    pub async fn shell(&self, command: &str) -> (u32, Stream) {
        self.start_process(&[], shell(command)).await
    }

    pub async fn start_process(&self, headers: &[(&str, &str)], message: Value) -> (u32, Stream) {
        let mut stream = self.stream("Start", headers, message).await;
        let pid = stream.started().await;
        (pid, stream)
    }

    /// Runs a shell command to its end.
    pub async fn run(&self, command: &str) -> Outcome {
        self.run_with(&[], shell(command)).await
    }

    pub async fn run_with(&self, headers: &[(&str, &str)], message: Value) -> Outcome {
        self.start_process(headers, message).await.1.outcome().await
    }

    /// The error of a start that fails.
    pub async fn refused(&self, headers: &[(&str, &str)], message: Value) -> ConnectError {
        let mut stream = self.stream("Start", headers, message).await;
        match stream.next().await {
            Next::End(Some(error)) => error,
            other => panic!("expected an error, got {other:?}"),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, self.stop);
        let _ = self.child.wait();
    }
}

/// A start request for a shell command without stdin, as the SDKs send it.
pub fn shell(command: &str) -> Value {
    json!({"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": false})
}

pub fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:")))
}

pub fn base64(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

/// What a stream says next.
#[derive(Debug)]
pub enum Next {
    Event(ProcessEvent),
    End(Option<ConnectError>),
}

pub struct Stream {
    body: Incoming,
    decoder: Decoder,
    unread: Vec<u8>,
}

impl Stream {
    pub async fn next(&mut self) -> Next {
        loop {
            match self.decoder.next_frame().unwrap() {
                Some(Frame::Message(json)) => {
                    let message: EventResponse = serde_json::from_slice(&json).unwrap();
                    return Next::Event(message.event);
                }
                Some(Frame::End(json)) => {
                    return Next::End(serde_json::from_slice::<EndStream>(&json).unwrap().error);
                }
                None => {}
            }
            let frame = tokio::time::timeout(GUARD, self.body.frame())
                .await
                .expect("no frame came");
            let frame = frame.expect("the stream ended without an end frame");
            if let Ok(data) = frame.unwrap().into_data() {
                self.decoder.push(&data);
            }
        }
    }

    pub async fn event(&mut self) -> ProcessEvent {
        match self.next().await {
            Next::Event(event) => event,
            Next::End(error) => panic!("the stream ended: {error:?}"),
        }
    }

    /// The start event, which must come first.
    pub async fn started(&mut self) -> u32 {
        match self.event().await {
            ProcessEvent::Start(start) => start.pid,
            other => panic!("expected start, got {other:?}"),
        }
    }

    /// Reads output up to and including the text; what follows it stays for later.
    pub async fn output_until(&mut self, text: &str) -> String {
        loop {
            let found = self
                .unread
                .windows(text.len())
                .position(|part| part == text.as_bytes());
            if let Some(at) = found {
                let rest = self.unread.split_off(at + text.len());
                let seen = std::mem::replace(&mut self.unread, rest);
                return String::from_utf8_lossy(&seen).into_owned();
            }
            if let ProcessEvent::Data(data) = self.event().await {
                let (Output::Stdout(blob) | Output::Stderr(blob) | Output::Pty(blob)) = data;
                self.unread.extend_from_slice(&blob.0);
            }
        }
    }

    /// Everything until the end, which must be clean.
    pub async fn outcome(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        outcome.add(&std::mem::take(&mut self.unread));
        loop {
            match self.event().await {
                ProcessEvent::Data(Output::Stdout(blob)) => outcome.add(&blob.0),
                ProcessEvent::Data(Output::Stderr(blob)) => outcome.stderr.extend(&blob.0),
                ProcessEvent::Data(Output::Pty(blob)) => outcome.add(&blob.0),
                ProcessEvent::Keepalive(_) => {}
                ProcessEvent::Start(_) => panic!("a second start"),
                ProcessEvent::End(end) => {
                    outcome.end = end;
                    break;
                }
            }
        }
        assert!(
            matches!(self.next().await, Next::End(None)),
            "the end frame must be clean"
        );
        assert!(
            self.body.frame().await.is_none(),
            "nothing may follow the end frame"
        );
        outcome
    }
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub bytes: Vec<u8>,
    pub stderr: Vec<u8>,
    pub largest: usize,
    pub end: EndEvent,
}

impl Outcome {
    fn add(&mut self, bytes: &[u8]) {
        self.largest = self.largest.max(bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    pub fn stdout(&self) -> &str {
        std::str::from_utf8(&self.bytes).unwrap()
    }
}
