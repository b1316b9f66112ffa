//! One command in a box, over a WebSocket.
//!
//! The first message says what to run. Then binary messages to the server are standard
//! input; binary messages from it begin with a byte that names the stream.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, stream::SplitStream};
use http::{Method, StatusCode, header};
use reqwest::Upgraded;
use sandkeep_model::{Code, Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        handshake::{client::generate_key, derive_accept_key},
        protocol::{Role, WebSocketConfig},
    },
};

use super::{client::Client, terminal::WindowSize};

/// The server sends small messages; a larger one is no server of ours.
const MAX_MESSAGE: usize = 4 << 20;

/// What to run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Request {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// In the place of a command: one that runs already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attach: Option<u32>,
    /// Whether it goes on when we go; unless this is said, one we started does not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detach: Option<bool>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tty: Option<WindowSize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// What the server tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// Its pid.
    Started(u32),
    Stdout(Bytes),
    Stderr(Bytes),
    Exited(Exited),
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exited {
    /// As a shell would have it.
    pub code: u8,
    /// Why it was killed, where that is known.
    pub why: Option<String>,
    /// So often the policy refused something meanwhile.
    pub refused: u64,
}

impl Exited {
    pub const fn by_signal(number: u8) -> Self {
        Self {
            code: 128 + number,
            why: None,
            refused: 0,
        }
    }
}

#[derive(Debug)]
pub struct Session {
    incoming: SplitStream<WebSocketStream<Upgraded>>,
    input: Input,
}

/// The way to the command: standard input, signals, the size of the window. Clones share it.
#[derive(Debug, Clone)]
pub struct Input(Arc<Mutex<mpsc::Sender<Message>>>);

impl Input {
    /// An error means that the command is not there any more.
    pub async fn bytes(&self, bytes: Bytes) -> Result<(), Ended> {
        self.send(Message::Binary(bytes)).await
    }

    pub async fn close(&self) -> Result<(), Ended> {
        self.send(text(&json!({"close_stdin": true}))).await
    }

    pub async fn resize(&self, size: WindowSize) -> Result<(), Ended> {
        self.send(text(&json!({"resize": size}))).await
    }

    pub async fn signal(&self, name: &str) -> Result<(), Ended> {
        self.send(text(&json!({"signal": name}))).await
    }

    /// What is sent from now on goes the way of another.
    pub fn goes_by(&self, other: &Self) {
        let sender = other.sender();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = sender;
    }

    fn sender(&self) -> mpsc::Sender<Message> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    async fn send(&self, message: Message) -> Result<(), Ended> {
        self.sender().send(message).await.map_err(|_| Ended)
    }
}

/// The command is not there any more.
#[derive(Debug, Clone, Copy)]
pub struct Ended;

fn text(value: &Value) -> Message {
    Message::text(value.to_string())
}

impl Session {
    /// Starts the command.
    pub async fn start(client: &Client, sandbox: &str, request: &Request) -> Result<Self> {
        let socket = upgrade(client, sandbox).await?;
        let (mut outgoing, incoming) = socket.split();
        // Writing has a task of its own: a command that only writes while we only write
        // must not stop both.
        let (sender, mut queue) = mpsc::channel::<Message>(16);
        tokio::spawn(async move {
            while let Some(message) = queue.recv().await {
                if outgoing.send(message).await.is_err() {
                    return;
                }
            }
            let _ = outgoing.close().await;
        });
        let first = serde_json::to_value(request)
            .map_err(|error| Error::internal(format!("writing down the command: {error}")))?;
        let input = Input(Arc::new(Mutex::new(sender)));
        let _ = input.send(text(&first)).await;
        Ok(Self { incoming, input })
    }

    pub fn input(&self) -> Input {
        self.input.clone()
    }

    /// What comes next. After [`Told::Exited`] nothing does.
    pub async fn next(&mut self) -> Result<Told> {
        loop {
            let message = match self.incoming.next().await {
                Some(Ok(message)) => message,
                Some(Err(error)) => {
                    return Err(broken(&format!("the connection to the box broke: {error}")));
                }
                None => {
                    return Err(broken(
                        "the server closed the connection before the command ended",
                    ));
                }
            };
            match message {
                Message::Binary(bytes) => {
                    if let Some(told) = stream_of(&bytes) {
                        return Ok(told);
                    }
                }
                Message::Text(text) => {
                    if let Some(told) = control(text.as_str())? {
                        return Ok(told);
                    }
                }
                Message::Close(_) => {
                    return Err(broken(
                        "the server closed the connection before the command ended",
                    ));
                }
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            }
        }
    }
}

fn broken(message: &str) -> Error {
    Error::new(Code::HostNotReady, message)
        .hint("the box may be gone (`sandkeep ls --all` says why) or the server was stopped")
}

fn stream_of(bytes: &Bytes) -> Option<Told> {
    let stream = *bytes.first()?;
    let rest = bytes.slice(1..);
    match stream {
        1 | 3 => Some(Told::Stdout(rest)),
        2 => Some(Told::Stderr(rest)),
        _ => None,
    }
}

