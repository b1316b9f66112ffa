//! The metadata service of a box, without the sockets: a request goes in, an answer comes out.
//!
//! The moat serves it on `169.254.169.254` and `sandkeep.internal` in the box's own network. The
//! listener that took the connection tells which box asks; nothing in the request does.

use std::borrow::Cow;

use sandkeep_model::{Code, Error, Result, Secret, Timestamp};
use serde_json::{Value, json};

use crate::{Audience, Sessions};

const MAX_QUERY_BYTES: usize = 4096;
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const TTL_HEADERS: [&str; 2] = [
    "x-sandkeep-metadata-ttl-seconds",
    "x-aws-ec2-metadata-token-ttl-seconds",
];
const TOKEN_HEADERS: [&str; 2] = ["x-sandkeep-metadata-token", "x-aws-ec2-metadata-token"];
/// The names the service is reached by. A page whose own name was pointed at our address (DNS
/// rebinding) shows that name here.
const HOSTS: [&str; 3] = ["169.254.169.254", "sandkeep.internal", "[fd00:ec2::254]"];

const INDEX: &str = "\
Metadata of this Sandkeep box.

  PUT /v1/session               a session token; header X-Sandkeep-Metadata-Ttl-Seconds: 1 to 21600
  GET /v1/identity              who this box is, as JSON
  GET /v1/token?audience=URL    a signed token (JWT) for that audience, good for 15 minutes
  GET /v1/token?name=NAME       the same, for the audience this box was given under that name
  GET /why?host=NAME            whether this box may reach NAME, and why not
  GET /policy                   what this box may reach
  GET /denials                  what was refused of late

Identity and token need the header X-Sandkeep-Metadata-Token with the session token:

  S=$(curl -sX PUT -H 'X-Sandkeep-Metadata-Ttl-Seconds: 600' http://sandkeep.internal/v1/session)
  curl -sH \"X-Sandkeep-Metadata-Token: $S\" http://sandkeep.internal/v1/identity
";

/// Where the answers come from. Implemented by the server for one box.
pub trait Source {
    /// The identity document.
    fn identity(&self) -> Result<Value>;
    /// Whom the token of this name is for.
    fn named(&self, name: &str) -> Option<Audience>;
    /// A new token for this audience, with the issue of it on record.
    fn token(&self, audience: &Audience) -> Result<Secret>;
}

#[derive(Clone, Copy)]
pub struct MetadataContext<'a> {
    pub sessions: &'a Sessions,
    pub source: &'a dyn Source,
}

impl std::fmt::Debug for MetadataContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MetadataContext({:?})", self.sessions)
    }
}

/// What the box asked. The body is of no use here and need not be read.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
    pub query: Option<&'a str>,
    /// In the order they came; names in any case.
    pub headers: &'a [(&'a str, &'a [u8])],
}

impl std::fmt::Debug for Request<'_> {
    /// Headers hold session tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.method, self.path)
    }
}

pub struct Response {
    pub status: u16,
    pub headers: Vec<(&'static str, Cow<'static, str>)>,
    /// May hold a token.
    pub body: String,
}

impl std::fmt::Debug for Response {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Response({}, {} bytes)", self.status, self.body.len())
    }
}

impl Response {
    fn new(status: u16, content_type: &'static str, body: impl Into<String>) -> Self {
        Self {
            status,
            headers: vec![
                ("content-type", Cow::Borrowed(content_type)),
                ("cache-control", Cow::Borrowed("no-store")),
                ("x-content-type-options", Cow::Borrowed("nosniff")),
            ],
            body: body.into(),
        }
    }

