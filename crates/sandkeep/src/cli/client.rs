//! Requests to a server.

use std::{net::IpAddr, time::Duration};

use http::{HeaderValue, Method, StatusCode};
use reqwest::{RequestBuilder, Response, Url};
use sandkeep_model::{Code, Error, Result, SandboxId, Secret};
use serde_json::Value;

use super::output::clean;

/// No answer to a plain request is larger; more is not read.
const MAX_ANSWER: usize = 16 << 20;
/// Longer than the server itself gives a plain request.
const PATIENCE: Duration = Duration::from_secs(150);
/// A server that is there says so at once.
const LOOK: Duration = Duration::from_secs(2);
/// Shorter beginnings of an id match too much by accident.
const PREFIX_LEAST: usize = 4;

#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    key: Secret,
}

/// Speaks to `base` alone.
fn http_client(base: &Url) -> Result<reqwest::Client> {
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("sandkeep/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(Duration::from_secs(10))
        // Interactive commands upgrade the connection, which HTTP/2 does not know.
        .http1_only()
        // A redirect would carry the key to wherever it points.
        .redirect(reqwest::redirect::Policy::none());
    if is_loopback(base) {
        builder = builder.no_proxy();
        if base.scheme() == "http" {
            // No TLS, so a host without any certificate authorities must do as well.
            builder = builder.tls_certs_only([]);
        }
    }
    builder.build().map_err(|error| {
        Error::internal(format!("preparing the HTTP client: {error}"))
            .hint("TLS needs certificate authorities: install ca-certificates")
    })
}

/// Whether a server of ours is there; others like the same port. It is told no key.
pub async fn is_sandkeep(url: &str) -> bool {
    let asked = async {
        let mut url = parse_base(url).ok()?;
        let http = http_client(&url).ok()?;
        url.set_path("/v1/health");
        let answer = http.get(url).timeout(LOOK).send().await.ok()?;
        let health: Value = answer.json().await.ok()?;
        health.get("version")?.as_str()?;
        health.get("status").cloned()
    };
    asked.await.is_some()
}

impl Client {
    /// `key` is asked with whether the server is on this machine: a key found in a file here
    /// must not be sent anywhere else.
    pub fn new(url: &str, key: impl FnOnce(bool) -> Option<Secret>) -> Result<Self> {
        let base = parse_base(url)?;
        let local = is_loopback(&base);
        let key = key(local).ok_or_else(|| {
            Error::new(Code::Unauthenticated, "no API key is known for the server")
                .hint("set SANDKEEP_API_KEY to the key the server printed when it started")
        })?;
        let http = http_client(&base)?;
        Ok(Self { http, base, key })
    }

    /// The server's address, to be shown.
    pub fn address(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    pub const fn base(&self) -> &Url {
        &self.base
    }

    /// A request below the server's address; `path` segments are encoded as needed.
    pub fn request(&self, method: Method, segments: &[&str]) -> Result<RequestBuilder> {
        let mut url = self.base.clone();
        url.path_segments_mut()
            .map_err(|()| Error::invalid("url", "the server's address can not have a path"))?
            .pop_if_empty()
            .push("v1")
            .extend(segments);
        let mut key = HeaderValue::from_str(self.key.expose())
            .map_err(|_| Error::invalid("api_key", "the API key can not be sent in a header"))?;
        key.set_sensitive(true);
        Ok(self.http.request(method, url).header("x-api-key", key))
    }

    /// Sends, and turns a refusal into its typed error.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request
            .send()
            .await
            .map_err(|error| self.unreachable(&error))?;
        if response.status().is_success() || response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(response);
        }
        let status = response.status();
        let body = bounded(response).await.unwrap_or_default();
        Err(refusal(status, &body))
    }

    /// Sends and reads the JSON answer; `Null` when there is none.
    pub async fn json(&self, request: RequestBuilder) -> Result<Value> {
        self.json_whenever(request.timeout(PATIENCE)).await
    }

    /// The same for what may take as long as it likes.
    pub async fn json_whenever(&self, request: RequestBuilder) -> Result<Value> {
        let response = self.send(request).await?;
        self.read_json(response).await
    }

    /// The JSON of an answer.
    pub async fn read_json(&self, response: Response) -> Result<Value> {
        let body = bounded(response).await?;
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).map_err(|error| {
            Error::internal(format!("the server's answer is not JSON: {error}"))
                .hint("is there a sandkeep server at SANDKEEP_URL?")
        })
    }

    pub async fn get(&self, segments: &[&str]) -> Result<Value> {
        self.json(self.request(Method::GET, segments)?).await
    }

    /// All boxes that match, page after page.
    pub async fn list(&self, query: &[(String, String)]) -> Result<Vec<Value>> {
        let mut all = Vec::new();
        let mut next: Option<String> = None;
        loop {
            let mut request = self.request(Method::GET, &["sandboxes"])?.query(query);
            if let Some(token) = &next {
                request = request.query(&[("next_token", token)]);
            }
            let mut page = self.json(request).await?;
            if let Some(Value::Array(boxes)) = page.get_mut("sandboxes").map(Value::take) {
                all.extend(boxes);
            }
            next = page
                .get("next_token")
                .and_then(Value::as_str)
                .map(ToOwned::to_owned);
            if next.is_none() {
                return Ok(all);
            }
        }
    }

    /// The id meant by `text`: a whole id, or the beginning of exactly one.
    pub async fn find(&self, text: &str) -> Result<String> {
        if text.parse::<SandboxId>().is_ok() {
            return Ok(text.to_owned());
        }
        let could_be = text.starts_with('i')
            && text
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !could_be {
            return Err(Error::sandbox_not_found(&clean(text)));
        }
        if text.len() < PREFIX_LEAST {
            return Err(Error::invalid(
                "box",
                format!(
                    "\"{text}\" is too short, at least {PREFIX_LEAST} characters of an id are needed"
                ),
            ));
        }
        let boxes = self.list(&[]).await?;
        unique(text, boxes.iter().filter_map(|item| item["id"].as_str()))
    }

    fn unreachable(&self, error: &reqwest::Error) -> Error {
        let base = self.address();
        let causes = causes(error);
        // The innermost cause says it; the outer ones repeat the address.
        let cause = causes.last().map_or("", String::as_str);
        if error.is_connect() {
            return no_connection(base, &causes, cause);
        }
        if error.is_timeout() {
            return Error::new(
                Code::DeadlineExceeded,
                format!("the server at {base} did not answer in time"),
            );
        }
        Error::internal(format!("talking to the server at {base}: {cause}"))
    }
}

