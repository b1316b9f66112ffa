//! `Range`, the conditional headers, `Accept-Encoding`, and the two numbers of Connect.
#![no_main]

use std::time::{Duration, Instant, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue, header};
use libfuzzer_sys::fuzz_target;
use sandkeep_agent::{
    connect::{call_timeout, keepalive_interval},
    fs::{
        negotiate::{Accepted, Coding},
        range::{RangeAnswer, Validators, parse_range},
    },
};

/// In this order, one line each.
const NAMES: [HeaderName; 9] = [
    header::RANGE,
    header::ACCEPT_ENCODING,
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::IF_RANGE,
    HeaderName::from_static("connect-timeout-ms"),
    HeaderName::from_static("keepalive-ping-interval"),
];

fuzz_target!(|data: &[u8]| {
    let Some((size, lines)) = data.split_first_chunk::<8>() else {
        return;
    };
    let size = u64::from_le_bytes(*size);
    let mut headers = HeaderMap::new();
    for (name, line) in NAMES.into_iter().zip(lines.split(|b| *b == b'\n')) {
        if let Ok(value) = HeaderValue::from_bytes(line)
            && !value.is_empty()
        {
            headers.insert(name, value);
        }
    }
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(range) = text(header::RANGE) {
        for size in [size, size % 64, 0] {
            check_range(range, size);
        }
    }
    check_accepted(Accepted::parse(text(header::ACCEPT_ENCODING)));
    let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(size % (1 << 40));
    let validators = Validators {
        etag: "\"5-1\"".to_owned(),
        modified,
    };
    let _condition = validators.check(&headers);
    let _applies = validators.range_applies(&headers);
    // The agent adds the one to the clock and sleeps for the other.
    if let Some(limit) = call_timeout(&headers) {
        assert!(!limit.is_zero());
        let _end = Instant::now() + limit;
    }
    assert!(!keepalive_interval(&headers).is_zero());
});

fn check_range(value: &str, size: u64) {
    if let RangeAnswer::Part { start, len } = parse_range(value, size) {
        assert!(len > 0);
        assert!(start.checked_add(len).is_some_and(|end| end <= size));
    }
}

fn check_accepted(accepted: Accepted) {
    assert!(accepted.gzip <= 1000 && accepted.identity <= 1000);
    for helps in [true, false] {
        match accepted.choose(helps) {
            Some(Coding::Gzip) => assert!(accepted.gzip > 0),
            Some(Coding::Identity) => assert!(accepted.identity > 0),
            None => assert_eq!((accepted.gzip, accepted.identity), (0, 0)),
        }
    }
}
