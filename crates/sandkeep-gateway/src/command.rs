//! Commands on their way through: the keeper hears of each before it starts, and of its end.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Response, StatusCode, request::Parts};
use http_body_util::{BodyExt, Full};
use sandkeep_agent_api::{
    DEFAULT_MAX_MESSAGE, DEFAULT_MAX_REQUEST, Decoder, Frame, HEADER_LEN, process::StartRequest,
};
use sandkeep_keeper::{Command, Hold};
use sandkeep_model::SandboxId;

use crate::{Body, Boxes, answer};

const START: &str = "/process.Process/Start";
const WATCH: &str = "/filesystem.Filesystem/WatchDir";
/// A request to start something is short and comes at once.
const BODY_DEADLINE: Duration = Duration::from_secs(60);
/// How our agent tells the end of a process. A box that says so wrongly only gets a point too
/// many.
const END: &[u8] = br#"{"event":{"end""#;

/// What an answer means for its box while it is under way.
pub(crate) enum Meaning {
    Command(CommandWatch),
    /// Somebody waits for it.
    Awaited {
        _hold: Option<Hold>,
    },
    /// It may be silent for days.
    News,
}

/// Looks for the end of a command in what its agent says.
pub(crate) struct CommandWatch {
    command: Option<Command>,
    decoder: Option<Decoder>,
}

impl CommandWatch {
    fn new(command: Command) -> Self {
        let decoder = command
            .has_more_to_do()
            .then(|| Decoder::new(DEFAULT_MAX_MESSAGE));
        Self {
            command: Some(command),
            decoder,
        }
    }

    pub(crate) fn saw(&mut self, bytes: &[u8]) {
        let Some(decoder) = &mut self.decoder else {
            return;
        };
        decoder.push(bytes);
        loop {
            match decoder.next_frame() {
                Ok(Some(Frame::Message(message))) if message.starts_with(END) => break,
                Ok(Some(Frame::Message(_))) => {}
                Ok(None) => return,
                // What its end is can not be told from this.
                Ok(Some(Frame::End(_))) | Err(_) => {
                    self.decoder = None;
                    return;
                }
            }
        }
        self.decoder = None;
        if let Some(command) = self.command.take() {
            command.ended();
        }
    }
}

/// Tells the keeper of a request that is let in. Commands are read as a whole for it; what
/// can not be read is for the agent to refuse.
pub(crate) async fn announce<K: Boxes>(
    boxes: &K,
    id: &SandboxId,
    parts: &Parts,
    body: Body,
) -> Result<(Meaning, Body), Box<Response<Body>>> {
    match parts.uri.path() {
        START => {}
        WATCH => return Ok((Meaning::News, body)),
        _ => {
            return Ok((
                Meaning::Awaited {
                    _hold: boxes.hold(id),
                },
                body,
            ));
        }
    }
    let bytes = whole(body).await?;
    let command = match start_request(&bytes) {
        Some(start) => boxes.command(id, &start).await,
        None => Command::default(),
    };
    let body = Full::new(bytes)
        .map_err(|never| match never {})
        .boxed_unsync();
    Ok((Meaning::Command(CommandWatch::new(command)), body))
}

async fn whole(body: Body) -> Result<Bytes, Box<Response<Body>>> {
    let refused = match tokio::time::timeout(BODY_DEADLINE, read(body)).await {
        Ok(Ok(bytes)) => return Ok(bytes),
        Ok(Err(refused)) => refused,
        Err(_) => (
            StatusCode::REQUEST_TIMEOUT,
            "the request did not arrive in time",
        ),
    };
    Err(Box::new(answer::refused(refused.0, refused.1)))
}

async fn read(mut body: Body) -> Result<Bytes, (StatusCode, &'static str)> {
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| (StatusCode::BAD_REQUEST, "the request was broken off"))?;
        let Some(bytes) = frame.data_ref() else {
            continue;
        };
        if all.len() + bytes.len() > DEFAULT_MAX_REQUEST + HEADER_LEN {
            return Err((StatusCode::PAYLOAD_TOO_LARGE, "the command is too large"));
        }
        all.extend_from_slice(bytes);
    }
    Ok(all.freeze())
}

fn start_request(bytes: &[u8]) -> Option<StartRequest> {
    let mut decoder = Decoder::new(DEFAULT_MAX_REQUEST);
    decoder.push(bytes);
    match decoder.next_frame() {
        Ok(Some(Frame::Message(message))) => serde_json::from_slice(&message).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_agent_api::{
        encode_message,
        process::{EndEvent, EventResponse, ProcessConfig, ProcessEvent},
    };

    #[test]
    fn a_command_is_read_and_rubbish_is_not_one() {
        let start = StartRequest {
            process: Some(ProcessConfig {
                cmd: "ls".to_owned(),
                ..ProcessConfig::default()
            }),
            ..StartRequest::default()
        };
        let framed = encode_message(&start).unwrap();
        assert_eq!(start_request(&framed), Some(start));
        for rubbish in [&b""[..], b"{}", b"\0\0\0\0\x02{]", b"\0\xff\xff\xff\xff"] {
            assert_eq!(start_request(rubbish), None, "{rubbish:?}");
        }
    }

    #[test]
    fn our_agent_tells_the_end_as_it_is_looked_for() {
        let end = EventResponse {
            event: ProcessEvent::End(EndEvent::default()),
        };
        assert!(serde_json::to_vec(&end).unwrap().starts_with(END));
    }
}
