use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::UnsyncBoxBody};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a request to an agent carries.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

pub fn empty() -> Body {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// A body that is sent as it comes; an error in it cuts the request off.
pub fn stream<S, E>(chunks: S) -> Body
where
    S: futures_util::Stream<Item = Result<Bytes, E>> + Send + 'static,
    E: Into<BoxError> + 'static,
{
    use futures_util::StreamExt;
    StreamBody::new(chunks.map(|chunk| {
        chunk
            .map(http_body::Frame::data)
            .map_err(Into::<BoxError>::into)
    }))
    .boxed_unsync()
}

/// The same body, and a word when it has been sent or given up.
pub(crate) fn with_end(body: Body) -> (Body, tokio::sync::oneshot::Receiver<()>) {
    let (end, ended) = tokio::sync::oneshot::channel();
    (Watched { body, _end: end }.boxed_unsync(), ended)
}

/// hyper drops a body when it is through with it; that drops the sender.
struct Watched {
    body: Body,
    _end: tokio::sync::oneshot::Sender<()>,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, BoxError>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}
