//! Starts the real agent on a socket of its own and talks HTTP to it.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sandkeep_agent_api::{CONNECT_JSON, Decoder, Frame, encode_message};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::net::UnixStream;

pub type ClientBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// A running agent and a directory to play in.
pub struct Agent {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A reply that was read to its end.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub fn header(&self, name: &str) -> &str {
        let value = self.headers.get(name).expect(name);
        value.to_str().expect("text")
    }

    /// The message of an error, after checking its status and shape.
    pub fn refused(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{:?}", self.body);
        let json = self.json();
        if json["code"].is_number() {
            assert_eq!(json["code"], status);
        }
        json["message"].as_str().expect("message").to_owned()
    }
}

impl Agent {
    pub async fn start() -> Self {
        // Extended attributes need a real file system, not every /tmp is one.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("dir");
        let socket = dir.path().join("agent.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_sandkeep-agent"))
            .arg("--listen")
            .arg(&socket)
            .stdin(Stdio::null())
            .spawn()
            .expect("agent");
        std::fs::create_dir(dir.path().join("work")).expect("dir");
        let agent = Self { child, dir };
        while UnixStream::connect(agent.socket()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        agent
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("agent.sock")
    }

    /// A path in the directory to play in.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("work").join(name)
    }

    pub fn shown(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    /// `/files` for a path in that directory.
    pub fn url(&self, name: &str) -> String {
        files_url(&self.path(name))
    }

    pub async fn connect(&self) -> SendRequest<ClientBody> {
        let stream = UnixStream::connect(self.socket()).await.expect("connect");
        let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("handshake");
        tokio::spawn(connection);
        sender
    }

    pub async fn send(&self, request: Request<ClientBody>) -> Response<Incoming> {
        let mut sender = self.connect().await;
        sender.send_request(request).await.expect("response")
    }

    pub async fn request(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Reply {
        let body = Full::new(body.into());
        let body = body.map_err(|never| match never {}).boxed_unsync();
        let response = self.send(build(method, url, headers, body)).await;
        read(response).await
    }

    pub async fn get(&self, url: &str, headers: &[(&str, &str)]) -> Reply {
        self.request(Method::GET, url, headers, "").await
    }

    /// Uploads as `application/octet-stream`.
    pub async fn put(&self, name: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Reply {
        let mut all = vec![("content-type", "application/octet-stream")];
        all.extend_from_slice(headers);
        self.request(Method::POST, &self.url(name), &all, body)
            .await
    }

    /// One unary RPC.
    pub async fn rpc(&self, method: &str, message: Value) -> Reply {
        let url = format!("/filesystem.Filesystem/{method}");
        let headers = [("content-type", "application/json")];
        let json = message.to_string();
        self.request(Method::POST, &url, &headers, json).await
    }

    /// Opens a stream of `WatchDir`.
    pub async fn watch(&self, message: Value, headers: &[(&str, &str)]) -> Stream {
        let mut all = vec![("content-type", CONNECT_JSON)];
        all.extend_from_slice(headers);
        let body = Full::new(encode_message(&message).expect("frame"));
        let body = body.map_err(|never| match never {}).boxed_unsync();
        let url = "/filesystem.Filesystem/WatchDir";
        let response = self.send(build(Method::POST, url, &all, body)).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], CONNECT_JSON);
        Stream {
            body: response.into_body(),
            decoder: Decoder::new(1 << 20),
        }
    }

    /// Open descriptors of the agent that are not sockets, pipes and such.
    pub fn open_files(&self) -> Vec<PathBuf> {
        let fds = format!("/proc/{}/fd", self.pid());
        std::fs::read_dir(fds)
            .expect("fds")
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .filter(|target| target.starts_with(self.dir.path()))
            .collect()
    }

    /// Waits for something that must come true.
    pub async fn until(&self, what: &str, check: impl Fn(&Self) -> bool) {
        for _ in 0..2000 {
            if check(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never came true: {what}");
    }
}

/// A stream of Connect frames.
pub struct Stream {
    body: Incoming,
    decoder: Decoder,
}

impl Stream {
    /// The next message, or the end's JSON as an error.
    pub async fn next(&mut self) -> Result<Value, Value> {
        loop {
            match self.decoder.next_frame().expect("frame") {
                Some(Frame::Message(json)) => {
                    return Ok(serde_json::from_slice(&json).expect("JSON"));
                }
                Some(Frame::End(json)) => {
                    return Err(serde_json::from_slice(&json).expect("JSON"));
                }
                None => {}
            }
            let frame = self.body.frame().await.expect("an end frame");
            if let Ok(bytes) = frame.expect("bytes").into_data() {
                self.decoder.push(&bytes);
            }
        }
    }

    /// The next event as `TYPE name`.
    pub async fn event(&mut self) -> String {
        let message = self.next().await.expect("event");
        event_text(&message["filesystem"])
    }
}

pub fn event_text(event: &Value) -> String {
    let kind = event["type"].as_str().expect("type");
    let kind = kind.strip_prefix("EVENT_TYPE_").expect("prefix");
    format!("{kind} {}", event["name"].as_str().expect("name"))
}

pub fn files_url(path: &Path) -> String {
    let path = path.to_string_lossy();
    format!(
        "/files?path={}",
        utf8_percent_encode(&path, NON_ALPHANUMERIC)
    )
}

pub fn build(
    method: Method,
    url: &str,
    headers: &[(&str, &str)],
    body: ClientBody,
) -> Request<ClientBody> {
    let mut request = Request::builder()
        .method(method)
        .uri(url)
        .header("host", "box");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(body).expect("request")
}

pub async fn read(response: Response<Incoming>) -> Reply {
    let (parts, body) = response.into_parts();
    Reply {
        status: parts.status,
        headers: parts.headers,
        body: body.collect().await.expect("body").to_bytes(),
    }
}
