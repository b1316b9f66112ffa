//! Limits on what boxes write, and the upkeep of quota groups.
//!
//! With simple quotas a disk has two groups: `0/<id>` made by the kernel, and `1/<id>`
//! above it which carries the limit. A box may make subvolumes inside its own disk; the
//! kernel puts those under the same `1/<id>`, so they do not escape the limit.
//! All `1/<id>` are members of one `2/<pool>`, whose limit is what all sandboxes together may hold:
//! it follows the room there is, and leaves a reserve in which the server can still delete.
//! The memory of a point lies in a subvolume, too. Its `1/<id>` carries the limit of that one image, and is
//! a member of that sum and of a second one over all images, which ends earlier: images alone never make
//! the storage low.
//! With classic quotas (kernels before 6.7) the limit is on what only the disk refers to,
//! because its referenced size includes the template.

use sandkeep_model::Result;
use std::{
    fs, io,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{
    btrfs::{self, EnableQuota, LimitOn, Qgroup},
    doing::Doing as _,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaKind {
    /// Counts what the disk wrote; cheap. Kernel 6.7 and newer.
    Simple,
    /// Counts what only the disk refers to; slower.
    Classic,
    /// Nothing limits a disk.
    None,
}

/// What an upkeep round did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tidied {
    /// Quota groups of disks that are gone.
    pub groups_removed: usize,
    /// Groups that must wait until the kernel has freed the disk.
    pub groups_waiting: usize,
}

/// The quotas of one mounted btrfs.
#[derive(Debug)]
pub struct Quota {
    pub kind: QuotaKind,
    /// `/sys/fs/btrfs/<fsid>/qgroups`: live numbers, without waiting for a commit.
    sysfs: PathBuf,
    /// Of all disks and images together, where there can be one.
    sum: Option<Sum>,
    /// Of all images together.
    images: Option<Sum>,
}

#[derive(Debug)]
struct Sum {
    group: Qgroup,
    /// The limit that was set last.
    limit: Mutex<Option<u64>>,
}

/// What may still be written to one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageRoom {
    /// Of its own limit.
    pub own: u64,
    /// Of what all images may take.
    pub together: u64,
}

impl Quota {
    pub const fn none() -> Self {
        Self {
            kind: QuotaKind::None,
            sysfs: PathBuf::new(),
            sum: None,
            images: None,
        }
    }

    /// Switches quotas on if they are off, and finds out which kind is on.
    pub fn enable(pool: &Path) -> Result<Self> {
        let dir = btrfs::open_dir(pool).doing_to("opening the pool", pool)?;
        let fsid = btrfs::fsid(dir.as_fd()).doing("asking the pool for its id")?;
        let sysfs = PathBuf::from(format!("/sys/fs/btrfs/{fsid}/qgroups"));
        let kind = enable_any(dir.as_fd(), &sysfs);
        let find = |number| {
            (kind == QuotaKind::Simple)
                .then(|| Sum::find(pool, dir.as_fd(), number))
                .flatten()
        };
        let (sum, images) = (find(ALL), find(IMAGES));
        Ok(Self {
            kind,
            sysfs,
            sum,
            images,
        })
    }

    /// As it is on a pool that nothing can be written to.
    pub fn look(pool: &Path) -> Result<Self> {
        let dir = btrfs::open_dir(pool).doing_to("opening the pool", pool)?;
        let fsid = btrfs::fsid(dir.as_fd()).doing("asking the pool for its id")?;
        let sysfs = PathBuf::from(format!("/sys/fs/btrfs/{fsid}/qgroups"));
        Ok(Self {
            kind: enabled_kind(&sysfs).unwrap_or(QuotaKind::None),
            sysfs,
            sum: None,
            images: None,
        })
    }

