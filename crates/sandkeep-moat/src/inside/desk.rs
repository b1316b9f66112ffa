//! The pages of the moat itself.

use std::sync::Arc;

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode,
    header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HOST, X_CONTENT_TYPE_OPTIONS},
};
use sandkeep_model::{Code, Error};
use serde::Serialize;
use serde_json::json;

use super::{query::parameter, words};
use crate::{
    dns::INSIDE_NAME,
    edge::INSIDE_V4,
    hooks::{BoxFuture, Inside, Visit},
    policy::Host,
    state::BoxView,
};

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";
const METADATA: [u8; 4] = [169, 254, 169, 254];
const LONGEST_QUERY: usize = 4096;
const INDEX: &str = "\
The moat of this Sandkeep box.

  GET /why?host=NAME[&port=NUMBER]  whether this box may reach NAME, and why not
  GET /policy                       what this box may reach
  GET /denials                      what was refused of late
";

/// Answers questions about the moat; passes on all others.
#[derive(Debug, Default)]
pub struct InsideDesk {
    others: Option<Arc<dyn Inside>>,
}

impl InsideDesk {
    /// `others` answers what is not about the moat: the identity of the box.
    pub fn new(others: Option<Arc<dyn Inside>>) -> Self {
        Self { others }
    }
}

impl Inside for InsideDesk {
    fn answer(&self, visit: Visit) -> BoxFuture<'_, Response<Bytes>> {
        if visit.request.uri().path() == "/why" {
            return Box::pin(async move {
                let answer = match check(&visit.request) {
                    Ok(()) => why(&visit.from, &visit.request).await,
                    Err(error) => Err(error),
                };
                answer.unwrap_or_else(|error| refusal(&error))
            });
        }
        let page = match visit.request.uri().path() {
            "/policy" => policy,
            "/denials" => denials,
            "/" if self.others.is_none() => index,
            _ => match &self.others {
                Some(others) => return others.answer(visit),
                None => nothing,
            },
        };
        let answer = check(&visit.request)
            .and_then(|()| page(&visit.from, &visit.request))
            .unwrap_or_else(|error| refusal(&error));
        Box::pin(std::future::ready(answer))
    }
}

type Answer = Result<Response<Bytes>, Error>;

fn check(request: &Request<Bytes>) -> Result<(), Error> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return Err(Error::invalid("method", "this page is for GET"));
    }
    // A page in a browser whose own name was pointed at our address shows that name here.
    let known = request
        .headers()
        .get(HOST)
        .and_then(|host| Host::parse_authority(host.to_str().ok()?).ok())
        .is_some_and(|(host, _)| match host {
            Host::Name(name) => name == INSIDE_NAME,
            Host::Address(address) => {
                address == INSIDE_V4 || address == std::net::IpAddr::from(METADATA)
            }
        });
    if !known {
        return Err(Error::new(
            Code::PermissionDenied,
            "this page is not known by the host name of the request",
        )
        .hint(format!("use http://{INSIDE_NAME}/")));
    }
    Ok(())
}

async fn why(from: &BoxView, request: &Request<Bytes>) -> Answer {
    let query = request.uri().query().unwrap_or_default();
    if query.len() > LONGEST_QUERY {
        return Err(Error::new(Code::TooLarge, "the question is too long"));
    }
    let host = parameter(query, "host").ok_or_else(|| {
        Error::invalid("host", "which host?").hint("ask for /why?host=example.org&port=443")
    })?;
    let target = match parameter(query, "port") {
        Some(port) => format!("{host}:{port}"),
        None => host,
    };
    Ok(json_page(&from.why(&target).await?))
}

fn policy(from: &BoxView, request: &Request<Bytes>) -> Answer {
    let policy = from.policy();
    let words = words::policy(&policy);
    let wants_text = request
        .headers()
        .get(ACCEPT)
        .is_some_and(|accept| accept.as_bytes().starts_with(b"text/plain"));
    if wants_text {
        return Ok(response(StatusCode::OK, TEXT, words.join("\n") + "\n"));
    }
    Ok(json_page(
        &json!({ "words": words, "policy": policy.to_json() }),
    ))
}

fn denials(from: &BoxView, _: &Request<Bytes>) -> Answer {
    Ok(json_page(&json!({ "denials": from.denials() })))
}

fn index(_: &BoxView, _: &Request<Bytes>) -> Answer {
    Ok(response(StatusCode::OK, TEXT, INDEX.to_owned()))
}

fn nothing(_: &BoxView, _: &Request<Bytes>) -> Answer {
    Err(Error::not_found("there is no such page").hint("GET / lists what there is"))
}

fn json_page(value: &impl Serialize) -> Response<Bytes> {
    match serde_json::to_string_pretty(value) {
        Ok(text) => response(StatusCode::OK, JSON, text + "\n"),
        Err(error) => refusal(&Error::internal(error.to_string())),
    }
}

fn refusal(error: &Error) -> Response<Bytes> {
    let status = StatusCode::from_u16(error.code.status()).unwrap_or(StatusCode::BAD_REQUEST);
    response(status, JSON, json!({ "error": error }).to_string() + "\n")
}

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
