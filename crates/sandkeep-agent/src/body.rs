//! Response bodies.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full};
use tokio::sync::mpsc;

/// Why a body broke off. The connection is then closed without a clean end, so the reader knows.
pub type BodyError = Box<dyn std::error::Error + Send + Sync>;
/// Any response body.
pub type Body = UnsyncBoxBody<Bytes, BodyError>;

/// No bytes.
pub fn empty_body() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// These bytes.
pub fn bytes_body(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Bytes as they come: the body ends when the sender is dropped, breaks off on an error, and the
/// sender's `closed()` tells that the reader has gone.
pub fn channel_body(capacity: usize) -> (mpsc::Sender<Result<Bytes, BodyError>>, Body) {
    let (sender, receiver) = mpsc::channel(capacity);
    (sender, ChannelBody(receiver).boxed_unsync())
}

struct ChannelBody(mpsc::Receiver<Result<Bytes, BodyError>>);

impl http_body::Body for ChannelBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, BodyError>>> {
        let next = std::task::ready!(self.0.poll_recv(context));
        Poll::Ready(next.map(|item| item.map(http_body::Frame::data)))
    }
}
