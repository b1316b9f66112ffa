//! The private server's storage, and the template its sandboxes are made from.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::{
    fault::{Doing as _, Fault, Result},
    server::{Place, random},
    stop::Stop,
};

const PREFIX: &str = "sandkeep-verify.";
const LOCK: &str = "verify.lock";

/// A directory of verify's own beside the operator's; it and all in it goes when this is dropped.
#[derive(Debug)]
pub struct WorkDir {
    pub path: PathBuf,
    _lock: File,
}

impl WorkDir {
    pub fn make(operator: &Path) -> Result<Self> {
        let parent = operator
            .parent()
            .filter(|parent| parent.is_dir())
            .map_or_else(|| PathBuf::from("/var/tmp"), Path::to_owned);
        sweep(&parent);
        let path = parent.join(format!("{PREFIX}{}", random(6)?));
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .doing(format_args!("making {}", path.display()))?;
        let lock = lock(&path).doing("locking the working directory")?;
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Only in a directory that is root's own: in one of somebody else the name may lead anywhere.
fn lock(dir: &Path) -> io::Result<File> {
    let dir = rustix::fs::open(
        dir,
        OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let stat = rustix::fs::fstat(&dir)?;
    if stat.st_uid != 0 || stat.st_mode & 0o077 != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let flags =
        OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&dir, LOCK, flags, Mode::from_raw_mode(0o600))?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file.into())
}

/// What runs left behind that were killed.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if ours && let Ok(_lock) = lock(&entry.path()) {
            remove(&entry.path());
        }
    }
}

fn remove(dir: &Path) {
    for state in [dir.join("state"), dir.join("small/state")] {
        cgroup_trees(&state)
            .iter()
            .for_each(|name| remove_cgroups(name));
    }
    if let Err(error) = fs::remove_dir_all(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        let _ = io::Write::write_all(
            &mut io::stderr().lock(),
            format!("warning: {} could not be removed: {error}\n", dir.display()).as_bytes(),
        );
    }
}

/// Each level has a tree of its own, named after its directory.
pub fn cgroup_trees(state: &Path) -> Vec<String> {
    ["ward-container", "ward-gvisor", "ward-microvm"]
        .iter()
        .map(|ward| sandkeep_host::cgroup::tree_name(&state.join(ward)))
        .collect()
}

/// The processes in them ended with the room.
fn remove_cgroups(name: &str) {
    let end = Instant::now() + Duration::from_secs(5);
    for tree in find_cgroups(Path::new("/sys/fs/cgroup"), name, 6) {
        // Processes that were just ended count for a moment.
        while !remove_cgroup_tree(&tree) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn directories(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// The cgroups of this name.
pub fn find_cgroups(dir: &Path, name: &str, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for child in directories(dir) {
        if child.file_name().is_some_and(|own| own == name) {
            found.push(child);
        } else if depth > 0 {
            found.extend(find_cgroups(&child, name, depth - 1));
        }
    }
    found
}

/// Removes a tree of cgroups; `false` while something is in it.
pub fn remove_cgroup_tree(dir: &Path) -> bool {
    for child in directories(dir) {
        remove_cgroup_tree(&child);
    }
    fs::remove_dir(dir).is_ok()
}

/// Makes the storage of the private server with the base template in it. Mounts made here are
/// those of the room.
pub fn prepare(place: &Place, operator: &Path, stop: &Stop, say: &dyn Fn(&str)) -> Result<()> {
    fs::DirBuilder::new()
        .mode(0o700)
        .create(&place.state)
        .doing("making the private server's directory")?;
    let size = place.storage_bytes.to_string();
    let given = std::env::var_os("SANDKEEP_BASE_CACHE").is_some_and(|dir| !dir.is_empty());
    if !given && let Some(script) = of_the_operator(operator) {
        say("copying the base template");
        let archive = place.state.join("base.tar");
        let mut pack = Command::new("sh");
        pack.args(["-c", script, "sh"])
            .arg(operator)
            .arg(&archive)
            .stdin(Stdio::null());
        run(pack, "copying the base template", stop)?;
        let mut import = place.command("template");
        import
            .args(["import", "base"])
            .arg(&archive)
            .arg("--state")
            .arg(&place.state)
            .args(["--storage-size", &size]);
        run(import, "importing the base template", stop)?;
        return fs::remove_file(&archive).doing("removing the archive of the base template");
    }
    say("making the base template (`sandkeep init`; a few minutes if it must be fetched)");
    let mut init = place.command("init");
    init.arg("--state")
        .arg(&place.state)
        .args(["--storage-size", &size]);
    run(init, "making the base template", stop)
}

/// How to pack the operator's own base template: from its mounted pool, or from the pool file of a
/// server that is stopped, mounted for reading in this room.
fn of_the_operator(operator: &Path) -> Option<&'static str> {
    const PACK: &str = "exec tar --create --file=\"$2\" --numeric-owner --xattrs \
        --xattrs-include='*' --one-file-system --directory=\"$1/pool/templates/base/root\" .";
    const MOUNT_AND_PACK: &str = "mount -o loop,ro \"$1/pool.img\" \"$1/pool\" && exec tar --create \
        --file=\"$2\" --numeric-owner --xattrs --xattrs-include='*' --one-file-system \
        --directory=\"$1/pool/templates/base/root\" .";
    if operator.join("pool/templates/base/root").is_dir() {
        Some(PACK)
    } else if operator.join("pool.img").is_file() && operator.join("pool").is_dir() {
        Some(MOUNT_AND_PACK)
    } else {
        None
    }
}

fn run(mut command: Command, what: &str, stop: &Stop) -> Result<()> {
    let (mut reader, writer) = io::pipe().doing("making a pipe")?;
    command
        .stdout(writer.try_clone().doing("making a pipe")?)
        .stderr(writer);
    let mut child = command.spawn().doing(what)?;
    drop(command);
    let said = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was said until the pipe broke is all there is.
        let _ = reader.read_to_end(&mut bytes);
        bytes
    });
    let status = stop.wait(&mut child)?;
    if status.success() {
        return Ok(());
    }
    let said = said.join().unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let lines: Vec<&str> = said.lines().collect();
    let last = lines[lines.len().saturating_sub(6)..].join("\n  ");
    Err(Fault::Cannot(format!(
        "{what} failed ({status}):\n  {last}"
    )))
}
