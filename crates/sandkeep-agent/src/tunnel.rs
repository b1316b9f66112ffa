//! Byte tunnels to ports of the box, for the host's gateway.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use sandkeep_agent_api::host::HttpError;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::connect::json_response;
use crate::{Body, State, empty_body};

/// Tunnels open at once.
pub(crate) const MAX_TUNNELS: usize = 512;
const BUFFER: usize = 16 << 10;
/// Loopback answers at once; longer means a full queue of the listener.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers `CONNECT <loopback>:<port>`: 200 and then raw bytes, or 502 when nobody listens.
pub(crate) async fn open(state: &State, request: Request<Incoming>) -> Response<Body> {
    let target = request
        .uri()
        .authority()
        .map(http::uri::Authority::as_str)
        .unwrap_or_default();
    let Some(addresses) = parse_target(target) else {
        return refuse(
            StatusCode::BAD_REQUEST,
            "bad_target",
            format!("'{target}' is not a loopback address with a port"),
        );
    };
    let Ok(place) = Arc::clone(state.tunnels()).try_acquire_owned() else {
        let message = format!("{MAX_TUNNELS} tunnels are open, close some first");
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "too_many_tunnels", message);
    };
    let upstream = match dial(&addresses).await {
        Ok(upstream) => upstream,
        Err(error) => {
            let message = format!("nothing accepts connections on {target}: {error}");
            return refuse(StatusCode::BAD_GATEWAY, "port_closed", message);
        }
    };
    tokio::spawn(async move {
        if let Ok(upgraded) = hyper::upgrade::on(request).await {
            carry(TokioIo::new(upgraded), upstream).await;
        }
        drop(place);
    });
    Response::new(empty_body())
}

/// Carries bytes both ways until both ways have ended; one side's end is passed on as its end
/// alone, so that "send all, close, read the answer" works.
async fn carry(mut caller: TokioIo<hyper::upgrade::Upgraded>, mut upstream: TcpStream) {
    // Whatever broke, both ends are closed by dropping them.
    let _ = copy_bidirectional_with_sizes(&mut caller, &mut upstream, BUFFER, BUFFER).await;
}

fn refuse(status: StatusCode, code: &'static str, message: String) -> Response<Body> {
    json_response(status, &HttpError { code, message })
}

fn parse_target(target: &str) -> Option<Vec<SocketAddr>> {
    let (host, port) = target.rsplit_once(':')?;
    let port = port.parse().ok().filter(|&port: &u16| port != 0)?;
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    match host {
        "127.0.0.1" => Some(vec![v4]),
        "[::1]" => Some(vec![v6]),
        "localhost" => Some(vec![v4, v6]),
        _ => None,
    }
}

async fn dial(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Small writes of interactive protocols must not wait for each other.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => failure = error,
            Err(_) => failure = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_targets_are_taken() {
        assert_eq!(parse_target("127.0.0.1:80").unwrap().len(), 1);
        assert_eq!(parse_target("[::1]:80").unwrap().len(), 1);
        assert_eq!(parse_target("localhost:80").unwrap().len(), 2);
        for target in [
            "",
            "10.0.0.1:80",
            "127.0.0.1",
            "127.0.0.1:0",
            "localhost:99999",
        ] {
            assert_eq!(parse_target(target), None, "{target}");
        }
    }
}
