//! What a connection begins with, before anything is sent on.

use std::{io, time::Duration};

use tokio::{
    net::TcpStream,
    time::{Instant, timeout_at},
};

use super::hello::MAX_HELLO;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Tls,
    Http1,
    /// HTTP/2 without TLS.
    Http2,
    /// Something like HTTP that two servers may read in two ways.
    Odd,
    /// Anything else: bytes.
    Raw,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Peeked {
    Kind(Kind),
    /// Nothing was said in the time given.
    Silent,
    /// It ended without saying anything.
    Closed,
    /// It began something and did not finish it in time or in size.
    Unfinished,
}

/// Reads until it is clear what this is. What was read stays in `head`. `first` is the time for
/// the first byte, `rest` from there on.
pub async fn peek(
    stream: &TcpStream,
    head: &mut Vec<u8>,
    first: Duration,
    rest: Duration,
) -> io::Result<Peeked> {
    let mut until = Instant::now() + first;
    let mut begun = !head.is_empty();
    loop {
        if begun && let Some(kind) = classify(head) {
            return Ok(Peeked::Kind(kind));
        }
        match timeout_at(until, read_more(stream, head)).await {
            Ok(Ok(0)) if !begun => return Ok(Peeked::Closed),
            // It ends without a line: nothing that HTTP or TLS would be.
            Ok(Ok(0)) => return Ok(Peeked::Kind(last_kind(head))),
            Ok(Ok(_)) if !begun => {
                begun = true;
                until = Instant::now() + rest;
            }
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(error),
            Err(_) if begun => return Ok(Peeked::Unfinished),
            Err(_) => return Ok(Peeked::Silent),
        }
        if head.len() > MAX_HELLO {
            return Ok(Peeked::Unfinished);
        }
    }
}

/// More bytes for `head`; zero at the end.
pub async fn read_more(stream: &TcpStream, head: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        let mut buffer = [0_u8; 4096];
        match stream.try_read(&mut buffer) {
            Ok(count) => {
                head.extend_from_slice(&buffer[..count]);
                return Ok(count);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// `None`: more is needed.
fn classify(bytes: &[u8]) -> Option<Kind> {
    if bytes.first() == Some(&0x16) {
        return match bytes.get(1) {
            None => None,
            Some(3) => Some(Kind::Tls),
            Some(_) => Some(Kind::Raw),
        };
    }
    // Servers skip empty lines before a request.
    let start = bytes.iter().position(|b| !matches!(b, b'\r' | b'\n'))?;
    let bytes = &bytes[start..];
    let end = bytes.iter().position(|b| *b == b'\n');
    let line = &bytes[..end.unwrap_or(bytes.len())];
    let binary = |b: &u8| *b >= 0x7f || (*b < 0x20 && !matches!(*b, b'\r' | b'\t'));
    let first_word = line.split(|b| matches!(b, b' ' | b'\t' | b'\r')).next()?;
    if line.iter().any(binary) || !first_word.iter().all(is_method_byte) {
        return Some(Kind::Raw);
    }
    end?;
    Some(kind_of_line(line.strip_suffix(b"\r").unwrap_or(line)))
}

const fn is_method_byte(byte: &u8) -> bool {
    byte.is_ascii_alphabetic() || *byte == b'-'
}

fn kind_of_line(line: &[u8]) -> Kind {
    if line == b"PRI * HTTP/2.0" {
        return Kind::Http2;
    }
    let plain = line.first().is_some_and(is_method_byte)
        && (line.ends_with(b" HTTP/1.1") || line.ends_with(b" HTTP/1.0"))
        && line.iter().filter(|b| **b == b' ').count() == 2;
    let speaks_of_http = line
        .windows(5)
        .any(|window| window.eq_ignore_ascii_case(b"http/"));
    match (plain, speaks_of_http) {
        (true, _) => Kind::Http1,
        (false, true) => Kind::Odd,
        (false, false) => Kind::Raw,
    }
}

/// What an unfinished beginning is when nothing follows: never something to be read as HTTP.
fn last_kind(bytes: &[u8]) -> Kind {
    match (bytes.first(), kind_of_line(bytes)) {
        (Some(0x16), _) => Kind::Odd,
        (_, Kind::Raw) => Kind::Raw,
        _ => Kind::Odd,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends() {
        assert_eq!(last_kind(b"word"), Kind::Raw);
        for odd in [&b"GET / HTTP/1.1"[..], b"\x16", b"x http/1"] {
            assert_eq!(last_kind(odd), Kind::Odd);
        }
    }

    #[test]
    fn beginnings() {
        for (bytes, kind) in [
            (&b"\x16\x03\x01"[..], Some(Kind::Tls)),
            (b"\x16", None),
            (b"\x16\x02", Some(Kind::Raw)),
            (b"GET / HT", None),
            (b"GET / HTTP/1.1\r\n", Some(Kind::Http1)),
            (b"\r\n\r\nPOST /x HTTP/1.0\n", Some(Kind::Http1)),
            (b"PRI * HTTP/2.0\r\n", Some(Kind::Http2)),
            (b"get / http/1.1\r\n", Some(Kind::Odd)),
            (b"GET  / HTTP/1.1\r\n", Some(Kind::Odd)),
            (b" GET / HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"GET /a b HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"VERSION-CONTROL /x HTTP/1.1\r\n", Some(Kind::Http1)),
            (b"SSH-2.0-x", Some(Kind::Raw)),
            (b"*1\r\n", Some(Kind::Raw)),
            (b"word", None),
            (b"\0\0\0\x08\x04\xd2\x16\x2f", Some(Kind::Raw)),
            (b"EHLO x\r\n", Some(Kind::Raw)),
            (b"\r\n", None),
        ] {
            assert_eq!(classify(bytes), kind, "{bytes:?}");
        }
    }
}
