//! The file under the pool. All blocks of it are allocated, so that what the pool writes is never
//! refused by the disk below: a btrfs whose write fails there is read-only for good.
//!
//! The file grows in steps ahead of those who write, and the file system in it is only ever as
//! large as what is allocated. Behind its end lies the tail: a little that is allocated, too, and
//! given to a file system that is so full that it cannot delete.

use rustix::fs::{FallocateFlags, IFlags};
use sandkeep_model::{Result, human_bytes};
use std::{
    fs::File,
    io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{
    btrfs,
    doing::Doing as _,
    loopdev::LoopDevice,
    sizing::{self, Below, TAIL},
    space,
};

const MIB: u64 = 1 << 20;
/// Steps are whole pieces of this.
const GRAIN: u64 = 64 * MIB;
/// The pool gives back at most so much in one go: what lies there has to be moved.
const LARGEST_SHRINK: u64 = 1 << 30;
/// btrfs becomes no smaller.
const SMALLEST_FS: u64 = 256 * MIB;

#[derive(Debug)]
pub struct Backing {
    image: PathBuf,
    /// Kept open: looking at it costs nothing then.
    file: File,
    device: PathBuf,
    root: PathBuf,
    /// The state directory, on the disk below.
    pub below: PathBuf,
    /// How large the file system may become.
    pub most: u64,
    /// Held by whoever changes the size.
    sizing: Mutex<()>,
}

impl Backing {
    pub fn open(
        image: PathBuf,
        device: PathBuf,
        root: PathBuf,
        state: &Path,
        most: u64,
    ) -> Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(&image)
            .doing_to("opening", &image)?;
        Ok(Self {
            image,
            file,
            device,
            root,
            below: state.to_owned(),
            most,
            sizing: Mutex::default(),
        })
    }

    fn size(&self) -> Result<u64> {
        let stat =
            rustix::fs::statvfs(&self.root).doing_to("asking for the space of", &self.root)?;
        Ok(space::size(&stat))
    }

    fn length(&self) -> Result<u64> {
        Ok(self
            .file
            .metadata()
            .doing_to("looking at", &self.image)?
            .len())
    }

    /// How much larger the file system may become now.
    pub fn growable(&self, size: u64, below: Below) -> u64 {
        self.most.saturating_sub(size).min(below.spare()) / MIB * MIB
    }

    /// Whether all blocks of the file are allocated.
    pub fn is_whole(&self) -> Result<bool> {
        let meta = self.file.metadata().doing_to("looking at", &self.image)?;
        Ok(meta.blocks().saturating_mul(512) >= meta.len())
    }

    /// Fills the holes that something else made.
    pub fn fill_holes(&self) -> Result<()> {
        let length = self.length()?;
        allocate(&self.file, 0, length).doing_to("allocating", &self.image)
    }

    /// Makes the file system larger by at least `wanted`, if the disk below has that much to
    /// spare, else by what it has. Gives by how much.
    pub fn grow(&self, wanted: u64) -> Result<u64> {
        let _turn = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let (size, length) = (self.size()?, self.length()?);
        let growable = self.growable(size, Below::of(&self.below)?);
        let step = wanted.next_multiple_of(GRAIN).min(growable);
        if step < MIB {
            return Ok(0);
        }
        self.lengthen(length, size + step + TAIL)?;
        self.resize(size + step)?;
        Ok(step)
    }

    /// Allocates up to a new end of the file. Nothing is changed when there is no room.
    fn lengthen(&self, from: u64, to: u64) -> Result<()> {
        if to <= from {
            return Ok(());
        }
        if let Err(error) = allocate(&self.file, from, to - from) {
            // Part of it may be there.
            if let Err(left) = self.file.set_len(from) {
                tracing::warn!(error = %left, "taking back the end of the pool file");
            }
            return Err(error).doing_to("growing", &self.image);
        }
        self.file.sync_all().doing_to("growing", &self.image)
    }

    fn resize(&self, to: u64) -> Result<()> {
        LoopDevice::refresh_size(&self.device)?;
        let dir = btrfs::open_dir(&self.root).doing_to("opening", &self.root)?;
        btrfs::resize(dir.as_fd(), to).doing_to("resizing the pool at", &self.root)?;
        tracing::info!(size = %human_bytes(to), "pool resized");
        Ok(())
    }

    /// Gives a file system that is too full to delete what lies behind its end. `false`: it had
    /// that already.
    pub fn give_tail(&self) -> Result<bool> {
        let _turn = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let (size, length) = (self.size()?, self.length()?);
        if length < size + MIB {
            return Ok(false);
        }
        self.resize(length / MIB * MIB)?;
        tracing::warn!("the pool was too full to delete: it has its last reserve now");
        Ok(true)
    }

    /// Allocates the tail again, once there is room.
    pub fn mend_tail(&self) -> Result<()> {
        let _turn = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let (size, length) = (self.size()?, self.length()?);
        if length < size + TAIL && Below::of(&self.below)?.free > 2 * TAIL {
            self.lengthen(length, size + TAIL)?;
        }
        Ok(())
    }

    /// Gives the disk below back what is far more than anybody is about to write. Gives by how
    /// much the pool is smaller now.
    pub fn give_back(&self, free: u64) -> Result<u64> {
        let ahead = sizing::ahead_of(self.size()?, Below::of(&self.below)?.free);
        let much = free.saturating_sub(ahead + ahead / 2 + GRAIN);
        let _turn = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.size()?;
        let step = (much / GRAIN * GRAIN)
            .min(LARGEST_SHRINK)
            .min(size.saturating_sub(SMALLEST_FS));
        if step == 0 {
            return Ok(0);
        }
        self.shrink_to(size - step)?;
        Ok(step)
    }

    fn shrink_to(&self, to: u64) -> Result<()> {
        self.resize(to)?;
        self.file
            .set_len(to + TAIL)
            .doing_to("shrinking", &self.image)?;
        LoopDevice::refresh_size(&self.device)
    }

    /// A pool of an earlier version was as large as it might ever become, and had blocks only
    /// where something was written. It becomes as large as what it holds and a head start.
    pub fn take_over(&self) -> Result<()> {
        if self.is_whole()? {
            return Ok(());
        }
        let below = Below::of(&self.below)?;
        let size = self.size()?;
        let stat =
            rustix::fs::statvfs(&self.root).doing_to("asking for the space of", &self.root)?;
        let free = stat.f_bfree.saturating_mul(stat.f_frsize);
        let target = (size.saturating_sub(free) + sizing::ahead(below.free))
            .next_multiple_of(GRAIN)
            .max(SMALLEST_FS);
        if target < size {
            let _turn = self.sizing.lock().unwrap_or_else(PoisonError::into_inner);
            tracing::info!(
                from = %human_bytes(size), to = %human_bytes(target),
                "the pool of an earlier version is made as large as what is allocated"
            );
            self.shrink_to(target)?;
        }
        self.fill_holes()
    }
}

/// Allocates blocks, and makes the file longer where it ends before them.
pub fn allocate(file: &File, from: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), from, bytes) {
        Ok(()) => Ok(()),
        // A disk below that can promise nothing: whoever asks whether the file is whole is told.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let end = from.saturating_add(bytes);
            if file.metadata()?.len() < end {
                file.set_len(end)?;
            }
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// On a disk that copies what is written anew, allocated blocks would help nobody: this file is
/// written in place. Only as long as it is empty, and only where there is such a thing.
pub fn write_in_place(file: &File) {
    if let Ok(flags) = rustix::fs::ioctl_getflags(file)
        && let Err(error) = rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW)
    {
        tracing::debug!(%error, "the disk below knows no files that are written in place");
    }
}
