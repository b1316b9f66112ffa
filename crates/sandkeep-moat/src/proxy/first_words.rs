//! What the first bytes of a connection are: TLS, HTTP or something else.
//!
//! Bytes that are taken for "something else" go on unseen, so this asks what *any* server reads as
//! a request, not what a request should look like. Servers differ: some skip what stands before
//! a request, take other separators than spaces, methods of any letters, no version, or bytes that
//! are no text. Only what none of them reads as a request is [`Kind::Raw`].

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Tls,
    Http1,
    /// HTTP/2 without TLS.
    Http2,
    /// Something that a server may read as HTTP or TLS, and another in another way.
    Odd,
    /// What cannot be HTTP or TLS.
    Raw,
    /// Not a whole line yet, of something that may have no lines: it goes on. But no server acts on
    /// a request before its line has ended, so with that end it is asked again what it is
    /// ([`classify_binary`]).
    Binary,
}

const HANDSHAKE: u8 = 0x16;
/// What is no text begins before a method could have ended.
const SHORTEST_METHOD: usize = 3;
/// `0035git-upload-pack …`: the length of the whole, and what is wanted.
const GIT: &[&[u8]] = &[
    b"git-upload-pack ",
    b"git-receive-pack ",
    b"git-upload-archive ",
];
const METHODS: &[&[u8]] = &[
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH",
    b"PROXY", b"PRI",
];

/// `None`: more is needed.
pub fn classify(bytes: &[u8]) -> Option<Kind> {
    let first = *bytes.first()?;
    if first == HANDSHAKE && *bytes.get(1)? == 3 {
        return Some(Kind::Tls);
    }
    if first >= 0x80 && is_old_hello(bytes)? {
        return Some(Kind::Odd);
    }
    let start = bytes.iter().position(|b| !is_skipped(*b))?;
    let plain_start = bytes[..start].iter().all(|b| matches!(b, b'\r' | b'\n'));
    let bytes = &bytes[start..];
    if start > 0 && !is_visible(bytes[0]) {
        // The second form of the PROXY protocol begins so, with a request behind it.
        return Some(Kind::Odd);
    }
    match so_far(bytes)? {
        Kind::Http1 if !plain_start => Some(Kind::Odd),
        kind => Some(kind),
    }
}

/// What begins with its first character and may have lines.
fn so_far(bytes: &[u8]) -> Option<Kind> {
    let Some(end) = bytes.iter().position(|b| *b == b'\n') else {
        return ended_early(bytes);
    };
    let line = &bytes[..end];
    let kind = at_line_end(line.strip_suffix(b"\r").unwrap_or(line));
    if kind != Kind::Raw || line.ends_with(b"\r") || ended_early(line) == Some(Kind::Raw) {
        return Some(kind);
    }
    // To gunicorn a line feed alone is a blank, and the line goes on.
    let whole = bytes.windows(2).position(|two| two == b"\r\n");
    Some(match whole {
        _ if speaks_of_http(&bytes[..whole.unwrap_or(bytes.len())]) => Kind::Odd,
        Some(_) => Kind::Raw,
        None => Kind::Binary,
    })
}

/// What a first line that was [`Kind::Binary`] is by now; `None` as long as it may be a request.
pub fn classify_binary(bytes: &[u8]) -> Option<Kind> {
    so_far(bytes).filter(|kind| *kind != Kind::Binary)
}

/// What a first line is, now that it is whole.
fn at_line_end(line: &[u8]) -> Kind {
    match ended_early(line) {
        Some(Kind::Raw) => Kind::Raw,
        _ if speaks_early(line) && !speaks_of_http(line) => Kind::Raw,
        _ => of_line(line),
    }
}

/// Protocols that begin without an end of line and wait for an answer then.
fn speaks_early(line: &[u8]) -> bool {
    begins_with_git(line) || is_stream_of_xml(line)
}

/// What an unfinished beginning is when nothing follows: never something to be read as HTTP.
pub fn at_the_end(bytes: &[u8]) -> Kind {
    let start = bytes.iter().position(|b| !is_skipped(*b));
    match (bytes.first(), start.map(|start| &bytes[start..])) {
        (Some(&HANDSHAKE), _) => Kind::Odd,
        (_, None) => Kind::Raw,
        (_, Some(rest)) if at_line_end(rest) == Kind::Raw && !speaks_of_http(rest) => Kind::Raw,
        _ => Kind::Odd,
    }
}

