//! Puts a value into a request.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{AUTHORIZATION, CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE},
    request::Parts,
};
use memchr::memmem;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sandkeep_model::Secret;
use zeroize::Zeroizing;

use super::needles::Needles;
use crate::policy::Place;

/// The value does not fit where it is to go, for example because of a line break in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Misfit;

/// Whether the value went in. What else gives it away is added to `needles`.
pub fn attach(
    parts: &mut Parts,
    place: &Place,
    value: &Secret,
    needles: &mut Needles,
) -> Result<bool, Misfit> {
    match place {
        Place::Header {
            name,
            before,
            after,
        } => {
            let text = Zeroizing::new(format!("{before}{}{after}", value.expose()));
            remove_lookalikes(&mut parts.headers, name);
            // Takes the place of all headers of this name.
            parts.headers.insert(name, sensitive(text.as_bytes())?);
            Ok(true)
        }
        Place::Basic { user } => {
            let pair = Zeroizing::new(format!("{user}:{}", value.expose()));
            set_basic(&mut parts.headers, pair.as_bytes(), value, needles)?;
            Ok(true)
        }
        Place::Query { name } => {
            parts.uri = with_parameter(&parts.uri, name, value)?;
            Ok(true)
        }
        Place::Placeholder { text } => {
            let basic = in_basic(&mut parts.headers, text, value, needles)?;
            Ok(in_headers(&mut parts.headers, text, value)? || basic)
        }
    }
}

fn sensitive(bytes: &[u8]) -> Result<HeaderValue, Misfit> {
    let mut value = HeaderValue::from_bytes(bytes).map_err(|_| Misfit)?;
    value.set_sensitive(true);
    Ok(value)
}

/// `x_api_key` is `x-api-key` to many servers.
fn remove_lookalikes(headers: &mut HeaderMap, name: &HeaderName) {
    let alike: Vec<HeaderName> = headers
        .keys()
        .filter(|own| own.as_str().replace('_', "-") == name.as_str())
        .cloned()
        .collect();
    for own in alike {
        headers.remove(own);
    }
}

fn set_basic(
    headers: &mut HeaderMap,
    pair: &[u8],
    value: &Secret,
    needles: &mut Needles,
) -> Result<(), Misfit> {
    let encoded = Zeroizing::new(STANDARD.encode(pair));
    needles.add_pair(value.expose(), &encoded);
    let text = Zeroizing::new(format!("Basic {}", *encoded));
    headers.insert(AUTHORIZATION, sensitive(text.as_bytes())?);
    Ok(())
}

fn with_parameter(uri: &Uri, name: &str, value: &Secret) -> Result<Uri, Misfit> {
    let others = uri
        .query()
        .unwrap_or_default()
        .split('&')
        .filter(|pair| !pair.is_empty() && !is_parameter(pair, name));
    let mut text = Zeroizing::new(format!("{}?", uri.path()));
    for pair in others {
        text.push_str(pair);
        text.push('&');
    }
    text.extend(utf8_percent_encode(name, NON_ALPHANUMERIC));
    text.push('=');
    text.extend(utf8_percent_encode(value.expose(), NON_ALPHANUMERIC));
    text.parse().map_err(|_| Misfit)
}

fn is_parameter(pair: &str, name: &str) -> bool {
    let own = pair.split('=').next().unwrap_or(pair).replace('+', " ");
    percent_decode_str(&own).eq(name.bytes())
}

fn in_headers(headers: &mut HeaderMap, text: &str, value: &Secret) -> Result<bool, Misfit> {
    let mut replaced = false;
    for (name, header) in headers.iter_mut() {
        let framing = [HOST, CONNECTION, UPGRADE, CONTENT_LENGTH, TRANSFER_ENCODING];
        // What servers answer to a WebSocket's key is a hash of it.
        if framing.contains(name) || name.as_str().starts_with("sec-websocket-") {
            continue;
        }
        if let Some(changed) = replace(header.as_bytes(), text, value) {
            *header = sensitive(&changed)?;
            replaced = true;
        }
    }
    Ok(replaced)
}

