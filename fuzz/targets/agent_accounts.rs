//! `/etc/passwd` and `/etc/group`, which belong to the box, and the kernel's table of sockets.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent::{
    ports,
    users::{Names, find_user, member_groups},
};

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let (passwd, group) = text.split_once('\0').unwrap_or((&text, &text));
    let names = Names::from_text(passwd.to_owned(), group.to_owned());
    for id in [0, 1000, u32::MAX] {
        assert!(!names.user(id).is_empty());
        assert!(!names.group(id).is_empty());
    }
    if let Some(user) = find_user(passwd, |_| true) {
        assert!(user.home.is_absolute());
        assert!(!user.name.contains([':', '\n']));
        assert_eq!(
            find_user(passwd, |other| other.name == user.name),
            Some(user.clone())
        );
        let groups = member_groups(group, &user);
        assert_eq!(groups.first(), Some(&user.gid));
    }
    ports::parse(&text);
});
