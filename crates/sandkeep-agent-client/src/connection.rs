//! One connection to an agent.

use std::time::Duration;

use http::{HeaderValue, Request, Response, header::HOST};
use hyper::{
    body::Incoming,
    client::conn::http1::{Builder, SendRequest},
};
use hyper_util::rt::TokioIo;
use sandkeep_model::{Error, Result};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::JoinHandle,
    time::Instant,
};

use crate::{Body, Limits, error};

/// One connection to the agent of one box. Dropping it closes the connection, also in
/// the middle of an answer: whoever reads a streamed answer must keep it.
pub struct Agent {
    sender: SendRequest<Body>,
    task: JoinHandle<()>,
    limits: Limits,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("closed", &self.sender.is_closed())
            .finish_non_exhaustive()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // An upgraded connection has left the task by now and is not touched.
        self.task.abort();
    }
}

/// A request that failed, given back if not a byte of it was sent.
#[derive(Debug)]
pub struct Unsent {
    pub error: Error,
    pub request: Option<Request<Body>>,
}

impl Agent {
    pub async fn over<T>(channel: T) -> Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Self::with_limits(channel, Limits::default()).await
    }

    pub async fn with_limits<T>(channel: T, limits: Limits) -> Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, connection) = Builder::new()
            .max_buf_size(Limits::HEAD_BYTES)
            .max_headers(Limits::HEADERS)
            .handshake::<_, Body>(TokioIo::new(channel))
            .await
            .map_err(|e| error::from_hyper(&e))?;
        let task = tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "connection to an agent ended");
            }
        });
        Ok(Self {
            sender,
            task,
            limits,
        })
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether the other side has closed; a connection that waits in a pool may become so.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Whether the next request can be sent at once: the last answer was read to its end.
    pub fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Sends a request as it is and waits for the head of the answer, without a deadline.
    /// A `Host` header is added when there is none.
    pub async fn request(
        &mut self,
        mut request: Request<Body>,
    ) -> Result<Response<Incoming>, Unsent> {
        if !request.headers().contains_key(HOST) {
            let host = HeaderValue::from_static("sandkeep-agent");
            request.headers_mut().insert(HOST, host);
        }
        if let Err(e) = self.sender.ready().await {
            return Err(Unsent {
                error: error::from_hyper(&e),
                request: Some(request),
            });
        }
        self.sender
            .try_send_request(request)
            .await
            .map_err(|mut refused| Unsent {
                request: refused.take_message(),
                error: error::from_hyper(refused.error()),
            })
    }

    /// [`Agent::request`], but the head must come in time.
    pub(crate) async fn head(
        &mut self,
        request: Request<Body>,
        until: Instant,
    ) -> Result<Response<Incoming>> {
        match tokio::time::timeout_at(until, self.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(unsent)) => Err(unsent.error),
            Err(_) => Err(error::late()),
        }
    }

    pub(crate) fn until(&self) -> Instant {
        Instant::now() + self.limits.deadline
    }

    /// The same connection with another deadline for what is not streamed.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.limits.deadline = deadline;
        self
    }
}
