//! The server's own API key in a request for a sandbox: a client that sends it by mistake would
//! hand the whole server to a program that it does not trust.

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode;
use sandkeep_model::{API_KEY_PREFIX, Secret};

/// Takes the key out of the headers; `true` when it was there.
pub(crate) fn strip(headers: &mut HeaderMap, key: &Secret) -> bool {
    let carrying: Vec<HeaderName> = headers
        .iter()
        .filter(|(_, value)| in_value(value, key))
        .map(|(name, _)| name.clone())
        .collect();
    for name in &carrying {
        headers.remove(name);
    }
    !carrying.is_empty()
}

/// Whether the key is in path or query, from where it cannot be taken without changing the request.
pub(crate) fn in_address(uri: &Uri, key: &Secret) -> bool {
    let address = uri.path_and_query().map_or("", |all| all.as_str());
    let decoded: Vec<u8> = percent_decode(address.as_bytes()).collect();
    names(&decoded, key)
}

fn in_value(value: &HeaderValue, key: &Secret) -> bool {
    let decoded: Vec<u8> = percent_decode(value.as_bytes()).collect();
    names(value.as_bytes(), key)
        || names(&decoded, key)
        || basic(value.as_bytes()).is_some_and(|pair| names(&pair, key))
}

/// Whether `text` has the key as a word. The time it takes tells nothing of the key: only words
/// of its length are compared, each in constant time.
fn names(text: &[u8], key: &Secret) -> bool {
    let of_key = key.expose().as_bytes();
    if of_key.is_empty() {
        return false;
    }
    // Keys that the server makes all begin alike; behind it there is nothing to search for.
    let prefix = API_KEY_PREFIX.as_bytes();
    if of_key.starts_with(prefix) {
        return text
            .windows(of_key.len())
            .any(|window| window.starts_with(prefix) && key.matches(window));
    }
    if of_key.iter().any(|byte| !in_a_word(*byte)) {
        // An operator's own key with other characters: every place it could begin at.
        return text.windows(of_key.len()).any(|window| key.matches(window));
    }
    text.split(|byte| !in_a_word(*byte))
        .any(|word| key.matches(word))
}

const fn in_a_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')
}

fn basic(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, rest) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return None;
    }
    // With or without padding, in either alphabet.
    let plain: Vec<u8> = rest
        .trim_ascii()
        .iter()
        .filter(|byte| **byte != b'=')
        .map(|byte| match byte {
            b'-' => b'+',
            b'_' => b'/',
            other => *other,
        })
        .collect();
    STANDARD_NO_PAD.decode(plain).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(uri: &str, pairs: &[(&'static str, &str)], key: &str) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        let key = Secret::new(key);
        let stripped = strip(&mut headers, &key);
        assert!(!strip(&mut headers, &key), "{headers:?}");
        in_address(&uri.parse().unwrap(), &key) || stripped
    }

    #[test]
    fn found_wherever_a_client_puts_it() {
        let key = "e2b_0123abcd";
        for headers in [
            &[("x-api-key", "e2b_0123abcd")][..],
            &[("authorization", "Bearer e2b_0123abcd")],
            &[("authorization", "e2b_0123abcd")],
            // user:e2b_0123abcd
            &[("authorization", "Basic dXNlcjplMmJfMDEyM2FiY2Q=")],
            &[("authorization", "Basic dXNlcjplMmJfMDEyM2FiY2Q")],
            &[("x-custom", "tok-e2b_0123abcd")],
            &[("x-custom", "e2b%5f0123abcd")],
            &[("cookie", "a=b; key=e2b_0123abcd; c=d")],
            &[("x-custom", "\"e2b_0123abcd\"")],
        ] {
            assert!(found("/", headers, key), "{headers:?}");
        }
        assert!(found("/?key=e2b_0123abcd&x=1", &[], key));
        assert!(found("/a/e2b%5f0123abcd/b", &[], key));
    }

    #[test]
    fn other_words_pass() {
        let key = "e2b_0123abcd";
        for value in ["e2b_0123abce", "e2b_0123abc", "", "Bearer x"] {
            let headers = [("x-api-key", value), ("authorization", value)];
            assert!(!found("/?q=e2b_0123", &headers, key), "{value}");
        }
        assert!(!found("/", &[("x-api-key", "")], ""));
    }

    #[test]
    fn a_key_with_other_characters_is_found_too() {
        let key = "pass word/1";
        assert!(found("/?k=pass%20word/1", &[], key));
        assert!(found("/", &[("x-api-key", "pass word/1")], key));
        assert!(!found("/", &[("x-api-key", "pass word/2")], key));
    }
}
