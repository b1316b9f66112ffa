//! The account `user` of images from elsewhere.
//!
//! Builds and sandboxes act as `user` unless they are told otherwise, and images of distributions
//! have no such account. So it is made when they are taken in, as clients of E2B expect it: with
//! the number 1000 where that is free, a home, bash where there is one, and sudo without a password
//! where there is sudo.
//!
//! Nothing of the image is run. Every path is resolved inside it by the kernel.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{Gid, Mode, OFlags, ResolveFlags, Uid, openat2},
    io::Errno,
};
use sandkeep_model::Result;

use crate::doing::Doing;

const NAME: &str = "user";
const NUMBER: u32 = 1000;
/// Numbers above are for others (`nobody`, services).
const LAST_NUMBER: u32 = 59_999;
const LARGEST_TABLE: u64 = 4 << 20;
const HOME_MODE: u32 = 0o755;

/// Makes the account in an image that has accounts, but not this one.
pub fn add_user(root: &Path) -> Result<()> {
    add(root).doing_to("making the account `user` in", root)
}

fn add(root: &Path) -> io::Result<()> {
    let root = File::open(root)?;
    let root = root.as_fd();
    let Some(mut passwd) = table(root, "etc/passwd")? else {
        return Ok(());
    };
    if passwd.has(NAME) {
        return Ok(());
    }
    let mut group = table(root, "etc/group")?;
    let is_free = |number: &u32| {
        !passwd.has_number(*number)
            && !group
                .as_ref()
                .is_some_and(|group| group.has_number(*number))
    };
    let Some(number) = (NUMBER..=LAST_NUMBER).find(is_free) else {
        return Ok(());
    };
    let shell = match is_there(root, "bin/bash") {
        true => "/bin/bash",
        false => "/bin/sh",
    };
    passwd.add(&format!("{NAME}:x:{number}:{number}::/home/{NAME}:{shell}"))?;
    if let Some(group) = group.as_mut().filter(|group| !group.has(NAME)) {
        group.add(&format!("{NAME}:x:{number}:"))?;
    }
    // No password: nobody logs in with one.
    if let Some(mut shadow) = table(root, "etc/shadow")? {
        shadow.add(&format!("{NAME}:!:::::::"))?;
    }
    if let Some(mut shadow) = table(root, "etc/gshadow")? {
        shadow.add(&format!("{NAME}:!::"))?;
    }
    make_home(root, number)?;
    may_become_root(root)
}

/// One of the tables of accounts.
struct Table {
    file: File,
    text: Vec<u8>,
}

fn table(root: BorrowedFd<'_>, path: &str) -> io::Result<Option<Table>> {
    let opened = open(root, path, OFlags::RDWR | OFlags::NONBLOCK);
    let file = match opened {
        Ok(file) => File::from(file),
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let found = file.metadata()?;
    if !found.is_file() || found.len() > LARGEST_TABLE {
        return Ok(None);
    }
    let mut text = Vec::new();
    (&file).take(LARGEST_TABLE).read_to_end(&mut text)?;
    Ok(Some(Table { file, text }))
}

impl Table {
    fn fields(&self) -> impl Iterator<Item = impl Iterator<Item = &[u8]>> {
        self.text
            .split(|&byte| byte == b'\n')
            .map(|line| line.split(|&byte| byte == b':'))
    }

    fn has(&self, name: &str) -> bool {
        self.fields()
            .any(|mut fields| fields.next() == Some(name.as_bytes()))
    }

    fn has_number(&self, number: u32) -> bool {
        let number = number.to_string();
        self.fields()
            .any(|mut fields| fields.nth(2) == Some(number.as_bytes()))
    }

    fn add(&mut self, line: &str) -> io::Result<()> {
        self.file.seek(SeekFrom::End(0))?;
        let apart = match self.text.last() {
            None | Some(b'\n') => "",
            Some(_) => "\n",
        };
        self.file.write_all(format!("{apart}{line}\n").as_bytes())
    }
}

fn open(root: BorrowedFd<'_>, path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    openat2(
        root,
        path,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV,
    )
}

