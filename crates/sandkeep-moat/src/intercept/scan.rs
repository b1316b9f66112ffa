//! Finds secrets in what comes back, over any number of pieces.

use std::{fmt, sync::Arc};

use base64::Engine as _;
use bytes::{Bytes, BytesMut};
use memchr::memchr;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use zeroize::Zeroizing;

/// Shorter values would be found everywhere by chance.
pub const SHORTEST_SOUGHT: usize = 8;

/// A value and its look in other clothes.
#[derive(Default, Clone)]
pub struct Needles(Vec<Arc<Needle>>);

struct Needle {
    bytes: Zeroizing<Vec<u8>>,
    /// For each matched length, the longest shorter one that is matched as well.
    shorter: Vec<usize>,
}

impl fmt::Debug for Needles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Needles({})", self.0.len())
    }
}

/// A secret is in what was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reflected;

impl Needle {
    fn new(bytes: Vec<u8>) -> Self {
        let mut shorter = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = shorter[matched - 1];
            }
            if bytes[at] == bytes[matched] {
                matched += 1;
            }
            shorter[at] = matched;
        }
        Self {
            bytes: Zeroizing::new(bytes),
            shorter,
        }
    }

    /// Goes on from `matched` bytes; how many are matched at the end of `piece`.
    fn advance(&self, mut matched: usize, piece: &[u8]) -> Result<usize, Reflected> {
        let mut at = 0;
        while at < piece.len() {
            if matched == 0 {
                match memchr(self.bytes[0], &piece[at..]) {
                    Some(skipped) => at += skipped,
                    None => return Ok(0),
                }
            }
            while matched > 0 && self.bytes[matched] != piece[at] {
                matched = self.shorter[matched - 1];
            }
            if self.bytes[matched] == piece[at] {
                matched += 1;
            }
            if matched == self.bytes.len() {
                return Err(Reflected);
            }
            at += 1;
        }
        Ok(matched)
    }
}

impl Needles {
    /// Looks for this value plain, and as it stands in URLs, in JSON and in base64.
    pub fn add_value(&mut self, value: &str) {
        self.add(value.as_bytes());
        let in_url = Zeroizing::new(utf8_percent_encode(value, NON_ALPHANUMERIC).to_string());
        self.add(in_url.as_bytes());
        let in_json = Zeroizing::new(serde_json::Value::from(value).to_string());
        // Without the quotes around it.
        self.add(&in_json.as_bytes()[1..in_json.len() - 1]);
        let engine = base64::engine::general_purpose::STANDARD_NO_PAD;
        self.add(Zeroizing::new(engine.encode(value)).as_bytes());
    }

    pub fn add(&mut self, bytes: &[u8]) {
        let known = self.0.iter().any(|needle| *needle.bytes == bytes);
        if bytes.len() >= SHORTEST_SOUGHT && !known {
            self.0.push(Arc::new(Needle::new(bytes.to_vec())));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn are_in(&self, text: &[u8]) -> bool {
        self.0.iter().any(|needle| needle.advance(0, text).is_err())
    }

    pub fn scanner(self) -> Scanner {
        Scanner {
            matched: vec![0; self.0.len()],
            needles: self,
            held: BytesMut::new(),
        }
    }
}

/// Lets through what can not be part of a secret any more. Only bytes that may be the beginning
/// of one wait for what follows, so streams of events are not held up.
#[derive(Debug)]
pub struct Scanner {
    needles: Needles,
    matched: Vec<usize>,
    held: BytesMut,
}

impl Scanner {
    /// What may go on now.
    pub fn push(&mut self, piece: Bytes) -> Result<Bytes, Reflected> {
        let mut hold = 0;
        for (needle, matched) in self.needles.0.iter().zip(&mut self.matched) {
            *matched = needle.advance(*matched, &piece)?;
            hold = hold.max(*matched);
        }
        if self.held.is_empty() && hold == 0 {
            return Ok(piece);
        }
        self.held.extend_from_slice(&piece);
        let go = self.held.len().saturating_sub(hold);
        Ok(self.held.split_to(go).freeze())
    }

    /// Nothing follows: what was held was no secret.
    pub fn finish(&mut self) -> Bytes {
        self.held.split().freeze()
    }

    pub fn held(&self) -> usize {
        self.held.len()
    }

    pub fn are_in(&self, text: &[u8]) -> bool {
        self.needles.are_in(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanner(values: &[&str]) -> Scanner {
        let mut needles = Needles::default();
        for value in values {
            needles.add_value(value);
        }
        needles.scanner()
    }

    /// What got through of `text` in pieces of this size.
    fn pass(values: &[&str], text: &str, size: usize) -> Result<String, Reflected> {
        let mut scanner = scanner(values);
        let mut out = Vec::new();
        for piece in text.as_bytes().chunks(size) {
            out.extend_from_slice(&scanner.push(Bytes::copy_from_slice(piece))?);
        }
        out.extend_from_slice(&scanner.finish());
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn found_over_any_pieces() {
        let text = "before aaaaaaab-secret-value-9 after";
        for size in 1..text.len() {
            assert_eq!(pass(&["aaab-secret-value-9"], text, size), Err(Reflected));
            let other = &["aaab-secret-value-8", "secret-value-9x", "t-value-9 after!"];
            assert_eq!(pass(other, text, size).as_deref(), Ok(text));
        }
    }

    #[test]
    fn nothing_of_a_secret_goes_before_it_is_known() {
        let mut scanner = scanner(&["very-secret"]);
        assert_eq!(scanner.push("x very-".into()).unwrap(), "x ");
        assert_eq!(scanner.held(), 5);
        assert_eq!(scanner.push("secr".into()).unwrap(), "");
        assert!(scanner.push("et".into()).is_err());
    }

    #[test]
    fn events_are_not_held_up() {
        let mut scanner = scanner(&["very-secret"]);
        assert_eq!(scanner.push("data: 1\n\n".into()).unwrap(), "data: 1\n\n");
        assert_eq!(scanner.held(), 0);
    }

    #[test]
    fn other_clothes() {
        let secret = "p@ss\"word/1";
        for shown in ["p%40ss%22word%2F1", "p@ss\\\"word/1", "cEBzcyJ3b3JkLzE"] {
            assert!(
                pass(&[secret], &format!("<{shown}>"), 3).is_err(),
                "{shown}"
            );
        }
        assert!(scanner(&["short"]).needles.is_empty());
        let shown = format!("{:?}", scanner(&[secret]));
        assert!(!shown.contains("word"), "{shown}");
    }
}
