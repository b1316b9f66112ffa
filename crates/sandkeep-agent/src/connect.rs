//! Connect RPC on the server's side: reading requests, answering with JSON or frames.

use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use sandkeep_agent_api::{
    CONNECT_JSON, ConnectError, DEFAULT_MAX_REQUEST, Decoder, Frame, encode_end, encode_message,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use crate::{Body, BodyError, bytes_body, channel_body};

/// Frames a stream may hold for a reader that is behind.
const QUEUED_FRAMES: usize = 4;
const KEEPALIVE_DEFAULT: Duration = Duration::from_secs(90);

/// An HTTP answer of any status with a JSON body.
pub fn json_response<T: Serialize>(status: StatusCode, value: &T) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(json) => typed_response(status, "application/json", bytes_body(json)),
        Err(_) => typed_response(
            StatusCode::INTERNAL_SERVER_ERROR,
            "application/json",
            bytes_body(&br#"{"code":"internal","message":"cannot encode answer"}"#[..]),
        ),
    }
}

/// A refused or failed unary call.
pub fn error_response(error: &ConnectError) -> Response<Body> {
    let status = StatusCode::from_u16(error.code.http_status());
    json_response(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), error)
}

/// The answer of a unary call.
pub fn unary_response<T: Serialize>(result: Result<T, ConnectError>) -> Response<Body> {
    match result {
        Ok(value) => json_response(StatusCode::OK, &value),
        Err(error) => error_response(&error),
    }
}

/// Answers a unary call: reads the message, calls, answers.
pub async fn unary<B, T, R, F>(
    request: Request<B>,
    call: impl FnOnce(HeaderMap, T) -> F,
) -> Response<Body>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>>,
    T: DeserializeOwned,
    R: Serialize,
    F: Future<Output = Result<R, ConnectError>>,
{
    let (parts, body) = request.into_parts();
    match read_json(body).await {
        Ok(message) => unary_response(call(parts.headers, message).await),
        Err(error) => error_response(&error),
    }
}

/// Answers a server-streaming call: reads the one request message, then lets `call` write
/// messages. What `call` returns becomes the end frame. `call` runs as a task of its own; it sees
/// a reader that went away as [`Gone`].
pub async fn server_stream<B, T, F, C>(request: Request<B>, call: C) -> Response<Body>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin + Send + 'static,
    T: DeserializeOwned,
    F: Future<Output = Result<(), ConnectError>> + Send + 'static,
    C: FnOnce(HeaderMap, T, FrameSink) -> F,
{
    let (parts, body) = request.into_parts();
    let mut stream = match RequestStream::new(&parts.headers, body) {
        Ok(stream) => stream,
        Err(unsupported) => return *unsupported,
    };
    let (sink, response) = stream_response();
    match stream.only_message().await {
        Ok(message) => {
            let running = call(parts.headers, message, sink.clone());
            tokio::spawn(async move { sink.end(running.await).await });
            // The end of the request may still be on its way; unread, it would cost the
            // connection.
            tokio::spawn(stream.discard());
        }
        // The queue is empty, so the end frame fits.
        Err(error) => sink.end_now(error),
    }
    response
}

/// Answers a client-streaming call: `call` reads the messages, its result is one message and the
/// end frame.
pub async fn client_stream<B, R, F>(
    request: Request<B>,
    call: impl FnOnce(HeaderMap, RequestStream<B>) -> F,
) -> Response<Body>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
    R: Serialize,
    F: Future<Output = Result<R, ConnectError>>,
{
    let (parts, body) = request.into_parts();
    let stream = match RequestStream::new(&parts.headers, body) {
        Ok(stream) => stream,
        Err(unsupported) => return *unsupported,
    };
    let result = call(parts.headers, stream).await;
    let mut answer = Vec::new();
    let end = match result.and_then(|message| encode_message(&message)) {
        Ok(frame) => {
            answer.extend_from_slice(&frame);
            encode_end(None)
        }
        Err(error) => encode_end(Some(error)),
    };
    answer.extend_from_slice(&end);
    typed_response(StatusCode::OK, CONNECT_JSON, bytes_body(answer))
}

/// Messages of a request, one after the other.
#[derive(Debug)]
pub struct RequestStream<B> {
    body: B,
    decoder: Decoder,
}

