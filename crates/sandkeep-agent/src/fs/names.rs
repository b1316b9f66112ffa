//! Who owns files, by name, for replies that show many of them.

use crate::users;
use std::cell::RefCell;
use std::collections::HashMap;

/// Names looked up once each: the box's account files may be long.
#[derive(Debug)]
pub(crate) struct Names {
    source: users::Names,
    users: RefCell<HashMap<u32, String>>,
    groups: RefCell<HashMap<u32, String>>,
}

impl Names {
    /// Reads the box's account files.
    pub(crate) fn load() -> Self {
        Self {
            source: users::Names::load(),
            users: RefCell::default(),
            groups: RefCell::default(),
        }
    }

    /// The user's name, or the number as text.
    pub(crate) fn user(&self, uid: u32) -> String {
        let mut known = self.users.borrow_mut();
        let name = known.entry(uid).or_insert_with(|| self.source.user(uid));
        name.clone()
    }

    /// The group's name, or the number as text.
    pub(crate) fn group(&self, gid: u32) -> String {
        let mut known = self.groups.borrow_mut();
        let name = known.entry(gid).or_insert_with(|| self.source.group(gid));
        name.clone()
    }
}
