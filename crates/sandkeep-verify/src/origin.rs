//! The outside's web server. It reads requests as leniently as real servers do, notes what it
//! would have served, and shows on demand what it was sent in many disguises.

use std::{
    fmt::Write as _,
    io::{self, Read, Write},
    net::IpAddr,
    thread,
    time::Duration,
};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
};

use crate::world::{Request, Seen, held};

const LONGEST_HEAD: usize = 64 << 10;
const LONGEST_BODY: usize = 1 << 20;

pub fn serve(mut stream: impl Read + Write, to: IpAddr, tls: bool, seen: &Seen) -> io::Result<()> {
    let mut buffer: Vec<u8> = Vec::new();
    loop {
        let Some(head) = head(&mut stream, &mut buffer)? else {
            return Ok(());
        };
        let Some(request) = parse(&head, to, tls) else {
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")?;
            return stream.flush();
        };
        let size = header(&request, "content-length")
            .and_then(|size| size.parse::<usize>().ok())
            .unwrap_or(0)
            .min(LONGEST_BODY);
        while buffer.len() < size {
            if fill(&mut stream, &mut buffer)? == 0 {
                return Ok(());
            }
        }
        let body: Vec<u8> = buffer.drain(..size).collect();
        held(&seen.requests).push(request.clone());
        answer(&mut stream, &request, &body, seen)?;
        stream.flush()?;
        if header(&request, "connection").is_some_and(|words| words.contains("close")) {
            return Ok(());
        }
    }
}

fn fill(stream: &mut impl Read, buffer: &mut Vec<u8>) -> io::Result<usize> {
    let mut piece = [0; 4096];
    let size = stream.read(&mut piece)?;
    buffer.extend(piece.get(..size).unwrap_or_default());
    Ok(size)
}

/// The head of the next request, without its empty line.
fn head(stream: &mut impl Read, buffer: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    loop {
        if let Some(at) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = buffer.drain(..at + 4).collect();
            return Ok(Some(head));
        }
        if buffer.len() > LONGEST_HEAD || fill(stream, buffer)? == 0 {
            return Ok(None);
        }
    }
}

/// As lenient as servers are: any bytes in method and target, any case, anything in values.
fn parse(head: &[u8], to: IpAddr, tls: bool) -> Option<Request> {
    let text: String = head.iter().map(|&byte| char::from(byte)).collect();
    let mut lines = text.split("\r\n");
    let first = lines.next()?;
    let (method, rest) = first.split_once(' ')?;
    let (target, version) = rest.rsplit_once(' ')?;
    if !version.starts_with("HTTP/1.") {
        return None;
    }
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let host = headers
        .iter()
        .find(|(name, _)| name == "host")
        .map(|(_, value)| value.clone())
        .unwrap_or_default();
    Some(Request {
        to,
        tls,
        method: method.to_owned(),
        target: target.to_owned(),
        host,
        headers,
    })
}

pub fn header<'a>(request: &'a Request, name: &str) -> Option<&'a str> {
    request
        .headers
        .iter()
        .find(|(own, _)| own == name)
        .map(|(_, value)| value.as_str())
}

fn answer(stream: &mut impl Write, request: &Request, body: &[u8], seen: &Seen) -> io::Result<()> {
    let (path, query) = request
        .target
        .split_once('?')
        .unwrap_or((request.target.as_str(), ""));
    let sent = header(request, "authorization").unwrap_or_default();
    match path {
        "/need" => {
            let good = sent == format!("Bearer {}", held(&seen.expected));
            let (status, text) = if good {
                ("200 OK", "welcome\n")
            } else {
                ("401 Unauthorized", "who are you?\n")
            };
            whole(stream, status, &[], text.as_bytes())
        }
        "/show" => {
            let secret = sent.strip_prefix("Bearer ").unwrap_or(sent);
            match disguised(query, sent, secret) {
                Some(Disguise::Body(bytes)) => whole(stream, "200 OK", &[], &bytes),
                Some(Disguise::Header(name, value)) => {
                    whole(stream, "200 OK", &[(name, &value)], b"look above\n")
                }
                None => whole(stream, "404 Not Found", &[], b"no such disguise\n"),
            }
        }
        "/half" => {
            // The value itself as a file, of which parts may be asked for.
            let secret = sent.strip_prefix("Bearer ").unwrap_or(sent).as_bytes();
            match header(request, "range").and_then(|range| part(range, secret.len())) {
                Some((from, to)) => whole(
                    stream,
                    "206 Partial Content",
                    &[(
                        "Content-Range",
                        &format!("bytes {from}-{}/{}", to.saturating_sub(1), secret.len()),
                    )],
                    secret.get(from..to).unwrap_or_default(),
                ),
                None => whole(stream, "200 OK", &[], secret),
            }
        }
        "/back" => back(stream, body),
        _ => whole(
            stream,
            "200 OK",
            &[],
            format!("served {} of {}\n", request.target, request.host).as_bytes(),
        ),
    }
}