impl<B> RequestStream<B>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Unpin,
{
    fn new(headers: &HeaderMap, body: B) -> Result<Self, Box<Response<Body>>> {
        let content_type = headers.get(CONTENT_TYPE).map(|value| value.as_bytes());
        let essence = content_type.and_then(|value| value.split(|&byte| byte == b';').next());
        if essence.is_none_or(|value| {
            !value
                .trim_ascii()
                .eq_ignore_ascii_case(CONNECT_JSON.as_bytes())
        }) {
            return Err(Box::new(typed_response(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "text/plain",
                bytes_body(&b"streaming calls take application/connect+json only"[..]),
            )));
        }
        Ok(Self {
            body,
            decoder: Decoder::new(DEFAULT_MAX_REQUEST),
        })
    }

    /// The next message, or `None` at the end of the request.
    pub async fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ConnectError> {
        loop {
            match self.decoder.next_frame()? {
                Some(Frame::Message(json)) => return parse(&json).map(Some),
                Some(Frame::End(_)) => return Ok(None),
                None => {}
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.decoder.push(bytes);
                    }
                }
                Some(Err(error)) => return Err(broken_body(error)),
                None => return self.decoder.finish().map(|()| None).map_err(Into::into),
            }
        }
    }

    /// Reads the rest of the request and throws it away.
    async fn discard(mut self) {
        while let Some(Ok(_)) = self.body.frame().await {}
    }

    async fn only_message<T: DeserializeOwned>(&mut self) -> Result<T, ConnectError> {
        let message = self.next_message().await?;
        message.ok_or_else(|| ConnectError::invalid_argument("the request has no message"))
    }
}

/// Where a streaming call writes its messages.
#[derive(Debug, Clone)]
pub struct FrameSink(mpsc::Sender<Result<Bytes, BodyError>>);

/// The reader of a stream went away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone;

impl From<Gone> for ConnectError {
    fn from(_: Gone) -> Self {
        // Nobody is left to read this; it only ends the call.
        Self::new(sandkeep_agent_api::Code::Canceled, "the caller went away")
    }
}

impl FrameSink {
    /// Writes a message; waits while the reader is behind.
    pub async fn send<T: Serialize>(&self, message: &T) -> Result<(), ConnectError> {
        let frame = encode_message(message)?;
        Ok(self.send_encoded(frame).await?)
    }

    /// Writes a message that is already a frame.
    pub async fn send_encoded(&self, frame: Bytes) -> Result<(), Gone> {
        self.0.send(Ok(frame)).await.map_err(|_| Gone)
    }

    /// Returns when the reader has gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }

    async fn end(self, result: Result<(), ConnectError>) {
        // A reader that went away needs no end.
        let _ = self.0.send(Ok(encode_end(result.err()))).await;
    }

    fn end_now(&self, error: ConnectError) {
        let _ = self.0.try_send(Ok(encode_end(Some(error))));
    }
}

fn stream_response() -> (FrameSink, Response<Body>) {
    let (sender, body) = channel_body(QUEUED_FRAMES);
    (
        FrameSink(sender),
        typed_response(StatusCode::OK, CONNECT_JSON, body),
    )
}

/// How often a silent stream must show that it lives.
pub fn keepalive_interval(headers: &HeaderMap) -> Duration {
    header_number(headers, "keepalive-ping-interval")
        .filter(|&seconds| seconds > 0)
        .map_or(KEEPALIVE_DEFAULT, Duration::from_secs)
}

/// How long the caller gives this call; zero and absent mean for ever.
pub fn call_timeout(headers: &HeaderMap) -> Option<Duration> {
    header_number(headers, "connect-timeout-ms")
        .filter(|&millis| millis > 0)
        .map(Duration::from_millis)
}

fn header_number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

/// Reads a JSON body of at most [`DEFAULT_MAX_REQUEST`] bytes; an empty body is the empty message.
pub async fn read_json<B, T>(body: B) -> Result<T, ConnectError>
where
    B: http_body::Body<Data = Bytes, Error: Into<BodyError>>,
    T: DeserializeOwned,
{
    let collected = Limited::new(body, DEFAULT_MAX_REQUEST)
        .collect()
        .await
        .map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                ConnectError::resource_exhausted(format!(
                    "the request is larger than {DEFAULT_MAX_REQUEST} bytes"
                ))
            } else {
                broken_body(error)
            }
        })?;
    let bytes = collected.to_bytes();
    parse(if bytes.is_empty() { b"{}" } else { &bytes })
}

fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, ConnectError> {
    serde_json::from_slice(json).map_err(|error| {
        ConnectError::invalid_argument(format!("cannot read the message: {error}"))
    })
}

fn broken_body(error: impl Into<BodyError>) -> ConnectError {
    ConnectError::invalid_argument(format!("the request broke off: {}", error.into()))
}

fn typed_response(status: StatusCode, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, http::HeaderValue::from_static(content_type));
    response
}
