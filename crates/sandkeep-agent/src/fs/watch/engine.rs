//! One inotify instance that follows a directory or a whole tree.

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use sandkeep_agent_api::filesystem::EventType;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Directories one watch may follow.
const MAX_DIRECTORIES: usize = 8192;
/// Changes one `drain` reports before it comes up for air.
const MAX_CHANGES: usize = 4096;
const BUFFER_BYTES: usize = 64 * 1024;

/// Something that happened; the name is relative to the watched directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) name: PathBuf,
    pub(super) kind: EventType,
}

/// What a scan found before its own events could be read.
#[derive(Debug, Default)]
struct Reported {
    written: bool,
}

/// A watched directory or tree.
#[derive(Debug)]
pub(super) struct Watch {
    inotify: Arc<OwnedFd>,
    root: PathBuf,
    recursive: bool,
    /// Watch descriptors and the directories they stand for, relative.
    dirs: HashMap<i32, PathBuf>,
    /// Entries that scans reported while the kernel may have queued the same:
    /// told only once. Empty again whenever the queue is.
    reported: HashMap<(i32, OsString), Reported>,
    /// Directories moved from somewhere, not yet to anywhere.
    moved: HashMap<u32, PathBuf>,
}

/// An event as the kernel tells it.
struct Raw {
    wd: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Option<OsString>,
}

