//! The memory of machines.
//!
//! A machine that was booted ahead is a file in memory that nobody can write to any more.
//! Boxes map it privately: they share every page they have not changed. What a box has changed
//! is what its QEMU holds of its own, which the kernel tells page by page.

use crate::pages::{PAGE, Run, push, read, union, write};
use rustix::{
    fs::{MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, ftruncate, memfd_create, seek},
    process::Pid,
};
use sandkeep_host::failure::{Doing as _, Failure};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    path::Path,
};

const NAME: &str = "sandkeep-ram";
/// Pages of the map looked at together.
const LOOK: usize = 1 << 16;

/// One memory.
#[derive(Debug)]
pub struct Ram {
    file: File,
}

impl Ram {
    /// All zero, to be written by a machine that boots in it.
    pub fn blank(size: u64) -> Result<Self, Failure> {
        let made = || {
            let fd = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&fd, size)?;
            Ok::<_, rustix::io::Errno>(File::from(fd))
        };
        Ok(Self {
            file: made().doing("making the memory of the machine")?,
        })
    }

    /// Nobody can change it from now on, not even who maps it.
    pub fn seal(&self) -> Result<(), Failure> {
        let all = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&self.file, all).doing("sealing the memory of the machine")
    }

    /// Reads the files of pages over one another; says which pages the last one had.
    pub fn load(size: u64, files: &[&Path]) -> Result<(Self, Vec<Run>), Failure> {
        let ram = Self::blank(size)?;
        let mut runs = Vec::new();
        for file in files {
            runs = read(file, size, |run, bytes| {
                ram.file.write_all_at(bytes, run.first * PAGE)
            })?;
        }
        ram.seal()?;
        Ok((ram, runs))
    }

    /// What a machine that stands still has in its memory.
    pub fn copy_of(mapped: &Mapped) -> Result<Self, Failure> {
        let ram = Self::blank(mapped.size)?;
        let copied = || -> io::Result<()> {
            let mut bytes = Vec::new();
            for part in mapped
                .filled()
                .map_err(io::Error::other)?
                .into_iter()
                .flat_map(Run::parts)
            {
                bytes.resize((part.count * PAGE) as usize, 0);
                mapped.read(part, &mut bytes)?;
                ram.file.write_all_at(&bytes, part.first * PAGE)?;
            }
            Ok(())
        };
        copied().doing("copying the memory of the machine")?;
        Ok(ram)
    }

    /// Writes every page that is not zero.
    pub fn store(&self, path: &Path) -> Result<(), Failure> {
        let runs = self.filled().doing("reading the memory of the machine")?;
        let file = File::create(path).doing(format_args!("making {}", path.display()))?;
        write(file, &runs, |run, bytes| {
            self.file.read_exact_at(bytes, run.first * PAGE)
        })
    }

    fn filled(&self) -> io::Result<Vec<Run>> {
        let zero = [0; PAGE as usize];
        let mut page = [0; PAGE as usize];
        let mut runs = Vec::new();
        let mut at = 0;
        loop {
            at = match seek(&self.file, SeekFrom::Data(at)) {
                Ok(at) => at,
                // Nothing but a hole until the end.
                Err(rustix::io::Errno::NXIO) => return Ok(runs),
                Err(error) => return Err(error.into()),
            };
            let end = seek(&self.file, SeekFrom::Hole(at))?;
            while at < end {
                self.file.read_exact_at(&mut page, at)?;
                if page != zero {
                    push(&mut runs, at / PAGE);
                }
                at += PAGE;
            }
        }
    }

    /// How much of it nobody has filled yet.
    pub fn holes(&self) -> Result<u64, Failure> {
        let found = self
            .file
            .metadata()
            .doing("looking at the memory of the machine")?;
        // Blocks are of 512 bytes, whatever the pages are.
        Ok(found.len().saturating_sub(found.blocks() * 512))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The memory of a machine, in the QEMU that runs it.
#[derive(Debug)]
pub struct Mapped {
    pid: Pid,
    start: u64,
    size: u64,
}

impl Mapped {
    pub fn find(pid: i32, size: u64) -> Result<Self, Failure> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
            .doing("looking into the machine")?;
        let start = start_of(&maps, size)
            .ok_or_else(|| io::Error::other("its memory is not there"))
            .doing("looking into the machine")?;
        let pid = Pid::from_raw(pid)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
            .doing("looking into the machine")?;
        Ok(Self { pid, start, size })
    }

    /// Every page with something in it, the box's own or not.
    pub fn filled(&self) -> Result<Vec<Run>, Failure> {
        let pid = self.pid.as_raw_nonzero();
        let look = || -> io::Result<Vec<Run>> {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
            let start = format!("{:x}-", self.start);
            let range = maps
                .lines()
                .find_map(|line| {
                    line.split(' ')
                        .next()
                        .filter(|range| range.starts_with(&start))
                })
                .ok_or_else(|| io::Error::other("its memory is not there"))?;
            let below = Ram {
                file: File::open(format!("/proc/{pid}/map_files/{range}"))?,
            };
            below.filled()
        };
        let below = look().doing("looking at the memory of the machine")?;
        Ok(union(&below, &self.changed()?))
    }

    /// The pages that are the box's own. The machine must stand still.
    pub fn changed(&self) -> Result<Vec<Run>, Failure> {
        let look = || -> io::Result<Vec<Run>> {
            let map = File::open(format!("/proc/{}/pagemap", self.pid.as_raw_nonzero()))?;
            let pages = self.size / PAGE;
            let mut runs = Vec::new();
            let mut buffer = vec![0; LOOK * 8];
            let mut at = 0;
            while at < pages {
                let count = (pages - at).min(LOOK as u64);
                let bytes = &mut buffer[..(count * 8) as usize];
                map.read_exact_at(bytes, (self.start / PAGE + at) * 8)?;
                for (page, entry) in (at..).zip(bytes.chunks_exact(8)) {
                    let entry = entry.try_into().map(u64::from_ne_bytes);
                    if entry.is_ok_and(is_own) {
                        push(&mut runs, page);
                    }
                }
                at += count;
            }
            Ok(runs)
        };
        look().doing("looking which memory the box has changed")
    }

    pub fn read(&self, run: Run, bytes: &mut [u8]) -> io::Result<()> {
        let local = libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        };
        let remote = self.remote(run, bytes.len())?;
        // SAFETY: the kernel writes at most `iov_len` bytes to `bytes`, which is that long and
        // ours; the other process is only read.
        let moved = unsafe {
            libc::process_vm_readv(
                self.pid.as_raw_nonzero().get(),
                &raw const local,
                1,
                &raw const remote,
                1,
                0,
            )
        };
        whole(moved, bytes.len())
    }

    /// Before the machine has begun.
    pub fn write(&self, run: Run, bytes: &[u8]) -> io::Result<()> {
        let local = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let remote = self.remote(run, bytes.len())?;
        // SAFETY: the kernel reads `iov_len` bytes of `bytes` and writes nothing of ours; in the
        // other process it writes to the memory of its machine, which is as large.
        let moved = unsafe {
            libc::process_vm_writev(
                self.pid.as_raw_nonzero().get(),
                &raw const local,
                1,
                &raw const remote,
                1,
                0,
            )
        };
        whole(moved, bytes.len())
    }

    fn remote(&self, run: Run, length: usize) -> io::Result<libc::iovec> {
        if (run.first + run.count) * PAGE > self.size || run.count * PAGE != length as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(libc::iovec {
            iov_base: (self.start + run.first * PAGE) as *mut libc::c_void,
            iov_len: length,
        })
    }
}

