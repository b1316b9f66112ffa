//! Interactive commands over a WebSocket.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, WebSocket, close_code, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use bytes::{BufMut, Bytes, BytesMut};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use sandkeep_agent_api::{
    host::HostSignal,
    process::{Selector, Signal},
};
use sandkeep_agent_client::Agent;
use sandkeep_model::{Code, Error, Result, SandboxId};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

use super::{
    command::{InteractiveRequest, TtySize},
    run::{Channel, Exit, Happening, INPUT_DEADLINE, Run},
};
use crate::{
    agent,
    error::{ErrorBody, ErrorDetail, NativeError},
    extract::{NativeId, parse_json},
    state::Shared,
};

/// The largest message a client may send.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;
/// How long the client may take to say what to run.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);
/// How long a client may leave output unread before it is cut off.
const SLOW_CLIENT: Duration = Duration::from_secs(60);
/// How long it may take to listen to a process again whose box was paused.
const ATTACHES: Duration = Duration::from_secs(60);
const PING_EVERY: Duration = Duration::from_secs(30);
/// Messages of the client that wait for the box; when full, the client has to wait.
const WAITING_INPUTS: usize = 8;

/// Runs a command interactively (WebSocket).
///
/// The first message is text, `InteractiveRequest` as JSON. Then the client sends binary
/// messages (bytes for the command) and text: `{"resize":{"cols","rows"}}`,
/// `{"signal":"INT|TERM|KILL|HUP|QUIT"}` or `{"close_stdin":true}`. The server sends text
/// `{"started":{"pid"}}`, binary messages whose first byte says where the rest was written
/// (1 stdout, 2 stderr, 3 terminal), and at the end text `{"exited":{"exit_code","signal"}}`
/// or `{"error":{…}}`, and closes. When the client goes away the command
/// that it started is killed, unless it asked for `detach`. When the server stops, commands go on: connect again
/// with `{"attach": PID}` in place of a command. What was written meanwhile is not told. A client
/// that attached leaves the command running when it goes, unless it said `"detach": false`.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/exec", tag = "exec",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 101, description = "A WebSocket; its first message is an `InteractiveRequest`",
        body = InteractiveRequest)))]
pub(crate) async fn interactive(
    State(state): State<Shared>,
    id: NativeId,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, NativeError> {
    // One that wakes by itself is woken; of others the client hears at once why not.
    state.keeper.awake(&id).await?;
    let upgrade = upgrade.map_err(|rejection| {
        Error::invalid("upgrade", rejection.body_text()).hint(
            "connect with a WebSocket client, or POST to the same path for commands without a terminal",
        )
    })?;
    Ok(upgrade
        .max_message_size(MAX_MESSAGE_BYTES)
        .max_frame_size(MAX_MESSAGE_BYTES)
        .on_upgrade(move |socket| serve(socket, state, id.0)))
}

/// What the server says in text.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Said {
    Started { pid: u32 },
    Exited(Exit),
    Error(ErrorDetail),
}

