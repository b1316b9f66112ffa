//! What kind of content a file holds, as well as a short look can tell.

use std::path::Path;

/// How much of a file is looked at.
const LOOK_BYTES: usize = 512;

/// The `Content-Type` of a file that starts with `start`.
pub(crate) fn media_type(path: &Path, start: &[u8]) -> &'static str {
    let extension = path
        .extension()
        .map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    let known = match extension.as_deref().unwrap_or_default() {
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "xml" => "text/xml; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "md" => "text/markdown; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "pdf" => "application/pdf",
        "zip" => "application/zip",
        "gz" | "tgz" => "application/gzip",
        "tar" => "application/x-tar",
        "wasm" => "application/wasm",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        "mp3" => "audio/mpeg",
        "wav" => "audio/wav",
        _ => "",
    };
    if !known.is_empty() {
        return known;
    }
    if is_text(&start[..start.len().min(LOOK_BYTES)]) {
        "text/plain; charset=utf-8"
    } else {
        "application/octet-stream"
    }
}

/// UTF-8 without control characters, a character cut at the end forgiven.
fn is_text(bytes: &[u8]) -> bool {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text
        .bytes()
        .any(|b| b < 0x20 && !matches!(b, b'\t' | b'\n' | b'\r' | 0x0c | 0x1b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_name_then_by_content() {
        let of = |name: &str, start: &[u8]| media_type(Path::new(name), start);
        assert_eq!(of("a.JSON", b"\0"), "application/json");
        assert_eq!(
            of("notes", "zażółć".as_bytes()),
            "text/plain; charset=utf-8"
        );
        assert_eq!(of("notes", b"ab\xc5"), "text/plain; charset=utf-8");
        assert_eq!(of("notes", b"\0\x01"), "application/octet-stream");
        assert_eq!(of("notes", b"\xff\xfe\xfd"), "application/octet-stream");
    }
}
