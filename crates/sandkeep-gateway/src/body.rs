//! Bodies on their way through.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use sandkeep_agent_client::{Agent, BoxError};
use sandkeep_model::Latched;

use crate::{Body, boxes::box_ended, command::Meaning};

/// A request's body that can be had back as long as nobody has read from it.
#[derive(Clone)]
pub(crate) struct Upload(Arc<Mutex<UploadState>>);

struct UploadState {
    body: Body,
    touched: bool,
    done: bool,
}

impl Upload {
    pub(crate) fn new(body: Body) -> Self {
        let done = body.is_end_stream();
        Self(Arc::new(Mutex::new(UploadState {
            body,
            touched: false,
            done,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, UploadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it can still be sent from its beginning.
    pub(crate) fn untouched(&self) -> bool {
        !self.lock().touched
    }

    /// Whether it was sent to its end.
    pub(crate) fn done(&self) -> bool {
        self.lock().done
    }

    pub(crate) fn body(&self) -> Body {
        self.clone().boxed_unsync()
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut state = self.lock();
        state.touched = true;
        let polled = Pin::new(&mut state.body).poll_frame(cx);
        match &polled {
            Poll::Ready(None) => state.done = true,
            Poll::Ready(Some(Ok(_))) => state.done = state.body.is_end_stream(),
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.lock().body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.lock().body.size_hint()
    }
}

/// What to do with the connection when its answer was read to the end.
type Release = Box<dyn FnOnce(Agent) + Send>;

/// An answer's body. It holds the connection: dropped half-way, the box is hung up on;
/// read to the end, the connection may serve again. When the box ends it fails, so that
/// the client's connection is broken off and not closed as if all were well.
pub(crate) struct Download {
    body: Incoming,
    closed: Latched<()>,
    connection: Option<(Agent, Release)>,
    meaning: Meaning,
}

impl Download {
    pub(crate) fn new(
        body: Incoming,
        closed: Latched<()>,
        agent: Agent,
        release: Release,
        meaning: Meaning,
    ) -> Self {
        let mut download = Self {
            meaning,
            body,
            closed,
            connection: Some((agent, release)),
        };
        if download.body.is_end_stream() {
            download.release();
        }
        download
    }

    fn release(&mut self) {
        if let Some((agent, release)) = self.connection.take() {
            release(agent);
        }
    }
}

impl HttpBody for Download {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        // All was read: what happens to the box now is no matter of this answer.
        if self.connection.is_none() {
            return Pin::new(&mut self.body).poll_frame(cx).map_err(Into::into);
        }
        // First, so that a dying box can not make its last answer look complete.
        if Pin::new(&mut self.closed).poll(cx).is_ready() {
            self.connection = None;
            return Poll::Ready(Some(Err(box_ended())));
        }
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let (Poll::Ready(Some(Ok(frame))), Meaning::Command(watch)) =
            (&polled, &mut self.meaning)
            && let Some(bytes) = frame.data_ref()
        {
            watch.saw(bytes);
        }
        match &polled {
            Poll::Ready(None) => self.release(),
            Poll::Ready(Some(Ok(_))) if self.body.is_end_stream() => self.release(),
            Poll::Ready(Some(Err(_))) => self.connection = None,
            _ => {}
        }
        polled.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