const fn is_skipped(byte: u8) -> bool {
    matches!(byte, b'\r' | b'\n' | b' ' | b'\t' | 0x0b | 0x0c)
}

const fn is_visible(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e)
}

/// What a method may be made of: it is decided as it is written.
const fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

/// What ends a word for some server: spaces, what C and Python count as such, and, for those who
/// compare signed bytes, everything else that is no visible character.
const fn is_separator(byte: u8) -> bool {
    !is_visible(byte)
}

/// The ClientHello of SSL 2, which servers take as the beginning of today's TLS.
fn is_old_hello(bytes: &[u8]) -> Option<bool> {
    Some(*bytes.get(2)? == 1 && *bytes.get(3)? == 3)
}

/// Protocols that wait for an answer before they have sent a line, so that nobody can wait for
/// its end. `line` holds no line feed.
fn ended_early(line: &[u8]) -> Option<Kind> {
    // What follows may still make a request of it, to a server that takes any method.
    if speaks_early(line) {
        return Some(Kind::Binary);
    }
    let word = line.iter().take_while(|b| is_visible(**b)).count();
    let mut gap = line[word..].iter().take_while(|b| is_separator(**b));
    let has_nul = gap.any(|b| *b == 0);
    let control = |b: &u8| !is_visible(*b) && !is_skipped(*b);
    let mut beginning = line.iter().take(SHORTEST_METHOD);
    match (beginning.any(control), has_nul) {
        // No server takes NUL so early.
        (true, true) => Some(Kind::Raw),
        // Gunicorn takes it in and behind a method.
        (true, false) | (false, true) => Some(Kind::Binary),
        (false, false) => None,
    }
}

/// A whole request of git, which has no end of line but says how long it is.
fn begins_with_git(line: &[u8]) -> bool {
    let length = line
        .get(..4)
        .and_then(|length| std::str::from_utf8(length).ok())
        .and_then(|text| usize::from_str_radix(text, 16).ok());
    let asked = length.and_then(|length| line.get(4..length));
    asked.is_some_and(|asked| {
        GIT.iter().any(|service| asked.starts_with(service)) && asked.ends_with(b"\0")
    })
}

/// The opening of an XMPP stream.
fn is_stream_of_xml(line: &[u8]) -> bool {
    (line.starts_with(b"<?xml ") || line.starts_with(b"<stream:stream ")) && line.contains(&b'>')
}

fn speaks_of_http(line: &[u8]) -> bool {
    line.windows(5)
        .any(|window| window.eq_ignore_ascii_case(b"http/"))
}

fn of_line(line: &[u8]) -> Kind {
    if line == b"PRI * HTTP/2.0" {
        return Kind::Http2;
    }
    let mut words = line.split(|b| is_separator(*b)).filter(|w| !w.is_empty());
    let method = words.clone().next().unwrap_or_default();
    // To Apache what is no text may be the method, and the first word its target.
    if line.first().is_some_and(|byte| is_visible(*byte)) {
        words.next();
    }
    if is_plain(line, method) {
        return Kind::Http1;
    }
    // To Apache `http:/x` and `#x` are some, too.
    let like_a_target = |word: &[u8]| {
        matches!(word.first(), Some(b'/' | b'\\' | b'*' | b'?' | b'#'))
            || word.windows(2).any(|w| w == b":/")
    };
    // NATS says CONNECT, too.
    let asks = METHODS.contains(&method) && !words.clone().any(|word| word.starts_with(b"{"));
    // Without a version it is HTTP/0.9, which servers still answer.
    if speaks_of_http(line) || asks || words.any(like_a_target) {
        return Kind::Odd;
    }
    Kind::Raw
}