fn whole(moved: isize, wanted: usize) -> io::Result<()> {
    match usize::try_from(moved) {
        Ok(count) if count == wanted => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// There, and neither a page of the file nor shared with it; or swapped out.
fn is_own(entry: u64) -> bool {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_FILE: u64 = 1 << 61;
    entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & OF_FILE == 0)
}

/// The first address of the memory. QEMU may have changed the rights of parts of it, so it may
/// be in several lines.
fn start_of(maps: &str, size: u64) -> Option<u64> {
    let mut parts = maps
        .lines()
        .filter(|line| line.contains(&format!("/memfd:{NAME}")))
        .filter_map(|line| {
            let mut words = line.split_ascii_whitespace();
            let (start, end) = words.next()?.split_once('-')?;
            let offset = words.nth(1)?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some((number(start)?, number(end)?, number(offset)?))
        });
    let (start, mut reached, offset) = parts.next()?;
    for (next, end, offset) in parts {
        if next != reached || offset != next - start {
            break;
        }
        reached = end;
    }
    (offset == 0 && reached - start >= size).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn memory_is_found_among_the_maps() {
        let maps = "7f0000000000-7f0000200000 rw-p 00000000 00:01 99 /memfd:sandkeep-ram (deleted)\n\
                    7f0000200000-7f0000400000 r--p 00200000 00:01 99 /memfd:sandkeep-ram (deleted)\n\
                    7f1000000000-7f1000200000 rw-p 00000000 00:00 0\n";
        assert_eq!(start_of(maps, 4 << 20), Some(0x7f00_0000_0000));
        assert_eq!(start_of(maps, 8 << 20), None);
        assert_eq!(start_of("", 1), None);
    }

    #[test]
    fn a_sealed_memory_can_not_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let ram = Ram::blank(16 * PAGE).unwrap();
        ram.file.write_all_at(b"x", 3 * PAGE).unwrap();
        let path = dir.path().join("ram");
        ram.store(&path).unwrap();
        let (again, runs) = Ram::load(16 * PAGE, &[&path]).unwrap();
        assert_eq!(again.holes().unwrap(), 15 * PAGE);
        assert_eq!(runs, [Run { first: 3, count: 1 }]);
        let opened = File::options()
            .write(true)
            .open(format!("/proc/self/fd/{}", again.fd().as_raw_fd()))
            .unwrap();
        assert!(opened.write_all_at(b"y", 0).is_err());
        assert!(opened.set_len(0).is_err());
        let mut byte = [0];
        again.file.read_exact_at(&mut byte, 3 * PAGE).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn only_own_pages_count() {
        assert!(is_own(1 << 63));
        assert!(is_own(1 << 62));
        assert!(!is_own(1 << 63 | 1 << 61));
        assert!(!is_own(0));
    }
}