impl Watch {
    /// Starts to watch `root`, which must be a directory.
    pub(super) fn open(root: &Path, recursive: bool) -> Result<Self, Errno> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut watch = Self {
            inotify: Arc::new(inotify),
            root: root.to_path_buf(),
            recursive,
            dirs: HashMap::new(),
            reported: HashMap::new(),
            moved: HashMap::new(),
        };
        let wd = inotify::add_watch(&*watch.inotify, root, interests())?;
        watch.dirs.insert(wd, PathBuf::new());
        if recursive {
            watch.follow_existing(wd)?;
        }
        Ok(watch)
    }

    /// The descriptor that becomes readable when there is something to drain.
    pub(super) fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.inotify)
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// What happened since the last call, oldest first, and whether there is
    /// more to read. Never waits.
    pub(super) fn drain(&mut self) -> (Vec<Change>, bool) {
        let inotify = Arc::clone(&self.inotify);
        let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
        let mut reader = Reader::new(&*inotify, &mut buffer);
        let mut changes = Vec::new();
        loop {
            // Never left with unread events in the buffer.
            if changes.len() >= MAX_CHANGES && reader.is_buffer_empty() {
                return (changes, true);
            }
            let raw = match reader.next() {
                Ok(event) => Raw {
                    wd: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event
                        .file_name()
                        .map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
                },
                Err(Errno::INTR) => continue,
                // The queue is empty; no other error can be helped either.
                Err(_) => break,
            };
            self.handle(&raw, &mut changes);
        }
        self.reported.clear();
        for (_, gone) in std::mem::take(&mut self.moved) {
            self.forget(&gone);
        }
        (changes, false)
    }

    fn handle(&mut self, raw: &Raw, changes: &mut Vec<Change>) {
        if raw.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.catch_up();
            return;
        }
        if raw.flags.contains(ReadFlags::IGNORED) {
            self.dirs.remove(&raw.wd);
            return;
        }
        let Some(dir) = self.dirs.get(&raw.wd) else {
            return;
        };
        let Some(name) = &raw.name else {
            // About the directory itself. Its parent tells, if watched too.
            if dir.as_os_str().is_empty() {
                add(changes, Path::new("."), kind_of_self(raw.flags));
            }
            return;
        };
        let path = dir.join(name);
        let kind = kind_of(raw.flags);
        let key = (raw.wd, name.clone());
        let repeated = match (kind, self.reported.get(&key)) {
            (Some(EventType::Create), Some(_)) => true,
            (Some(EventType::Write), Some(reported)) => reported.written,
            (Some(EventType::Remove | EventType::Rename), Some(_)) => {
                self.reported.remove(&key);
                false
            }
            _ => false,
        };
        if !repeated {
            add(changes, &path, kind);
        }
        if self.recursive && raw.flags.contains(ReadFlags::ISDIR) {
            self.handle_directory(raw, path, changes);
        }
    }

    /// Keeps the set of watched directories right.
    fn handle_directory(&mut self, raw: &Raw, path: PathBuf, changes: &mut Vec<Change>) {
        if raw.flags.contains(ReadFlags::MOVED_FROM) {
            self.moved.insert(raw.cookie, path);
        } else if raw.flags.contains(ReadFlags::MOVED_TO) {
            match self.moved.remove(&raw.cookie) {
                Some(old) => self.rename(&old, &path),
                None => self.follow_new(path, changes),
            }
        } else if raw.flags.contains(ReadFlags::CREATE) {
            self.follow_new(path, changes);
        }
    }

    /// Watches a directory that just appeared, and tells of what was put in
    /// it before the watch could see it.
    fn follow_new(&mut self, path: PathBuf, changes: &mut Vec<Change>) {
        let mut waiting = vec![path];
        while let Some(dir) = waiting.pop() {
            // Gone again, or more than we may watch: it is left unwatched.
            let Ok(Some(wd)) = self.watch_dir(&dir) else {
                continue;
            };
            let Ok(entries) = std::fs::read_dir(self.root.join(&dir)) else {
                continue;
            };
            for entry in entries.flatten() {
                let path = dir.join(entry.file_name());
                let Ok(meta) = entry.metadata() else { continue };
                let written = meta.is_file() && meta.len() > 0;
                add(changes, &path, Some(EventType::Create));
                if written {
                    add(changes, &path, Some(EventType::Write));
                }
                let key = (wd, entry.file_name());
                self.reported.insert(key, Reported { written });
                if meta.is_dir() {
                    waiting.push(path);
                }
            }
        }
    }

    /// Watches everything below a directory, telling nothing.
    fn follow_existing(&mut self, wd: i32) -> Result<(), Errno> {
        let mut waiting: Vec<PathBuf> = self.dirs.get(&wd).cloned().into_iter().collect();
        while let Some(dir) = waiting.pop() {
            let Ok(entries) = std::fs::read_dir(self.root.join(&dir)) else {
                continue;
            };
            for entry in entries.flatten() {
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                let path = dir.join(entry.file_name());
                match self.watch_dir(&path) {
                    Ok(Some(_)) => waiting.push(path),
                    Ok(None) => {}
                    // Vanished, or not for us: not a reason to watch nothing.
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::NAMETOOLONG) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Events were lost: at least miss no directory from here on.
    fn catch_up(&mut self) {
        let known: Vec<i32> = self.dirs.keys().copied().collect();
        if self.recursive {
            for wd in known {
                // Too many directories: those we have go on being watched.
                if self.follow_existing(wd).is_err() {
                    return;
                }
            }
        }
    }

    /// Adds a watch; `None` if that directory has one already.
    fn watch_dir(&mut self, dir: &Path) -> Result<Option<i32>, Errno> {
        if self.dirs.len() >= MAX_DIRECTORIES {
            return Err(Errno::NOSPC);
        }
        let flags = interests() | WatchFlags::DONT_FOLLOW;
        let wd = inotify::add_watch(&*self.inotify, self.root.join(dir), flags)?;
        let old = self.dirs.insert(wd, dir.to_path_buf());
        Ok(old.is_none().then_some(wd))
    }

    /// A watched directory has another name now, and so has all below it.
    fn rename(&mut self, old: &Path, new: &Path) {
        for dir in self.dirs.values_mut() {
            if let Ok(below) = dir.strip_prefix(old) {
                *dir = if below.as_os_str().is_empty() {
                    new.to_path_buf()
                } else {
                    new.join(below)
                };
            }
        }
    }

    /// A directory left the tree: what happens there is no longer ours.
    fn forget(&mut self, gone: &Path) {
        let inotify = &self.inotify;
        self.dirs.retain(|&wd, dir| {
            if !dir.starts_with(gone) {
                return true;
            }
            // Removed by the kernel already, if it fails.
            let _ = inotify::remove_watch(&**inotify, wd);
            false
        });
    }
}

/// Adds a change, unless it only repeats the one before.
fn add(changes: &mut Vec<Change>, name: &Path, kind: Option<EventType>) {
    let Some(kind) = kind else { return };
    if let Some(last) = changes.last()
        && last.kind == kind
        && last.name == name
    {
        return;
    }
    changes.push(Change {
        name: name.to_path_buf(),
        kind,
    });
}

fn interests() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::DELETE
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVE_SELF
        | WatchFlags::ONLYDIR
}

fn kind_of(flags: ReadFlags) -> Option<EventType> {
    if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
        Some(EventType::Create)
    } else if flags.contains(ReadFlags::MODIFY) {
        Some(EventType::Write)
    } else if flags.contains(ReadFlags::DELETE) {
        Some(EventType::Remove)
    } else if flags.contains(ReadFlags::MOVED_FROM) {
        Some(EventType::Rename)
    } else if flags.contains(ReadFlags::ATTRIB) {
        Some(EventType::Chmod)
    } else {
        None
    }
}

