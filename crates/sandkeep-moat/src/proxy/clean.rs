//! What is taken out of requests, or refused, so that servers read what the policy read.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request,
    header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE},
};
use http_body::Body;

use crate::policy::Refusal;

/// Headers by which servers and frameworks take another method, host or path than those of the
/// request, beside the families of [`is_override`].
const OVERRIDES: &[&str] = &[
    "forwarded",
    "x-http-method",
    "x-method",
    "method",
    "x-host",
    "x-http-host",
    "x-proxy-host",
    "x-proxy-url",
    "x-backend-host",
    "x-real-host",
    "x-server-name",
    "x-request-uri",
    "x-request-url",
    "x-request-method",
    "request-uri",
    "x-uri",
    "x-url",
    "base-url",
    "destination-url",
    "x-destination-url",
    "x-envoy-original-path",
    "x-envoy-original-host",
    "x-envoy-internal",
    "x-invoke-path",
    "x-matched-path",
    "x-now-route-matches",
    "x-middleware-subrequest",
    "x-script-name",
    "script-name",
    "path-info",
    "redirect-url",
    "x-accel-redirect",
    "x-sendfile",
];

/// What a name must not resemble: gateways (CGI, WSGI, PHP) make the same variable of `a-b`, `a_b`
/// and `a.b`.
const MEANT: [HeaderName; 7] = [
    HOST,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    CONNECTION,
    UPGRADE,
    EXPECT,
    TE,
];

/// Whether a header stands for another method, host or path than those of the request.
fn is_override(name: &str) -> bool {
    name.contains("override")
        || OVERRIDES.contains(&name)
        || ["x-forwarded", "x-original", "x-rewrite"]
            .iter()
            .any(|family| name.starts_with(family))
}

/// As gateways read a name.
fn as_variable(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    name.chars().map(plain).collect()
}

/// For hosts of which only some requests are allowed: nothing goes with a request that makes it
/// another one.
pub fn strip_for_narrowed(headers: &mut HeaderMap) {
    let doubtful: Vec<HeaderName> = headers
        .keys()
        .filter(|name| {
            let read = as_variable(name.as_str());
            is_override(&read)
                || (read != name.as_str() && MEANT.iter().any(|own| own.as_str() == read))
        })
        .cloned()
        .collect();
    for name in doubtful {
        headers.remove(name);
    }
    // Some servers add trailers to the headers; those that are not named here are not sent.
    headers.remove(TRAILER);
}

/// The head is answered and the body sent by us: what the client expects is done already, and
/// servers disagree on what else it may mean.
pub fn strip_expectations(headers: &mut HeaderMap) {
    headers.remove(EXPECT);
}

/// Takes out wishes for protocols in which requests could not be seen any more. Servers may ignore
/// such a wish, so nobody misses it; `curl --http2` and Java ask for h2c with every request.
pub fn strip_upgrades_that_hide(headers: &mut HeaderMap) {
    let hides = |protocol: &str| {
        let name = protocol.split('/').next().unwrap_or(protocol).trim();
        ["h2c", "h2", "http", "tls", "ssl"]
            .iter()
            .any(|own| name.eq_ignore_ascii_case(own))
    };
    let wishes: Vec<HeaderValue> = headers.get_all(UPGRADE).iter().cloned().collect();
    let read = |value: &HeaderValue| value.to_str().map(str::to_owned).ok();
    let all: Vec<String> = wishes
        .iter()
        .filter_map(read)
        .flat_map(|value| {
            value
                .split(',')
                .map(|one| one.trim().to_owned())
                .collect::<Vec<_>>()
        })
        .filter(|one| !one.is_empty())
        .collect();
    let unreadable = wishes.iter().any(|value| value.to_str().is_err());
    let left: Vec<&str> = all
        .iter()
        .map(String::as_str)
        .filter(|protocol| !hides(protocol))
        .collect();
    if left.len() == all.len() && !unreadable {
        return;
    }
    headers.remove(UPGRADE);
    headers.remove("http2-settings");
    if let (false, Ok(value)) = (left.is_empty(), HeaderValue::try_from(left.join(", "))) {
        headers.insert(UPGRADE, value);
    }
}

