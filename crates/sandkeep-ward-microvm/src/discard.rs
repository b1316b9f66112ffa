//! Memory that a machine has freed goes back to the host.
//!
//! The machine reports its free pages and QEMU drops them: first from the file the memory comes
//! from, then from its own mapping. That file is shared by all boxes of a machine and sealed, so
//! the first step is refused and QEMU would not come to the second, which is the one that is
//! wanted. So the kernel is told to answer the first with success and not to do it: for the one
//! descriptor that is the memory, because disks are trimmed by the very same call and mean it.
//! Which number that descriptor has is up to QEMU, but the same at each start: it is looked up
//! once, and no QEMU is used of which it is not true.

use rustix::fs::{fstat, stat};
use sandkeep_host::failure::Doing as _;
use sandkeep_model::{Error, Result};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch, apply_filter,
};
use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd, OwnedFd, RawFd},
    sync::atomic::{AtomicI32, Ordering},
};

/// What a QEMU is handed open has numbers from here on: those below are the ones it opens, in the
/// same order each time.
const HANDED_OVER: RawFd = 128;

/// The same descriptor with a number that is out of the way of those QEMU opens.
pub fn high(fd: impl AsFd) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, HANDED_OVER)
        .doing("handing files to QEMU")
        .map_err(Error::from)
}

/// The number under which QEMU opens the memory of its machine, as far as it is known.
#[derive(Debug, Default)]
pub struct Spot(AtomicI32);

impl Spot {
    pub fn get(&self) -> Option<RawFd> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| *number > 0)
    }

    pub fn set(&self, number: Option<RawFd>) {
        self.0.store(number.unwrap_or(0), Ordering::Release);
    }

    /// Where a QEMU that has started has it. None if that is not clear.
    pub fn of(pid: i32, ram: impl AsFd) -> Result<Option<RawFd>> {
        let look = || -> io::Result<Vec<RawFd>> {
            let ram = fstat(ram)?;
            let mut found = Vec::new();
            for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
                let entry = entry?;
                let name = entry.file_name();
                let number: Option<RawFd> = name.to_str().and_then(|name| name.parse().ok());
                let same = stat(entry.path())
                    .is_ok_and(|other| (other.st_dev, other.st_ino) == (ram.st_dev, ram.st_ino));
                found.extend(number.filter(|number| same && *number < HANDED_OVER));
            }
            Ok(found)
        };
        match look().doing("looking into QEMU")?[..] {
            [number] => Ok(Some(number)),
            _ => Ok(None),
        }
    }
}

/// Has the kernel pretend that holes are punched into one descriptor.
pub struct Pretence(BpfProgram);

impl std::fmt::Debug for Pretence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pretence").field(&self.0.len()).finish()
    }
}

impl Pretence {
    pub fn about(number: RawFd) -> Result<Self> {
        let made = || -> std::result::Result<BpfProgram, BackendError> {
            let is = |argument, value: i32| {
                SeccompCondition::new(
                    argument,
                    SeccompCmpArgLen::Dword,
                    SeccompCmpOp::Eq,
                    u64::from(value.cast_unsigned()),
                )
            };
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let rule = SeccompRule::new(vec![is(0, number)?, is(1, hole)?])?;
            let rules = BTreeMap::from([(libc::SYS_fallocate, vec![rule])]);
            let done = SeccompAction::Errno(0);
            // QEMU, and so this level, is of one architecture.
            SeccompFilter::new(rules, SeccompAction::Allow, done, TargetArch::x86_64)?.try_into()
        };
        made()
            .map(Self)
            .map_err(|error| Error::internal(format!("the filter of QEMU: {error}")))
    }

    /// From here on, for this thread and all programs it starts. Safe between fork and exec.
    pub fn begin(&self) -> io::Result<()> {
        apply_filter(&self.0).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, memfd_create};
    use std::os::{fd::AsRawFd as _, unix::fs::FileExt as _};

    fn memory() -> fs::File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = fs::File::from(memfd_create("test", flags).unwrap());
        file.write_all_at(&[7; 8192], 0).unwrap();
        file
    }

    fn first(file: &fs::File) -> u8 {
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    }

    #[test]
    fn holes_are_pretended_in_one_descriptor_and_nothing_else_is() {
        const HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
        let (ram, disk) = (memory(), memory());
        rustix::fs::fcntl_add_seals(&ram, SealFlags::WRITE).unwrap();
        let pretence = Pretence::about(ram.as_raw_fd()).unwrap();
        fallocate(&ram, HOLE, 0, 4096).unwrap_err();
        // The filter is that of one thread.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pretence.begin().unwrap();
                fallocate(&ram, HOLE, 0, 4096).unwrap();
                fallocate(&ram, FallocateFlags::ZERO_RANGE, 0, 4096).unwrap_err();
                fallocate(&disk, HOLE, 0, 4096).unwrap();
                ram.write_at(&[1], 0).unwrap_err();
            });
        });
        assert_eq!((first(&ram), first(&disk)), (7, 0));
    }

    #[test]
    fn memory_is_found_where_it_is_open_once() {
        let pid = std::process::id().cast_signed();
        let ram = memory();
        assert_eq!(Spot::of(pid, &ram).unwrap(), Some(ram.as_raw_fd()));
        let above = high(&ram).unwrap();
        assert!(above.as_raw_fd() >= HANDED_OVER);
        assert_eq!(Spot::of(pid, &ram).unwrap(), Some(ram.as_raw_fd()));
        let _twice = ram.try_clone().unwrap();
        assert_eq!(Spot::of(pid, &ram).unwrap(), None);
        let spot = Spot::default();
        assert_eq!(spot.get(), None);
        spot.set(Some(9));
        assert_eq!(spot.get(), Some(9));
    }
}