/// A request line as everybody reads it: nothing in it is left to opinion.
fn is_plain(line: &[u8], method: &[u8]) -> bool {
    let by_spaces = line.iter().filter(|b| **b == b' ').count() == 2;
    by_spaces
        && (line.ends_with(b" HTTP/1.1") || line.ends_with(b" HTTP/1.0"))
        && method.iter().all(|b| is_token(*b))
        && line.iter().all(|b| is_visible(*b) || *b == b' ')
        && line.get(method.len()) == Some(&b' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends() {
        for raw in [&b"word"[..], b"\r\n", b"\xff\xfd\x18", b"two words"] {
            assert_eq!(at_the_end(raw), Kind::Raw, "{raw:?}");
        }
        for odd in [
            &b"GET / HTTP/1.1"[..],
            b"\x16",
            b"x http/1",
            b"GET /private",
            b"GET",
            b" G_T\t/private",
            b"\x80GET /private",
        ] {
            assert_eq!(at_the_end(odd), Kind::Odd, "{odd:?}");
        }
    }

    #[test]
    fn beginnings() {
        for (bytes, kind) in [
            (&b"\x16\x03\x01"[..], Some(Kind::Tls)),
            (b"\x16", None),
            (b"\x16\x02", Some(Kind::Binary)),
            (b"\x80\x2e\x01\x03", Some(Kind::Odd)),
            (b"\xff\xfd\x01\xff", Some(Kind::Binary)),
            (b"\x80G)T /x\r\n", Some(Kind::Odd)),
            (b"\xff\xfd\x01\xffname\r\n", Some(Kind::Raw)),
            (b"GET / HT", None),
            (b"GET / HTTP/1.1\r\n", Some(Kind::Http1)),
            (b"\r\n\r\nPOST /x HTTP/1.0\n", Some(Kind::Http1)),
            (b"PRI * HTTP/2.0\r\n", Some(Kind::Http2)),
            (b"get / http/1.1\r\n", Some(Kind::Odd)),
            (b"get / HTTP/1.1\r\n", Some(Kind::Http1)),
            (b"G_T / HTTP/1.1\r\n", Some(Kind::Http1)),
            (b"<GT / HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"GET /\x80 HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"GET /x\r\n", Some(Kind::Odd)),
            (b"GET  / HTTP/1.1\r\n", Some(Kind::Odd)),
            (b" GET / HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"GET /a b HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"VERSION-CONTROL /x HTTP/1.1\r\n", Some(Kind::Http1)),
            (b"SSH-2.0-x", None),
            (b"SSH-2.0-x\r\n", Some(Kind::Raw)),
            (b"*1\r\n", Some(Kind::Raw)),
            (b"word", None),
            (b"\0\0\0\x08\x04\xd2\x16\x2f", Some(Kind::Raw)),
            (b"EHLO x\r\n", Some(Kind::Raw)),
            (b"AMQP\0", Some(Kind::Binary)),
            (b"AMQP\0\x0a", Some(Kind::Binary)),
            (b"\xef\xbb\xbf /private\r\n", Some(Kind::Odd)),
            (b"GEEET\n", Some(Kind::Binary)),
            (b"GEEET\n /private HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"{}\n{}\r\n", Some(Kind::Raw)),
            (b"GET\0 /private\rHTTP/1.1\r\n", Some(Kind::Odd)),
            (b"l\0\x0b\0", Some(Kind::Raw)),
            (b"0021git-upload-pack /project\0a=b\0", Some(Kind::Binary)),
            (
                b"0021git-upload-pack /project\0a=b\x000032want 1\n",
                Some(Kind::Binary),
            ),
            (
                b"<?xml version='1.0'?><stream:stream xmlns='http://x/'>",
                Some(Kind::Binary),
            ),
            (b"<?xml version='1.0'?>\r\n", Some(Kind::Raw)),
            (b"GET\x01", None),
            (b"GET\x01/private\x01HTTP/1.1\r\n", Some(Kind::Odd)),
            (b"\r\n", None),
        ] {
            assert_eq!(classify(bytes), kind, "{}", bytes.escape_ascii());
        }
    }

    /// What one byte more shows must not have been decided before: nobody sends slowly enough to
    /// be taken for something else.
    #[test]
    fn slow_bytes_are_not_taken_for_something_else() {
        for request in [
            &b"GET /private?\xc3\xa9 HTTP/1.1\r\n"[..],
            b"G_T /private HTTP/1.1\r\n",
            b"GET\x1c/private\x1dHTTP/1.1\r\n",
            b"GET\xa0/private\xa0HTTP/1.1\r\n",
            b"0024git-upload-pack /private HTTP/1.1\r\n",
            b"<?xml /private HTTP/1.1?>\r\n",
            b"<?xml version='1.0'?>GET\x01/private HTTP/1.1\r\n",
            b"0021git-upload-pack /private\0a=b\0 HTTP/1.1\r\n",
            b"\r\n\r\n\0\r\nQUIT\n",
            b"\x0b GET / HTTP/1.1\r\n",
        ] {
            for length in 0..=request.len() {
                let kind = classify(&request[..length]);
                assert_ne!(
                    kind,
                    Some(Kind::Raw),
                    "{}",
                    request[..length].escape_ascii()
                );
            }
        }
    }
}
