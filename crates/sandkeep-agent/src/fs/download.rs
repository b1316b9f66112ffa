//! `GET` and `HEAD /files`.

use super::entry::base_name;
use super::error::FileError;
use super::file_body::{CHUNK_BYTES, FileBody, Packer, Reader};
use super::media_type::media_type;
use super::negotiate::{Accepted, Coding};
use super::open::regular_for_reading;
use super::query::FilesQuery;
use super::range::{Condition, RangeAnswer, Validators, parse_range};
use crate::{Body, State, bytes_body, empty_body};
use http::header::{
    ACCEPT_ENCODING, ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH,
    CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, LAST_MODIFIED, RANGE, VARY,
};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::BodyExt;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::fs::Metadata;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Below this, packing costs more than it saves.
const MIN_PACKED_BYTES: usize = 1024;

/// Answers one download. Blocks.
pub(crate) fn download(
    state: &State,
    query: &FilesQuery,
    headers: &HeaderMap,
    head_only: bool,
) -> Result<Response<Body>, FileError> {
    let user = state.user(headers, query.username.as_deref())?;
    let path = state
        .resolve(query.path.as_deref().unwrap_or_default(), &user)
        .map_err(|error| FileError::bad_request(error.message))?;
    let (mut file, meta) = regular_for_reading(&path)?;
    let accepted = Accepted::parse(joined(headers, &ACCEPT_ENCODING).as_deref());
    let validators = validators(&meta);

    let mut reply = Reply::new(&path);
    // Files the kernel makes up have no size and no history.
    if meta.len() > 0 {
        match validators.check(headers) {
            Condition::Proceed => {}
            Condition::NotModified => return Ok(reply.validated(&validators).not_modified()),
            Condition::Failed => {
                return Err(FileError::new(
                    StatusCode::PRECONDITION_FAILED,
                    format!("path '{}' is not as the request expects it", path.display()),
                ));
            }
        }
        reply = reply.validated(&validators);
    }

    let range = match headers.get(RANGE).and_then(|value| value.to_str().ok()) {
        Some(value)
            if meta.len() > 0 && accepted.identity > 0 && validators.range_applies(headers) =>
        {
            parse_range(value, meta.len())
        }
        _ => RangeAnswer::Whole,
    };
    let left = match range {
        RangeAnswer::Unsatisfiable => return Ok(reply.unsatisfiable(meta.len())),
        RangeAnswer::Part { start, len } => {
            file.seek(SeekFrom::Start(start))
                .map_err(|error| FileError::from_io("read", &path, &error))?;
            Some(len)
        }
        RangeAnswer::Whole => (meta.len() > 0).then_some(meta.len()),
    };

    // The first read happens before anything is answered, so that a file
    // which cannot be read is refused in words.
    let mut reader = Reader::new(file, left);
    let first = reader
        .read_full()
        .map_err(|error| FileError::from_os("read", &path, error))?;
    // Fewer bytes than asked for means the end, whatever size was announced:
    // the kernel's own files often announce too much.
    let wanted = left.unwrap_or(u64::MAX).min(CHUNK_BYTES as u64);
    let whole = (first.len() as u64) < wanted || left == Some(first.len() as u64);
    let length = if whole {
        Some(first.len() as u64)
    } else {
        left
    };
    reply.typed(&path, &first);

    if let RangeAnswer::Part { start, .. } = range {
        let length = length.unwrap_or(0);
        if length == 0 {
            return Ok(reply.unsatisfiable(meta.len()));
        }
        let shown = format!("bytes {start}-{}/{}", start + length - 1, meta.len());
        reply.set(CONTENT_RANGE, &shown);
        reply.status = StatusCode::PARTIAL_CONTENT;
    } else {
        // Only what is at hand in full is packed by choice. More would make
        // the box's processor the bottleneck.
        let packed = (whole && accepted.prefers_gzip())
            .then(|| pack_if_it_helps(&first))
            .flatten();
        match accepted.choose(packed.is_some()) {
            Some(Coding::Identity) => {}
            Some(Coding::Gzip) => {
                reply.set(CONTENT_ENCODING, "gzip");
                if let Some(packed) = packed {
                    return Ok(
                        reply.finish(Some(packed.len() as u64), head_only, || bytes_body(packed))
                    );
                }
                return Ok(reply.finish(None, head_only, || {
                    FileBody::new(first, reader, Some(Packer::new())).boxed_unsync()
                }));
            }
            None => {
                return Err(FileError::new(
                    StatusCode::NOT_ACCEPTABLE,
                    "no acceptable encoding found, supported: identity, gzip",
                ));
            }
        }
    }
    Ok(reply.finish(length, head_only, || {
        if whole {
            bytes_body(first)
        } else {
            FileBody::new(first, reader, None).boxed_unsync()
        }
    }))
}

