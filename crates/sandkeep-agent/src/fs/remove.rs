//! Removing a whole tree, however deep, without recursion and with a bounded
//! number of open directories.

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, unlinkat};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Ancestors kept open; those above are found again by `..`.
const MAX_OPEN_LEVELS: usize = 64;
/// How often a directory that refills while we empty it is emptied again.
const MAX_REFILLS: u32 = 100;

/// A directory being emptied.
struct Level {
    fd: Option<OwnedFd>,
    identity: (u64, u64),
    name_in_parent: CString,
}

/// Removes what is at `path`, links not followed. Nothing there is success.
pub(crate) fn remove_all(path: &Path) -> Result<(), Errno> {
    let missing_is_fine = |error| match error {
        Errno::NOENT | Errno::NOTDIR => Ok(()),
        error => Err(error),
    };
    match rustix::fs::unlink(path) {
        Ok(()) => return Ok(()),
        // Linux says EISDIR for a directory, POSIX says EPERM.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return missing_is_fine(error),
    }
    let flags = directory_flags();
    let top = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(top) => top,
        // It was no directory: then the first error is the true one.
        Err(Errno::NOTDIR) => return Err(Errno::PERM),
        Err(error) => return missing_is_fine(error),
    };
    empty(top)?;
    rustix::fs::rmdir(path).or_else(missing_is_fine)
}

/// Removes everything in the directory `top`.
fn empty(top: OwnedFd) -> Result<(), Errno> {
    let mut refills = 0;
    let mut stack = vec![level(top, CString::default())?];
    while let Some(current) = stack.last() {
        let fd = open_fd(current)?;
        if let Some(name) = unlink_files(fd)? {
            match openat(fd, &name, directory_flags(), Mode::empty()) {
                Ok(child) => stack.push(level(child, name)?),
                // Swapped for something else, or gone: look again.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => refill(&mut refills)?,
                Err(error) => return Err(error),
            }
            if let Some(far) = stack.len().checked_sub(MAX_OPEN_LEVELS + 1) {
                stack[far].fd = None;
            }
            continue;
        }
        let Some(done) = stack.pop() else { break };
        let Some(parent) = stack.last_mut() else {
            break;
        };
        if parent.fd.is_none() {
            parent.fd = Some(reopen_parent(open_fd(&done)?, parent.identity)?);
        }
        match unlinkat(open_fd(parent)?, &done.name_in_parent, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            // Somebody put something in: the parent's next turn finds it.
            Err(Errno::NOTEMPTY | Errno::EXIST) => refill(&mut refills)?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn refill(refills: &mut u32) -> Result<(), Errno> {
    *refills += 1;
    if *refills > MAX_REFILLS {
        return Err(Errno::NOTEMPTY);
    }
    Ok(())
}

/// Unlinks what is not a directory, and stops at the first that is.
fn unlink_files(fd: BorrowedFd<'_>) -> Result<Option<CString>, Errno> {
    for entry in Dir::read_from(fd)? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            return Ok(Some(name.to_owned()));
        }
        match unlinkat(fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => return Ok(Some(name.to_owned())),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Goes up by `..`, refusing to arrive anywhere but where we came from: the
/// tree may be moved under our feet.
fn reopen_parent(child: BorrowedFd<'_>, identity: (u64, u64)) -> Result<OwnedFd, Errno> {
    let parent = openat(child, "..", directory_flags(), Mode::empty())?;
    if identify(&parent)? != identity {
        return Err(Errno::BUSY);
    }
    Ok(parent)
}

fn level(fd: OwnedFd, name_in_parent: CString) -> Result<Level, Errno> {
    Ok(Level {
        identity: identify(&fd)?,
        fd: Some(fd),
        name_in_parent,
    })
}

fn open_fd(level: &Level) -> Result<BorrowedFd<'_>, Errno> {
    level.fd.as_ref().map(AsFd::as_fd).ok_or(Errno::BADF)
}

fn identify(fd: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{mkdirat, open};

    #[test]
    fn trees_links_and_nothing_at_all() {
        let dir = tempfile::tempdir().expect("dir");
        let root = dir.path();
        std::fs::create_dir_all(root.join("tree/a/b")).expect("dirs");
        std::fs::create_dir_all(root.join("tree/c")).expect("dirs");
        std::fs::create_dir(root.join("kept")).expect("dir");
        std::fs::write(root.join("kept/file"), "").expect("file");
        std::fs::write(root.join("tree/a/file"), "").expect("file");
        std::os::unix::fs::symlink(root.join("kept"), root.join("tree/link")).expect("link");
        std::os::unix::fs::symlink(root.join("kept"), root.join("link")).expect("link");

        remove_all(&root.join("tree")).expect("tree");
        remove_all(&root.join("link")).expect("link");
        remove_all(&root.join("missing")).expect("missing");
        remove_all(&root.join("kept/file/below")).expect("below a file");
        assert!(root.join("kept/file").exists());
        let left: Vec<_> = std::fs::read_dir(root).expect("read").collect();
        assert_eq!(left.len(), 1);
    }

    #[test]
    fn deeper_than_a_path_can_name() {
        let dir = tempfile::tempdir().expect("dir");
        let top = dir.path().join("deep");
        std::fs::create_dir(&top).expect("dir");
        let mut fd = open(&top, directory_flags(), Mode::empty()).expect("open");
        for _ in 0..3000 {
            mkdirat(&fd, "d", Mode::from(0o755)).expect("mkdir");
            fd = openat(&fd, "d", directory_flags(), Mode::empty()).expect("open");
        }
        drop(fd);
        remove_all(&top).expect("remove");
        assert!(!top.exists());
    }
}