fn whole(
    stream: &mut impl Write,
    status: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        // Writing to a String can not fail.
        let _ = write!(head, "{name}: {value}\r\n");
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)
}

/// What was sent, in one chunk; the rest of a stream comes later. A scanner that keeps back more
/// of a chunk the more of it looks like a secret shows that by what arrives first.
fn back(stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
    stream.write_all(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    )?;
    stream.write_all(format!("{:x}\r\n", body.len()).as_bytes())?;
    stream.write_all(body)?;
    stream.write_all(b"\r\n")?;
    stream.flush()?;
    thread::sleep(Duration::from_millis(400));
    stream.write_all(b"5\r\n-end-\r\n0\r\n\r\n")
}

enum Disguise {
    Body(Vec<u8>),
    Header(&'static str, String),
}

fn disguised(name: &str, sent: &str, secret: &str) -> Option<Disguise> {
    let text = |text: String| Some(Disguise::Body(format!("<{text}>\n").into_bytes()));
    match name {
        "plain" => text(secret.to_owned()),
        "header" => Some(Disguise::Header("X-You-Sent", sent.to_owned())),
        "base64-of-header" => text(base64(sent.as_bytes(), false)),
        "base64-shifted" => text(base64(format!("x{secret}").as_bytes(), false)),
        "base64-url" => text(base64(format!("xy{secret}").as_bytes(), true)),
        "hex" => text(secret.bytes().map(|byte| format!("{byte:02x}")).collect()),
        "upper" => text(secret.to_ascii_uppercase()),
        "utf-16" => Some(Disguise::Body(
            secret.encode_utf16().flat_map(u16::to_le_bytes).collect(),
        )),
        "percent" => text(escaped(secret, |byte| format!("%{byte:02X}"))),
        "json-slash" => text(secret.replace('/', "\\/")),
        "json-unicode" => text(escaped(secret, |byte| format!("\\u{byte:04x}"))),
        "html" => text(escaped(secret, |byte| format!("&#{byte};"))),
        "location" => Some(Disguise::Header(
            "X-Location",
            format!("/login?of={}", base64(sent.as_bytes(), true)),
        )),
        _ => None,
    }
}

/// What a disguise of a bearer token looks like on the wire.
pub fn as_shown(name: &str, secret: &str) -> Option<Vec<u8>> {
    Some(
        match disguised(name, &format!("Bearer {secret}"), secret)? {
            Disguise::Header(_, value) => value.into_bytes(),
            // Without the brackets and the end of the line.
            Disguise::Body(bytes) if name == "utf-16" => bytes,
            Disguise::Body(bytes) => bytes.get(1..bytes.len().saturating_sub(2))?.to_vec(),
        },
    )
}

/// As encoders do it: letters, digits and what may stand in a path segment stay.
fn escaped(text: &str, escape: impl Fn(u8) -> String) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
            byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            byte => escape(byte),
        })
        .collect()
}

fn base64(bytes: &[u8], url: bool) -> String {
    if url {
        URL_SAFE_NO_PAD.encode(bytes)
    } else {
        STANDARD_NO_PAD.encode(bytes)
    }
}

fn part(range: &str, size: usize) -> Option<(usize, usize)> {
    let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
    let from = from.parse().ok()?;
    let to = if to.is_empty() {
        size
    } else {
        to.parse::<usize>().ok()?.saturating_add(1).min(size)
    };
    (from < to).then_some((from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_requests_are_read_as_real_servers_read_them() {
        let to: IpAddr = "198.18.7.1".parse().unwrap();
        let read = |head: &[u8]| parse(head, to, false).unwrap();
        let odd = read(b"GET /private?\xc3\xa9 HTTP/1.1\r\nHost: narrow.test\r\n\r\n");
        assert!(odd.target.starts_with("/private") && odd.host == "narrow.test");
        assert_eq!(read(b"G_T /private HTTP/1.1\r\nHOST:a\r\n\r\n").host, "a");
        assert!(parse(b"\x16\x03\x01 x\r\n\r\n", to, false).is_none());
    }

    #[test]
    fn halves_are_halves() {
        assert_eq!(part("bytes=0-15", 40), Some((0, 16)));
        assert_eq!(part("bytes=16-", 40), Some((16, 40)));
        assert_eq!(part("bytes=50-", 40), None);
    }
}
