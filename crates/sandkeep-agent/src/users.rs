//! Users and groups of the box, read from its own files.
//!
//! The agent is static, so it cannot ask the C library (which would load name service modules
//! from the box). The files belong to the box: they may be huge, or a pipe that never answers.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
const MAX_FILE: u64 = 4 << 20;
/// The kernel's limit on supplementary groups.
const MAX_GROUPS: usize = 65_536;

/// A user of the box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: PathBuf,
}

/// The user of that name.
pub fn lookup(name: &str) -> io::Result<Option<User>> {
    Ok(find_user(&read_bounded(Path::new(PASSWD))?, |user| {
        user.name == name
    }))
}

/// The groups a process of this user gets, its own group first.
pub fn groups_of(user: &User) -> io::Result<Vec<u32>> {
    Ok(member_groups(&read_bounded(Path::new(GROUP))?, user))
}

/// Names for numbers, from one reading of both files; for showing who owns many files.
#[derive(Debug)]
pub struct Names {
    passwd: String,
    group: String,
}

impl Names {
    /// From the text of both files.
    pub fn from_text(passwd: String, group: String) -> Self {
        Self { passwd, group }
    }

    /// Reads both files; one that cannot be read knows no names.
    pub fn load() -> Self {
        let read = |path| read_bounded(Path::new(path)).unwrap_or_default();
        Self::from_text(read(PASSWD), read(GROUP))
    }

    /// The user's name, or the number as text.
    pub fn user(&self, uid: u32) -> String {
        find_user(&self.passwd, |user| user.uid == uid)
            .map_or_else(|| uid.to_string(), |user| user.name)
    }

    /// The group's name, or the number as text.
    pub fn group(&self, gid: u32) -> String {
        parse_groups(&self.group)
            .find(|group| group.gid == gid)
            .map_or_else(|| gid.to_string(), |group| group.name.to_owned())
    }
}

/// Reads a text file of the box: regular, at most 4 MiB, never blocking on a pipe.
pub(crate) fn read_bounded(path: &Path) -> io::Result<String> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other(format!(
            "{} is not a regular file",
            path.display()
        )));
    }
    // In one read; every start of a process comes by here. One byte more shows the end.
    let expected = usize::try_from(found.len().min(MAX_FILE)).unwrap_or(0);
    let mut bytes = Vec::with_capacity(expected + 1);
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    })
}

/// The first user in the text of a passwd file that is wanted.
pub fn find_user(passwd: &str, wanted: impl Fn(&User) -> bool) -> Option<User> {
    passwd.lines().filter_map(parse_user).find(wanted)
}

fn parse_user(line: &str) -> Option<User> {
    let mut fields = line.split(':');
    let name = fields
        .next()
        .filter(|name| !name.is_empty() && !name.starts_with('#'))?;
    let uid = fields.nth(1)?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    let home = fields
        .nth(1)
        .filter(|home| home.starts_with('/'))
        .unwrap_or("/");
    Some(User {
        name: name.to_owned(),
        uid,
        gid,
        home: PathBuf::from(home),
    })
}

struct Group<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

fn parse_groups(text: &str) -> impl Iterator<Item = Group<'_>> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let gid = fields.nth(1)?.parse().ok()?;
        Some(Group {
            name,
            gid,
            members: fields.next().unwrap_or_default(),
        })
    })
}

/// The user's own group and those of a group file's text that list the user.
pub fn member_groups(group_file: &str, user: &User) -> Vec<u32> {
    let mut groups = vec![user.gid];
    for group in parse_groups(group_file) {
        let is_member = group
            .members
            .split(',')
            .any(|member| member.trim() == user.name);
        if is_member && !groups.contains(&group.gid) && groups.len() < MAX_GROUPS {
            groups.push(group.gid);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n# note\nbroken\nuser:x:1000:1000::/home/user:/bin/bash\nodd:x:7:7:::\n";
    const GROUP: &str = "root:x:0:\nsudo:x:27:other,user\nuser:x:1000:user\ndocker:x:999:user,\n";

    #[test]
    fn users_are_found_by_name() {
        let user = find_user(PASSWD, |user| user.name == "user").unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1000));
        assert_eq!(user.home, Path::new("/home/user"));
        assert_eq!(
            find_user(PASSWD, |user| user.name == "odd").unwrap().home,
            Path::new("/")
        );
        assert_eq!(find_user(PASSWD, |user| user.name == "# note"), None);
        assert_eq!(find_user(PASSWD, |user| user.name.is_empty()), None);
    }

    #[test]
    fn supplementary_groups_come_after_the_users_own() {
        let user = find_user(PASSWD, |user| user.name == "user").unwrap();
        assert_eq!(member_groups(GROUP, &user), [1000, 27, 999]);
    }

    #[test]
    fn numbers_without_a_name_stay_numbers() {
        let names = Names {
            passwd: PASSWD.into(),
            group: GROUP.into(),
        };
        assert_eq!(names.user(1000), "user");
        assert_eq!(names.user(5), "5");
        assert_eq!(names.group(27), "sudo");
        assert_eq!(names.group(5), "5");
    }

    #[test]
    fn a_pipe_in_place_of_the_file_does_not_block() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("passwd");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        assert!(read_bounded(&path).is_err());
    }
}
