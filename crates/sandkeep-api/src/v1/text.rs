//! Bytes of a box as JSON can carry them.

use std::mem;

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;
use utoipa::ToSchema;

/// Text where the bytes are UTF-8, base64 where they are not.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Piece {
    Text(String),
    Base64(String),
}

/// Cuts a stream into pieces without tearing a character apart.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// The beginning of a character whose end has not come yet; at most three bytes.
    carried: Vec<u8>,
}

impl Pieces {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Option<Piece> {
        let mut whole = mem::take(&mut self.carried);
        whole.extend_from_slice(bytes);
        let good = match std::str::from_utf8(&whole) {
            Ok(_) => whole.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => return Some(Piece::Base64(STANDARD.encode(&whole))),
        };
        self.carried = whole.split_off(good);
        piece(whole)
    }

    /// What is left when the stream ends.
    pub(crate) fn end(&mut self) -> Option<Piece> {
        piece(mem::take(&mut self.carried))
    }
}

fn piece(bytes: Vec<u8>) -> Option<Piece> {
    if bytes.is_empty() {
        return None;
    }
    Some(match String::from_utf8(bytes) {
        Ok(text) => Piece::Text(text),
        Err(error) => Piece::Base64(STANDARD.encode(error.as_bytes())),
    })
}

/// The beginning of an output, up to a limit; the rest is only noticed.
#[derive(Debug)]
pub(crate) struct Capture {
    bytes: Vec<u8>,
    limit: usize,
    cut: bool,
}

/// An output that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Captured {
    pub text: String,
    /// The very bytes, when `text` could not hold them.
    pub base64: Option<String>,
    pub truncated: bool,
}

impl Capture {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            cut: false,
        }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let room = self.limit - self.bytes.len();
        self.cut |= bytes.len() > room;
        self.bytes
            .extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    pub(crate) fn end(mut self) -> Captured {
        if self.cut
            && let Err(error) = std::str::from_utf8(&self.bytes)
            && error.error_len().is_none()
        {
            // The limit fell into a character; that does not make the output binary.
            self.bytes.truncate(error.valid_up_to());
        }
        let truncated = self.cut;
        match String::from_utf8(self.bytes) {
            Ok(text) => Captured {
                text,
                base64: None,
                truncated,
            },
            Err(error) => Captured {
                text: String::from_utf8_lossy(error.as_bytes()).into_owned(),
                base64: Some(STANDARD.encode(error.as_bytes())),
                truncated,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_not_torn() {
        let mut pieces = Pieces::default();
        let euro = "€".as_bytes();
        assert_eq!(pieces.push(&euro[..1]), None);
        assert_eq!(pieces.push(&euro[1..2]), None);
        assert_eq!(pieces.push(&euro[2..]), Some(Piece::Text("€".to_owned())));
        assert_eq!(pieces.end(), None);
        assert_eq!(pieces.push(&euro[..2]), None);
        assert_eq!(pieces.end(), Some(Piece::Base64("4oI=".to_owned())));
    }

    #[test]
    fn binary_is_base64_and_nothing_is_lost() {
        let mut pieces = Pieces::default();
        assert_eq!(
            pieces.push(&[b'a', 0xff]),
            Some(Piece::Base64("Yf8=".to_owned()))
        );
        assert_eq!(pieces.push(b"b"), Some(Piece::Text("b".to_owned())));
    }

    #[test]
    fn a_capture_is_bounded_and_says_so() {
        let mut capture = Capture::new(4);
        capture.push("ab".as_bytes());
        capture.push("€€".as_bytes());
        capture.push(b"more");
        assert_eq!(
            capture.end(),
            Captured {
                text: "ab".to_owned(),
                base64: None,
                truncated: true
            }
        );
        let mut capture = Capture::new(4);
        capture.push(&[0xff, b'x']);
        let captured = capture.end();
        assert_eq!(captured.base64.as_deref(), Some("/3g="));
        assert!(!captured.truncated);
    }
}
