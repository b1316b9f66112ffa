//! The pool: a btrfs file system in a sparse file of ours, a directory the operator gives,
//! or, where there is no btrfs, a plain directory without limits.

use rustix::{
    fs::StatVfs,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount_remount},
};
use sandkeep_model::{Code, Error, Result, human_bytes};
use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd as _, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    btrfs,
    doing::Doing as _,
    loopdev::{LoopDevice, backing_file},
    mounts::{mounted_at, same_file},
    quota::QuotaKind,
    staging::make_private_dir,
    vault::VaultConfig,
};

/// btrfs refuses smaller devices.
const SMALLEST_POOL: u64 = 128 << 20;
/// Below this nothing new is begun: a btrfs that is full to the brim has trouble deleting.
const RESERVE: u64 = 32 << 20;

/// What belongs to root of a sandbox on its disk belongs to root of the host here. The clone of
/// the mount that a sandbox has is without `nosuid`: sudo works there.
const FLAGS: MountFlags = MountFlags::NOATIME.union(MountFlags::NOSUID);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// A sparse file in the state directory, mounted by us.
    LoopFile,
    /// A directory on the operator's own btrfs.
    Operator,
    /// No btrfs: disks are whole copies and nothing limits them.
    PlainDirectory,
}

/// What the pool is and how full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolInfo {
    pub path: PathBuf,
    pub kind: PoolKind,
    pub quota: QuotaKind,
    pub total_bytes: u64,
    /// For a sparse file never more than the disk under it still has.
    pub free_bytes: u64,
}

#[derive(Debug)]
pub struct Pool {
    pub root: PathBuf,
    pub kind: PoolKind,
    /// The directory whose free space bounds a sparse file.
    under: Option<PathBuf>,
}

