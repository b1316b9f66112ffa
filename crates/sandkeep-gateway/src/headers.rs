//! Which headers pass, in both directions.

use std::net::IpAddr;

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{CONNECTION, COOKIE, EXPECT, HOST, UPGRADE},
};
use sandkeep_model::Secret;

use crate::{access::TOKEN_HEADER, port_lock};

/// They are about one connection, not about the request.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Only we may say where a request came from.
const ORIGIN: [&str; 6] = [
    "forwarded",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-real-ip",
];

/// Takes out what ends at this hop, named ones included.
pub(crate) fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

fn drop_origin_and_routing(headers: &mut HeaderMap) {
    for name in ORIGIN {
        headers.remove(name);
    }
    let routing: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with("e2b-"))
        .cloned()
        .collect();
    for name in routing {
        headers.remove(name);
    }
    // We read the body only when the box asks for it; hyper says 100 to the client then.
    headers.remove(EXPECT);
}

/// For the agent: no secret, no routing, no story about where it came from.
pub(crate) fn for_agent(headers: &mut HeaderMap) {
    drop_hop_by_hop(headers);
    drop_origin_and_routing(headers);
    headers.remove(TOKEN_HEADER);
    headers.remove(HOST);
}

/// Who asked, for the program behind a port.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    pub client: Option<IpAddr>,
    pub host: Option<&'a str>,
    /// What it is told in place of the host.
    pub mask: Option<String>,
    pub scheme: &'static str,
}

/// For a program in the box: everything but the box's own token, with the truth about the origin.
pub(crate) fn for_port(headers: &mut HeaderMap, asked: &Asked<'_>, token: Option<&Secret>) {
    let upgrade = wanted_upgrade(headers);
    drop_hop_by_hop(headers);
    drop_origin_and_routing(headers);
    port_lock::strip(headers);
    // A program may use a header of this name for itself; only ours must not get in.
    let ours = |value: &HeaderValue| token.is_some_and(|token| token.matches(value.as_bytes()));
    if headers.get_all(TOKEN_HEADER).iter().any(ours) {
        headers.remove(TOKEN_HEADER);
    }
    if let Some(upgrade) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, upgrade);
    }
    join_cookies(headers);
    let mut set = |name: &'static str, value: Option<String>| {
        if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
            headers.insert(name, value);
        }
    };
    set("x-forwarded-for", asked.client.map(|ip| ip.to_string()));
    set("x-forwarded-host", asked.host.map(str::to_owned));
    set("x-forwarded-proto", Some(asked.scheme.to_owned()));
    let host = asked.mask.clone();
    set("host", host.or_else(|| asked.host.map(str::to_owned)));
}

/// HTTP/2 may send cookies one by one, HTTP/1.1 knows only one line of them.
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<&[u8]> = headers
        .get_all(COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if cookies.len() < 2 {
        return;
    }
    if let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..])) {
        headers.insert(COOKIE, joined);
    }
}

/// The protocol the sender wants to change to, if it really asks for a change.
pub(crate) fn wanted_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    if asks {
        headers.get(UPGRADE).cloned()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn the_agent_gets_only_what_it_needs() {
        let mut headers = map(&[
            ("authorization", "Basic cm9vdDo="),
            ("connect-timeout-ms", "7000"),
            ("connection", "close, x-private"),
            ("content-type", "application/connect+json"),
            ("e2b-sandbox-id", "iabc"),
            ("e2b-traffic-access-token", "secret"),
            ("expect", "100-continue"),
            ("host", "localhost:3000"),
            ("keepalive-ping-interval", "50"),
            ("range", "bytes=0-1"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("x-access-token", "secret"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-private", "1"),
        ]);
        for_agent(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(
            left,
            [
                "authorization",
                "connect-timeout-ms",
                "content-type",
                "keepalive-ping-interval",
                "range"
            ]
        );
    }

    #[test]
    fn a_program_gets_the_truth_about_the_client() {
        let mut headers = map(&[
            ("host", "3000-iabc.example.org"),
            ("cookie", "a=b"),
            ("cookie", "c=d"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x-real-ip", "6.6.6.6"),
            ("forwarded", "for=6.6.6.6"),
            ("x-access-token", "tok"),
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
        ]);
        let asked = Asked {
            client: Some([10, 0, 0, 7].into()),
            host: Some("3000-iabc.example.org"),
            mask: None,
            scheme: "https",
        };
        for_port(&mut headers, &asked, Some(&Secret::new("tok")));
        assert_eq!(headers["x-forwarded-for"], "10.0.0.7");
        assert_eq!(headers["x-forwarded-proto"], "https");
        assert_eq!(headers["x-forwarded-host"], "3000-iabc.example.org");
        assert_eq!(headers["host"], "3000-iabc.example.org");
        assert_eq!(headers.get_all("cookie").iter().count(), 1);
        assert_eq!(headers["cookie"], "a=b; c=d");
        assert_eq!(headers["upgrade"], "websocket");
        assert_eq!(headers["connection"], "Upgrade");
        for gone in ["x-real-ip", "forwarded", "x-access-token"] {
            assert!(!headers.contains_key(gone), "{gone}");
        }
    }

    #[test]
    fn a_programs_own_token_passes_and_a_lone_upgrade_does_not() {
        let mut headers = map(&[("x-access-token", "app"), ("upgrade", "websocket")]);
        let asked = Asked {
            client: None,
            host: None,
            mask: None,
            scheme: "http",
        };
        for_port(&mut headers, &asked, Some(&Secret::new("tok")));
        assert_eq!(headers["x-access-token"], "app");
        assert!(!headers.contains_key("upgrade"));
    }
}
