//! Headers that are about one connection and not about the request.

use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{
        ACCEPT_CHARSET, ACCEPT_ENCODING, ALT_SVC, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH,
        CONTENT_RANGE, HOST, IF_RANGE, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, RANGE,
        SEC_WEBSOCKET_EXTENSIONS, TE, TRANSFER_ENCODING, UPGRADE,
    },
    response::Parts,
};

use super::http2;

const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
/// An old name of `Range` that servers still know.
const REQUEST_RANGE: HeaderName = HeaderName::from_static("request-range");
/// Asks for the difference to what the client has.
const A_IM: HeaderName = HeaderName::from_static("a-im");

/// Takes out what does not go further than the next hop. `switching`: the request asks for, or the
/// response makes, a change of protocol.
pub fn strip_hop_by_hop(headers: &mut HeaderMap, switching: bool) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|token| token.trim().parse().ok())
        // Whoever lists these wants the next hop to read the request differently.
        .filter(|name| ![HOST, CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE].contains(name))
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE] {
        headers.remove(name);
    }
    for name in ["keep-alive", "proxy-connection"] {
        headers.remove(name);
    }
    if switching {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    } else {
        headers.remove(UPGRADE);
    }
}

/// As above, and what would lead the box to ways that are closed to it.
pub fn strip_response(headers: &mut HeaderMap, switching: bool) {
    strip_hop_by_hop(headers, switching);
    // The length is told by what is sent, and HTTP/3 does not get out.
    headers.remove(TRANSFER_ENCODING);
    headers.remove(ALT_SVC);
}

/// Asks for an answer that can be searched: whole, and neither compressed nor in a rare charset.
pub fn ask_for_plain(headers: &mut HeaderMap) {
    for name in [
        RANGE,
        IF_RANGE,
        REQUEST_RANGE,
        A_IM,
        ACCEPT_CHARSET,
        SEC_WEBSOCKET_EXTENSIONS,
    ] {
        headers.remove(name);
    }
    let identity = HeaderValue::from_static("identity");
    headers.insert(ACCEPT_ENCODING, identity.clone());
    if http2::is_grpc(headers) {
        headers.insert(GRPC_ACCEPT_ENCODING, identity);
    }
}

/// Why an answer can not be searched, if it can not.
pub fn unreadable(answer: &Parts) -> Option<&'static str> {
    let headers = &answer.headers;
    let other_than = |name, plain: &'static [u8]| {
        headers
            .get_all(name)
            .iter()
            .any(move |value| !value.as_bytes().trim_ascii().eq_ignore_ascii_case(plain))
    };
    if other_than(CONTENT_ENCODING, b"identity")
        || other_than(GRPC_ENCODING, b"identity")
        || other_than(TRANSFER_ENCODING, b"chunked")
        || headers.contains_key(SEC_WEBSOCKET_EXTENSIONS)
    {
        return Some(
            "it is compressed though that was not asked for, so it cannot be searched for secrets",
        );
    }
    let refused = answer.status == StatusCode::RANGE_NOT_SATISFIABLE;
    let part = [StatusCode::PARTIAL_CONTENT, StatusCode::IM_USED].contains(&answer.status)
        || (headers.contains_key(CONTENT_RANGE) && !refused);
    part.then_some(
        "it is a part though the whole was asked for, and parts of a secret are not recognized",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::header::AUTHORIZATION;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[test]
    fn what_connection_lists_goes_but_not_the_framing() {
        let mut map = headers(&[
            ("connection", "close, X-Mine, Host, Content-Length"),
            ("connection", "authorization"),
            ("x-mine", "1"),
            ("host", "a.test"),
            ("content-length", "3"),
            ("authorization", "x"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("keep-alive", "timeout=5"),
            ("accept", "*/*"),
        ]);
        strip_hop_by_hop(&mut map, false);
        let mut left: Vec<_> = map.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "content-length", "host"]);
        assert!(!map.contains_key(AUTHORIZATION));
    }

    #[test]
    fn an_upgrade_stays_one() {
        let mut map = headers(&[
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
        ]);
        strip_hop_by_hop(&mut map, true);
        assert_eq!(map[CONNECTION], "upgrade");
        assert_eq!(map[UPGRADE], "websocket");
    }
}
