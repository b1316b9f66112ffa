//! A response body that ends in an error when it holds a secret.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::gate::{Gate, Search, Stop};

pub type BodyError = Box<dyn StdError + Send + Sync>;
type Polled = Poll<Option<Result<Frame<Bytes>, BodyError>>>;

pub struct ScanBody {
    inner: Incoming,
    /// `None` where nothing is looked for.
    searched: Option<Searched>,
}

struct Searched {
    gate: Gate,
    search: Search,
    ended: bool,
    trailers: Option<HeaderMap>,
    /// Told once, when something is found.
    found: Option<Box<dyn FnOnce(Stop) + Send + Sync>>,
}

impl fmt::Debug for ScanBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScanBody({})", self.searched.is_some())
    }
}

impl ScanBody {
    pub fn new(
        inner: Incoming,
        search: Option<Search>,
        found: impl FnOnce(Stop) + Send + Sync + 'static,
    ) -> Self {
        let searched = search.map(|search| Searched {
            gate: Gate::new(search.clone()),
            search,
            ended: false,
            trailers: None,
            found: Some(Box::new(found)),
        });
        Self { inner, searched }
    }
}

impl Searched {
    /// What was held back is not given out either.
    fn give_up(&mut self) {
        self.ended = true;
        drop(self.gate.finish());
    }

    fn stop(&mut self, why: Stop) -> Polled {
        self.give_up();
        if let Some(found) = self.found.take() {
            found(why);
        }
        Poll::Ready(Some(Err(why.into())))
    }

    fn poll(&mut self, inner: &mut Incoming, context: &mut Context<'_>) -> Polled {
        while !self.ended {
            let frame = match Pin::new(&mut *inner).poll_frame(context) {
                Poll::Pending => {
                    let clean = ready!(self.gate.poll_pause(context));
                    return match clean {
                        Ok(clean) => Poll::Ready(Some(Ok(Frame::data(clean)))),
                        Err(why) => self.stop(why),
                    };
                }
                Poll::Ready(None) => {
                    self.ended = true;
                    break;
                }
                Poll::Ready(Some(Err(error))) => {
                    self.give_up();
                    return Poll::Ready(Some(Err(error.into())));
                }
                Poll::Ready(Some(Ok(frame))) => frame,
            };
            match frame.into_data() {
                Ok(data) => {
                    let clean = match self.gate.push(&data) {
                        Ok(clean) => clean,
                        Err(why) => return self.stop(why),
                    };
                    if inner.is_end_stream() {
                        self.ended = true;
                        return ready_with(joined(clean, self.gate.finish()));
                    }
                    if !clean.is_empty() {
                        return ready_with(clean);
                    }
                }
                Err(frame) => {
                    self.ended = true;
                    self.trailers = frame.into_trailers().ok();
                }
            }
        }
        let rest = self.gate.finish();
        if !rest.is_empty() {
            return ready_with(rest);
        }
        match self.trailers.take() {
            Some(trailers) if self.search.is_in(&trailers) => self.stop(Stop::Reflected),
            Some(trailers) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            None => Poll::Ready(None),
        }
    }
}

fn ready_with(data: Bytes) -> Polled {
    Poll::Ready(Some(Ok(Frame::data(data))))
}

fn joined(one: Bytes, other: Bytes) -> Bytes {
    if one.is_empty() {
        return other;
    }
    let mut both = BytesMut::from(one);
    both.extend_from_slice(&other);
    both.freeze()
}

impl Body for ScanBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Polled {
        let Self { inner, searched } = &mut *self;
        match searched {
            Some(searched) => searched.poll(inner, context),
            None => Pin::new(inner).poll_frame(context).map_err(BodyError::from),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.searched {
            Some(searched) => {
                (searched.ended || self.inner.is_end_stream())
                    && searched.gate.held() == 0
                    && searched.trailers.is_none()
            }
            None => self.inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let held = self.searched.as_ref().map(|searched| searched.gate.held());
        let held = u64::try_from(held.unwrap_or_default()).unwrap_or(u64::MAX);
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower().saturating_add(held));
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper.saturating_add(held));
        }
        hint
    }
}
