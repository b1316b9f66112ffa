//! Byte ranges and conditional requests (RFC 9110 §13 and §14).

use http::{HeaderMap, header};
use std::time::{Duration, SystemTime};

/// What a `Range` header asks of a file of known size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeAnswer {
    /// No range, or one we need not honour: send everything.
    Whole,
    /// Send `len` bytes from `start`.
    Part { start: u64, len: u64 },
    /// Nothing of the file is in the range: 416.
    Unsatisfiable,
}

/// Reads a `Range` value. Several ranges at once, and units other than bytes,
/// are answered with the whole file, as the standard allows.
#[must_use]
pub fn parse_range(value: &str, size: u64) -> RangeAnswer {
    let Some((unit, spec)) = value.split_once('=') else {
        return RangeAnswer::Whole;
    };
    if !unit.trim().eq_ignore_ascii_case("bytes") || spec.contains(',') {
        return RangeAnswer::Whole;
    }
    let Some((first, last)) = spec.trim().split_once('-') else {
        return RangeAnswer::Whole;
    };
    match (number(first.trim()), number(last.trim())) {
        (Number::Absent, Number::Is(suffix)) => {
            if suffix == 0 || size == 0 {
                return RangeAnswer::Unsatisfiable;
            }
            let len = suffix.min(size);
            RangeAnswer::Part {
                start: size - len,
                len,
            }
        }
        (Number::Is(start), last @ (Number::Absent | Number::Is(_))) => {
            let end = match last {
                Number::Is(end) if end < start => return RangeAnswer::Whole,
                Number::Is(end) => end.min(size.saturating_sub(1)),
                _ => size.saturating_sub(1),
            };
            if start >= size {
                return RangeAnswer::Unsatisfiable;
            }
            RangeAnswer::Part {
                start,
                len: end - start + 1,
            }
        }
        _ => RangeAnswer::Whole,
    }
}

enum Number {
    Absent,
    Is(u64),
    Malformed,
}

fn number(text: &str) -> Number {
    if text.is_empty() {
        return Number::Absent;
    }
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Number::Malformed;
    }
    // More digits than fit is simply far beyond every file's end.
    Number::Is(text.parse().unwrap_or(u64::MAX))
}

/// What identifies one version of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Validators {
    /// A strong entity tag, quotes included.
    pub etag: String,
    /// When the file was last changed.
    pub modified: SystemTime,
}

/// What the conditions of a request lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Proceed,
    NotModified,
    Failed,
}

impl Validators {
    /// Evaluates the conditional headers in the order RFC 9110 §13.2.2 gives.
    #[must_use]
    pub fn check(&self, headers: &HeaderMap) -> Condition {
        let value = |name| headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(tags) = value(header::IF_MATCH) {
            if !self.listed(tags, true) {
                return Condition::Failed;
            }
        } else if let Some(date) = value(header::IF_UNMODIFIED_SINCE).and_then(http_date)
            && self.modified_seconds() > date
        {
            return Condition::Failed;
        }
        if let Some(tags) = value(header::IF_NONE_MATCH) {
            if self.listed(tags, false) {
                return Condition::NotModified;
            }
        } else if let Some(date) = value(header::IF_MODIFIED_SINCE).and_then(http_date)
            && self.modified_seconds() <= date
        {
            return Condition::NotModified;
        }
        Condition::Proceed
    }

    /// Whether a `Range` may be honoured, given `If-Range`.
    #[must_use]
    pub fn range_applies(&self, headers: &HeaderMap) -> bool {
        let Some(value) = headers.get(header::IF_RANGE) else {
            return true;
        };
        let Ok(value) = value.to_str() else {
            return false;
        };
        if value.trim_start().starts_with(['"', 'W']) {
            return value.trim() == self.etag;
        }
        http_date(value).is_some_and(|date| date == self.modified_seconds())
    }

    /// Whether an entity-tag list names this version.
    fn listed(&self, list: &str, strong: bool) -> bool {
        list.split(',').map(str::trim).any(|tag| {
            if tag == "*" {
                return true;
            }
            match tag.strip_prefix("W/") {
                Some(weak) => !strong && weak == self.etag,
                None => tag == self.etag,
            }
        })
    }

    /// HTTP dates have no fractions.
    fn modified_seconds(&self) -> u64 {
        self.modified
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_secs()
    }
}

