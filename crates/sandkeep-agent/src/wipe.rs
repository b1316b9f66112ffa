//! Pages that a copy of a machine must find empty.
//!
//! A program that asked for it with `MADV_WIPEONFORK` learns from an empty page that it is a copy
//! and draws new random numbers: BoringSSL, AWS-LC, Chromium and others keep their generators so.
//! Linux empties these pages in a forked process. It knows nothing of a copied machine, so the
//! agent empties them there.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
const ZEROES: [u8; PAGE as usize] = [0; PAGE as usize];
/// More of it than this in one piece is not what the flag was made for.
const MOST_PAGES: u64 = 1 << 18;
/// In an entry of `pagemap`: the page is there, in memory or swapped out.
const THERE: u64 = 3 << 62;
/// Entries that are read at once.
const ENTRIES: u64 = 512;

/// Pages of one process that have to be emptied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Marked {
    pid: i32,
    pages: Vec<u64>,
}

/// The pages that these processes have so marked and filled. One that ended meanwhile has none.
pub(crate) fn find(processes: &[i32]) -> Vec<Marked> {
    let mut found = Vec::new();
    for &pid in processes {
        if let Ok(pages) = marked_in(pid)
            && !pages.is_empty()
        {
            found.push(Marked { pid, pages });
        }
    }
    found
}

/// Empties them. The processes do not run meanwhile.
pub(crate) fn empty(marked: &[Marked]) -> io::Result<()> {
    let mut refused = Ok(());
    for one in marked {
        if let Err(error) = empty_in(one)
            && is_still_filled(one)
        {
            let message = format!("emptying pages of process {}: {error}", one.pid);
            refused = Err(io::Error::other(message));
        }
    }
    refused
}

/// One that stands still can be killed, and one that could not be held goes on.
fn is_still_filled(one: &Marked) -> bool {
    marked_in(one.pid).is_ok_and(|now| now.iter().any(|page| one.pages.contains(page)))
}

fn empty_in(one: &Marked) -> io::Result<()> {
    let memory = File::options()
        .write(true)
        .open(format!("/proc/{}/mem", one.pid))?;
    for &page in &one.pages {
        memory.write_all_at(&ZEROES, page)?;
    }
    Ok(())
}

fn marked_in(pid: i32) -> io::Result<Vec<u64>> {
    let map = BufReader::new(File::open(format!("/proc/{pid}/smaps"))?);
    let ranges = ranges_in(map)?;
    if ranges.is_empty() {
        return Ok(Vec::new());
    }
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut pages = Vec::new();
    for (start, end) in ranges {
        let end = end.min(start.saturating_add(MOST_PAGES * PAGE));
        pages_there(&pagemap, start, end, &mut pages)?;
    }
    Ok(pages)
}

fn pages_there(pagemap: &File, start: u64, end: u64, pages: &mut Vec<u64>) -> io::Result<()> {
    let (mut next, last) = (start / PAGE, end / PAGE);
    let mut entries = [0_u8; 8 * ENTRIES as usize];
    while next < last {
        let count = (last - next).min(ENTRIES);
        let read = &mut entries[..8 * count as usize];
        pagemap.read_exact_at(read, next * 8)?;
        for (entry, number) in read.as_chunks::<8>().0.iter().zip(next..) {
            if u64::from_ne_bytes(*entry) & THERE != 0 {
                pages.push(number * PAGE);
            }
        }
        next += count;
    }
    Ok(())
}

/// The ranges of a `smaps` whose flags have `wf`.
fn ranges_in(mut map: impl BufRead) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let mut range = None;
    let mut line = Vec::with_capacity(256);
    while map.read_until(b'\n', &mut line)? > 0 {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let wiped = flags
                .split(u8::is_ascii_whitespace)
                .any(|flag| flag == b"wf");
            ranges.extend(range.take().filter(|_| wiped));
        } else if let Some(found) = range_of(&line) {
            range = Some(found);
        }
        line.clear();
    }
    Ok(ranges)
}

/// `7f0000000000-7f0000001000 rw-p …`; other lines begin with a name and a colon.
fn range_of(line: &[u8]) -> Option<(u64, u64)> {
    let word = line.split(|&byte| byte == b' ').next()?;
    let (start, end) = std::str::from_utf8(word).ok()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_ranges_are_read_from_a_map() {
        let map = "\
55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
VmFlags: rd wr mr mw me ac sd 
7f10a0000000-7f10a0001000 rw-p 00000000 00:00 0 
Rss:                   4 kB
VmFlags: rd wr mr mw me ac wf sd 
7f10a0001000-7f10a0002000 rw-p 00000000 00:00 0 
VmFlags: rd wr wfx 
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
VmFlags: ex wf 
";
        assert_eq!(
            ranges_in(map.as_bytes()).unwrap(),
            [
                (0x7f10_a000_0000, 0x7f10_a000_1000),
                (0xffff_ffff_ff60_0000, 0xffff_ffff_ff60_1000)
            ]
        );
    }

    #[test]
    fn a_page_that_asked_for_it_is_emptied_and_no_other() {
        const LENGTH: usize = 3 * PAGE as usize;
        // SAFETY: a new anonymous mapping of this process; nothing else knows of it.
        let memory = unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                LENGTH,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            // The second of three pages, and not the third, which is never touched.
            let second = at.byte_add(PAGE as usize);
            assert_eq!(
                libc::madvise(second, 2 * PAGE as usize, libc::MADV_WIPEONFORK),
                0
            );
            std::slice::from_raw_parts_mut(at.cast::<u8>(), LENGTH)
        };
        memory[0] = 7;
        memory[PAGE as usize] = 7;
        let own = i32::try_from(std::process::id()).unwrap();
        let found = find(&[own]);
        let second = memory.as_ptr() as u64 + PAGE;
        assert!(found.iter().any(|one| one.pages == [second]), "{found:x?}");
        let this = Marked {
            pid: own,
            pages: vec![second],
        };
        empty(&[this]).unwrap();
        // The kernel wrote it.
        let now = std::hint::black_box(&*memory);
        assert_eq!((now[0], now[PAGE as usize]), (7, 0));
        assert_eq!(find(&[i32::MAX]), []);
        // One that was killed meanwhile has nothing to be emptied.
        let gone = Marked {
            pid: i32::MAX,
            pages: vec![second],
        };
        empty(&[gone]).unwrap();
        let unmapped = Marked {
            pid: own,
            pages: vec![0],
        };
        empty(&[unmapped]).unwrap();
    }
}