/// What an error says of why, outermost first.
fn causes(error: &dyn std::error::Error) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source())
        .map(ToString::to_string)
        .collect()
}

/// A server that is not there, a name that is not, and one that is not trusted want different help.
fn no_connection(base: &str, causes: &[String], cause: &str) -> Error {
    let says = |word: &str| causes.iter().any(|text| text.contains(word));
    let failed = |what: String| Error::new(Code::HostNotReady, what);
    if says("dns error") {
        return failed(format!("the name in {base} is not found: {cause}"))
            .hint("set SANDKEEP_URL or --url to an address that this machine finds");
    }
    if says("peer certificate") {
        return failed(format!("the certificate of {base} is not trusted: {cause}"))
            .hint("set SSL_CERT_FILE to the certificate of its authority (ca.pem in its state directory), or use the name it is for");
    }
    if base.starts_with("https:") && !says("os error") && !says("timed out") {
        return failed(format!("no TLS connection to {base}: {cause}"))
            .hint("does a server with TLS listen there? One without is reached at http://");
    }
    failed(format!("no server answers at {base}"))
        .hint("start one with `sandkeep serve`, or set SANDKEEP_URL to where it is")
}

fn parse_base(url: &str) -> Result<Url> {
    let bad = |why: &str| {
        Error::invalid(
            "url",
            format!("\"{}\" is no address of a server: {why}", clean(url)),
        )
        .hint("write it like http://127.0.0.1:3000, in --url or SANDKEEP_URL")
    };
    let base = Url::parse(url).map_err(|error| bad(&error.to_string()))?;
    if !matches!(base.scheme(), "http" | "https") || base.host_str().is_none() {
        return Err(bad("it must begin with http:// or https://"));
    }
    Ok(base)
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn unique<'a>(prefix: &str, ids: impl Iterator<Item = &'a str>) -> Result<String> {
    let matching: Vec<&str> = ids.filter(|id| id.starts_with(prefix)).collect();
    match matching.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] => Err(Error::sandbox_not_found(&prefix)),
        many => Err(Error::invalid(
            "box",
            format!("\"{prefix}\" is the beginning of {} ids", many.len()),
        )
        .hint("write more of the id; `sandkeep ls` shows them all")),
    }
}

