//! Which points were read through since this server started, so that they need not be again.
//!
//! See `docs/adr/0011-an-image-is-read-through-once.md` for why that is enough.

use sandkeep_model::PointId;
use std::{
    collections::{BTreeMap, HashMap},
    fs::Metadata,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use crate::mounts::mount_of;

/// Older kernels give the time of a change in ticks of up to 10 ms: two changes within one look
/// like one.
const TICK: Duration = Duration::from_millis(20);

/// What changes with every change of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    written: Duration,
    changed: Duration,
}

impl Stamp {
    pub fn of(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.size(),
            written: time(meta.mtime(), meta.mtime_nsec()),
            changed: time(meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// A change from now on gives another stamp.
    fn has_settled(&self) -> bool {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        self.written.max(self.changed) + TICK <= now
    }
}

fn time(seconds: i64, nanoseconds: i64) -> Duration {
    let seconds = Duration::from_secs(seconds.try_into().unwrap_or(0));
    seconds + Duration::from_nanos(nanoseconds.try_into().unwrap_or(0))
}

/// The files of a memory by their names.
pub type Stamps = BTreeMap<String, Stamp>;

/// The points that were found whole, with what their files looked like then.
#[derive(Debug)]
pub struct Verified {
    points: Mutex<HashMap<PointId, Stamps>>,
    /// Whether decay of the disk shows when a file is read.
    has_checksums: bool,
}

impl Verified {
    /// For points in a pool.
    pub fn on(pool: &Path) -> Self {
        let mount = mount_of(pool).ok().flatten();
        Self {
            points: Mutex::default(),
            has_checksums: mount.is_some_and(|mount| mount.has_checksums()),
        }
    }

    /// Kept only when every later change will show.
    pub fn remember(&self, id: &PointId, stamps: Stamps) {
        if self.has_checksums && !stamps.is_empty() && stamps.values().all(Stamp::has_settled) {
            self.lock().insert(id.clone(), stamps);
        }
    }

    /// For a point that is used in the next moment and never again.
    pub fn vouch_for(&self, id: &PointId, stamps: Stamps) {
        self.lock().insert(id.clone(), stamps);
    }

    pub fn is(&self, id: &PointId, now: &Stamps) -> bool {
        self.lock().get(id).is_some_and(|then| then == now)
    }

    pub fn forget(&self, id: &PointId) {
        self.lock().remove(id);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PointId, Stamps>> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn verified(has_checksums: bool) -> Verified {
        Verified {
            points: Mutex::default(),
            has_checksums,
        }
    }

    #[test]
    fn only_what_would_show_its_changes_is_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        fs::write(&path, "abc").unwrap();
        let id = PointId::random();
        let look =
            || Stamps::from([("pages".to_owned(), Stamp::of(&fs::metadata(&path).unwrap()))]);
        let fresh = look();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let young = Stamp {
            changed: now,
            ..fresh["pages"].clone()
        };
        let young = Stamps::from([("pages".to_owned(), young)]);
        let known = verified(true);
        known.remember(&id, young.clone());
        assert!(!known.is(&id, &young));
        std::thread::sleep(TICK * 2);
        known.remember(&id, look());
        assert!(known.is(&id, &fresh));
        assert!(!known.is(&PointId::random(), &fresh));
        fs::write(&path, "abd").unwrap();
        assert!(!known.is(&id, &look()));
        known.forget(&id);
        assert!(!known.is(&id, &fresh));
        // Nothing tells of decay here.
        let blind = verified(false);
        blind.remember(&id, fresh.clone());
        assert!(!blind.is(&id, &fresh));
        // One that is used at once is not read at all.
        blind.vouch_for(&id, fresh.clone());
        assert!(blind.is(&id, &fresh));
    }
}
