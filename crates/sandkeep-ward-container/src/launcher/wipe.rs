//! Memory that a process wants wiped in its copies (`MADV_WIPEONFORK`).
//!
//! Generators of random numbers keep there what tells them that they are copies. Our CRIU does
//! not write it to the image; where another one did, it is wiped here, before anything runs.

use rustix::fs::{Mode, OFlags, open};
use std::{fs, io, ops::Range, os::unix::fs::FileExt as _};

/// How the kernel shows the wish in `smaps`.
const WISH: &str = "wf";
/// What `pagemap` says of a page that has something in it: in memory, or swapped out.
const THERE: u64 = 0b11 << 62;
const ENTRY: usize = size_of::<u64>();

/// Of these processes, none of which runs.
pub fn wipe(pids: &[i32]) -> io::Result<()> {
    pids.iter().try_for_each(|pid| of_process(*pid))
}

fn of_process(pid: i32) -> io::Result<()> {
    let text = match fs::read(format!("/proc/{pid}/smaps"))
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    {
        // It has ended, and has no memory.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let ranges = wished(&text);
    if ranges.is_empty() {
        return Ok(());
    }
    let page = rustix::param::page_size();
    let pages = fs::File::open(format!("/proc/{pid}/pagemap"))?;
    let memory = fs::File::from(open(
        format!("/proc/{pid}/mem"),
        OFlags::RDWR | OFlags::CLOEXEC,
        Mode::empty(),
    )?);
    let nothing = vec![0; page];
    let mut entries = vec![0; 512 * ENTRY];
    for range in ranges {
        let step = u64::try_from(page).map_err(io::Error::other)?;
        let mut at = range.start;
        while at < range.end {
            let left = usize::try_from((range.end - at) / step).map_err(io::Error::other)?;
            let count = left.min(entries.len() / ENTRY);
            let place = at / step * ENTRY as u64;
            pages.read_exact_at(&mut entries[..count * ENTRY], place)?;
            for entry in entries[..count * ENTRY].chunks_exact(ENTRY) {
                let entry = <[u8; ENTRY]>::try_from(entry).map_err(io::Error::other)?;
                if u64::from_ne_bytes(entry) & THERE != 0 {
                    memory.write_all_at(&nothing, at)?;
                }
                at += step;
            }
        }
    }
    Ok(())
}

/// The mappings with the wish, out of the text of `smaps`.
fn wished(text: &str) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut range = None;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if flags.split_ascii_whitespace().any(|flag| flag == WISH) {
                found.extend(range.take());
            }
        } else if let Some(fresh) = line.split(' ').next().and_then(addresses) {
            range = Some(fresh);
        }
    }
    found
}

fn addresses(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        process::{Command, Stdio},
    };

    #[test]
    fn mappings_with_the_wish_are_found() {
        let text = "7f00-7f02 rw-p 00000000 00:00 0 \nSize: 8 kB\nVmFlags: rd wr mr wf ac \n\
                    8000-9000 rw-p 00000000 00:00 0   [heap]\nVmFlags: rd wr mr \n\
                    a000-b000 r--p 00000000 00:00 0 /a wf\nVmFlags: rd wf\n";
        assert_eq!(wished(text), [0x7f00..0x7f02, 0xa000..0xb000]);
    }

    #[test]
    fn what_is_to_be_wiped_is_and_nothing_else() {
        let script = "import ctypes, mmap\n\
            libc = ctypes.CDLL(None)\n\
            both = [mmap.mmap(-1, 3 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in '12']\n\
            for one in both: one[4096:4100] = b'sign'\n\
            at = ctypes.addressof(ctypes.c_char.from_buffer(both[0]))\n\
            assert libc.madvise(ctypes.c_void_p(at), 3 * 4096, 18) == 0\n\
            print('ready', flush=True)\n\
            input()\n\
            print(both[0][4096:4100] == bytes(4), both[1][4096:4100], flush=True)\n";
        let mut child = Command::new("python3")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(said.next().unwrap().unwrap(), "ready");
        wipe(&[i32::try_from(child.id()).unwrap()]).unwrap();
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), "True b'sign'");
        assert!(child.wait().unwrap().success());
    }
}