/// Refuses what one server ends here and another there.
pub fn refuse_ambiguous_framing<B: Body>(
    request: &Request<B>,
    narrowed: bool,
) -> Result<(), Refusal> {
    let codings: Vec<&HeaderValue> = request
        .headers()
        .get_all(TRANSFER_ENCODING)
        .iter()
        .collect();
    let plain = match codings.as_slice() {
        [] => true,
        [one] => one.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked"),
        _ => false,
    };
    if !plain || (!codings.is_empty() && request.headers().contains_key(CONTENT_LENGTH)) {
        return Err(Refusal::of_form(
            "its length can be read in two ways",
            "send either Content-Length or \"Transfer-Encoding: chunked\", once",
        ));
    }
    let without_body = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE];
    if narrowed && without_body.contains(request.method()) && !request.body().is_end_stream() {
        return Err(Refusal::of_form(
            format!(
                "only some requests to this host are allowed, and a body of {} can be read as a request of its own",
                request.method()
            ),
            "send the body with POST, or without one",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(list: &[(&'static str, &'static str)], clean: fn(&mut HeaderMap)) -> String {
        let mut headers: HeaderMap = HeaderMap::new();
        for (name, value) in list {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        clean(&mut headers);
        let mut names: Vec<String> = headers
            .iter()
            .map(|(name, value)| format!("{name}={}", value.to_str().unwrap()))
            .collect();
        names.sort_unstable();
        names.join(" ")
    }

    #[test]
    fn what_makes_another_request_of_it_goes() {
        let list = [
            ("host", "a.test"),
            ("content-length", "3"),
            ("content_length", "4"),
            ("transfer.encoding", "chunked"),
            ("x_http_method_override", "DELETE"),
            ("x-forwarded_host", "b"),
            ("x-original-url", "/b"),
            ("trailer", "x-original-url"),
            ("x-forwarded", "b"),
            ("x-mine", "1"),
            ("content-type", "a/b"),
        ];
        assert_eq!(
            left(&list, strip_for_narrowed),
            "content-length=3 content-type=a/b host=a.test x-mine=1"
        );
    }

    #[test]
    fn only_upgrades_that_hide_requests_go() {
        for (list, after) in [
            (&[("upgrade", "h2c"), ("http2-settings", "x")][..], ""),
            (&[("upgrade", "websocket")], "upgrade=websocket"),
            (&[("upgrade", "websocket, H2C")], "upgrade=websocket"),
            (&[("upgrade", "TLS/1.2"), ("upgrade", "tcp")], "upgrade=tcp"),
            (&[("upgrade", "HTTP/2.0")], ""),
        ] {
            assert_eq!(left(list, strip_upgrades_that_hide), after);
        }
    }

    #[test]
    fn lengths_in_two_ways_are_refused() {
        let request = |list: &[(&str, &str)]| {
            let mut builder = Request::get("/x");
            for (name, value) in list {
                builder = builder.header(*name, *value);
            }
            builder
                .body(http_body_util::Empty::<bytes::Bytes>::new())
                .unwrap()
        };
        for good in [
            &[][..],
            &[("transfer-encoding", "Chunked")],
            &[("content-length", "0")],
        ] {
            assert!(refuse_ambiguous_framing(&request(good), true).is_ok());
        }
        for bad in [
            &[("transfer-encoding", "gzip, chunked")][..],
            &[
                ("transfer-encoding", "chunked"),
                ("transfer-encoding", "chunked"),
            ],
            &[("transfer-encoding", "chunked"), ("content-length", "3")],
        ] {
            assert!(refuse_ambiguous_framing(&request(bad), false).is_err());
        }
    }
}
