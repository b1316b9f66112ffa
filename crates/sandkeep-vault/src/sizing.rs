//! How large the pool may become, how much of the disk below stays for others, and where that
//! is written down.

use sandkeep_model::{Code, Error, Result, human_bytes};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use crate::{doing::Doing as _, space, staging::sync_dir};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// btrfs refuses smaller devices.
pub const SMALLEST_POOL: u64 = 128 * MIB;
/// Where nobody says how large.
const DEFAULT_SIZE: u64 = 100 * GIB;
/// Allocated in the pool file behind the end of the file system: what lets a file system that is
/// full to the brim delete again.
pub const TAIL: u64 = 64 * MIB;

/// What the pool leaves on the disk below it, for the ledger, the audit log and others.
pub fn left_below(total: u64) -> u64 {
    (total / 20).clamp(256 * MIB, 4 * GIB)
}

/// How much is allocated ahead of those who write. On a busy disk a step takes seconds; who
/// writes meanwhile must not be refused.
pub fn ahead(free_below: u64) -> u64 {
    (free_below / 8).clamp(2 * GIB, 8 * GIB)
}

/// The same for a pool that is there: more than what it calls low.
pub fn ahead_of(total: u64, free_below: u64) -> u64 {
    ahead(free_below).max(watermark(total) * 2)
}

/// What sandboxes never get: deleting, and the server's own notes, need room.
pub fn reserve(total: u64) -> u64 {
    (total / 16).clamp(16 * MIB, GIB)
}

/// With less than this, nothing new is begun and whoever writes is held.
pub fn watermark(total: u64) -> u64 {
    reserve(total) * 2
}

/// Images are not written into this: what one sandbox has written of it must not make the storage low
/// for the others. `open` is what is not set aside for contents or names yet.
pub fn left_by_images(total: u64, open: u64) -> u64 {
    let low = watermark(total);
    low + low / 4 + 32 * MIB + piece(total).min(open)
}

/// So much at once the kernel sets aside for contents or names.
pub fn piece(total: u64) -> u64 {
    (total / 10).min(if total > 50 * GIB { GIB } else { 256 * MIB })
}

/// The same for names and trees.
pub fn watermark_for_names(total: u64) -> u64 {
    (total / 256).clamp(4 * MIB, 64 * MIB)
}

#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    size_bytes: u64,
}

fn place(state: &Path) -> PathBuf {
    state.join("storage.json")
}

/// The size the pool of this state directory was given, or has, when it was made before sizes
/// were kept. `None`: there is no pool yet.
pub fn kept(state: &Path) -> Option<u64> {
    let image = fs::metadata(state.join("pool.img")).ok()?;
    let said = fs::read(place(state)).ok();
    let kept = said.and_then(|text| serde_json::from_slice::<Kept>(&text).ok());
    Some(kept.map_or(image.len(), |kept| kept.size_bytes))
}

pub fn keep(state: &Path, size_bytes: u64) -> Result<()> {
    let (path, staged) = (place(state), state.join("storage.json.new"));
    let text = serde_json::to_vec(&Kept { size_bytes })
        .map_err(|error| Error::internal(format!("writing the size of the storage: {error}")))?;
    File::create(&staged)
        .and_then(|mut file| {
            file.write_all(&text)?;
            file.sync_all()
        })
        .doing_to("writing", &staged)?;
    fs::rename(&staged, &path).doing_to("writing", &path)?;
    sync_dir(state)
}

/// The disk below, as far as a pool may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Below {
    pub total: u64,
    pub free: u64,
}

impl Below {
    pub fn of(dir: &Path) -> Result<Self> {
        let stat = rustix::fs::statvfs(dir).doing_to("asking for the space of", dir)?;
        Ok(Self {
            total: space::size(&stat),
            free: space::available(&stat),
        })
    }

    /// What a pool may still take.
    pub fn spare(self) -> u64 {
        self.free.saturating_sub(left_below(self.total))
    }

    /// The size of a new pool.
    pub fn size_for(self, wanted: Option<u64>) -> Result<u64> {
        let most = self.spare().saturating_sub(TAIL) / MIB * MIB;
        match wanted {
            Some(size) if size < SMALLEST_POOL => Err(too_small(size)),
            Some(size) => self.check(size, 0).map(|()| size),
            None if most < SMALLEST_POOL => Err(self.no_room()),
            None => Ok(most.min(DEFAULT_SIZE)),
        }
    }

    /// Refuses a size of which this disk could not hold what is not allocated yet.
    pub fn check(self, size: u64, allocated: u64) -> Result<()> {
        let more = size.saturating_sub(allocated);
        let spare = self.spare();
        if more == 0 || more.saturating_add(TAIL) <= spare {
            return Ok(());
        }
        let most = allocated.saturating_add(spare.saturating_sub(TAIL)) / MIB * MIB;
        let hint = if most < SMALLEST_POOL {
            "free space on that disk, or name another with --state".to_owned()
        } else {
            format!(
                "give at most --storage-size {}MiB, free space on that disk, or name another with --state",
                most / MIB
            )
        };
        Err(Error::new(
            Code::DiskFull,
            format!(
                "a storage of {} does not fit the disk below it: {} are free there, of which {} stay for the ledger and others",
                human_bytes(size),
                human_bytes(self.free),
                human_bytes(left_below(self.total)),
            ),
        )
        .field("storage_size")
        .hint(hint))
    }

    fn no_room(self) -> Error {
        Error::new(
            Code::DiskFull,
            format!(
                "there is no room for a storage: the disk has {} free, of which {} stay for the ledger and others",
                human_bytes(self.free),
                human_bytes(left_below(self.total)),
            ),
        )
        .hint("free space on that disk, or name another with --state")
    }
}

fn too_small(size: u64) -> Error {
    Error::invalid(
        "storage_size",
        format!(
            "a pool of {} is too small, the least is {}",
            human_bytes(size),
            human_bytes(SMALLEST_POOL)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_of_100_gib_was_made_on_a_disk_of_3() {
        let below = Below {
            total: 3 * GIB,
            free: 3 * GIB,
        };
        let adapted = below.size_for(None).unwrap();
        assert!(
            (2 * GIB..=3 * GIB - 256 * MIB - TAIL).contains(&adapted),
            "{adapted}"
        );
        let refused = below.size_for(Some(100 * GIB)).unwrap_err();
        assert_eq!(refused.code, Code::DiskFull);
        assert!(refused.message.contains("3.0 GiB are free"), "{refused}");
        assert!(refused.hint.unwrap().contains("--storage-size"));
        assert_eq!(below.size_for(Some(2 * GIB)).unwrap(), 2 * GIB);
        let wide = Below {
            total: 1 << 42,
            free: 1 << 42,
        };
        assert_eq!(wide.size_for(None).unwrap(), DEFAULT_SIZE);
    }

    #[test]
    fn what_is_allocated_already_needs_no_more_room() {
        let full = Below {
            total: 100 * GIB,
            free: 0,
        };
        full.check(20 * GIB, 20 * GIB + TAIL).unwrap();
        full.check(20 * GIB, 10 * GIB).unwrap_err();
        full.size_for(None).unwrap_err();
    }

    #[test]
    fn the_size_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        keep(dir.path(), 7 * GIB).unwrap();
        assert_eq!(kept(dir.path()), None, "there is no pool");
        let image = File::create(dir.path().join("pool.img")).unwrap();
        image.set_len(GIB).unwrap();
        assert_eq!(kept(dir.path()), Some(7 * GIB));
        fs::remove_file(place(dir.path())).unwrap();
        assert_eq!(kept(dir.path()), Some(GIB), "one of an earlier version");
    }
}
