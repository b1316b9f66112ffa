//! Who may reach a private port, and how the answer to the right token is remembered in a browser.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode,
    header::{CACHE_CONTROL, COOKIE, LOCATION, ORIGIN, REFERER, REFERRER_POLICY, SET_COOKIE},
    request::Parts,
};
use sandkeep_agent_client::empty;
use sandkeep_model::Secret;

use crate::{Body, target};

/// E2B's own name for it.
const HEADER: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
/// For a person who opens a link: the token becomes a cookie and leaves the address bar.
const PARAMETER: &str = "sandkeep_token";
const COOKIE_NAME: &str = "sandkeep_traffic";

/// What becomes of a request for a private port.
pub(crate) enum Entry {
    Granted,
    /// The token came in the address: the browser is told to keep it as a cookie.
    Redirect(Box<Response<Body>>),
    Preflight,
    /// The words are for a client.
    Refused(&'static str),
}

/// Looks for the sandbox's traffic token in `parts`.
pub(crate) fn entry(parts: &Parts, token: &Secret, scheme: &str) -> Entry {
    // First of all: the program must not see it, whatever else opens the port.
    if let Some((given, rest)) = parameter(parts) {
        let reads = matches!(parts.method, Method::GET | Method::HEAD);
        return if reads && token.matches(given.as_bytes()) {
            Entry::Redirect(Box::new(session(token, &rest, scheme)))
        } else {
            Entry::Refused("the traffic access token in the address is wrong, or not in a link")
        };
    }
    let mut shown = parts.headers.get_all(HEADER).iter().peekable();
    if shown.peek().is_some() {
        return if shown.all(|value| token.matches(value.as_bytes())) {
            Entry::Granted
        } else {
            Entry::Refused("the traffic access token in header e2b-traffic-access-token is wrong")
        };
    }
    let by_cookie = cookies(&parts.headers)
        .any(|(name, value)| name == COOKIE_NAME.as_bytes() && token.matches(value));
    if by_cookie {
        return if from_own_page(parts) {
            Entry::Granted
        } else {
            Entry::Refused("a page of another origin cannot use the session of this port")
        };
    }
    if parts.method == Method::OPTIONS
        && parts.headers.contains_key("access-control-request-method")
    {
        // A browser asks before it sends the token; the program is not bothered with it.
        return Entry::Preflight;
    }
    Entry::Refused(
        "the ports of this sandbox are private: send its traffic token in header \
         e2b-traffic-access-token, or open the link that `sandkeep url SANDBOX PORT` prints",
    )
}

/// Takes the token out of what the program in the sandbox gets.
pub(crate) fn strip(headers: &mut HeaderMap) {
    headers.remove(HEADER);
    let ours = |name: &[u8]| name == COOKIE_NAME.as_bytes();
    if !cookies(headers).any(|(name, _)| ours(name)) {
        return;
    }
    let kept: Vec<&[u8]> = pieces(headers)
        .filter(|piece| !ours(split_cookie(piece).0))
        .collect();
    let joined = HeaderValue::from_bytes(&kept.join(&b"; "[..]));
    headers.remove(COOKIE);
    if let Ok(joined) = joined
        && !joined.is_empty()
    {
        headers.insert(COOKIE, joined);
    }
}

fn pieces(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    headers
        .get_all(COOKIE)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b';'))
        .map(<[u8]>::trim_ascii)
}

fn split_cookie(piece: &[u8]) -> (&[u8], &[u8]) {
    match piece.iter().position(|byte| *byte == b'=') {
        Some(at) => (piece[..at].trim_ascii(), piece[at + 1..].trim_ascii()),
        None => (&[], piece),
    }
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&[u8], &[u8])> {
    pieces(headers).map(split_cookie)
}

/// Browsers send the cookie whoever makes the request, and under one domain all sandboxes are the
/// same site. So a page of another sandbox must not get in with it; following a link is fine.
fn from_own_page(parts: &Parts) -> bool {
    let text = |name: &str| parts.headers.get(name).map(HeaderValue::as_bytes);
    if let Some(origin) = parts.headers.get(ORIGIN)
        && !same_host(parts, origin)
    {
        return false;
    }
    let read = matches!(parts.method, Method::GET | Method::HEAD);
    match text("sec-fetch-site") {
        Some(b"same-origin" | b"none") => true,
        // A link was followed; a frame in another page is no link.
        Some(_) => {
            read && text("sec-fetch-mode") == Some(b"navigate")
                && text("sec-fetch-dest") == Some(b"document")
        }
        // Over plain HTTP browsers say nothing but where they come from.
        None => parts
            .headers
            .get(REFERER)
            .is_none_or(|referer| same_host(parts, referer)),
    }
}

fn same_host(parts: &Parts, url: &HeaderValue) -> bool {
    let own = target::host(parts).ok().flatten();
    let theirs = url
        .to_str()
        .ok()
        .and_then(|url| url.split_once("://"))
        .map(|(_, rest)| rest.split('/').next().unwrap_or_default());
    own.is_some() && own == theirs
}

/// The token in the query, and path and query without it.
fn parameter(parts: &Parts) -> Option<(String, String)> {
    let mut given = None;
    let mut rest = Vec::new();
    for pair in parts.uri.query()?.split('&') {
        match pair.split_once('=') {
            Some((PARAMETER, value)) => given = Some(value.to_owned()),
            _ => rest.push(pair),
        }
    }
    let path = parts.uri.path();
    // `//host` would be another place.
    let path = format!("/{}", path.trim_start_matches(['/', '\\']));
    let query = rest.join("&");
    let rest = if query.is_empty() {
        path
    } else {
        format!("{path}?{query}")
    };
    given.map(|given| (given, rest))
}

