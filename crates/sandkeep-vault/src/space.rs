//! How full a btrfs file system is, from what the kernel tells about it in `/sys/fs/btrfs`.
//!
//! `statvfs` leaves out what is promised to writers and not written yet, and that is what counts
//! when somebody writes faster than the disk.

use rustix::fs::StatVfs;
use std::{fs, io, path::Path};

use crate::sizing;

/// Space of one kind, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Kind {
    /// Set aside for this kind.
    total: u64,
    /// The same on the device.
    on_disk: u64,
    /// Used, about to be used, or freed but not usable yet.
    taken: u64,
    /// Promised to writers.
    promised: u64,
    /// Freed, and usable when the kernel writes its books the next time.
    pinned: u64,
}

/// What is left of a file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    pub total: u64,
    /// For the contents of files, promises kept.
    pub free: u64,
    /// Promised to writers of contents; not in `free`.
    pub promised: u64,
    /// Freed, but usable only when the kernel writes its books the next time; not in `free`.
    pub pinned: u64,
    /// Not set aside for contents or names yet.
    pub open: u64,
    /// For names, attributes and trees. Without it nothing can be written at all.
    pub free_for_names: u64,
}

impl Space {
    /// What images leave of it.
    pub fn left_by_images(&self) -> u64 {
        sizing::left_by_images(self.total, self.open)
    }

    /// With less than this, nothing new is begun.
    pub fn watermark(&self) -> u64 {
        sizing::watermark(self.total)
    }

    /// Of a btrfs on one device, by the kernel's own books.
    pub fn read(allocation: &Path, total: u64) -> io::Result<Self> {
        let data = Kind::read(&allocation.join("data"))?;
        let names = Kind::read(&allocation.join("metadata"))?;
        let system = Kind::read(&allocation.join("system"))?;
        let set_aside = data.on_disk + names.on_disk + system.on_disk;
        let open = total.saturating_sub(set_aside);
        let free_names = names.total.saturating_sub(names.taken + names.promised);
        // The kernel sets a piece aside for names when four fifths of what they have are taken.
        let crowded = free_names < names.total / 4 + 2 * sizing::watermark_for_names(total);
        let for_names = if crowded { sizing::piece(total) } else { 0 };
        let open_to_contents = open.saturating_sub(for_names);
        Ok(Self {
            total,
            free: (open_to_contents + data.total).saturating_sub(data.taken + data.promised),
            promised: data.promised,
            pinned: data.pinned + names.pinned,
            open,
            free_for_names: open.saturating_add(free_names),
        })
    }

    /// Of any other file system.
    pub fn from_statvfs(stat: &StatVfs) -> Self {
        let free = available(stat);
        Self {
            total: size(stat),
            free,
            promised: 0,
            pinned: 0,
            open: 0,
            free_for_names: free,
        }
    }
}

impl Kind {
    fn read(dir: &Path) -> io::Result<Self> {
        let one = |name: &str| -> io::Result<u64> {
            let text = fs::read_to_string(dir.join(name))?;
            text.trim()
                .parse()
                .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
        };
        let pinned = one("bytes_pinned")?;
        Ok(Self {
            total: one("total_bytes")?,
            on_disk: one("disk_total")?,
            taken: one("bytes_used")? + pinned + one("bytes_reserved")?,
            pinned,
            promised: one("bytes_may_use")?,
        })
    }
}

pub fn available(stat: &StatVfs) -> u64 {
    stat.f_bavail.saturating_mul(stat.f_frsize)
}

pub fn size(stat: &StatVfs) -> u64 {
    stat.f_blocks.saturating_mul(stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file system of 2000 MiB, of which 890 are not set aside.
    fn with_names_promised(promised: u64) -> Space {
        let dir = tempfile::tempdir().unwrap();
        for (kind, total, used, promised) in [
            ("data", 1000, 300, 200),
            ("metadata", 100, 10, promised),
            ("system", 10, 1, 0),
        ] {
            let place = dir.path().join(kind);
            fs::create_dir(&place).unwrap();
            for (name, value) in [
                ("total_bytes", total),
                ("disk_total", total),
                ("bytes_used", used),
                ("bytes_pinned", 0),
                ("bytes_reserved", 0),
                ("bytes_may_use", promised),
            ] {
                fs::write(place.join(name), format!("{}\n", value * MIB)).unwrap();
            }
        }
        Space::read(dir.path(), 2000 * MIB).unwrap()
    }

    #[test]
    fn promises_to_writers_are_not_free() {
        let space = with_names_promised(20);
        assert_eq!(space.free, (890 + 500) * MIB);
        assert_eq!(space.promised, 200 * MIB);
        assert_eq!(space.free_for_names, (890 + 70) * MIB);
    }

    #[test]
    fn what_names_are_about_to_need_was_counted_for_contents() {
        assert_eq!(with_names_promised(60).free, (890 - 200 + 500) * MIB);
    }
}