fn kind_of_self(flags: ReadFlags) -> Option<EventType> {
    if flags.contains(ReadFlags::DELETE_SELF) {
        Some(EventType::Remove)
    } else if flags.contains(ReadFlags::MOVE_SELF) {
        Some(EventType::Rename)
    } else if flags.contains(ReadFlags::ATTRIB) {
        Some(EventType::Chmod)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn names(watch: &mut Watch) -> Vec<String> {
        let (changes, more) = watch.drain();
        assert!(!more);
        changes
            .iter()
            .map(|change| format!("{:?} {}", change.kind, change.name.display()))
            .collect()
    }

    fn tree(recursive: bool) -> (tempfile::TempDir, Watch) {
        let dir = tempfile::tempdir().expect("dir");
        fs::create_dir_all(dir.path().join("old/inner")).expect("dirs");
        let watch = Watch::open(dir.path(), recursive).expect("watch");
        (dir, watch)
    }

    #[test]
    fn one_directory() {
        let (dir, mut watch) = tree(false);
        fs::write(dir.path().join("a"), "x").expect("write");
        fs::write(dir.path().join("old/b"), "x").expect("write");
        fs::rename(dir.path().join("a"), dir.path().join("c")).expect("rename");
        fs::remove_file(dir.path().join("c")).expect("remove");
        assert_eq!(
            names(&mut watch),
            ["Create a", "Write a", "Rename a", "Create c", "Remove c"]
        );
        assert_eq!(names(&mut watch), [""; 0]);
    }

    #[test]
    fn existing_and_new_subdirectories() {
        let (dir, mut watch) = tree(true);
        fs::write(dir.path().join("old/inner/f"), "x").expect("write");
        // Everything below happens before the watch can follow.
        fs::create_dir_all(dir.path().join("new/deep")).expect("dirs");
        fs::write(dir.path().join("new/deep/f"), "x").expect("write");
        fs::write(dir.path().join("new/empty"), "").expect("write");
        let mut got = names(&mut watch);
        assert_eq!(
            got[..3],
            ["Create old/inner/f", "Write old/inner/f", "Create new"]
        );
        got[3..].sort();
        assert_eq!(
            got[3..],
            [
                "Create new/deep",
                "Create new/deep/f",
                "Create new/empty",
                "Write new/deep/f"
            ]
        );
        fs::write(dir.path().join("new/deep/f"), "y").expect("write");
        assert_eq!(names(&mut watch), ["Write new/deep/f"]);
    }

    #[test]
    fn what_a_scan_told_is_not_told_again() {
        let (dir, mut watch) = tree(true);
        fs::create_dir(dir.path().join("new")).expect("dir");
        fs::write(dir.path().join("new/f"), "x").expect("write");
        // The state right after a scan whose events are still queued.
        let wd = watch
            .watch_dir(Path::new("new"))
            .expect("watch")
            .expect("new");
        let reported = Reported { written: true };
        watch.reported.insert((wd, "f".into()), reported);
        fs::write(dir.path().join("new/f"), "y").expect("write");
        fs::remove_file(dir.path().join("new/f")).expect("remove");
        fs::write(dir.path().join("new/f"), "z").expect("write");
        assert_eq!(
            names(&mut watch),
            ["Create new", "Remove new/f", "Create new/f", "Write new/f"]
        );
    }

    #[test]
    fn moved_directories_keep_being_watched_under_their_new_name() {
        let (dir, mut watch) = tree(true);
        fs::rename(dir.path().join("old"), dir.path().join("new")).expect("rename");
        assert_eq!(names(&mut watch), ["Rename old", "Create new"]);
        fs::write(dir.path().join("new/inner/f"), "x").expect("write");
        assert_eq!(
            names(&mut watch),
            ["Create new/inner/f", "Write new/inner/f"]
        );
    }

    #[test]
    fn directories_moved_out_are_forgotten_and_moved_in_are_scanned() {
        let (dir, mut watch) = tree(true);
        let outside = tempfile::tempdir().expect("dir");
        fs::rename(dir.path().join("old"), outside.path().join("old")).expect("rename");
        assert_eq!(names(&mut watch), ["Rename old"]);
        fs::write(outside.path().join("old/f"), "x").expect("write");
        assert_eq!(names(&mut watch), [""; 0]);
        fs::rename(outside.path().join("old"), dir.path().join("back")).expect("rename");
        let mut got = names(&mut watch);
        got.sort();
        assert_eq!(
            got,
            [
                "Create back",
                "Create back/f",
                "Create back/inner",
                "Write back/f"
            ]
        );
    }

    #[test]
    fn the_end_of_the_watched_directory_is_told() {
        let dir = tempfile::tempdir().expect("dir");
        let root = dir.path().join("root");
        fs::create_dir(&root).expect("dir");
        let mut watch = Watch::open(&root, true).expect("watch");
        fs::remove_dir(&root).expect("remove");
        assert_eq!(names(&mut watch), ["Remove ."]);
        assert!(watch.dirs.is_empty());
    }

    #[test]
    fn links_are_not_followed_below_the_root() {
        let (dir, mut watch) = tree(true);
        let outside = tempfile::tempdir().expect("dir");
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).expect("link");
        fs::write(outside.path().join("f"), "x").expect("write");
        assert_eq!(names(&mut watch), ["Create link"]);
    }
}
