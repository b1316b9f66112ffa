//! A streaming `multipart/form-data` reader that never holds more than one
//! header block and one boundary's worth of bytes beyond what it was given.
//!
//! It does no I/O: bytes are pushed in as they come, events come out through a
//! callback. That keeps it easy to fuzz and lets the caller decide on which
//! thread the work happens.

use super::params::{Params, decode_extended};
use memchr::memmem::Finder;

/// The most bytes one part's header block may have.
const MAX_HEADER_BYTES: usize = 16 * 1024;
/// The most parts one body may have.
const MAX_PARTS: usize = 10_000;
/// The most bytes before the first boundary; real clients send none.
const MAX_PREAMBLE_BYTES: usize = 16 * 1024;
/// RFC 2046 §5.1.1.
const MAX_BOUNDARY_BYTES: usize = 70;

/// Why a body could not be read as `multipart/form-data`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MultipartError {
    #[error("the content type names no usable multipart boundary")]
    NoBoundary,
    #[error("the multipart body ended before its final boundary")]
    Truncated,
    #[error("a multipart part has more than {MAX_HEADER_BYTES} bytes of headers")]
    HeaderTooLarge,
    #[error("a multipart part has a malformed header")]
    BadHeader,
    #[error("a multipart part has no form-data Content-Disposition")]
    NoDisposition,
    #[error("the multipart body has more than {MAX_PARTS} parts")]
    TooManyParts,
    #[error("the multipart body does not start with its boundary")]
    NoFirstBoundary,
}

/// What a part says about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartHead {
    /// The form field's name.
    pub name: String,
    /// The full file name, slashes kept.
    pub filename: Option<String>,
}

/// What the parser found.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    Part(PartHead),
    Data(&'a [u8]),
    PartEnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Preamble,
    /// Behind a boundary, before the end of its line.
    BoundaryLine,
    Headers,
    Body,
    /// Behind the final boundary; everything more is ignored.
    Epilogue,
}

/// What follows a delimiter decides whether it really is one.
enum Tail {
    Next,
    Final,
    NotADelimiter,
    NeedMore,
}

/// The parser itself.
#[derive(Debug)]
pub struct Multipart {
    delimiter: Finder<'static>,
    delimiter_len: usize,
    buf: Vec<u8>,
    state: State,
    preamble_seen: usize,
    parts: usize,
}

impl Multipart {
    /// A parser for the given `Content-Type` value.
    pub fn from_content_type(content_type: &str) -> Result<Self, MultipartError> {
        let params = Params::parse(content_type).ok_or(MultipartError::NoBoundary)?;
        let boundary = params.get("boundary").ok_or(MultipartError::NoBoundary)?;
        Self::new(boundary)
    }

    /// A parser for the given boundary.
    pub fn new(boundary: &str) -> Result<Self, MultipartError> {
        let usable = !boundary.is_empty()
            && boundary.len() <= MAX_BOUNDARY_BYTES
            && boundary.bytes().all(|b| (b' '..=b'~').contains(&b));
        if !usable {
            return Err(MultipartError::NoBoundary);
        }
        let delimiter = format!("\r\n--{boundary}");
        Ok(Self {
            delimiter_len: delimiter.len(),
            delimiter: Finder::new(delimiter.as_bytes()).into_owned(),
            // The first boundary has no line end before it; pretend it has.
            buf: b"\r\n".to_vec(),
            state: State::Preamble,
            preamble_seen: 0,
            parts: 0,
        })
    }

