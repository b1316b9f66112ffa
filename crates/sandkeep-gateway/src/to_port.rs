//! To a program that listens in the box.

use http::{Request, Response, StatusCode, request::Parts};
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use sandkeep_agent_client::{Agent, TunnelError, empty, tunnel};
use sandkeep_keeper::Counts;
use sandkeep_model::{Latched, SandboxId};
use tokio::io::copy_bidirectional;

use crate::{
    Body, Boxes, Cut,
    answer::Failure,
    body::Download,
    command::Meaning,
    headers::{self, Asked},
    pool::Pool,
    to_agent::failure,
};

/// Carries a request to whoever listens on `port`; `upgrade` is the client's side of a
/// possible change of protocol.
pub(crate) async fn forward<K: Boxes>(
    boxes: &K,
    pool: &Pool<K>,
    (id, port): (&SandboxId, u16),
    mut parts: Parts,
    body: Body,
    asked: &Asked<'_>,
    upgrade: Option<OnUpgrade>,
) -> Result<Response<Body>, Failure> {
    let token = boxes.access_token(id);
    headers::for_port(&mut parts.headers, asked, token.as_ref());
    let mut request = Request::new(body);
    *request.method_mut() = parts.method;
    if let Some(path) = parts.uri.path_and_query() {
        *request.uri_mut() = path.clone().into();
    }
    *request.headers_mut() = parts.headers;

    let cut = parts.extensions.remove::<Cut>().unwrap_or_default();
    let hold = boxes.hold(id);
    let mut closed: Latched<()> = boxes.closed(id);
    let sent = async {
        let channel = pool
            .channel(id, Counts::Traffic)
            .await
            .map_err(|e| failure(&e))?;
        let io = tunnel(channel, port).await.map_err(|error| match error {
            TunnelError::PortClosed => Failure::PortClosed,
            TunnelError::Agent(error) => failure(&error),
        })?;
        // Only the transport differs: the same bounds hold for what a program answers.
        let mut program = Agent::over(io).await.map_err(|_| Failure::Broken)?;
        match program.request(request).await {
            Ok(response) => Ok((response, program)),
            Err(unsent) => {
                tracing::debug!(%id, port, error = %unsent.error, "no answer from a port");
                Err(Failure::Broken)
            }
        }
    };
    let (response, program) = tokio::select! {
        biased;
        () = &mut closed => return Err(Failure::NoBox),
        sent = sent => sent?,
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let client = upgrade.ok_or(Failure::Broken)?;
        return switch(response, program, client, closed, cut);
    }
    let (mut head, body) = response.into_parts();
    headers::drop_hop_by_hop(&mut head.headers);
    // A program that speaks HTTP/1.0 must not take the client's connection back to it.
    head.version = http::Version::HTTP_11;
    let awaited = Meaning::Awaited { _hold: hold };
    let body = Download::new(body, closed, program, Box::new(drop), awaited).boxed_unsync();
    Ok(Response::from_parts(head, body))
}

/// Lets both sides talk as they like from here on, until one hangs up or the box ends.
fn switch(
    mut response: Response<hyper::body::Incoming>,
    program: Agent,
    client: OnUpgrade,
    closed: Latched<()>,
    cut: Cut,
) -> Result<Response<Body>, Failure> {
    let protocol = headers::wanted_upgrade(response.headers()).ok_or(Failure::Broken)?;
    let inner = hyper::upgrade::on(&mut response);
    tokio::spawn(async move {
        let talk = async {
            let (inner, outer) = tokio::try_join!(inner, client)?;
            // The connection has left its task; this only ends the empty task.
            drop(program);
            copy_bidirectional(&mut TokioIo::new(inner), &mut TokioIo::new(outer))
                .await
                .ok();
            Ok::<_, hyper::Error>(())
        };
        tokio::select! {
            biased;
            () = closed => cut.mark(),
            ended = talk => if let Err(error) = ended {
                tracing::debug!(%error, "a change of protocol did not come about");
            },
        }
    });
    let (mut head, _) = response.into_parts();
    headers::drop_hop_by_hop(&mut head.headers);
    let mut answer = Response::from_parts(head, empty());
    let headers = answer.headers_mut();
    headers.insert(
        http::header::CONNECTION,
        http::HeaderValue::from_static("Upgrade"),
    );
    headers.insert(http::header::UPGRADE, protocol);
    // What hyper noted about the inner connection is not about the client's.
    answer.extensions_mut().clear();
    Ok(answer)
}
