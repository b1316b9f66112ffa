//! The pool: a btrfs file system in a file of ours, a directory the operator gives,
//! or, where there is no btrfs, a plain directory without limits.

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount_remount};
use sandkeep_model::{Code, Error, Result, human_bytes};
use std::{
    ffi::CStr,
    fs::{self, File},
    io,
    os::{fd::AsFd as _, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    backing::{self, Backing},
    btrfs,
    doing::Doing as _,
    loopdev::{LoopDevice, backing_file},
    mounts::{mounted_at, same_file},
    pieces,
    quota::QuotaKind,
    sizing::{self, Below, TAIL},
    space::Space,
    staging::make_private_dir,
    vault::VaultConfig,
};

/// No discards: the blocks of the pool file stay. And nothing is set aside for names that they do not
/// need: the kernel takes an empty piece back, sets it aside again, and with each of them a tenth of
/// a small storage came and went. [`Space`] keeps a piece for names that are about to need one.
const OPTIONS: &CStr = c"space_cache=v2,nodiscard,metadata_ratio=0";

/// What belongs to root of a sandbox on its disk belongs to root of the host here. The clone of
/// the mount that a sandbox has is without `nosuid`: sudo works there.
const FLAGS: MountFlags = MountFlags::NOATIME.union(MountFlags::NOSUID);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// A file in the state directory, mounted by us.
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
    pub free_bytes: u64,
    /// How much larger it may become, as long as the disk below has that much.
    pub growable_bytes: u64,
}

#[derive(Debug)]
pub struct Pool {
    pub root: PathBuf,
    pub kind: PoolKind,
    /// What is under a pool file.
    pub backing: Option<Backing>,
    /// `/sys/fs/btrfs/<fsid>/allocation` of a pool file.
    allocation: Option<PathBuf>,
}

impl Pool {
    pub fn open(config: &VaultConfig, state: &Path) -> Result<Self> {
        match &config.pool_dir {
            Some(dir) => open_given(dir, config.allow_unlimited_disk),
            None => match open_loop(state, config.pool_size_bytes) {
                Ok(pool) => Ok(pool),
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
                        backing: None,
                        allocation: None,
                    })
                }
                Err(error) => Err(error),
            },
        }
    }

    /// What is in it right now.
    pub fn space(&self) -> Result<Space> {
        let stat =
            rustix::fs::statvfs(&self.root).doing_to("asking for the space of", &self.root)?;
        let plain = Space::from_statvfs(&stat);
        let Some(allocation) = &self.allocation else {
            return Ok(plain);
        };
        match Space::read(allocation, plain.total) {
            Ok(space) => Ok(space),
            Err(error) => {
                tracing::debug!(%error, "the kernel tells less of the pool");
                Ok(plain)
            }
        }
    }

    /// How much larger it may become now.
    pub fn growable(&self, space: &Space) -> Result<u64> {
        match &self.backing {
            None => Ok(0),
            Some(backing) => Ok(backing.growable(space.total, Below::of(&backing.below)?)),
        }
    }

    /// Whether nothing can be written to it: an operator did that, or the kernel after a fault.
    pub fn is_read_only(&self) -> bool {
        use rustix::fs::StatVfsMountFlags;
        rustix::fs::statvfs(&self.root)
            .is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
    }

    /// Refuses to begin something new when there is no room to finish it.
    pub fn check_room(&self) -> Result<()> {
        self.check_room_for(0)
    }

    /// Room for so much, and what is needed to go on after it. A pool file becomes larger first.
    pub fn check_room_for(&self, bytes: u64) -> Result<()> {
        self.check_room_beyond(Space::watermark, bytes)
    }

    /// The same, and as much as `left` says.
    pub fn check_room_beyond(&self, left: fn(&Space) -> u64, bytes: u64) -> Result<()> {
        if self.is_read_only() {
            return Err(read_only());
        }
        let mut space = self.space()?;
        let least = left(&space).saturating_add(bytes);
        if space.free < least
            && let Some(backing) = &self.backing
        {
            let missing = least - space.free;
            // A seventh of what comes may go to names.
            backing.grow(missing.saturating_add(missing / 4))?;
            space = self.space()?;
        }
        let names = sizing::watermark_for_names(space.total);
        if space.free >= left(&space).saturating_add(bytes) && space.free_for_names >= names {
            return Ok(());
        }
        Err(self.full(&space, bytes))
    }

    /// Memory is not written into the last of a storage, while others still write there.
    pub fn no_room_for_images(&self) -> Result<Error> {
        let space = self.space()?;
        let text = format!(
            "memory is written to the disk only while more than {} of the storage are left, and {} are",
            human_bytes(space.left_by_images()),
            human_bytes(space.free),
        );
        Ok(Error::new(Code::DiskFull, text).hint(
            "delete sandboxes, points or templates; or free space on the disk below it, or raise \
             `storage_size` and restart",
        ))
    }

    fn full(&self, space: &Space, bytes: u64) -> Error {
        let reserve = sizing::reserve(space.total);
        let free = space.free.saturating_sub(reserve);
        let for_what = match bytes {
            0 => String::new(),
            bytes => format!(", this needs {}", human_bytes(bytes)),
        };
        Error::new(
            Code::DiskFull,
            format!(
                "the storage at {} is full: {} are left of {}{for_what}",
                self.root.display(),
                human_bytes(free),
                human_bytes(space.total),
            ),
        )
        .hint(
            "delete sandboxes, points or templates; or free space on the disk below it, or raise \
             `storage_size` and restart",
        )
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

/// Why nothing can be written.
pub fn read_only() -> Error {
    Error::new(
        Code::HostNotReady,
        "the storage is read-only: the kernel closed it after a fault, or somebody remounted it",
    )
    .hint(
        "look into the kernel's log; stop the server, run `sandkeep storage repair`, and start it \
         again. What runs can be killed meanwhile",
    )
    .retryable(false)
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
        backing: None,
        allocation: None,
    })
}