fn control(text: &str) -> Result<Option<Told>> {
    let value: Value = serde_json::from_str(text)
        .map_err(|error| Error::internal(format!("the server's message is not JSON: {error}")))?;
    if let Some(started) = value.get("started") {
        let pid = started["pid"].as_u64().and_then(|n| u32::try_from(n).ok());
        return Ok(Some(Told::Started(pid.unwrap_or_default())));
    }
    if let Some(exited) = value.get("exited") {
        return Ok(Some(Told::Exited(Exited {
            code: exit_code(exited),
            why: exited["why"].as_str().map(str::to_owned),
            refused: exited["refused_by_policy"].as_u64().unwrap_or_default(),
        })));
    }
    match value.get("error") {
        Some(error) => Err(serde_json::from_value(error.clone()).unwrap_or_else(|_| {
            Error::internal(error["message"].as_str().unwrap_or("the command failed"))
        })),
        None => Ok(None),
    }
}

/// 128 + n when signal n ended it, as shells say it.
fn exit_code(exited: &Value) -> u8 {
    let signal = match &exited["signal"] {
        Value::Number(number) => number.as_u64().and_then(|n| u8::try_from(n).ok()),
        Value::String(name) => signal_number(name),
        _ => None,
    };
    match signal {
        Some(number) if number > 0 => 128_u8.saturating_add(number),
        _ => exited["exit_code"]
            .as_i64()
            .map_or(1, |code| u8::try_from(code & 0xff).unwrap_or(1)),
    }
}

fn signal_number(name: &str) -> Option<u8> {
    let bare = name.strip_prefix("SIG").unwrap_or(name);
    Some(match bare {
        "HUP" => 1,
        "INT" => 2,
        "QUIT" => 3,
        "ILL" => 4,
        "TRAP" => 5,
        "ABRT" => 6,
        "BUS" => 7,
        "FPE" => 8,
        "KILL" => 9,
        "USR1" => 10,
        "SEGV" => 11,
        "USR2" => 12,
        "PIPE" => 13,
        "ALRM" => 14,
        "TERM" => 15,
        other => return other.parse().ok(),
    })
}

/// A WebSocket over the HTTP client's own connection: TLS and certificates are handled in one place.
async fn upgrade(client: &Client, sandbox: &str) -> Result<WebSocketStream<Upgraded>> {
    let key = generate_key();
    let request = client
        .request(Method::GET, &["sandboxes", sandbox, "exec"])?
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, &key);
    let response = client.send(request).await?;
    let accepted = response
        .headers()
        .get(header::SEC_WEBSOCKET_ACCEPT)
        .is_some_and(|value| value.as_bytes() == derive_accept_key(key.as_bytes()).as_bytes());
    if response.status() != StatusCode::SWITCHING_PROTOCOLS || !accepted {
        return Err(
            Error::internal("the server does not open a WebSocket for commands")
                .hint("a proxy in between may not pass WebSockets"),
        );
    }
    let upgraded = response
        .upgrade()
        .await
        .map_err(|error| Error::internal(format!("opening the WebSocket: {error}")))?;
    let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE));
    Ok(WebSocketStream::from_raw_socket(upgraded, Role::Client, Some(config)).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_message_leaves_out_what_was_not_asked() {
        let request = Request {
            cmd: vec!["ls".to_owned()],
            ..Request::default()
        };
        assert_eq!(
            serde_json::to_string(&request).unwrap(),
            r#"{"cmd":["ls"]}"#
        );
    }

    #[test]
    fn streams_are_told_apart_by_their_first_byte() {
        assert_eq!(
            stream_of(&Bytes::from_static(b"\x01out")),
            Some(Told::Stdout(Bytes::from_static(b"out")))
        );
        assert_eq!(
            stream_of(&Bytes::from_static(b"\x02err")),
            Some(Told::Stderr(Bytes::from_static(b"err")))
        );
        assert_eq!(
            stream_of(&Bytes::from_static(b"\x03tty")),
            Some(Told::Stdout(Bytes::from_static(b"tty")))
        );
        assert_eq!(stream_of(&Bytes::from_static(b"\x09?")), None);
        assert_eq!(stream_of(&Bytes::new()), None);
    }

    #[test]
    fn exits_read_as_a_shell_tells_them() {
        let exit = |text: &str| match control(text).unwrap() {
            Some(Told::Exited(exited)) => exited.code,
            other => panic!("{other:?}"),
        };
        assert_eq!(exit(r#"{"exited":{"exit_code":7,"signal":null}}"#), 7);
        assert_eq!(
            exit(r#"{"exited":{"exit_code":-1,"signal":"SIGKILL"}}"#),
            137
        );
        assert_eq!(exit(r#"{"exited":{"exit_code":-1,"signal":15}}"#), 143);
        assert_eq!(exit(r#"{"exited":{}}"#), 1);
    }

    #[test]
    fn an_error_of_the_server_keeps_its_words() {
        let text = r#"{"error":{"code":"not_found","message":"no such user","hint":null,"field":null,"retryable":false}}"#;
        assert_eq!(control(text).unwrap_err().message, "no such user");
        assert!(control("{").is_err());
        assert_eq!(control("{\"later\":1}").unwrap(), None);
    }
}