fn is_there(root: BorrowedFd<'_>, path: &str) -> bool {
    open(root, path, OFlags::PATH).is_ok()
}

fn make_home(root: BorrowedFd<'_>, number: u32) -> io::Result<()> {
    let directory = OFlags::PATH | OFlags::DIRECTORY;
    let homes = match open(root, "home", directory) {
        Ok(homes) => homes,
        Err(Errno::NOENT) => {
            match rustix::fs::mkdirat(root, "home", Mode::from_raw_mode(HOME_MODE)) {
                Ok(()) => open(root, "home", directory)?,
                // A link to what the image makes when it boots, perhaps.
                Err(Errno::EXIST) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Err(error) => return Err(error.into()),
    };
    match rustix::fs::mkdirat(&homes, NAME, Mode::from_raw_mode(HOME_MODE)) {
        Ok(()) => {}
        // Whatever it holds is the image's; it is given to the account.
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let home = rustix::fs::openat(&homes, NAME, flags, Mode::empty())?;
    rustix::fs::fchown(
        &home,
        Some(Uid::from_raw(number)),
        Some(Gid::from_raw(number)),
    )?;
    Ok(())
}

/// As in E2B's own images. Root of a sandbox is no more than its `user` may become anyway.
fn may_become_root(root: BorrowedFd<'_>) -> io::Result<()> {
    const RULE: &[u8] = b"user ALL=(ALL:ALL) NOPASSWD: ALL\n";
    let rules = match open(root, "etc/sudoers.d", OFlags::PATH | OFlags::DIRECTORY) {
        Ok(rules) => rules,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::openat(&rules, NAME, flags, Mode::from_raw_mode(0o440)) {
        Ok(file) => File::from(file).write_all(RULE),
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn image() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("etc/sudoers.d")).unwrap();
        std::fs::write(
            root.path().join("etc/passwd"),
            "root:x:0:0:root:/root:/bin/sh",
        )
        .unwrap();
        std::fs::write(root.path().join("etc/group"), "root:x:0:\n").unwrap();
        root
    }

    fn read(root: &tempfile::TempDir, path: &str) -> String {
        std::fs::read_to_string(root.path().join(path)).unwrap()
    }

    #[test]
    fn an_image_without_the_account_gets_it_once() {
        let root = image();
        for _ in 0..2 {
            add_user(root.path()).unwrap();
        }
        assert_eq!(
            read(&root, "etc/passwd"),
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
        );
        assert_eq!(read(&root, "etc/group"), "root:x:0:\nuser:x:1000:\n");
        assert!(read(&root, "etc/sudoers.d/user").contains("NOPASSWD"));
        let home = std::fs::metadata(root.path().join("home/user")).unwrap();
        assert_eq!((home.uid(), home.gid()), (1000, 1000));
    }

    #[test]
    fn a_number_that_is_taken_is_left_to_its_owner() {
        let root = image();
        let passwd = "ubuntu:x:1000:1000::/home/ubuntu:/bin/bash\n";
        std::fs::write(root.path().join("etc/passwd"), passwd).unwrap();
        add_user(root.path()).unwrap();
        assert!(read(&root, "etc/passwd").contains("user:x:1001:1001:"));
    }

    #[test]
    fn links_of_a_hostile_image_lead_nowhere_outside() {
        let outside = tempfile::tempdir().unwrap();
        let table = outside.path().join("passwd");
        std::fs::write(&table, "root:x:0:0::/:/bin/sh\n").unwrap();
        let root = image();
        std::fs::remove_file(root.path().join("etc/passwd")).unwrap();
        symlink(&table, root.path().join("etc/passwd")).unwrap();
        add_user(root.path()).unwrap();
        assert!(!std::fs::read_to_string(&table).unwrap().contains("user"));
        std::fs::remove_file(root.path().join("etc/passwd")).unwrap();
        std::fs::write(root.path().join("etc/passwd"), "").unwrap();
        symlink(outside.path(), root.path().join("home")).unwrap();
        add_user(root.path()).unwrap();
        assert!(!outside.path().join("user").exists());
    }
}