fn open_loop(state: &Path, wanted: Option<u64>) -> Result<Pool> {
    let root = state.join("pool");
    let image = state.join("pool.img");
    make_private_dir(&root).or_else(|error| match mounted_at(&root) {
        // One that is read-only, with us or not.
        Ok(Some(_)) => Ok(()),
        _ => Err(error),
    })?;
    let mounted = mounted_at(&root).doing("reading the mounts")?;
    let device = match &mounted {
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
            mount.source.clone()
        }
        None => {
            if !image.exists() {
                make_image(state, &image, wanted)?;
            }
            let device = LoopDevice::attach(&image)?;
            LoopDevice::keep_blocks(&device.path);
            mount_pool(&device.path, &root)?;
            device.path
        }
    };
    let most = decide_size(state, &image, wanted)?;
    let dir = btrfs::open_dir(&root).doing_to("opening", &root)?;
    let fsid = btrfs::fsid(dir.as_fd()).doing("asking the pool for its id")?;
    let pool = Pool {
        backing: Some(Backing::open(
            image,
            device.clone(),
            root.clone(),
            state,
            most,
        )?),
        allocation: Some(PathBuf::from(format!("/sys/fs/btrfs/{fsid}/allocation"))),
        root,
        kind: PoolKind::LoopFile,
    };
    if pool.is_read_only() {
        tracing::error!(
            pool = %pool.root.display(),
            "the storage is read-only: nothing can be made until `sandkeep storage repair`"
        );
        return Ok(pool);
    }
    if mounted.is_some() {
        LoopDevice::keep_blocks(&device);
        remount(&pool.root);
    }
    if let Some(backing) = &pool.backing
        && let Err(error) = backing.take_over()
    {
        tracing::error!(
            %error,
            "the disk below has less room than the storage was promised: it is watched, but something \
             that fills that disk at once can break the storage"
        );
    }
    if let Err(error) = pieces::widen_names(&pool.root) {
        tracing::warn!(
            %error,
            "names stay in a small piece: while the storage is full, writes may be refused for a moment"
        );
    }
    Ok(pool)
}

/// How large the pool may become: as somebody says now, or said before. A size that is new must
/// fit; one that was taken before is no reason not to start.
fn decide_size(state: &Path, image: &Path, wanted: Option<u64>) -> Result<u64> {
    let kept = sizing::kept(state);
    let length = fs::metadata(image).doing_to("looking at", image)?.len();
    let size = match (wanted, kept) {
        (Some(wanted), Some(kept)) if wanted > kept => {
            Below::of(state)?.check(wanted, length)?;
            wanted
        }
        (Some(wanted), _) => wanted,
        (None, kept) => kept.unwrap_or(length),
    };
    if kept != Some(size) || !state.join("storage.json").exists() {
        // On a full disk the size of the file stands for it.
        if let Err(error) = sizing::keep(state, size) {
            tracing::warn!(%error, "the size of the storage is not kept");
        }
    }
    Ok(size)
}

/// A pool that an earlier version mounted.
fn remount(root: &Path) {
    let done = mount_remount(root, FLAGS, OPTIONS);
    if let Err(error) = done {
        tracing::warn!(%error, "the pool keeps the mount options of an earlier version");
    }
}

fn mount_pool(device: &Path, root: &Path) -> Result<()> {
    let mounted = rustix::mount::mount(device, root, "btrfs", FLAGS, Some(OPTIONS));
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
fn make_image(state: &Path, image: &Path, wanted: Option<u64>) -> Result<()> {
    if !kernel_has_btrfs() {
        // Loading it may be all that is missing; whether it worked is asked, not assumed.
        if let Err(error) = Command::new("modprobe").arg("btrfs").output() {
            tracing::debug!(%error, "modprobe could not be run");
        }
        if !kernel_has_btrfs() {
            return Err(no_btrfs());
        }
    }
    let below = Below::of(state)?;
    let most = below.size_for(wanted)?;
    let size = most.min(sizing::ahead(below.free));
    let staged = state.join("pool.img.new");
    let file = File::create(&staged).doing_to("making the pool file", &staged)?;
    backing::write_in_place(&file);
    let allocated = file
        .set_permissions(fs::Permissions::from_mode(0o600))
        .and_then(|()| backing::allocate(&file, 0, size));
    if let Err(error) = allocated {
        let _gone = fs::remove_file(&staged);
        return Err(error).doing_to("sizing the pool file", &staged);
    }
    run_mkfs(&staged)?;
    backing::allocate(&file, size, TAIL).doing_to("sizing the pool file", &staged)?;
    file.sync_all().doing_to("writing", &staged)?;
    sizing::keep(state, most)?;
    fs::rename(&staged, image).doing_to("naming the pool file", image)?;
    File::open(state)
        .and_then(|dir| dir.sync_all())
        .doing_to("writing", state)?;
    tracing::info!(file = %image.display(), size, most, "pool file made");
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
