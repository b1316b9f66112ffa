//! Which box a request is for, and what a file URL is signed for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent::fs::query::FilesQuery;
use sandkeep_gateway::{FileQuery, Operation, Route, route, sign};
use sandkeep_model::Secret;

fuzz_target!(|input: &str| {
    let mut lines = input
        .split('\n')
        .map(|line| (!line.is_empty()).then_some(line));
    let mut line = || lines.next().flatten();
    let (query, host, id, port, domain) = (line(), line(), line(), line(), line());
    if let Ok(Route::Box(target)) = route(host, id, port, domain) {
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        assert!((1..=63).contains(&target.sandbox.len()));
        assert!(target.sandbox.bytes().all(plain));
        assert_ne!(target.port, 0);
    }
    file_query(query.unwrap_or_default());
});

/// What is checked here is what the agent obeys: both must read the same in a query.
fn file_query(text: &str) {
    let checked = FileQuery::parse(text);
    checked.expired(1_700_000_000);
    let token = Secret::new("token");
    assert!(!checked.signed_with(Operation::Read, &token));
    if checked.ambiguous {
        return;
    }
    if let Ok(obeyed) = FilesQuery::parse(Some(text)) {
        assert_eq!(obeyed.path.unwrap_or_default().as_bytes(), checked.path);
        assert_eq!(
            obeyed.username.unwrap_or_default().as_bytes(),
            checked.username
        );
    }
    signed(&checked, &token);
}

/// A signature made for these words is good for them, and for nothing else.
fn signed(query: &FileQuery, token: &Secret) {
    let (Ok(path), Ok(user)) = (
        std::str::from_utf8(&query.path),
        std::str::from_utf8(&query.username),
    ) else {
        return;
    };
    let good = FileQuery {
        signature: Some(sign(path, Operation::Read, Some(user), token, None).into_bytes()),
        expiration: None,
        ..query.clone()
    };
    assert!(good.signed_with(Operation::Read, token));
    assert!(!good.signed_with(Operation::Write, token));
}
