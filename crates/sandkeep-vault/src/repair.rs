//! Making a pool writable again that the kernel closed after a fault.
//!
//! Such a file system refuses to be remounted: it has to be unmounted everywhere and mounted anew.
//! Whatever still uses it ends before that.

use sandkeep_model::{Error, Result};
use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use crate::{
    btrfs, doing::Doing as _, lock::Lock, mounts::mounted_at, pool::Pool, vault::VaultConfig,
};

/// Memory has to be given back before a process is gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repaired {
    /// It was writable all the time.
    pub was_well: bool,
    /// Processes that used it and were ended.
    pub ended: usize,
}

/// Mounts the pool of a state directory anew. No server may use it. `end`: processes that still
/// use it are ended.
pub fn repair(config: &VaultConfig, end: bool) -> Result<Repaired> {
    let state = fs::canonicalize(&config.state_dir)
        .doing_to("finding the state directory", &config.state_dir)?;
    let _lock = Lock::take(&state.join("vault.lock"))?;
    if config.pool_dir.is_some() {
        return Err(
            Error::conflict("this storage is a directory on a file system of yours")
                .hint("mount that file system anew, then start the server"),
        );
    }
    let root = state.join("pool");
    let well = |ended| {
        let pool = Pool::open(config, &state)?;
        if pool.is_read_only() {
            return Err(broken(&root));
        }
        let probe = root.join(".repaired");
        File::create(&probe)
            .and_then(|file| file.sync_all())
            .and_then(|()| fs::remove_file(&probe))
            .doing_to("writing to", &root)?;
        Ok(Repaired {
            was_well: ended == 0,
            ended,
        })
    };
    let Some(mount) = mounted_at(&root).doing("reading the mounts")? else {
        return well(0);
    };
    if !is_read_only(&root) {
        return well(0);
    }
    let dir = btrfs::open_dir(&root).doing_to("opening", &root)?;
    let fsid = btrfs::fsid(dir.as_fd()).doing("asking the pool for its id")?;
    drop(dir);
    let mut ended = 0;
    let begun = Instant::now();
    loop {
        let users = users(&fsid, &mount.device);
        if users.is_empty() {
            break;
        }
        if !end {
            return Err(Error::conflict(format!(
                "{} processes of sandboxes still use the storage",
                users.len()
            ))
            .hint("kill the sandboxes while the server runs, or give --end-sandboxes: their processes are ended"));
        }
        if begun.elapsed() > PATIENCE {
            return Err(Error::conflict(format!(
                "{} processes that use the storage do not end: {users:?}",
                users.len()
            ))
            .hint("reboot this host"));
        }
        for pid in users {
            thaw(pid);
            if rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok() {
                ended += 1;
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
    while mounted_at(&root).doing("reading the mounts")?.is_some() {
        match rustix::mount::unmount(&root, rustix::mount::UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(rustix::io::Errno::BUSY) if begun.elapsed() < PATIENCE => {
                thread::sleep(Duration::from_millis(100));
            }
            Err(error) => return Err(error).doing_to("unmounting", &root),
        }
    }
    // Somebody who still held it would have it stay as it is.
    while Path::new("/sys/fs/btrfs").join(&fsid).exists() && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(100));
    }
    let done = well(ended)?;
    Ok(Repaired {
        was_well: false,
        ..done
    })
}

fn is_read_only(root: &Path) -> bool {
    rustix::fs::statvfs(root)
        .is_ok_and(|stat| stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

fn broken(root: &Path) -> Error {
    Error::host_not_ready(format!(
        "the storage at {} is read-only again right after it was mounted",
        root.display()
    ))
    .hint("look into the kernel's log; `btrfs check` of the pool file tells more")
    .retryable(false)
}

/// Processes with the file system mounted in a namespace of theirs, or with a file of it open.
fn users(fsid: &str, device: &str) -> Vec<rustix::process::Pid> {
    let own_mounts = fs::read_link("/proc/self/ns/mnt").ok();
    let own = rustix::process::getpid();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.flatten().filter_map(|entry| {
        let number: i32 = entry.file_name().to_str()?.parse().ok()?;
        rustix::process::Pid::from_raw(number)
    });
    pids.filter(|pid| *pid != own)
        .filter(|pid| {
            let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_pid()));
            let elsewhere = fs::read_link(proc.join("ns/mnt")).ok() != own_mounts;
            (elsewhere && mounts(&proc, device)) || holds(&proc, fsid)
        })
        .collect()
}

fn mounts(proc: &Path, device: &str) -> bool {
    fs::read_to_string(proc.join("mountinfo")).is_ok_and(|text| {
        text.lines()
            .any(|line| line.split(' ').nth(2) == Some(device))
    })
}

fn holds(proc: &Path, fsid: &str) -> bool {
    let open = fs::read_dir(proc.join("fd"));
    let open = open
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    ["cwd", "root", "exe"]
        .map(|name| proc.join(name))
        .into_iter()
        .chain(open)
        .any(|path| is_of(&path, fsid).unwrap_or(false))
}

fn is_of(path: &Path, fsid: &str) -> io::Result<bool> {
    let meta = fs::metadata(path)?;
    // Opening anything else might wait, or do something.
    if !(meta.is_file() || meta.is_dir()) || !btrfs::is_btrfs(path)? {
        return Ok(false);
    }
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    Ok(btrfs::fsid(file.as_fd())? == fsid)
}

/// With freezers of version 1 what is frozen does not die.
fn thaw(pid: rustix::process::Pid) {
    let Ok(text) = fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_pid())) else {
        return;
    };
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        if controllers.split(',').any(|name| name == "freezer") {
            let path = format!("/sys/fs/cgroup/freezer{path}/freezer.state");
            if let Err(error) = fs::write(&path, "THAWED") {
                tracing::debug!(%error, path, "thawing a process");
            }
        }
    }
}