async fn bounded(mut response: Response) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    let failed = |error: reqwest::Error| {
        Error::internal(format!(
            "reading the server's answer: {}",
            error.without_url()
        ))
    };
    while let Some(chunk) = response.chunk().await.map_err(failed)? {
        if body.len() + chunk.len() > MAX_ANSWER {
            return Err(Error::new(
                Code::TooLarge,
                format!("the server's answer is larger than {MAX_ANSWER} bytes"),
            ));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn refusal(status: StatusCode, body: &[u8]) -> Error {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    if let Ok(error) = serde_json::from_value(value["error"].clone()) {
        return error;
    }
    let said = value["error"]["message"]
        .as_str()
        .or(value["message"].as_str());
    let code = Code::ALL
        .into_iter()
        .find(|code| code.status() == status.as_u16())
        .unwrap_or(Code::Internal);
    match said {
        Some(message) => Error::new(code, clean(message)),
        None => Error::new(code, format!("the server answered {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_from_a_file_goes_only_to_this_machine() {
        for (url, local) in [
            ("http://127.0.0.1:3000", true),
            ("http://localhost:3000", true),
            ("http://[::1]:3000", true),
            ("http://10.0.0.1:3000", false),
            ("https://localhost.example", false),
        ] {
            assert_eq!(is_loopback(&parse_base(url).unwrap()), local, "{url}");
        }
        let error = Client::new("http://example.test", |local| {
            local.then(|| Secret::new("k"))
        })
        .unwrap_err();
        assert_eq!(error.code, Code::Unauthenticated);
    }

    #[test]
    fn a_server_that_is_not_reached_is_told_from_one_that_is_not_there() {
        let said = |base: &str, causes: &[&str]| {
            let causes: Vec<String> = causes.iter().map(ToString::to_string).collect();
            let last = causes.last().unwrap().clone();
            no_connection(base, &causes, &last).message
        };
        let refused = ["tcp connect error", "Connection refused (os error 111)"];
        assert!(said("https://a.test", &refused).starts_with("no server answers"));
        let unknown = [
            "dns error",
            "failed to lookup address information: Name or service not known",
        ];
        assert!(said("http://a.test", &unknown).contains("a.test is not found: failed to lookup"));
        let untrusted = ["client error", "invalid peer certificate: UnknownIssuer"];
        assert!(said("https://a.test", &untrusted).contains("not trusted"));
        let plain = [
            "client error",
            "received corrupt message of type InvalidContentType",
        ];
        assert!(said("https://a.test", &plain).starts_with("no TLS connection"));
    }

    #[test]
    fn odd_addresses_are_refused_in_words() {
        for bad in ["", "127.0.0.1:3000", "ftp://x", "http://"] {
            assert!(parse_base(bad).unwrap_err().hint.is_some(), "{bad}");
        }
    }

    #[test]
    fn a_beginning_must_mean_one_box() {
        let ids = ["iabcd1", "iabcd2", "ixyz00"];
        assert_eq!(unique("ixyz", ids.into_iter()).unwrap(), "ixyz00");
        assert_eq!(
            unique("iabc", ids.into_iter()).unwrap_err().code,
            Code::InvalidArgument
        );
        assert_eq!(
            unique("iqqq", ids.into_iter()).unwrap_err().code,
            Code::NotFound
        );
    }

    #[test]
    fn refusals_keep_their_words() {
        let native = br#"{"error":{"code":"not_found","message":"gone","hint":"look","field":null,"retryable":false}}"#;
        let error = refusal(StatusCode::NOT_FOUND, native);
        assert_eq!(
            (error.code, error.hint.as_deref()),
            (Code::NotFound, Some("look"))
        );
        let other = refusal(StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!(other.code, Code::BoxUnreachable);
    }
}