    /// Takes the next bytes of the body and reports what they complete.
    pub fn push<E, F>(&mut self, data: &[u8], mut on_event: F) -> Result<(), E>
    where
        E: From<MultipartError>,
        F: FnMut(Event<'_>) -> Result<(), E>,
    {
        if self.state == State::Epilogue {
            return Ok(());
        }
        let mut buf = std::mem::take(&mut self.buf);
        buf.extend_from_slice(data);
        let mut used = 0;
        while let Some(step) = self.step(&buf[used..], &mut on_event)? {
            used += step;
        }
        buf.drain(..used);
        self.buf = buf;
        Ok(())
    }

    /// Says that the body is over.
    pub fn finish(self) -> Result<(), MultipartError> {
        match self.state {
            State::Epilogue => Ok(()),
            State::Preamble => Err(MultipartError::NoFirstBoundary),
            _ => Err(MultipartError::Truncated),
        }
    }

    /// Handles what can be handled of `rest`: the bytes used, or `None` when
    /// more must come first. Every `Some` either uses bytes or changes state.
    fn step<E, F>(&mut self, rest: &[u8], on_event: &mut F) -> Result<Option<usize>, E>
    where
        E: From<MultipartError>,
        F: FnMut(Event<'_>) -> Result<(), E>,
    {
        match self.state {
            State::Preamble | State::Body => self.step_body(rest, on_event),
            State::BoundaryLine => Ok(self.step_boundary_line(rest)?),
            State::Headers => {
                let Some((head, used)) = take_headers(rest)? else {
                    return Ok(None);
                };
                self.parts += 1;
                if self.parts > MAX_PARTS {
                    return Err(MultipartError::TooManyParts.into());
                }
                self.state = State::Body;
                on_event(Event::Part(head))?;
                Ok(Some(used))
            }
            State::Epilogue => Ok(None),
        }
    }

    fn step_body<E, F>(&mut self, rest: &[u8], on_event: &mut F) -> Result<Option<usize>, E>
    where
        E: From<MultipartError>,
        F: FnMut(Event<'_>) -> Result<(), E>,
    {
        let Some(at) = self.delimiter.find(rest) else {
            // The last bytes may be the start of a delimiter.
            let sure = rest.len().saturating_sub(self.delimiter_len - 1);
            if sure == 0 {
                return Ok(None);
            }
            self.body_bytes(&rest[..sure], on_event)?;
            return Ok(Some(sure));
        };
        match tail(&rest[at + self.delimiter_len..]) {
            Tail::NeedMore => {
                if at == 0 {
                    return Ok(None);
                }
                self.body_bytes(&rest[..at], on_event)?;
                Ok(Some(at))
            }
            Tail::NotADelimiter => {
                // Only the line end is settled: the dashes may belong to the
                // next search, but a delimiter cannot start before them.
                self.body_bytes(&rest[..at + 2], on_event)?;
                Ok(Some(at + 2))
            }
            found @ (Tail::Next | Tail::Final) => {
                self.body_bytes(&rest[..at], on_event)?;
                if self.state == State::Body {
                    on_event(Event::PartEnd)?;
                }
                self.state = match found {
                    Tail::Final => State::Epilogue,
                    _ => State::BoundaryLine,
                };
                let used = at + self.delimiter_len;
                Ok(Some(if self.state == State::Epilogue {
                    rest.len()
                } else {
                    used
                }))
            }
        }
    }

    fn body_bytes<E, F>(&mut self, bytes: &[u8], on_event: &mut F) -> Result<(), E>
    where
        E: From<MultipartError>,
        F: FnMut(Event<'_>) -> Result<(), E>,
    {
        if self.state == State::Preamble {
            self.preamble_seen += bytes.len();
            if self.preamble_seen > MAX_PREAMBLE_BYTES {
                return Err(MultipartError::NoFirstBoundary.into());
            }
            return Ok(());
        }
        if bytes.is_empty() {
            return Ok(());
        }
        on_event(Event::Data(bytes))
    }

    /// Skips the padding that may follow a boundary, up to its line end.
    fn step_boundary_line(&mut self, rest: &[u8]) -> Result<Option<usize>, MultipartError> {
        let padding = rest
            .iter()
            .take_while(|b| matches!(b, b' ' | b'\t'))
            .count();
        if padding > MAX_BOUNDARY_BYTES {
            return Err(MultipartError::BadHeader);
        }
        match &rest[padding..] {
            [b'\r', b'\n', ..] => {
                self.state = State::Headers;
                Ok(Some(padding + 2))
            }
            [] | [b'\r'] => Ok(None),
            _ => Err(MultipartError::BadHeader),
        }
    }
}

fn tail(after: &[u8]) -> Tail {
    match after {
        [b'-', b'-', ..] => Tail::Final,
        [b'\r', b'\n', ..] | [b' ' | b'\t', ..] => Tail::Next,
        [] | [b'-'] | [b'\r'] => Tail::NeedMore,
        _ => Tail::NotADelimiter,
    }
}

/// Reads a header block and its empty line: what it says and how many bytes it
/// used.
fn take_headers(rest: &[u8]) -> Result<Option<(PartHead, usize)>, MultipartError> {
    if rest.starts_with(b"\r\n") {
        return Err(MultipartError::NoDisposition);
    }
    let Some(end) = memchr::memmem::find(rest, b"\r\n\r\n") else {
        // A block of exactly the limit may have all but the last byte of its end here.
        if rest.len() > MAX_HEADER_BYTES + 3 {
            return Err(MultipartError::HeaderTooLarge);
        }
        return Ok(None);
    };
    if end > MAX_HEADER_BYTES {
        return Err(MultipartError::HeaderTooLarge);
    }
    let head = parse_headers(&rest[..end])?;
    Ok(Some((head, end + 4)))
}

fn parse_headers(block: &[u8]) -> Result<PartHead, MultipartError> {
    let text = std::str::from_utf8(block).map_err(|_| MultipartError::BadHeader)?;
    // A lone CR or LF, or a NUL, is how headers are smuggled.
    let unfolded = text.replace("\r\n ", " ").replace("\r\n\t", " ");
    let mut disposition = None;
    for line in unfolded.split("\r\n") {
        if line.bytes().any(|b| matches!(b, b'\r' | b'\n' | 0)) {
            return Err(MultipartError::BadHeader);
        }
        let (name, value) = line.split_once(':').ok_or(MultipartError::BadHeader)?;
        if name.is_empty() || name.bytes().any(|b| b <= b' ' || b >= 0x7f) {
            return Err(MultipartError::BadHeader);
        }
        if name.eq_ignore_ascii_case("content-disposition") {
            if disposition.is_some() {
                return Err(MultipartError::BadHeader);
            }
            disposition = Some(value.trim().to_owned());
        }
    }
    let disposition = disposition.ok_or(MultipartError::NoDisposition)?;
    let params = Params::parse(&disposition).ok_or(MultipartError::BadHeader)?;
    if !params.main.eq_ignore_ascii_case("form-data") {
        return Err(MultipartError::NoDisposition);
    }
    let filename = params
        .get("filename*")
        .and_then(decode_extended)
        .or_else(|| params.get("filename").map(str::to_owned));
    Ok(PartHead {
        name: params.get("name").unwrap_or_default().to_owned(),
        filename,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, PartialEq, Eq, Clone)]
    struct Got {
        head: PartHead,
        data: Vec<u8>,
        ended: bool,
    }

    fn read(boundary: &str, chunks: &[&[u8]]) -> Result<Vec<Got>, MultipartError> {
        let mut parser = Multipart::new(boundary)?;
        let mut got: Vec<Got> = Vec::new();
        for chunk in chunks {
            parser.push::<MultipartError, _>(chunk, |event| {
                match event {
                    Event::Part(head) => got.push(Got {
                        head,
                        ..Got::default()
                    }),
                    Event::Data(bytes) => {
                        got.last_mut().expect("part").data.extend_from_slice(bytes);
                    }
                    Event::PartEnd => got.last_mut().expect("part").ended = true,
                }
                Ok(())
            })?;
        }
        parser.finish()?;
        Ok(got)
    }

    fn part(name: &str, filename: Option<&str>, data: &[u8]) -> Got {
        Got {
            head: PartHead {
                name: name.into(),
                filename: filename.map(Into::into),
            },
            data: data.to_vec(),
            ended: true,
        }
    }

    const TWO: &[u8] =
        b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a/b.txt\"\r\n\
        Content-Type: text/plain\r\n\r\nhello\r\n--XY\r\n\r\n--XXZ not one\r\n--XX\r\n\
        content-disposition: form-data; name=file\r\n\r\n\r\n--XX--\r\nbye";

    #[test]
    fn reads_the_same_however_it_is_cut() {
        let want = vec![
            part(
                "file",
                Some("a/b.txt"),
                b"hello\r\n--XY\r\n\r\n--XXZ not one",
            ),
            part("file", None, b""),
        ];
        assert_eq!(read("XX", &[TWO]).expect("whole"), want);
        for at in 0..TWO.len() {
            let cut = read("XX", &[&TWO[..at], &TWO[at..]]);
            assert_eq!(cut.expect("cut"), want, "cut at {at}");
        }
        for size in 1..7 {
            let chunks: Vec<&[u8]> = TWO.chunks(size).collect();
            assert_eq!(read("XX", &chunks).expect("chunks"), want, "size {size}");
        }
    }

    #[test]
    fn a_missing_final_boundary_is_an_error() {
        let end = TWO.len() - b"--\r\nbye".len();
        assert_eq!(read("XX", &[&TWO[..end]]), Err(MultipartError::Truncated));
        assert_eq!(
            read("XX", &[b"hello"]),
            Err(MultipartError::NoFirstBoundary)
        );
        assert_eq!(read("XX", &[]), Err(MultipartError::NoFirstBoundary));
    }

    #[test]
    fn a_form_with_no_parts_is_empty() {
        assert_eq!(read("XX", &[b"--XX--"]).expect("empty"), vec![]);
    }

    #[test]
    fn huge_headers_and_preambles_are_refused() {
        let mut body =
            b"--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"".to_vec();
        body.resize(MAX_HEADER_BYTES + 100, b'a');
        assert_eq!(read("XX", &[&body]), Err(MultipartError::HeaderTooLarge));
        body.extend_from_slice(b"\"\r\n\r\nx\r\n--XX--");
        assert_eq!(read("XX", &[&body]), Err(MultipartError::HeaderTooLarge));
        let preamble = vec![b'p'; MAX_PREAMBLE_BYTES * 2];
        assert_eq!(
            read("XX", &[&preamble]),
            Err(MultipartError::NoFirstBoundary)
        );
    }

    #[test]
    fn headers_of_exactly_the_limit_are_read_however_their_end_is_cut() {
        let mut body = b"--XX\r\nContent-Disposition: form-data; name=".to_vec();
        let start = b"--XX\r\n".len();
        body.resize(start + MAX_HEADER_BYTES, b'a');
        body.extend_from_slice(b"\r\n\r\nx\r\n--XX--");
        let whole = read("XX", &[&body]).expect("whole");
        for at in 0..5 {
            let (one, two) = body.split_at(start + MAX_HEADER_BYTES + at);
            assert_eq!(read("XX", &[one, two]).expect("cut"), whole, "cut at {at}");
        }
    }

    #[test]
    fn crlf_tricks_are_refused() {
        let with = |headers: &str| {
            let body = format!("--XX\r\n{headers}\r\n\r\nx\r\n--XX--");
            read("XX", &[body.as_bytes()])
        };
        let good = "Content-Disposition: form-data; name=\"file\"; filename=\"a\"";
        assert!(with(good).is_ok());
        assert_eq!(
            with(&format!("{good}\nX: y")),
            Err(MultipartError::BadHeader)
        );
        assert_eq!(
            with(&format!("{good}\rX: y")),
            Err(MultipartError::BadHeader)
        );
        assert_eq!(
            with(&format!("{good}\r\n{good}")),
            Err(MultipartError::BadHeader)
        );
        assert_eq!(with("X y"), Err(MultipartError::BadHeader));
        assert_eq!(with("X: y"), Err(MultipartError::NoDisposition));
        assert_eq!(
            with("Content-Disposition: attachment"),
            Err(MultipartError::NoDisposition)
        );
        let folded = with("Content-Disposition: form-data;\r\n name=\"file\"; filename=\"a\"");
        assert_eq!(folded.expect("folded"), vec![part("file", Some("a"), b"x")]);
        assert_eq!(
            read("XX", &[b"--XX\r\n\r\nx\r\n--XX--"]),
            Err(MultipartError::NoDisposition)
        );
    }

    #[test]
    fn filenames_keep_slashes_escapes_and_other_scripts() {
        let name = |value: &str| {
            let body = format!(
                "--XX\r\nContent-Disposition: form-data; name=\"file\"; {value}\r\n\r\nx\r\n--XX--"
            );
            read("XX", &[body.as_bytes()]).map(|got| got[0].head.filename.clone())
        };
        assert_eq!(
            name("filename=\"/a/../b c;d.txt\""),
            Ok(Some("/a/../b c;d.txt".into()))
        );
        assert_eq!(
            name(r#"filename="a\"b\\c\d""#),
            Ok(Some(r#"a"b\c\d"#.into()))
        );
        assert_eq!(
            name("filename=\"źdźbło.txt\""),
            Ok(Some("źdźbło.txt".into()))
        );
        assert_eq!(
            name("filename=\"x\"; filename*=UTF-8''%c5%bad%20b"),
            Ok(Some("źd b".into()))
        );
        assert_eq!(name("filename=\"open"), Err(MultipartError::BadHeader));
    }

    #[test]
    fn boundaries_come_from_the_content_type() {
        let of = |value: &str| Multipart::from_content_type(value).map(|p| p.delimiter_len - 4);
        assert_eq!(of("multipart/form-data; boundary=abc"), Ok(3));
        assert_eq!(
            of("multipart/form-data; charset=x; Boundary=\"a b\""),
            Ok(3)
        );
        assert_eq!(
            of("multipart/form-data").err(),
            Some(MultipartError::NoBoundary)
        );
        assert_eq!(
            of("multipart/form-data; boundary=\"\"").err(),
            Some(MultipartError::NoBoundary)
        );
        let long = format!("multipart/form-data; boundary={}", "a".repeat(71));
        assert_eq!(of(&long).err(), Some(MultipartError::NoBoundary));
    }

    #[test]
    fn too_many_parts_are_refused() {
        let one = b"--X\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n";
        let body: Vec<u8> = one
            .iter()
            .copied()
            .cycle()
            .take(one.len() * (MAX_PARTS + 1))
            .collect();
        assert_eq!(read("X", &[&body]), Err(MultipartError::TooManyParts));
    }
}
