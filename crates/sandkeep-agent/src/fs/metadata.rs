//! The caller's own notes on a file: `X-Metadata-*` headers in, `user.e2b.*`
//! extended attributes on disk, a `metadata` map out.

use super::error::FileError;
use http::HeaderMap;
use rustix::fs::{
    XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, lgetxattr, llistxattr,
};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;

const HEADER_PREFIX: &str = "x-metadata-";
const XATTR_PREFIX: &str = "user.e2b.";
/// An attribute's name has at most 255 bytes, the prefix included.
const MAX_KEY_BYTES: usize = 255 - XATTR_PREFIX.len();
/// All keys and values together.
const MAX_TOTAL_BYTES: usize = 4096;
/// The most we read of what anybody in the box may have set.
const MAX_LIST_BYTES: usize = 64 * 1024;

/// Keys in lower case and their values.
pub(crate) type Metadata = BTreeMap<String, String>;

/// Takes the metadata out of a request's headers.
pub(crate) fn from_headers(headers: &HeaderMap) -> Result<Metadata, FileError> {
    let mut metadata = Metadata::new();
    let mut total = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else {
            continue;
        };
        if key.is_empty() {
            return Err(FileError::bad_request("metadata key is empty"));
        }
        if key.len() > MAX_KEY_BYTES {
            return Err(FileError::bad_request(format!(
                "metadata key is longer than {MAX_KEY_BYTES} bytes"
            )));
        }
        let bytes = value.as_bytes();
        if !bytes.iter().all(|b| (b' '..=b'~').contains(b)) {
            return Err(FileError::bad_request(format!(
                "metadata value of '{key}' must be printable ASCII"
            )));
        }
        total += key.len() + bytes.len();
        if total > MAX_TOTAL_BYTES {
            return Err(FileError::bad_request(format!(
                "metadata is larger than {MAX_TOTAL_BYTES} bytes"
            )));
        }
        metadata
            .entry(key.to_owned())
            .or_insert_with(|| String::from_utf8_lossy(bytes).into_owned());
    }
    Ok(metadata)
}

/// Makes `metadata` the whole set of an open file: what is not in it goes.
pub(crate) fn replace(file: BorrowedFd<'_>, metadata: &Metadata) -> Result<(), Errno> {
    let mut list = vec![0; MAX_LIST_BYTES];
    let old = match flistxattr(file, &mut list[..]) {
        Ok(len) => ours(&list[..len]),
        // A file system without attributes has none to clear.
        Err(Errno::NOTSUP | Errno::RANGE) if metadata.is_empty() => return Ok(()),
        Err(error) => return Err(error),
    };
    for key in old.iter().filter(|key| !metadata.contains_key(*key)) {
        match fremovexattr(file, format!("{XATTR_PREFIX}{key}")) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(error) => return Err(error),
        }
    }
    for (key, value) in metadata {
        let name = format!("{XATTR_PREFIX}{key}");
        // Setting the same value again would be one more event for watchers.
        let mut have = vec![0; MAX_TOTAL_BYTES];
        let same = old.contains(key)
            && fgetxattr(file, name.as_str(), &mut have[..])
                .is_ok_and(|len| have.get(..len) == Some(value.as_bytes()));
        if !same {
            fsetxattr(file, name, value.as_bytes(), XattrFlags::empty())?;
        }
    }
    Ok(())
}

/// Reads a file's metadata; what cannot be read is left out.
pub(crate) fn read(path: &Path) -> Metadata {
    // Nearly every file has few attributes or none: no large buffer for those.
    let mut few = [0; 512];
    let keys = match llistxattr(path, &mut few[..]) {
        Ok(len) => ours(&few[..len]),
        Err(Errno::RANGE) => {
            let mut many = vec![0; MAX_LIST_BYTES];
            match llistxattr(path, &mut many[..]) {
                Ok(len) => ours(&many[..len]),
                Err(_) => return Metadata::new(),
            }
        }
        Err(_) => return Metadata::new(),
    };
    if keys.is_empty() {
        return Metadata::new();
    }
    let mut metadata = Metadata::new();
    let mut value = vec![0; MAX_TOTAL_BYTES];
    for key in keys {
        let Ok(len) = lgetxattr(path, format!("{XATTR_PREFIX}{key}"), &mut value[..]) else {
            continue;
        };
        let text = String::from_utf8_lossy(&value[..len]).into_owned();
        metadata.insert(key, text);
    }
    metadata
}

/// Our keys in a NUL-separated list of attribute names.
fn ours(list: &[u8]) -> Vec<String> {
    list.split(|b| *b == 0)
        .filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(XATTR_PREFIX))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn parse(pairs: &[(&str, &str)]) -> Result<Metadata, FileError> {
        let headers = pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_bytes(name.as_bytes()).expect("name"),
                    HeaderValue::from_bytes(value.as_bytes()).expect("value"),
                )
            })
            .collect();
        from_headers(&headers)
    }

    #[test]
    fn headers_become_a_map_with_lower_case_keys() {
        let got = parse(&[("X-Metadata-Author", "me"), ("X-Other", "x")]).expect("metadata");
        assert_eq!(got, Metadata::from([("author".into(), "me".into())]));
        assert!(parse(&[]).expect("none").is_empty());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let message = |pairs: &[(&str, &str)]| parse(pairs).expect_err("refused").message;
        assert!(message(&[("x-metadata-", "v")]).contains("empty"));
        assert!(message(&[("x-metadata-a", "ż")]).contains("printable"));
        assert!(message(&[("x-metadata-a", "a\tb")]).contains("printable"));
        let long = format!("x-metadata-{}", "k".repeat(MAX_KEY_BYTES + 1));
        assert!(message(&[(&long, "v")]).contains("longer"));
        let big = "v".repeat(MAX_TOTAL_BYTES);
        assert!(message(&[("x-metadata-a", &big)]).contains("larger"));
    }

    #[test]
    fn a_set_replaces_the_set_before() {
        let file = tempfile::NamedTempFile::new_in(".").expect("file");
        let set = |pairs: &[(&str, &str)]| {
            use std::os::fd::AsFd;
            let map = pairs
                .iter()
                .map(|(k, v)| ((*k).into(), (*v).into()))
                .collect();
            replace(file.as_file().as_fd(), &map).expect("replace");
            assert_eq!(read(file.path()), map);
        };
        set(&[("a", "1"), ("b", "2")]);
        set(&[("b", "3")]);
        set(&[]);
    }
}
