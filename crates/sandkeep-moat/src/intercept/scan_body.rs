//! A response body that ends in an error when it holds a secret.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::scan::{Needles, Reflected, Scanner};

pub type BodyError = Box<dyn StdError + Send + Sync>;

pub struct ScanBody {
    inner: Incoming,
    scanner: Scanner,
    ended: bool,
    trailers: Option<HeaderMap>,
    /// Told once, when a secret is found.
    found: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl fmt::Debug for ScanBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScanBody({:?})", self.scanner)
    }
}

impl fmt::Display for Reflected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the response holds a secret of this box")
    }
}

impl StdError for Reflected {}

impl ScanBody {
    pub fn new(
        inner: Incoming,
        needles: Needles,
        found: impl FnOnce() + Send + Sync + 'static,
    ) -> Self {
        Self {
            inner,
            scanner: needles.scanner(),
            ended: false,
            trailers: None,
            found: Some(Box::new(found)),
        }
    }

    /// What was held back is not given out either.
    fn give_up(&mut self) {
        self.ended = true;
        drop(self.scanner.finish());
    }

    fn stop<T>(&mut self) -> Poll<Option<Result<T, BodyError>>> {
        self.give_up();
        if let Some(found) = self.found.take() {
            found();
        }
        Poll::Ready(Some(Err(Reflected.into())))
    }
}

impl Body for ScanBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        while !self.ended {
            let frame = match ready!(Pin::new(&mut self.inner).poll_frame(context)) {
                None => {
                    self.ended = true;
                    break;
                }
                Some(Err(error)) => {
                    self.give_up();
                    return Poll::Ready(Some(Err(error.into())));
                }
                Some(Ok(frame)) => frame,
            };
            match frame.into_data() {
                Ok(data) => match self.scanner.push(data) {
                    Ok(clean) if clean.is_empty() => {}
                    Ok(clean) => return Poll::Ready(Some(Ok(Frame::data(clean)))),
                    Err(Reflected) => return self.stop(),
                },
                Err(frame) => {
                    self.ended = true;
                    self.trailers = frame.into_trailers().ok();
                }
            }
        }
        let rest = self.scanner.finish();
        if !rest.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(rest))));
        }
        match self.trailers.take() {
            Some(trailers)
                if trailers
                    .values()
                    .any(|value| self.scanner.are_in(value.as_bytes())) =>
            {
                self.stop()
            }
            Some(trailers) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        (self.ended || self.inner.is_end_stream())
            && self.scanner.held() == 0
            && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let held = u64::try_from(self.scanner.held()).unwrap_or(u64::MAX);
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower().saturating_add(held));
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper.saturating_add(held));
        }
        hint
    }
}