    fn with(mut self, name: &'static str, value: impl Into<Cow<'static, str>>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    fn refusal(mut error: Error) -> Self {
        if error.code == Code::Internal {
            // What broke on the host is none of the box's business.
            tracing::error!(message = %error.message, "the metadata service failed");
            error = Error::internal("the server could not answer")
                .hint("try again, or tell the operator");
        }
        let response = Self::new(
            error.code.status(),
            JSON,
            json!({ "error": error }).to_string(),
        );
        if error.code == Code::ResourceExhausted {
            return response.with("retry-after", "1");
        }
        response
    }
}

/// An error of ours in the words of this service.
pub fn refusal(error: Error) -> Response {
    Response::refusal(error)
}

pub fn handle(context: &MetadataContext<'_>, request: &Request<'_>) -> Response {
    handle_at(context, request, Timestamp::now())
}

fn handle_at(context: &MetadataContext<'_>, request: &Request<'_>, now: Timestamp) -> Response {
    answer(context, request, now).unwrap_or_else(Response::refusal)
}

fn answer(
    context: &MetadataContext<'_>,
    request: &Request<'_>,
    now: Timestamp,
) -> Result<Response> {
    refuse_forwarded(request)?;
    refuse_other_hosts(request)?;
    match (request.path, request.method) {
        ("/", "GET") => Ok(Response::new(200, TEXT, INDEX)),
        ("/v1/session" | "/latest/api/token", "PUT") => start_session(context, request, now),
        ("/v1/identity", "GET") => {
            need_session(context, request, now)?;
            let document = context.source.identity()?;
            Ok(Response::new(200, JSON, document.to_string()))
        }
        ("/v1/token", "GET") => {
            need_session(context, request, now)?;
            issue(context, request, now)
        }
        ("/" | "/v1/identity" | "/v1/token", _) => Ok(wrong_method("GET")),
        ("/v1/session" | "/latest/api/token", _) => Ok(wrong_method("PUT")),
        _ => Err(Error::not_found("the metadata service has no such page")
            .hint("GET / lists what there is")),
    }
}

fn wrong_method(right: &'static str) -> Response {
    let error = Error::invalid("method", format!("this page is for {right}"));
    let mut response = Response::refusal(error).with("allow", right);
    response.status = 405;
    response
}

fn start_session(
    context: &MetadataContext<'_>,
    request: &Request<'_>,
    now: Timestamp,
) -> Result<Response> {
    let seconds = single(request, &TTL_HEADERS)?
        .and_then(|text| std::str::from_utf8(text).ok())
        // `parse` would take a plus sign.
        .filter(|text| text.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| {
            Error::invalid("ttl", "a session needs its length in seconds")
                .hint("send the header X-Sandkeep-Metadata-Ttl-Seconds: 600")
        })?;
    let token = context.sessions.start(seconds, now)?;
    Ok(Response::new(200, TEXT, token.expose())
        .with("x-sandkeep-metadata-ttl-seconds", seconds.to_string())
        .with("x-aws-ec2-metadata-token-ttl-seconds", seconds.to_string()))
}

fn issue(context: &MetadataContext<'_>, request: &Request<'_>, now: Timestamp) -> Result<Response> {
    let query = request.query.unwrap_or_default();
    let audience = match (parameter(query, "audience")?, parameter(query, "name")?) {
        (Some(audience), None) => audience.parse()?,
        (None, Some(name)) => context.source.named(&name).ok_or_else(|| {
            Error::not_found("this box has no token of that name")
                .hint("the identity document lists those it has")
        })?,
        _ => {
            return Err(Error::invalid("audience", "a token is always for somebody")
                .hint("ask for /v1/token?audience=https://the-service.example.org"));
        }
    };
    if !context.sessions.may_mint(now) {
        return Err(Error::new(
            Code::ResourceExhausted,
            "this box asks for tokens too often",
        )
        .hint("a token is good for many calls until it ends; keep it"));
    }
    let token = context.source.token(&audience)?;
    Ok(Response::new(200, "application/jwt", token.expose()))
}

fn need_session(
    context: &MetadataContext<'_>,
    request: &Request<'_>,
    now: Timestamp,
) -> Result<()> {
    let known =
        single(request, &TOKEN_HEADERS)?.is_some_and(|token| context.sessions.knows(token, now));
    if known {
        return Ok(());
    }
    Err(Error::new(
        Code::Unauthenticated,
        "this needs a session, and the request shows none that is open",
    )
    .hint("PUT /v1/session first; GET / shows how"))
}

/// A proxy that was talked into asking us says whom it asks for. It gets nothing.
fn refuse_forwarded(request: &Request<'_>) -> Result<()> {
    let forwarded = request.headers.iter().any(|(name, _)| {
        let name = name.to_ascii_lowercase();
        name.starts_with("x-forwarded-")
            || matches!(name.as_str(), "forwarded" | "via" | "x-real-ip")
    });
    if forwarded {
        return Err(Error::new(
            Code::PermissionDenied,
            "the metadata service does not answer through a proxy",
        )
        .hint("ask directly from a process of the box"));
    }
    Ok(())
}

fn refuse_other_hosts(request: &Request<'_>) -> Result<()> {
    let known = single(request, &["host"])?.is_some_and(|host| {
        let host = String::from_utf8_lossy(host).to_ascii_lowercase();
        HOSTS.contains(&host.strip_suffix(":80").unwrap_or(&host))
    });
    if known {
        return Ok(());
    }
    Err(Error::new(
        Code::PermissionDenied,
        "the metadata service is not known by the host name of this request",
    )
    .hint("use http://sandkeep.internal/ or http://169.254.169.254/"))
}

/// The value of a header that has several names but may come only once.
fn single<'a>(request: &Request<'a>, names: &[&str]) -> Result<Option<&'a [u8]>> {
    let mut found = request
        .headers
        .iter()
        .filter(|(name, _)| names.iter().any(|known| name.eq_ignore_ascii_case(known)))
        .map(|(_, value)| value.trim_ascii());
    let first = found.next();
    if found.next().is_some() {
        return Err(Error::invalid(
            names[0],
            format!("the header {} came more than once", names[0]),
        ));
    }
    Ok(first)
}

/// The one value of a query parameter, decoded.
fn parameter(query: &str, wanted: &str) -> Result<Option<String>> {
    if query.len() > MAX_QUERY_BYTES {
        return Err(Error::new(Code::TooLarge, "the query is too long").field(wanted));
    }
    let mut found = None;
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if decoded(name).as_deref() != Some(wanted) {
            continue;
        }
        let value = decoded(value)
            .ok_or_else(|| Error::invalid(wanted, format!("{wanted} is not text")))?;
        if found.replace(value).is_some() {
            return Err(Error::invalid(
                wanted,
                format!("{wanted} came more than once"),
            ));
        }
    }
    Ok(found)
}

fn decoded(text: &str) -> Option<String> {
    let spaced = text.replace('+', " ");
    percent_encoding::percent_decode_str(&spaced)
        .decode_utf8()
        .ok()
        .map(Cow::into_owned)
}

#[cfg(test)]
mod tests;
