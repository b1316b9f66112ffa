//! The server's own API key in a request for a sandbox: a client that sends it by mistake would
//! hand the whole server to a program that it does not trust.
//!
//! The key is sought in the head of a request: as it is, with percent-encoding, and in base64
//! (any alphabet, with other text before and behind it), as part of any word. Bodies and WebSocket
//! messages are not looked through: that would cost every byte of every upload.

use http::{HeaderMap, HeaderName, Uri};
use percent_encoding::percent_decode;
use sandkeep_model::Secret;

/// Takes the key out of the headers; `true` when it was there.
pub(crate) fn strip(headers: &mut HeaderMap, key: &Secret) -> bool {
    // Names of headers arrive in lower case.
    let small = Secret::new(key.expose().to_ascii_lowercase());
    let carrying: Vec<HeaderName> = headers
        .iter()
        .filter(|(name, value)| {
            holds(value.as_bytes(), key) || holds(name.as_str().as_bytes(), &small)
        })
        .map(|(name, _)| name.clone())
        .collect();
    for name in &carrying {
        headers.remove(name);
    }
    !carrying.is_empty()
}

/// Whether the key is in the address, from where it cannot be taken without changing the request.
pub(crate) fn in_address(uri: &Uri, key: &Secret) -> bool {
    let address = uri.path_and_query().map_or("", |all| all.as_str());
    let host = uri.authority().map_or("", |all| all.as_str());
    holds(address.as_bytes(), key) || holds(host.as_bytes(), key)
}

fn holds(text: &[u8], key: &Secret) -> bool {
    let plain_or_encoded = |text: &[u8]| has(text, key) || has_in_base64(text, key);
    if plain_or_encoded(text) {
        return true;
    }
    text.contains(&b'%') && plain_or_encoded(&percent_decode(text).collect::<Vec<u8>>())
}

/// Whether the key stands in `text`, alone or as part of a word. How long it takes tells nothing of
/// the key: a sum over each place is compared, which tells only whether all of it is the same, and
/// then the key in constant time.
fn has(text: &[u8], key: &Secret) -> bool {
    // Any odd number that spreads bytes over the whole sum.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let of_key = key.expose().as_bytes();
    if of_key.is_empty() || text.len() < of_key.len() {
        return false;
    }
    let add = |sum: u64, byte: u8| sum.wrapping_mul(FACTOR).wrapping_add(u64::from(byte) + 1);
    let sought = of_key.iter().fold(0, |sum, byte| add(sum, *byte));
    // What a byte counts once it is the first of as many as the key has.
    let first = (1..of_key.len()).fold(1_u64, |all, _| all.wrapping_mul(FACTOR));
    let mut sum = 0_u64;
    for (at, byte) in text.iter().enumerate() {
        if let Some(gone) = at.checked_sub(of_key.len()) {
            sum = sum.wrapping_sub((u64::from(text[gone]) + 1).wrapping_mul(first));
        }
        sum = add(sum, *byte);
        let from = (at + 1).saturating_sub(of_key.len());
        if sum == sought && key.matches(&text[from..=at]) {
            return true;
        }
    }
    false
}

/// Whether the key stands in something that was encoded and stands in `text`.
fn has_in_base64(text: &[u8], key: &Secret) -> bool {
    let least = (key.expose().len() * 4).div_ceil(3);
    let mut decoded = Vec::new();
    text.split(|byte| sextet(*byte).is_none())
        .filter(|run| run.len() >= least)
        // Before it may stand letters that are no part of it, as in a path.
        .flat_map(|run| (0..4).filter_map(move |from| run.get(from..)))
        .any(|run| {
            decode(run, &mut decoded);
            has(&decoded, key)
        })
}

/// What a digit of base64 stands for, in either alphabet.
const fn sextet(byte: u8) -> Option<u8> {
    match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' | b'-' => Some(62),
        b'/' | b'_' => Some(63),
        _ => None,
    }
}

/// All whole bytes of it, whatever stands at its end.
fn decode(run: &[u8], into: &mut Vec<u8>) {
    into.clear();
    let (mut bits, mut count) = (0_u32, 0);
    for digit in run.iter().filter_map(|byte| sextet(*byte)) {
        bits = bits << 6 | u32::from(digit);
        count += 6;
        if count >= 8 {
            count -= 8;
            let [.., byte] = (bits >> count).to_be_bytes();
            into.push(byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::{
        Engine as _,
        engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD},
    };
    use http::HeaderValue;

    fn found(uri: &str, pairs: &[(&str, &str)], key: &str) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let name: HeaderName = name.parse().unwrap();
            headers.append(name, HeaderValue::from_str(value).unwrap());
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
            &[("authorization", "Basic dXNlcjplMmJfMDEyM2FiY2Q%3D")],
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
    fn found_as_part_of_a_word_in_a_name_and_in_the_host() {
        // Such as the server makes, and an operator's own.
        for key in ["e2b_0123abcd", "Operators-own_key"] {
            for (name, value) in [
                ("x-custom".to_owned(), format!("tok-{key}")),
                ("x-custom".to_owned(), format!("xx{key}xx")),
                (format!("x-{key}"), "1".to_owned()),
                (key.to_owned(), String::new()),
                ("host".to_owned(), format!("8000-iabc-{key}.localhost")),
            ] {
                assert!(found("/", &[(&name, &value)], key), "{name}: {value}");
            }
            assert!(found(&format!("/xx{key}xx"), &[], key));
            assert!(found(
                &format!("http://8000-iabc.{key}.localhost/"),
                &[],
                key
            ));
        }
    }

    #[test]
    fn found_in_base64_wherever_it_begins() {
        // The last has digits of which the alphabets differ.
        for key in ["e2b_0123abcd", "Operators-own_key", "?>~?>~?>~?>~"] {
            for before in ["", "u", "us", "use", "user:", "{\"token\":\""] {
                let text = format!("{before}{key}\"}}");
                for encoded in [
                    STANDARD.encode(&text),
                    STANDARD_NO_PAD.encode(&text),
                    URL_SAFE.encode(&text),
                    URL_SAFE_NO_PAD.encode(&text),
                ] {
                    let protocol = format!("base64url.bearer.authorization.k8s.io.{encoded}, v1");
                    for (name, value) in [
                        ("sec-websocket-protocol", protocol),
                        ("authorization", format!("Basic {encoded}")),
                        ("cookie", format!("a=b; session={encoded}; c=d")),
                        ("x-custom", format!("x{encoded}")),
                    ] {
                        assert!(found("/", &[(name, &value)], key), "{name}: {value}");
                    }
                    for path in [format!("/a/{encoded}"), format!("/?t={encoded}&x=1")] {
                        assert!(found(&path, &[], key), "{path}");
                    }
                }
            }
        }
    }

    #[test]
    fn other_words_pass() {
        let key = "e2b_0123abcd";
        for value in [
            "e2b_0123abce",
            "e2b_0123abc",
            "e2b_0123ABCD",
            "",
            "Bearer x",
            // user:e2b_0123abce
            "Basic dXNlcjplMmJfMDEyM2FiY2U=",
        ] {
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
        let percent = "100%25-of-it";
        assert!(found("/", &[("x-api-key", percent)], percent));
    }
}
