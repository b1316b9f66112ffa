//! Paths of requests become absolute and clean, or are refused; doing it twice changes nothing.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use sandkeep_agent::{paths::resolve, users::User};

fuzz_target!(|input: &str| {
    let mut lines = input.splitn(3, '\n');
    let path = lines.next().unwrap_or_default();
    let home = lines.next().unwrap_or_default();
    let workdir = lines.next().map(Path::new);
    let user = User {
        name: "user".to_owned(),
        uid: 1000,
        gid: 1000,
        home: home.into(),
    };
    let Ok(found) = resolve(path, &user, workdir) else {
        return;
    };
    let mut components = found.components();
    assert_eq!(components.next(), Some(Component::RootDir), "{found:?}");
    assert!(
        components.all(|part| matches!(part, Component::Normal(_))),
        "{found:?}"
    );
    let text = found.to_str().expect("made of text");
    if !text.contains('\0') {
        assert_eq!(resolve(text, &user, None).as_ref(), Ok(&found));
    }
});
