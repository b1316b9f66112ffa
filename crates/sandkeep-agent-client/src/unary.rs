//! One question, one answer, both small.

use bytes::{Bytes, BytesMut};
use http::{
    HeaderValue, Method, Request, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use sandkeep_model::{Error, Result};
use serde::{Serialize, de::DeserializeOwned};
use tokio::time::{Instant, timeout_at};

use crate::{Agent, Body, error, full};

impl Agent {
    /// A Connect call, e.g. `process.Process/List`, as `user` or the box's default user.
    pub async fn unary<Q, A>(&mut self, method: &str, user: Option<&str>, question: &Q) -> Result<A>
    where
        Q: Serialize + Sync + ?Sized,
        A: DeserializeOwned,
    {
        let until = self.until();
        let mut request = post(&format!("/{method}"), "application/json", json(question)?)?;
        request
            .headers_mut()
            .insert("connect-protocol-version", HeaderValue::from_static("1"));
        as_user(&mut request, user)?;
        let answer = self.whole(request, until).await?;
        parse(&answer)
    }

    /// Sends and reads the whole answer; refusals become errors.
    pub(crate) async fn whole(&mut self, request: Request<Body>, until: Instant) -> Result<Bytes> {
        let (parts, body) = self.head(request, until).await?.into_parts();
        let limit = self.limits().unary_bytes;
        let bytes = timeout_at(until, collect(body, limit))
            .await
            .map_err(|_| error::late())??;
        if parts.status.is_success() {
            return Ok(bytes);
        }
        Err(refusal(parts.status, &bytes))
    }
}

pub(crate) fn refusal(status: StatusCode, body: &[u8]) -> Error {
    serde_json::from_slice::<error::WireError>(body)
        .unwrap_or_default()
        .into_error(status)
}

/// Reads a body to its end, but never more than `limit` bytes.
pub(crate) async fn collect(mut body: Incoming, limit: usize) -> Result<Bytes> {
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| error::from_hyper(&e))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if all.len() + data.len() > limit {
            return Err(error::nonsense("an answer larger than its limit"));
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}

pub(crate) fn json<Q: Serialize + ?Sized>(value: &Q) -> Result<Bytes> {
    serde_json::to_vec(value)
        .map(Bytes::from)
        .map_err(|e| Error::internal(format!("writing JSON for the agent: {e}")))
}

pub(crate) fn parse<A: DeserializeOwned>(bytes: &[u8]) -> Result<A> {
    serde_json::from_slice(bytes).map_err(|_| error::nonsense("JSON that does not fit"))
}

pub(crate) fn get(path: &str) -> Result<Request<Body>> {
    build(Method::GET, path, crate::empty())
}

pub(crate) fn post(path: &str, kind: &'static str, body: Bytes) -> Result<Request<Body>> {
    let mut request = build(Method::POST, path, full(body))?;
    request
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(request)
}

pub(crate) fn build(method: Method, path: &str, body: Body) -> Result<Request<Body>> {
    Request::builder()
        .method(method)
        .uri(path)
        .body(body)
        .map_err(|e| Error::internal(format!("building a request for the agent: {e}")))
}

/// Names the user the way envd takes it: Basic, without a password.
pub(crate) fn as_user(request: &mut Request<Body>, user: Option<&str>) -> Result<()> {
    let Some(user) = user else { return Ok(()) };
    if user.is_empty() || user.len() > 256 || user.contains(':') || user.contains(char::is_control)
    {
        return Err(Error::invalid("user", "this can not be the name of a user")
            .hint("name a user that is in the box's /etc/passwd, e.g. user or root"));
    }
    let value = format!("Basic {}", base64(format!("{user}:").as_bytes()));
    let value = HeaderValue::try_from(value)
        .map_err(|_| Error::invalid("user", "this can not be the name of a user"))?;
    request.headers_mut().insert(AUTHORIZATION, value);
    Ok(())
}

fn base64(bytes: &[u8]) -> String {
    use base64::{Engine, engine::general_purpose::STANDARD};
    STANDARD.encode(bytes)
}
