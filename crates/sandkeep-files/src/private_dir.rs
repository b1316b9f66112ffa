//! A directory closed to everybody else, and files in it that are replaced in one step.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, RenameFlags};
use sandkeep_model::{Code, Error, Result, random_token};
use zeroize::Zeroizing;

/// Begins the name of a file that is still being written.
const STAGED: &str = ".staged-";
const LOCK: &str = ".lock";

/// A directory of mode 0700 whose files have mode 0600.
///
/// A file is written beside its place, made durable and renamed: after a crash there is the old
/// one or the new one, never half of one.
#[derive(Debug, Clone)]
pub struct PrivateDir {
    path: PathBuf,
}

/// Held as long as nobody else may write in the directory. The kernel frees it when we die.
#[derive(Debug)]
pub struct DirLock {
    _file: File,
}

impl PrivateDir {
    /// Makes the directory if it is missing; one that others can enter is refused.
    pub fn open(path: &Path) -> Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| doing("making", path, error))?;
        let found = fs::symlink_metadata(path).map_err(|error| doing("reading", path, error))?;
        if !found.is_dir() || found.mode() & 0o077 != 0 {
            return Err(not_private(path, "700"));
        }
        Ok(Self {
            path: path.to_owned(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps every other process out until the guard is dropped. Also sweeps what a crash left
    /// half-written: with the lock held, nobody is writing it.
    pub fn lock(&self) -> Result<DirLock> {
        let path = self.path.join(LOCK);
        let file = private_file()
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|error| doing("opening", &path, error))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::conflict(format!(
                    "{} is used by another process",
                    self.path.display()
                ))
                .hint("only one server may use a state directory; stop the other one"));
            }
            Err(errno) => return Err(doing("locking", &path, errno.into())),
        }
        for name in self.entries()? {
            if name.starts_with(STAGED) {
                self.remove(&name)?;
            }
        }
        Ok(DirLock { _file: file })
    }

    /// The names of the files in it whose names are text.
    pub fn entries(&self) -> Result<Vec<String>> {
        let fault = |error| doing("reading", &self.path, error);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(fault)? {
            if let Ok(name) = entry.map_err(fault)?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// The bytes of a file, wiped when dropped; `None` if there is no such file.
    pub fn read(&self, name: &str, limit: u64) -> Result<Option<Zeroizing<Vec<u8>>>> {
        read_private(&self.path.join(name), limit)
    }

    /// Replaces a file in one step.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.place(name, bytes, RenameFlags::empty()).map(drop)
    }

    /// Writes a file unless there is one; tells whether it was written.
    pub fn create(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        self.place(name, bytes, RenameFlags::NOREPLACE)
    }

    /// The bytes of a file that is made on first use, and only then.
    pub fn read_or_make(
        &self,
        name: &str,
        limit: u64,
        make: impl FnOnce() -> Result<Zeroizing<Vec<u8>>>,
    ) -> Result<Zeroizing<Vec<u8>>> {
        if let Some(found) = self.read(name, limit)? {
            return Ok(found);
        }
        let made = make()?;
        if self.create(name, &made)? {
            return Ok(made);
        }
        // Somebody else was quicker; theirs counts.
        self.read(name, limit)?
            .ok_or_else(|| Error::conflict(format!("{name} comes and goes")))
    }

    /// What is not there is fine.
    pub fn remove(&self, name: &str) -> Result<()> {
        let path = self.path.join(name);
        match fs::remove_file(&path) {
            Ok(()) => self.sync(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(doing("removing", &path, error)),
        }
    }

    /// Makes names given and taken so far durable.
    pub fn sync(&self) -> Result<()> {
        File::open(&self.path)
            .and_then(|dir| dir.sync_all())
            .map_err(|error| doing("making durable", &self.path, error))
    }

    fn place(&self, name: &str, bytes: &[u8], flags: RenameFlags) -> Result<bool> {
        let target = self.path.join(name);
        let staged = self.path.join(format!("{STAGED}{}", random_token(12)));
        let written = private_file()
            .create_new(true)
            .open(&staged)
            .and_then(|mut file| {
                file.write_all(bytes)?;
                file.sync_all()
            })
            .and_then(|()| {
                let cwd = rustix::fs::CWD;
                match rustix::fs::renameat_with(cwd, &staged, cwd, &target, flags) {
                    Ok(()) => Ok(true),
                    Err(rustix::io::Errno::EXIST) => Ok(false),
                    Err(errno) => Err(errno.into()),
                }
            });
        if !matches!(written, Ok(true)) {
            // A leftover is swept at the next start.
            let _ = fs::remove_file(&staged);
        }
        let placed = written.map_err(|error| doing("writing", &target, error))?;
        if placed {
            self.sync()?;
        }
        Ok(placed)
    }
}

/// Reads a file that nobody else may read; `None` if there is none.
fn read_private(path: &Path, limit: u64) -> Result<Option<Zeroizing<Vec<u8>>>> {
    let file = match private_file().write(false).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(doing("opening", path, error)),
    };
    let found = file
        .metadata()
        .map_err(|error| doing("reading", path, error))?;
    if !found.is_file() || found.mode() & 0o077 != 0 {
        return Err(not_private(path, "600"));
    }
    // Room for all of it at once: a vector that grows leaves copies behind that nobody wipes.
    let room = usize::try_from(found.len().min(limit)).unwrap_or(0) + 1;
    let mut bytes = Zeroizing::new(Vec::with_capacity(room));
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|error| doing("reading", path, error))?;
    if bytes.len() as u64 > limit {
        return Err(Error::new(
            Code::TooLarge,
            format!("{} is larger than {limit} bytes", path.display()),
        ));
    }
    Ok(Some(bytes))
}

fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    options
}

fn not_private(path: &Path, mode: &str) -> Error {
    Error::host_not_ready(format!(
        "{} is open to other users of this host, or is not what it should be",
        path.display()
    ))
    .hint(format!("chmod {mode} {}", path.display()))
    .retryable(false)
}

fn doing(what: &str, path: &Path, error: io::Error) -> Error {
    Error::from(error).context(format!("{what} {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn room() -> (tempfile::TempDir, PrivateDir) {
        let room = tempfile::tempdir().unwrap();
        let dir = PrivateDir::open(&room.path().join("deep/state")).unwrap();
        (room, dir)
    }

    #[test]
    fn files_and_directory_are_private() {
        let (_room, dir) = room();
        dir.write("a", b"one").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(dir.path()), 0o700);
        assert_eq!(mode(&dir.path().join("a")), 0o600);
    }

    #[test]
    fn replaced_whole_and_created_once() {
        let (_room, dir) = room();
        assert!(dir.read("a", 10).unwrap().is_none());
        assert!(dir.create("a", b"one").unwrap());
        assert!(!dir.create("a", b"two").unwrap());
        assert_eq!(dir.read("a", 10).unwrap().unwrap().as_slice(), b"one");
        dir.write("a", b"three").unwrap();
        assert_eq!(dir.read("a", 5).unwrap().unwrap().as_slice(), b"three");
        assert_eq!(dir.read("a", 4).unwrap_err().code, Code::TooLarge);
        assert_eq!(dir.entries().unwrap(), ["a"]);
        dir.remove("a").unwrap();
        dir.remove("a").unwrap();
        assert!(dir.entries().unwrap().is_empty());
    }

    #[test]
    fn made_on_first_use() {
        let (_room, dir) = room();
        let one = || Ok(Zeroizing::new(b"one".to_vec()));
        let fails = || Err(Error::conflict("nothing to make it from"));
        assert!(dir.read_or_make("a", 10, fails).is_err());
        assert_eq!(dir.read_or_make("a", 10, one).unwrap().as_slice(), b"one");
        assert_eq!(dir.read_or_make("a", 10, fails).unwrap().as_slice(), b"one");
        // Somebody writes another while this one is made.
        let slow = || {
            dir.write("b", b"two")?;
            one()
        };
        assert_eq!(dir.read_or_make("b", 10, slow).unwrap().as_slice(), b"two");
    }

    #[test]
    fn what_others_can_read_is_refused() {
        let (_room, dir) = room();
        dir.write("a", b"one").unwrap();
        fs::set_permissions(dir.path().join("a"), fs::Permissions::from_mode(0o640)).unwrap();
        assert!(
            dir.read("a", 10)
                .unwrap_err()
                .hint
                .unwrap()
                .contains("chmod 600")
        );
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(PrivateDir::open(dir.path()).is_err());
    }

    #[test]
    fn a_link_is_not_followed() {
        let (room, dir) = room();
        fs::write(room.path().join("outside"), b"x").unwrap();
        std::os::unix::fs::symlink(room.path().join("outside"), dir.path().join("a")).unwrap();
        assert!(dir.read("a", 10).is_err());
    }

    #[test]
    fn one_writer_and_a_sweep() {
        let (_room, dir) = room();
        fs::write(dir.path().join(".staged-abc"), b"half").unwrap();
        let lock = dir.lock().unwrap();
        assert!(!dir.path().join(".staged-abc").exists());
        assert_eq!(dir.lock().unwrap_err().code, Code::Conflict);
        drop(lock);
        dir.lock().unwrap();
    }
}