fn http_date(value: &str) -> Option<u64> {
    let time = httpdate::parse_http_date(value.trim()).ok()?;
    time.duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .map(|since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn ranges() {
        let part = |start, len| RangeAnswer::Part { start, len };
        let cases = [
            ("bytes=0-9", 100, part(0, 10)),
            ("bytes=90-", 100, part(90, 10)),
            ("bytes=-5", 100, part(95, 5)),
            ("bytes=-500", 100, part(0, 100)),
            ("bytes=0-0", 1, part(0, 1)),
            ("bytes=50-1000", 100, part(50, 50)),
            ("Bytes= 1 - 2 ", 10, part(1, 2)),
            ("bytes=0-99999999999999999999999", 10, part(0, 10)),
            ("bytes=100-", 100, RangeAnswer::Unsatisfiable),
            (
                "bytes=99999999999999999999999-",
                100,
                RangeAnswer::Unsatisfiable,
            ),
            ("bytes=-0", 100, RangeAnswer::Unsatisfiable),
            ("bytes=0-", 0, RangeAnswer::Unsatisfiable),
            ("bytes=-1", 0, RangeAnswer::Unsatisfiable),
            ("bytes=5-4", 100, RangeAnswer::Whole),
            ("bytes=-", 100, RangeAnswer::Whole),
            ("bytes=a-b", 100, RangeAnswer::Whole),
            ("bytes=+1-2", 100, RangeAnswer::Whole),
            ("bytes=0-1,3-4", 100, RangeAnswer::Whole),
            ("lines=0-1", 100, RangeAnswer::Whole),
            ("", 100, RangeAnswer::Whole),
        ];
        for (value, size, want) in cases {
            assert_eq!(parse_range(value, size), want, "{value} of {size}");
        }
    }

    fn validators() -> Validators {
        Validators {
            etag: "\"abc\"".into(),
            modified: SystemTime::UNIX_EPOCH + Duration::from_millis(784_111_777_500),
        }
    }

    fn check(pairs: &[(header::HeaderName, &'static str)]) -> Condition {
        validators().check(&headers(pairs))
    }

    fn headers(pairs: &[(header::HeaderName, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.clone(), HeaderValue::from_static(value)))
            .collect()
    }

    const AT: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
    const BEFORE: &str = "Sun, 06 Nov 1994 08:49:36 GMT";

    #[test]
    fn conditions() {
        use header::{IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE};
        assert_eq!(check(&[]), Condition::Proceed);
        assert_eq!(
            check(&[(IF_NONE_MATCH, "\"x\", W/\"abc\"")]),
            Condition::NotModified
        );
        assert_eq!(check(&[(IF_NONE_MATCH, "*")]), Condition::NotModified);
        assert_eq!(check(&[(IF_NONE_MATCH, "\"x\"")]), Condition::Proceed);
        assert_eq!(check(&[(IF_MATCH, "\"abc\"")]), Condition::Proceed);
        assert_eq!(check(&[(IF_MATCH, "W/\"abc\"")]), Condition::Failed);
        assert_eq!(check(&[(IF_MODIFIED_SINCE, AT)]), Condition::NotModified);
        assert_eq!(check(&[(IF_MODIFIED_SINCE, BEFORE)]), Condition::Proceed);
        assert_eq!(check(&[(IF_MODIFIED_SINCE, "soon")]), Condition::Proceed);
        assert_eq!(check(&[(IF_UNMODIFIED_SINCE, AT)]), Condition::Proceed);
        assert_eq!(check(&[(IF_UNMODIFIED_SINCE, BEFORE)]), Condition::Failed);
        // A tag, where given, outweighs the date.
        let both = [(IF_NONE_MATCH, "\"x\""), (IF_MODIFIED_SINCE, AT)];
        assert_eq!(check(&both), Condition::Proceed);
    }

    #[test]
    fn if_range() {
        let applies = |value| validators().range_applies(&headers(&[(header::IF_RANGE, value)]));
        assert!(validators().range_applies(&HeaderMap::new()));
        assert!(applies("\"abc\""));
        assert!(!applies("W/\"abc\""));
        assert!(!applies("\"old\""));
        assert!(applies(AT));
        assert!(!applies(BEFORE));
    }
}
