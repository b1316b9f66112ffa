//! Headers that are about one connection and not about the request.

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        ALT_SVC, CONNECTION, CONTENT_LENGTH, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
        TRANSFER_ENCODING, UPGRADE,
    },
};

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