/// Tools turn `https://user:placeholder@host` into a header in which the placeholder is encoded.
fn in_basic(
    headers: &mut HeaderMap,
    text: &str,
    value: &Secret,
    needles: &mut Needles,
) -> Result<bool, Misfit> {
    let said = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let Some((scheme, encoded)) = said.and_then(|said| said.split_at_checked(6)) else {
        return Ok(false);
    };
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return Ok(false);
    }
    let Ok(pair) = STANDARD.decode(encoded.trim_ascii()) else {
        return Ok(false);
    };
    match replace(&pair, text, value) {
        Some(changed) => set_basic(headers, &changed, value, needles).map(|()| true),
        None => Ok(false),
    }
}

/// `None`: the text is not there.
fn replace(hay: &[u8], text: &str, value: &Secret) -> Option<Zeroizing<Vec<u8>>> {
    let mut out = Zeroizing::new(Vec::new());
    let mut from = 0;
    // An empty placeholder would be everywhere.
    for at in memmem::find_iter(hay, text.as_bytes()).filter(|_| !text.is_empty()) {
        out.extend_from_slice(&hay[from..at]);
        out.extend_from_slice(value.expose().as_bytes());
        from = at + text.len();
    }
    if from == 0 {
        return None;
    }
    out.extend_from_slice(&hay[from..]);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn put(parts: &mut Parts, place: &Place) -> Result<bool, Misfit> {
        attach(
            parts,
            place,
            &Secret::new("s3cret/value"),
            &mut Needles::default(),
        )
    }

    #[test]
    fn all_headers_of_the_name_are_replaced() {
        let mut parts = parts(
            "/",
            &[("Authorization", "mine"), ("AUTHORIZATION", "Basic eDp5")],
        );
        let place = Place::Header {
            name: AUTHORIZATION,
            before: "Bearer ".to_owned(),
            after: String::new(),
        };
        assert_eq!(put(&mut parts, &place), Ok(true));
        let sent: Vec<_> = parts.headers.get_all(AUTHORIZATION).iter().collect();
        assert_eq!(sent, ["Bearer s3cret/value"]);
        assert!(!format!("{parts:?}").contains("s3cret"));
    }

    #[test]
    fn lookalikes_go() {
        let mut parts = parts("/", &[("x_api_key", "mine"), ("x-api_key", "mine")]);
        let place = Place::Header {
            name: HeaderName::from_static("x-api-key"),
            before: String::new(),
            after: String::new(),
        };
        assert_eq!(put(&mut parts, &place), Ok(true));
        assert_eq!(parts.headers.len(), 1);
    }

    #[test]
    fn the_parameter_is_replaced_however_it_is_written() {
        let mut parts = parts("/a?x=1&api%5Fkey=mine&api_key=mine&y=2", &[]);
        let place = Place::Query {
            name: "api_key".to_owned(),
        };
        assert_eq!(put(&mut parts, &place), Ok(true));
        assert_eq!(parts.uri, "/a?x=1&y=2&api%5Fkey=s3cret%2Fvalue");
    }

    #[test]
    fn a_placeholder_in_headers_and_in_basic_authorization() {
        let place = Place::Placeholder {
            text: "SK_GIT".to_owned(),
        };
        let basic = format!("basic {}", STANDARD.encode("x:SK_GIT"));
        let mut both = parts(
            "/?q=SK_GIT",
            &[("x-key", "a SK_GIT b"), ("authorization", &basic)],
        );
        assert_eq!(put(&mut both, &place), Ok(true));
        assert_eq!(both.headers["x-key"], "a s3cret/value b");
        let sent = both.headers[AUTHORIZATION].to_str().unwrap();
        let pair = STANDARD.decode(sent.strip_prefix("Basic ").unwrap());
        assert_eq!(pair.unwrap(), b"x:s3cret/value");
        // Not in the URL, which ends up in logs.
        assert_eq!(both.uri, "/?q=SK_GIT");
        assert_eq!(
            put(&mut parts("/", &[("host", "SK_GIT")]), &place),
            Ok(false)
        );
    }

    #[test]
    fn line_breaks_do_not_make_headers() {
        let place = Place::Header {
            name: AUTHORIZATION,
            before: String::new(),
            after: String::new(),
        };
        let value = Secret::new("a\r\nHost: evil.test");
        let outcome = attach(
            &mut parts("/", &[]),
            &place,
            &value,
            &mut Needles::default(),
        );
        assert_eq!(outcome, Err(Misfit));
    }
}