fn session(token: &Secret, to: &str, scheme: &str) -> Response<Body> {
    let secure = if scheme == "https" { "; Secure" } else { "" };
    let cookie = format!(
        "{COOKIE_NAME}={}; Path=/; HttpOnly; SameSite=Lax{secure}",
        token.expose()
    );
    let mut response = Response::new(empty());
    *response.status_mut() = StatusCode::SEE_OTHER;
    let headers = response.headers_mut();
    if let Ok(mut cookie) = HeaderValue::try_from(cookie) {
        cookie.set_sensitive(true);
        headers.insert(SET_COOKIE, cookie);
    }
    if let Ok(to) = HeaderValue::try_from(to) {
        headers.insert(LOCATION, to);
    }
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(method: &str, uri: &str, headers: &[(&'static str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn word(entry: &Entry) -> &'static str {
        match entry {
            Entry::Granted => "granted",
            Entry::Redirect(_) => "redirect",
            Entry::Preflight => "preflight",
            Entry::Refused(_) => "refused",
        }
    }

    fn asked(method: &str, uri: &str, headers: &[(&'static str, &str)]) -> &'static str {
        word(&entry(
            &parts(method, uri, headers),
            &Secret::new("tok"),
            "http",
        ))
    }

    #[test]
    fn the_token_opens_and_nothing_else_does() {
        let header = "e2b-traffic-access-token";
        assert_eq!(asked("GET", "/", &[(header, "tok")]), "granted");
        assert_eq!(
            asked("GET", "/", &[("cookie", "a=b; sandkeep_traffic=tok")]),
            "granted"
        );
        for headers in [
            &[][..],
            &[(header, "")],
            &[(header, "tokk")],
            &[(header, "wrong"), (header, "tok")],
            &[(header, "wrong"), ("cookie", "sandkeep_traffic=tok")],
            &[("cookie", "sandkeep_traffic=")],
            &[("cookie", "xsandkeep_traffic=tok")],
            &[("x-access-token", "tok")],
            &[("authorization", "Bearer tok")],
        ] {
            assert_eq!(asked("GET", "/", headers), "refused", "{headers:?}");
            assert_eq!(asked("POST", "/x", headers), "refused", "{headers:?}");
        }
        assert_eq!(asked("OPTIONS", "/", &[]), "refused");
        let preflight = [("access-control-request-method", "POST")];
        assert_eq!(asked("OPTIONS", "/", &preflight), "preflight");
    }

    #[test]
    fn a_link_becomes_a_session_and_loses_its_token() {
        let token = Secret::new("tok");
        let link = parts("GET", "/a/b?x=1&sandkeep_token=tok&y=2", &[]);
        let Entry::Redirect(answer) = entry(&link, &token, "https") else {
            panic!("no redirect");
        };
        assert_eq!(answer.status(), 303);
        assert_eq!(answer.headers()[LOCATION], "/a/b?x=1&y=2");
        let cookie = answer.headers()[SET_COOKIE].to_str().unwrap();
        assert_eq!(
            cookie,
            "sandkeep_traffic=tok; Path=/; HttpOnly; SameSite=Lax; Secure"
        );
        assert_eq!(asked("GET", "/?sandkeep_token=wrong", &[]), "refused");
        // Opened again, from a bookmark: it does not reach the program either.
        let again = [("cookie", "sandkeep_traffic=tok")];
        assert_eq!(asked("GET", "/?sandkeep_token=tok", &again), "redirect");
        assert_eq!(asked("POST", "/?sandkeep_token=tok", &again), "refused");
        assert_eq!(asked("POST", "/?sandkeep_token=tok", &[]), "refused");
        let elsewhere = parts("GET", "//evil.test/?sandkeep_token=tok", &[]);
        let Entry::Redirect(answer) = entry(&elsewhere, &token, "http") else {
            panic!("no redirect");
        };
        assert_eq!(answer.headers()[LOCATION], "/evil.test/");
    }

    #[test]
    fn a_page_of_another_sandbox_cannot_use_the_session() {
        let cookie = ("cookie", "sandkeep_traffic=tok");
        let host = ("host", "80-ia.example.org");
        let with = |more: &[(&'static str, &'static str)], method: &str| {
            let headers = [&[cookie, host][..], more].concat();
            asked(method, "/", &headers)
        };
        let own = [("origin", "http://80-ia.example.org")];
        assert_eq!(with(&own, "POST"), "granted");
        assert_eq!(with(&[("sec-fetch-site", "same-origin")], "GET"), "granted");
        let link = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
        ];
        assert_eq!(with(&link, "GET"), "granted");
        assert_eq!(with(&link, "POST"), "refused");
        for other in [
            &[("origin", "http://80-ib.example.org")][..],
            &[("origin", "null")],
            &[
                ("origin", "http://80-ib.example.org"),
                ("upgrade", "websocket"),
            ],
            &[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "cors")],
            &[
                ("sec-fetch-site", "same-site"),
                ("sec-fetch-mode", "navigate"),
                ("sec-fetch-dest", "iframe"),
            ],
            &[("referer", "http://80-ib.example.org/page")],
        ] {
            assert_eq!(with(other, "GET"), "refused", "{other:?}");
        }
    }

    #[test]
    fn the_program_never_sees_the_token() {
        let mut headers = parts(
            "GET",
            "/",
            &[
                ("e2b-traffic-access-token", "tok"),
                ("cookie", "a=b; sandkeep_traffic=tok"),
                ("cookie", "c=d"),
            ],
        )
        .headers;
        strip(&mut headers);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers[COOKIE], "a=b; c=d");
        let mut only = parts("GET", "/", &[("cookie", "sandkeep_traffic=tok")]).headers;
        strip(&mut only);
        assert!(only.is_empty());
    }
}
