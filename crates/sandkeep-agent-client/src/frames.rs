//! The messages of a stream the agent sends.

use http_body_util::BodyExt;
use hyper::body::Incoming;
use sandkeep_agent_api::{Decoder, Frame};
use sandkeep_model::Result;
use serde::{Deserialize, de::DeserializeOwned};

use crate::{Agent, error, unary::parse};

/// Read leniently: an error code we do not know must not hide the error.
#[derive(Deserialize)]
struct EndOfStream {
    error: Option<error::WireError>,
}

/// The messages of a stream the agent sends. Dropping it closes the connection.
#[derive(Debug)]
pub struct Frames {
    body: Incoming,
    decoder: Decoder,
    done: bool,
    connection: Agent,
}

impl Frames {
    pub(crate) fn new(body: Incoming, connection: Agent) -> Self {
        Self {
            body,
            decoder: Decoder::new(connection.limits().frame_bytes),
            done: false,
            connection,
        }
    }

    /// The next message; `None` after a proper end. A stream that stops without one is an error.
    ///
    /// Cancel safe: what was read stays in the decoder.
    pub async fn next<M: DeserializeOwned>(&mut self) -> Result<Option<M>> {
        if self.done {
            return Ok(None);
        }
        let next = self.read().await;
        // After an error the stream has no meaning any more.
        self.done = !matches!(next, Ok(Some(_)));
        next
    }

    async fn read<M: DeserializeOwned>(&mut self) -> Result<Option<M>> {
        loop {
            match self.decoder.next_frame() {
                Err(e) => return Err(error::nonsense(&e.to_string())),
                Ok(Some(Frame::Message(json))) => return parse(&json).map(Some),
                Ok(Some(Frame::End(json))) => {
                    return match parse::<EndOfStream>(&json)?.error {
                        Some(error) => Err(error.into_stream_error()),
                        None => Ok(None),
                    };
                }
                Ok(None) => self.fill().await?,
            }
        }
    }

    async fn fill(&mut self) -> Result<()> {
        let silence = self.connection.limits().silence;
        match tokio::time::timeout(silence, self.body.frame()).await {
            Err(_) => Err(error::unreachable("the agent of the box fell silent")),
            Ok(None) => Err(error::unreachable("the agent ended a stream too early")),
            Ok(Some(Err(e))) => Err(error::from_hyper(&e)),
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    self.decoder.push(&data);
                }
                Ok(())
            }
        }
    }
}
