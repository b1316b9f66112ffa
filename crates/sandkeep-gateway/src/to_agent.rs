//! To the agent itself: envd's calls.

use http::{Request, Response, request::Parts};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use sandkeep_agent_client::Agent;
use sandkeep_model::{Code, Error, Latched, SandboxId};

use crate::{
    Body, Boxes,
    answer::Failure,
    body::{Download, Upload},
    command::announce,
    headers,
    pool::Pool,
};

/// Carries a request that was let in to the agent, exactly on its path.
pub(crate) async fn forward<K: Boxes>(
    boxes: &K,
    pool: &Pool<K>,
    id: &SandboxId,
    mut parts: Parts,
    body: Body,
) -> Result<Response<Body>, Failure> {
    headers::for_agent(&mut parts.headers);
    // First of all: a point that is made with the memory of the box cuts who is connected.
    let (meaning, body) = match announce(boxes, id, &parts, body).await {
        Ok(announced) => announced,
        Err(refused) => return Ok(*refused),
    };
    let upload = Upload::new(body);
    let mut closed: Latched<()> = boxes.closed(id);
    let (response, agent) = tokio::select! {
        biased;
        () = &mut closed => return Err(Failure::NoBox),
        sent = send(pool, id, &parts, &upload) => sent.map_err(|error| failure(&error))?,
    };
    let (mut head, body) = response.into_parts();
    headers::drop_hop_by_hop(&mut head.headers);
    let (pool, id) = (pool.clone(), id.clone());
    let release = Box::new(move |agent| {
        // An answer that came before the whole question leaves the connection in between.
        if upload.done() {
            pool.put(&id, agent);
        }
    });
    let body = Download::new(body, closed, agent, release, meaning).boxed_unsync();
    Ok(Response::from_parts(head, body))
}

/// Over a waiting connection if there is one, and once more over a fresh one if that was
/// stale and the body is still whole.
async fn send<K: Boxes>(
    pool: &Pool<K>,
    id: &SandboxId,
    parts: &Parts,
    upload: &Upload,
) -> Result<(Response<Incoming>, Agent), Error> {
    if let Some(mut agent) = pool.take(id) {
        match agent.request(request(parts, upload)).await {
            Ok(response) => return Ok((response, agent)),
            Err(unsent) if !upload.untouched() => return Err(unsent.error),
            Err(_) => {}
        }
    }
    let mut agent = pool.fresh(id).await?;
    match agent.request(request(parts, upload)).await {
        Ok(response) => Ok((response, agent)),
        Err(unsent) => Err(unsent.error),
    }
}

fn request(parts: &Parts, upload: &Upload) -> Request<Body> {
    let mut request = Request::new(upload.body());
    *request.method_mut() = parts.method.clone();
    if let Some(path) = parts.uri.path_and_query() {
        *request.uri_mut() = path.clone().into();
    }
    *request.headers_mut() = parts.headers.clone();
    request
}

pub(crate) fn failure(error: &Error) -> Failure {
    match error.code {
        Code::NotFound | Code::Conflict => Failure::NoBox,
        _ => Failure::NoAnswer,
    }
}