fn pack_if_it_helps(plain: &[u8]) -> Option<Vec<u8>> {
    if plain.len() < MIN_PACKED_BYTES {
        return None;
    }
    let mut packer = Packer::new();
    let mut packed = packer.push(plain);
    packed.extend_from_slice(&packer.finish()?);
    (packed.len() < plain.len() / 10 * 9).then_some(packed)
}

/// The tag names a version of the file: any write changes the time.
fn validators(meta: &Metadata) -> Validators {
    let nanos = u32::try_from(meta.mtime_nsec()).unwrap_or(0);
    let since = Duration::new(u64::try_from(meta.mtime()).unwrap_or(0), nanos);
    Validators {
        etag: format!(
            "\"{:x}-{:x}-{:x}\"",
            meta.ino(),
            since.as_nanos(),
            meta.len()
        ),
        modified: SystemTime::UNIX_EPOCH + since,
    }
}

/// A header that may be repeated, as one list.
fn joined(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let values: Vec<&str> = headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .collect();
    (!values.is_empty()).then(|| values.join(","))
}

/// A reply being put together.
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
}

impl Reply {
    fn new(path: &Path) -> Self {
        let mut reply = Self {
            status: StatusCode::OK,
            headers: HeaderMap::new(),
        };
        reply.set(VARY, "Accept-Encoding");
        reply.set(CONTENT_DISPOSITION, &disposition(&base_name(path)));
        reply
    }

    fn set(&mut self, name: HeaderName, value: &str) {
        // What is put in here is always printable.
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.insert(name, value);
        }
    }

    fn validated(mut self, validators: &Validators) -> Self {
        self.set(ETAG, &validators.etag);
        self.set(ACCEPT_RANGES, "bytes");
        // A date beyond what HTTP can write is left out.
        if validators.modified < SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799) {
            self.set(LAST_MODIFIED, &httpdate::fmt_http_date(validators.modified));
        }
        self
    }

    fn typed(&mut self, path: &Path, start: &[u8]) {
        self.set(CONTENT_TYPE, media_type(path, start));
    }

    fn not_modified(mut self) -> Response<Body> {
        self.status = StatusCode::NOT_MODIFIED;
        self.headers.remove(CONTENT_DISPOSITION);
        self.response(empty_body())
    }

    fn unsatisfiable(self, size: u64) -> Response<Body> {
        let mut response = FileError::new(
            StatusCode::RANGE_NOT_SATISFIABLE,
            format!("the range lies outside the file's {size} bytes"),
        )
        .response();
        if let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}")) {
            response.headers_mut().insert(CONTENT_RANGE, value);
        }
        response
    }

    fn finish(
        mut self,
        length: Option<u64>,
        head_only: bool,
        body: impl FnOnce() -> Body,
    ) -> Response<Body> {
        if self.headers.contains_key(CONTENT_ENCODING)
            && let Some(tag) = self.headers.get(ETAG).and_then(|tag| tag.to_str().ok())
        {
            // Packed bytes are another version to caches and to If-Range.
            let tag = format!("W/{tag}");
            self.set(ETAG, &tag);
            self.headers.remove(ACCEPT_RANGES);
        }
        if let Some(length) = length {
            self.headers.insert(CONTENT_LENGTH, length.into());
        }
        let body = if head_only { empty_body() } else { body() };
        self.response(body)
    }

    fn response(self, body: Body) -> Response<Body> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        response
    }
}

/// Shown in a browser rather than saved, under the file's own name.
fn disposition(name: &str) -> String {
    let plain: String = name
        .chars()
        .map(|c| match c {
            '"' | '\\' => '_',
            ' '..='~' => c,
            _ => '_',
        })
        .collect();
    if plain == name {
        return format!("inline; filename=\"{plain}\"");
    }
    let encoded = utf8_percent_encode(name, NON_ALPHANUMERIC);
    format!("inline; filename=\"{plain}\"; filename*=UTF-8''{encoded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_in_a_header() {
        assert_eq!(disposition("a b.txt"), "inline; filename=\"a b.txt\"");
        assert_eq!(
            disposition("a\"\r\nX: ż"),
            "inline; filename=\"a___X: _\"; filename*=UTF-8''a%22%0D%0AX%3A%20%C5%BC"
        );
    }

    #[test]
    fn packing_must_pay() {
        assert!(pack_if_it_helps(&[b'a'; 4096]).is_some());
        assert!(pack_if_it_helps(b"short").is_none());
        let mut noise = vec![0; 4096];
        rustix::rand::getrandom(&mut noise[..], rustix::rand::GetRandomFlags::empty())
            .expect("random");
        assert!(pack_if_it_helps(&noise).is_none());
    }
}