    /// Has disks of an earlier version count for the sum, too.
    pub fn count_all(&self, pool: BorrowedFd<'_>, disks: impl Iterator<Item = u64>) {
        let Some(sum) = &self.sum else { return };
        for id in disks {
            let group = Qgroup { level: 1, id };
            match btrfs::assign_qgroup(pool, group, sum.group) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    tracing::debug!(%error, id, "a disk does not count for the sum");
                }
                _ => {}
            }
        }
    }

    /// Lets all disks together hold `more` than they do, promises to their writers included. A
    /// limit that differs by less than `exact` stays.
    pub fn limit_sum(&self, pool: BorrowedFd<'_>, more: u64, exact: u64) -> io::Result<()> {
        self.limit_together(pool, self.sum.as_ref(), more, exact)
    }

    /// The same for all images.
    pub fn limit_images(&self, pool: BorrowedFd<'_>, more: u64, exact: u64) -> io::Result<()> {
        self.limit_together(pool, self.images.as_ref(), more, exact)
    }

    fn limit_together(
        &self,
        pool: BorrowedFd<'_>,
        sum: Option<&Sum>,
        more: u64,
        exact: u64,
    ) -> io::Result<()> {
        let Some(sum) = sum else { return Ok(()) };
        let limit = self.counted(sum.group, more)?.saturating_add(more);
        let mut last = sum.limit.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| last.abs_diff(limit) < exact) {
            return Ok(());
        }
        // Zero would lift it.
        btrfs::limit_qgroup(pool, sum.group, LimitOn::Referenced, limit.max(1))?;
        *last = Some(limit);
        Ok(())
    }

    /// What a group holds, and what was promised to those who write to it.
    fn held(&self, group: Qgroup) -> io::Result<u64> {
        Ok(self
            .figure(group, "referenced")?
            .saturating_add(self.figure(group, "rsv_data")?))
    }

    /// What the kernel compares with the limit of a group. It sets room aside for names as well, 80 KiB
    /// for each file that is made, and gives that back when it writes its books: three hundred new
    /// files would take all that is left from the others. What is set aside shall not become contents,
    /// so it is made up for with no more than `most`.
    fn counted(&self, group: Qgroup, most: u64) -> io::Result<u64> {
        let for_names = self
            .figure(group, "rsv_meta_prealloc")?
            .saturating_add(self.figure(group, "rsv_meta_pertrans")?);
        Ok(self.held(group)?.saturating_add(for_names.min(most)))
    }

    /// What one disk holds: what it grows by shows here while it is still being written.
    pub fn held_by(&self, id: u64) -> io::Result<Option<u64>> {
        match self.limited_group(id) {
            None => Ok(None),
            Some((group, _)) => self.held(group).map(Some),
        }
    }

    fn figure(&self, group: Qgroup, name: &str) -> io::Result<u64> {
        let dir = self.sysfs.join(format!("{}_{}", group.level, group.id));
        let text = fs::read_to_string(dir.join(name))?;
        text.trim()
            .parse()
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
    }

    const fn limited_group(&self, id: u64) -> Option<(Qgroup, LimitOn)> {
        match self.kind {
            QuotaKind::Simple => Some((Qgroup { level: 1, id }, LimitOn::Referenced)),
            QuotaKind::Classic => Some((Qgroup { level: 0, id }, LimitOn::Exclusive)),
            QuotaKind::None => None,
        }
    }

    /// Makes the groups of a new disk and limits it. Zero means no limit.
    pub fn adopt(&self, disk: BorrowedFd<'_>, id: u64, limit: u64) -> io::Result<()> {
        if self.kind == QuotaKind::Simple {
            let (own, sum) = (Qgroup { level: 0, id }, Qgroup { level: 1, id });
            match btrfs::create_qgroup(disk, sum) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            btrfs::assign_qgroup(disk, own, sum)?;
            if let Some(all) = &self.sum {
                btrfs::assign_qgroup(disk, sum, all.group)?;
            }
        }
        self.limit(disk, id, limit)
    }

    /// The same for the subvolume of an image.
    pub fn adopt_image(&self, image: BorrowedFd<'_>, id: u64, limit: u64) -> io::Result<()> {
        self.adopt(image, id, limit)?;
        self.count_as_image(image, id)
    }

    /// What is written to this subvolume counts for all images together.
    pub fn count_as_image(&self, volume: BorrowedFd<'_>, id: u64) -> io::Result<()> {
        if let Some(images) = &self.images {
            btrfs::assign_qgroup(volume, Qgroup { level: 1, id }, images.group)?;
        }
        Ok(())
    }

    /// What may still be written to an image. `None` where nobody counts.
    pub fn image_room(&self, id: u64) -> io::Result<Option<ImageRoom>> {
        let Some((group, on)) = self.limited_group(id) else {
            return Ok(None);
        };
        let most = match on {
            LimitOn::Referenced => self.figure(group, "max_referenced")?,
            LimitOn::Exclusive => self.figure(group, "max_exclusive")?,
        };
        let together = match &self.images {
            None => u64::MAX,
            Some(images) => self
                .figure(images.group, "max_referenced")?
                .saturating_sub(self.held(images.group)?),
        };
        Ok(Some(ImageRoom {
            own: most.saturating_sub(self.held(group)?),
            together,
        }))
    }

    pub fn limit(&self, disk: BorrowedFd<'_>, id: u64, limit: u64) -> io::Result<()> {
        let Some((group, on)) = self.limited_group(id) else {
            return Ok(());
        };
        btrfs::limit_qgroup(disk, group, on, limit)
    }

    /// Bytes written to the disk beyond its template; `None` where nobody counts.
    pub fn usage(&self, id: u64) -> io::Result<Option<u64>> {
        let Some((group, on)) = self.limited_group(id) else {
            return Ok(None);
        };
        let figure = match on {
            LimitOn::Referenced => "referenced",
            LimitOn::Exclusive => "exclusive",
        };
        self.figure(group, figure).map(Some)
    }

    /// Removes the groups of one subvolume that is gone. `false`: the kernel still frees it,
    /// ask again later.
    pub fn forget(&self, pool: BorrowedFd<'_>, level: u16, id: u64) -> io::Result<bool> {
        if self.kind == QuotaKind::None || (self.kind == QuotaKind::Classic && level > 0) {
            return Ok(true);
        }
        match btrfs::remove_qgroup(pool, Qgroup { level, id }) {
            Ok(()) => Ok(true),
            // Newer kernels remove it by themselves.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// The two sums of one pool differ in this bit.
const ALL: u64 = 0;
const IMAGES: u64 = 1 << 47;

impl Sum {
    fn find(pool: &Path, dir: BorrowedFd<'_>, number: u64) -> Option<Self> {
        // Several servers may have directories on one file system of an operator.
        let inode = fs::metadata(pool).ok()?.ino();
        let volume = btrfs::subvolume_id(dir).ok()?;
        let id = (volume.wrapping_mul(0x1_0001).wrapping_add(inode)) & 0xffff_ffff_ffff;
        let id = id ^ number;
        let group = Qgroup { level: 2, id };
        match btrfs::create_qgroup(dir, group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                tracing::warn!(%error, "all sandboxes together are not limited");
                None
            }
            _ => Some(Self {
                group,
                limit: Mutex::default(),
            }),
        }
    }
}

fn enable_any(pool: BorrowedFd<'_>, sysfs: &Path) -> QuotaKind {
    if let Some(kind) = enabled_kind(sysfs) {
        return kind;
    }
    for kind in [EnableQuota::Simple, EnableQuota::Classic] {
        match btrfs::enable_quota(pool, kind) {
            Ok(()) => {
                let on = enabled_kind(sysfs).unwrap_or(QuotaKind::None);
                tracing::info!(?on, "quotas switched on");
                return on;
            }
            Err(error) => tracing::warn!(?kind, %error, "quotas could not be switched on"),
        }
    }
    QuotaKind::None
}

/// The directory is there when quotas are on; `mode` came with simple quotas.
fn enabled_kind(sysfs: &Path) -> Option<QuotaKind> {
    if !sysfs.is_dir() {
        return None;
    }
    match fs::read_to_string(sysfs.join("mode")) {
        Ok(mode) if mode.trim() == "squota" => Some(QuotaKind::Simple),
        Ok(mode) if mode.trim() == "disabled" => None,
        _ => Some(QuotaKind::Classic),
    }
}
