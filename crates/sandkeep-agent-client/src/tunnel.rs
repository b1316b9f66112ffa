//! A raw way to a port in the box.

use http::{Method, StatusCode};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use sandkeep_model::Error;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout_at,
};

use crate::{
    Agent, empty, error,
    unary::{build, collect, refusal},
};

/// Bytes to and from a port in the box; what the agent sent with its answer comes first.
pub type Tunnel = TokioIo<Upgraded>;

#[derive(Debug)]
pub enum TunnelError {
    /// The box answers, but nobody in it listens on this port.
    PortClosed,
    /// The agent could not be asked.
    Agent(Error),
}

impl From<Error> for TunnelError {
    fn from(error: Error) -> Self {
        Self::Agent(error)
    }
}

/// Asks the agent at the other end of `channel` to connect it to `port` in the box.
pub async fn tunnel<T>(channel: T, port: u16) -> Result<Tunnel, TunnelError>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut agent = Agent::over(channel).await?;
    let until = agent.until();
    let target = format!("localhost:{port}");
    let mut request = build(Method::CONNECT, &target, empty())?;
    if let Ok(host) = http::HeaderValue::try_from(target) {
        request.headers_mut().insert(http::header::HOST, host);
    }
    let response = agent.head(request, until).await?;
    let status = response.status();
    if status == StatusCode::OK {
        return match timeout_at(until, hyper::upgrade::on(response)).await {
            Ok(Ok(upgraded)) => Ok(TokioIo::new(upgraded)),
            Ok(Err(e)) => Err(error::from_hyper(&e).into()),
            Err(_) => Err(error::late().into()),
        };
    }
    let limit = agent.limits().unary_bytes;
    let body = timeout_at(until, collect(response.into_body(), limit))
        .await
        .map_err(|_| error::late())??;
    if status == StatusCode::BAD_GATEWAY && says_closed(&body) {
        return Err(TunnelError::PortClosed);
    }
    Err(refusal(status, &body).into())
}

fn says_closed(body: &[u8]) -> bool {
    serde_json::from_slice::<serde_json::Value>(body)
        .is_ok_and(|answer| answer["code"] == "port_closed")
}