/// What the client says in text after its first message.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Asked {
    Resize(TtySize),
    Signal(SignalName),
    CloseStdin(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum SignalName {
    Int,
    Term,
    Kill,
    Hup,
    Quit,
}

/// What the client wants done to its command.
#[derive(Debug)]
enum Input {
    Bytes(Bytes),
    Asked(Asked),
}

/// Why a conversation is over.
#[derive(Debug)]
enum Over {
    Exited(Exit),
    Failed(Error),
    /// There is nobody left to tell.
    ClientLeft,
}

pub(crate) fn stopping() -> Error {
    Error::host_not_ready("the server is stopping; commands in sandboxes go on")
        .hint("when it is back, `sandkeep ps SANDBOX` lists them and `sandkeep exec --attach PID SANDBOX` listens again")
}

async fn serve(mut socket: WebSocket, state: Shared, id: SandboxId) {
    let started = match first(&mut socket).await {
        Ok(Some(request)) => start(&state, &id, request).await,
        Ok(None) => return,
        Err(error) => Err(error),
    };
    let (mut sink, source) = socket.split();
    let over = match started {
        Ok((run, tty)) => converse(&mut sink, source, run, tty, &state, &id).await,
        Err(error) => Over::Failed(error),
    };
    let (said, code) = match over {
        Over::ClientLeft => return,
        Over::Exited(exit) => (Said::Exited(exit), close_code::NORMAL),
        Over::Failed(error) => {
            let code = if error.code == Code::InvalidArgument {
                close_code::POLICY
            } else {
                close_code::ERROR
            };
            let ErrorBody { error } = error.into();
            (Said::Error(error), code)
        }
    };
    let last = async {
        say(&mut sink, &said).await?;
        let frame = CloseFrame {
            code,
            reason: "".into(),
        };
        sink.send(Message::Close(Some(frame))).await.map_err(|_| ())
    };
    // Whether the client still hears it changes nothing here.
    timeout(SLOW_CLIENT, last).await.ok();
}

/// The first message; `None` when the client left before it.
async fn first(socket: &mut WebSocket) -> Result<Option<InteractiveRequest>> {
    let wrong = |message: &str| {
        Error::invalid("first message", message).hint("send text like {\"cmd\": \"bash\"} first")
    };
    loop {
        let message = timeout(FIRST_MESSAGE, socket.recv())
            .await
            .map_err(|_| wrong("nothing was said about what to run"))?;
        match message {
            None | Some(Err(_) | Ok(Message::Close(_))) => return Ok(None),
            Some(Ok(Message::Text(text))) => return parse_json(text.as_bytes()).map(Some),
            Some(Ok(Message::Binary(_))) => return Err(wrong("the first message is not text")),
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
        }
    }
}

async fn start(state: &Shared, id: &SandboxId, request: InteractiveRequest) -> Result<(Run, bool)> {
    let tty = request.tty.is_some();
    let run = match (request.attach, &request.cmd) {
        (Some(_), Some(_)) => {
            return Err(Error::invalid("attach", "cmd and attach are both given")
                .hint("give cmd to start a command, attach to listen to one that runs"));
        }
        // Whoever only listens does not end it by leaving.
        (Some(pid), None) => Run::attach(state, id, pid, request.detach.unwrap_or(true)).await?,
        (None, _) => Run::start(state, id, request.check()?).await?,
    };
    Ok((run, tty))
}

/// Carries both directions until one end is over. Dropping `run` kills the command if it
/// has not ended.
async fn converse(
    sink: &mut SplitSink<WebSocket, Message>,
    source: SplitStream<WebSocket>,
    mut run: Run,
    tty: bool,
    state: &Shared,
    id: &SandboxId,
) -> Over {
    let pid = run.pid();
    if say(sink, &Said::Started { pid }).await.is_err() {
        return Over::ClientLeft;
    }
    let (inputs, waiting) = mpsc::channel(WAITING_INPUTS);
    let process = Fed {
        state: Arc::clone(state),
        id: id.clone(),
        pid,
        tty,
        attached: run.attached(),
    };
    let feeder = tokio::spawn(feed(process, waiting));
    let over = tokio::select! {
        over = tell(sink, &mut run) => over,
        over = listen(source, inputs) => over,
        () = state.shutdown.cancelled() => Over::Failed(stopping()),
    };
    feeder.abort();
    over
}

/// Box to client.
async fn tell(sink: &mut SplitSink<WebSocket, Message>, run: &mut Run) -> Over {
    let mut ping = tokio::time::interval(PING_EVERY);
    ping.reset();
    loop {
        let message = tokio::select! {
            happening = run.next() => match happening {
                Ok(Happening::Output(channel, bytes)) => output(channel, &bytes),
                Ok(Happening::Keepalive) => continue,
                Ok(Happening::Exited(exit)) => return Over::Exited(exit),
                Err(error) => return Over::Failed(error),
            },
            _ = ping.tick() => Message::Ping(Bytes::new()),
        };
        match timeout(SLOW_CLIENT, sink.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Over::ClientLeft,
            Err(_) => {
                tracing::debug!(
                    pid = run.pid(),
                    "a client did not read its command's output"
                );
                return Over::ClientLeft;
            }
        }
    }
}

fn output(channel: Channel, bytes: &[u8]) -> Message {
    let mut message = BytesMut::with_capacity(bytes.len() + 1);
    message.put_u8(match channel {
        Channel::Stdout => 1,
        Channel::Stderr => 2,
        Channel::Tty => 3,
    });
    message.put_slice(bytes);
    Message::Binary(message.freeze())
}

async fn say(sink: &mut SplitSink<WebSocket, Message>, said: &Said) -> Result<(), ()> {
    let text = serde_json::to_string(said).map_err(|_| ())?;
    sink.send(Message::Text(text.into())).await.map_err(|_| ())
}

/// Client to box, as far as its queue has room.
async fn listen(mut source: SplitStream<WebSocket>, inputs: mpsc::Sender<Input>) -> Over {
    loop {
        let input = match source.next().await {
            None | Some(Ok(Message::Close(_))) => return Over::ClientLeft,
            Some(Err(error)) => {
                tracing::debug!(%error, "an interactive client broke off");
                return Over::ClientLeft;
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => continue,
            Some(Ok(Message::Binary(bytes))) => Input::Bytes(bytes),
            Some(Ok(Message::Text(text))) => match asked(text.as_bytes()) {
                Ok(asked) => Input::Asked(asked),
                Err(error) => return Over::Failed(error),
            },
        };
        if inputs.send(input).await.is_err() {
            // The feeder ends only when the box can not be reached; the other direction
            // will say so.
            std::future::pending::<()>().await;
        }
    }
}

fn asked(text: &[u8]) -> Result<Asked> {
    let asked: Asked = parse_json(text).map_err(|error| {
        error.hint(
            "send binary messages for input, or text: {\"resize\":{\"cols\":80,\"rows\":24}}, \
             {\"signal\":\"INT\"}, {\"close_stdin\":true}",
        )
    })?;
    if let Asked::Resize(size) = asked {
        size.check("resize")?;
    }
    Ok(asked)
}

/// A process that gets input.
struct Fed {
    state: Shared,
    id: SandboxId,
    pid: u32,
    tty: bool,
    attached: watch::Receiver<bool>,
}

/// Does what the client wants, in its order, over a connection of its own. A box that is
/// paused and wakes by itself is woken by it.
async fn feed(mut process: Fed, mut waiting: mpsc::Receiver<Input>) {
    let mut connection: Option<Agent> = None;
    while let Some(input) = waiting.recv().await {
        let mut agent = match connection.take().filter(|agent| !agent.is_closed()) {
            Some(agent) => agent,
            None => match process.reach().await {
                Ok(agent) => agent,
                Err(error) => {
                    tracing::debug!(sandbox = %process.id, pid = process.pid, %error, "feeding a command");
                    return;
                }
            },
        };
        if let Err(error) = give(&mut agent, process.pid, process.tty, input).await {
            // Usual when the command has just ended or closed its input.
            tracing::debug!(sandbox = %process.id, pid = process.pid, %error, "feeding a command");
        }
        connection = Some(agent);
    }
}

impl Fed {
    /// Only when somebody listens to what the process answers.
    async fn reach(&mut self) -> Result<Agent> {
        self.state.keeper.awake(&self.id).await?;
        let listens = self.attached.wait_for(|attached| *attached);
        if timeout(ATTACHES, listens).await.is_err() {
            return Err(Error::new(
                Code::DeadlineExceeded,
                "the process was not found again in time",
            ));
        }
        Ok(agent::open(&self.state, &self.id)
            .await?
            .deadline(INPUT_DEADLINE))
    }
}

async fn give(agent: &mut Agent, pid: u32, tty: bool, input: Input) -> Result<()> {
    let process = || Selector::Pid(pid);
    match input {
        Input::Bytes(bytes) if tty => agent.send_pty(process(), &bytes).await,
        Input::Bytes(bytes) => agent.send_stdin(process(), &bytes).await,
        Input::Asked(Asked::Resize(TtySize { cols, rows })) => {
            agent.resize(process(), cols, rows).await
        }
        // A terminal has no end of input but the character for it.
        Input::Asked(Asked::CloseStdin(true)) if tty => agent.send_pty(process(), b"\x04").await,
        Input::Asked(Asked::CloseStdin(true)) => agent.close_stdin(process()).await,
        Input::Asked(Asked::CloseStdin(false)) => Ok(()),
        Input::Asked(Asked::Signal(signal)) => match signal {
            SignalName::Kill => agent.signal(process(), Signal::Kill).await,
            SignalName::Term => agent.signal(process(), Signal::Term).await,
            // The terminal knows who is in the foreground; we do not.
            SignalName::Int if tty => agent.send_pty(process(), b"\x03").await,
            SignalName::Quit if tty => agent.send_pty(process(), b"\x1c").await,
            SignalName::Int => agent.host_signal(pid, HostSignal::Int).await,
            SignalName::Quit => agent.host_signal(pid, HostSignal::Quit).await,
            SignalName::Hup => agent.host_signal(pid, HostSignal::Hup).await,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_ask_is_read() {
        let read = |text: &str| asked(text.as_bytes());
        assert_eq!(
            read(r#"{"resize":{"cols":80,"rows":24}}"#).unwrap(),
            Asked::Resize(TtySize { cols: 80, rows: 24 })
        );
        assert_eq!(
            read(r#"{"signal":"INT"}"#).unwrap(),
            Asked::Signal(SignalName::Int)
        );
        assert_eq!(
            read(r#"{"close_stdin":true}"#).unwrap(),
            Asked::CloseStdin(true)
        );
        for bad in [
            r#"{"resize":{"cols":0,"rows":24}}"#,
            r#"{"signal":"STOP"}"#,
            r#"{"other":1}"#,
            "\"x\"",
            "nope",
        ] {
            let error = read(bad).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{bad}");
        }
    }

    #[test]
    fn output_says_where_it_comes_from() {
        for (channel, tag) in [
            (Channel::Stdout, 1),
            (Channel::Stderr, 2),
            (Channel::Tty, 3),
        ] {
            let Message::Binary(bytes) = output(channel, b"hi") else {
                panic!("not binary");
            };
            assert_eq!(bytes[..], [tag, b'h', b'i']);
        }
    }
}