impl Pool {
    pub fn open(config: &VaultConfig, state: &Path) -> Result<Self> {
        match &config.pool_dir {
            Some(dir) => open_given(dir, config.allow_unlimited_disk),
            None => match open_loop(state, config.pool_size_bytes) {
                Ok(root) => Ok(Self {
                    root,
                    kind: PoolKind::LoopFile,
                    under: Some(state.to_owned()),
                }),
                // Only for what the host lacks; a full or broken disk is no reason to go
                // on without limits. And never when a real pool is already there.
                Err(error)
                    if error.code == Code::HostNotReady
                        && config.allow_unlimited_disk
                        && !state.join("pool.img").exists() =>
                {
                    tracing::warn!(%error, "no btrfs pool: disks are copies without limits");
                    let root = state.join("pool");
                    make_private_dir(&root)?;
                    Ok(Self {
                        root,
                        kind: PoolKind::PlainDirectory,
                        under: None,
                    })
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Total and free bytes.
    pub fn space(&self) -> Result<(u64, u64)> {
        let stat =
            rustix::fs::statvfs(&self.root).doing_to("asking for the space of", &self.root)?;
        let mut free = available(&stat);
        if let Some(under) = &self.under {
            let below = rustix::fs::statvfs(under).doing_to("asking for the space of", under)?;
            free = free.min(available(&below));
        }
        Ok((stat.f_blocks.saturating_mul(stat.f_frsize), free))
    }

    /// Refuses to begin something new when there is no room to finish it.
    pub fn check_room(&self) -> Result<()> {
        let (_, free) = self.space()?;
        if free >= RESERVE {
            return Ok(());
        }
        Err(full(&self.root, free))
    }

    pub fn unmount(&self) -> Result<()> {
        if self.kind != PoolKind::LoopFile {
            return Ok(());
        }
        match rustix::mount::unmount(&self.root, UnmountFlags::NOFOLLOW) {
            // Not mounted any more.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(rustix::io::Errno::BUSY) => Err(Error::conflict(format!(
                "the pool at {} is in use and stays mounted",
                self.root.display()
            ))
            .hint("end the boxes that still run, then try again")),
            Err(error) => Err(error).doing_to("unmounting", &self.root),
        }
    }
}

fn available(stat: &StatVfs) -> u64 {
    stat.f_bavail.saturating_mul(stat.f_frsize)
}

fn full(root: &Path, free: u64) -> Error {
    Error::new(
        Code::DiskFull,
        format!(
            "the pool at {} is full: {} are left",
            root.display(),
            human_bytes(free)
        ),
    )
    .hint("remove boxes or templates, free space on the disk under it, or raise the pool's size and restart")
}

fn open_given(dir: &Path, allow_unlimited: bool) -> Result<Pool> {
    fs::create_dir_all(dir).doing_to("making the pool directory", dir)?;
    let root = fs::canonicalize(dir).doing_to("finding the pool directory", dir)?;
    let on_btrfs = btrfs::is_btrfs(&root).doing_to("looking at", &root)?;
    if !on_btrfs && !allow_unlimited {
        return Err(Error::host_not_ready(format!(
            "{} is not on a btrfs file system",
            root.display()
        ))
        .hint(
            "give a directory on btrfs, leave the pool directory unset so that a pool file is \
             made, or allow unlimited disks",
        )
        .retryable(false));
    }
    Ok(Pool {
        root,
        kind: if on_btrfs {
            PoolKind::Operator
        } else {
            PoolKind::PlainDirectory
        },
        under: None,
    })
}

fn open_loop(state: &Path, size: u64) -> Result<PathBuf> {
    let root = state.join("pool");
    let image = state.join("pool.img");
    make_private_dir(&root)?;
    let device = match mounted_at(&root).doing("reading the mounts")? {
        Some(mount) => {
            let ours = mount.kind == "btrfs"
                && backing_file(&mount.source).is_some_and(|file| same_file(&file, &image));
            if !ours {
                return Err(Error::conflict(format!(
                    "something else ({} {}) is mounted at {}",
                    mount.kind,
                    mount.source.display(),
                    root.display()
                ))
                .hint("unmount it, or give the server another state directory"));
            }
            // One of an earlier version mounted it without.
            mount_remount(&root, MountFlags::BIND | FLAGS, c"")
                .doing_to("changing the flags of the mount", &root)?;
            mount.source
        }
        None => {
            if !image.exists() {
                make_image(state, &image, size)?;
            }
            let device = LoopDevice::attach(&image)?;
            mount_pool(&device.path, &root)?;
            device.path
        }
    };
    grow(&image, &device, &root, size)?;
    Ok(root)
}

fn mount_pool(device: &Path, root: &Path) -> Result<()> {
    let mounted = rustix::mount::mount(
        device,
        root,
        "btrfs",
        FLAGS,
        // Freed blocks become holes in the sparse file again.
        Some(c"space_cache=v2,discard=async"),
    );
    match mounted {
        Ok(()) => {}
        Err(rustix::io::Errno::NODEV) => return Err(no_btrfs()),
        Err(error) => {
            return Err(error).doing(format_args!(
                "mounting the pool {} at {}",
                device.display(),
                root.display()
            ));
        }
    }
    // Other mount namespaces must not get a copy that keeps the pool busy.
    rustix::mount::mount_change(root, MountPropagationFlags::PRIVATE)
        .doing_to("making private the mount", root)?;
    fs::set_permissions(root, fs::Permissions::from_mode(0o700)).doing_to("closing", root)
}

fn no_btrfs() -> Error {
    Error::host_not_ready("this kernel has no btrfs")
        .hint("load it (`modprobe btrfs`) or run a kernel that has it")
        .retryable(false)
}

fn kernel_has_btrfs() -> bool {
    fs::read_to_string("/proc/filesystems").is_ok_and(|text| {
        text.lines()
            .any(|line| line.split_whitespace().next_back() == Some("btrfs"))
    })
}

/// A new pool file appears under its name only when it is whole.
fn make_image(state: &Path, image: &Path, size: u64) -> Result<()> {
    if !kernel_has_btrfs() {
        // Loading it may be all that is missing; whether it worked is asked, not assumed.
        if let Err(error) = Command::new("modprobe").arg("btrfs").output() {
            tracing::debug!(%error, "modprobe could not be run");
        }
        if !kernel_has_btrfs() {
            return Err(no_btrfs());
        }
    }
    if size < SMALLEST_POOL {
        return Err(Error::invalid(
            "pool_size_bytes",
            format!(
                "a pool of {} is too small, the least is {}",
                human_bytes(size),
                human_bytes(SMALLEST_POOL)
            ),
        ));
    }
    let free = available(&rustix::fs::statvfs(state).doing_to("asking for the space of", state)?);
    if free < SMALLEST_POOL {
        return Err(full(state, free));
    }
    let staged = state.join("pool.img.new");
    let file = File::create(&staged).doing_to("making the pool file", &staged)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))
        .and_then(|()| file.set_len(size))
        .doing_to("sizing the pool file", &staged)?;
    run_mkfs(&staged)?;
    file.sync_all().doing_to("writing", &staged)?;
    fs::rename(&staged, image).doing_to("naming the pool file", image)?;
    File::open(state)
        .and_then(|dir| dir.sync_all())
        .doing_to("writing", state)?;
    tracing::info!(file = %image.display(), size, "pool file made");
    Ok(())
}

fn run_mkfs(file: &Path) -> Result<()> {
    let made = Command::new("mkfs.btrfs")
        .args([
            "-q", "-f", "-K", "-L", "sandkeep", "-m", "single", "-d", "single",
        ])
        .arg(file)
        .output();
    let output = match made {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::host_not_ready("mkfs.btrfs is not installed")
                .hint("install btrfs-progs (Debian, Ubuntu: `apt-get install btrfs-progs`)")
                .retryable(false));
        }
        Err(error) => return Err(error).doing("running mkfs.btrfs"),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rev().find(|line| !line.trim().is_empty());
    Err(Error::internal(format!(
        "mkfs.btrfs failed: {}",
        last.unwrap_or("it gave no reason")
    )))
}

/// The operator may raise the size; a pool never shrinks.
fn grow(image: &Path, device: &Path, root: &Path, size: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(root).doing_to("asking for the space of", root)?;
    let now = stat.f_blocks.saturating_mul(stat.f_frsize);
    // Whole megabytes: the file system rounds its size down to its own blocks.
    if size >> 20 <= now >> 20 {
        return Ok(());
    }
    let file = File::options()
        .write(true)
        .open(image)
        .doing_to("opening", image)?;
    if file.metadata().doing_to("looking at", image)?.len() < size {
        file.set_len(size).doing_to("growing", image)?;
    }
    LoopDevice::refresh_size(device)?;
    let dir = btrfs::open_dir(root).doing_to("opening", root)?;
    btrfs::grow_to_device(dir.as_fd()).doing_to("growing the pool at", root)?;
    tracing::info!(from = now, to = size, "pool grown");
    Ok(())
}
