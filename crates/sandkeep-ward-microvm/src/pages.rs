//! Pages of memory in a file: which ones, then what is in them. Pages that are not named are
//! as before, so a file of this kind is a whole memory over nothing, or a change over another.

use sandkeep_host::failure::{Doing as _, Failure};
use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

pub const PAGE: u64 = 4096;
const MAGIC: &[u8; 8] = b"SKPAGES1";
/// Pages moved at once.
const CHUNK: u64 = 256;

/// Pages that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first: u64,
    pub count: u64,
}

impl Run {
    /// In pieces that are moved at once.
    pub fn parts(self) -> impl Iterator<Item = Self> {
        (0..self.count)
            .step_by(CHUNK as usize)
            .map(move |done| Self {
                first: self.first + done,
                count: CHUNK.min(self.count - done),
            })
    }
}

/// Adds a page that comes after all others.
pub fn push(runs: &mut Vec<Run>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.first + last.count == page => last.count += 1,
        _ => runs.push(Run {
            first: page,
            count: 1,
        }),
    }
}

/// All pages of both, in order and once.
pub fn union(a: &[Run], b: &[Run]) -> Vec<Run> {
    let mut all: Vec<Run> = a.iter().chain(b).copied().collect();
    all.sort_unstable_by_key(|run| run.first);
    let mut out: Vec<Run> = Vec::with_capacity(all.len());
    for run in all {
        match out.last_mut() {
            Some(last) if run.first <= last.first + last.count => {
                last.count = last.count.max(run.first + run.count - last.first);
            }
            _ => out.push(run),
        }
    }
    out
}

/// Writes these pages; `fill` gives their content, a part of a run at a time.
pub fn write(
    file: File,
    runs: &[Run],
    mut fill: impl FnMut(Run, &mut [u8]) -> io::Result<()>,
) -> Result<(), Failure> {
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut written = || -> io::Result<()> {
        out.write_all(MAGIC)?;
        out.write_all(&(runs.len() as u64).to_le_bytes())?;
        for run in runs {
            out.write_all(&run.first.to_le_bytes())?;
            out.write_all(&run.count.to_le_bytes())?;
        }
        let mut buffer = vec![0; (CHUNK * PAGE) as usize];
        for part in runs.iter().flat_map(|run| run.parts()) {
            let bytes = &mut buffer[..(part.count * PAGE) as usize];
            fill(part, bytes)?;
            out.write_all(bytes)?;
        }
        out.flush()
    };
    written().doing("writing the memory of the machine")
}

/// Reads pages, a part of a run at a time; says which there were. `size` is the size of the
/// memory they belong to: what lies outside of it is refused.
pub fn read(
    path: &Path,
    size: u64,
    mut each: impl FnMut(Run, &[u8]) -> io::Result<()>,
) -> Result<Vec<Run>, Failure> {
    let mut read = || -> io::Result<Vec<Run>> {
        let file = open(path)?;
        let length = file.metadata()?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let runs = runs(&mut file, length, size)?;
        let mut buffer = vec![0; (CHUNK * PAGE) as usize];
        for part in runs.iter().flat_map(|run| run.parts()) {
            let bytes = &mut buffer[..(part.count * PAGE) as usize];
            file.read_exact(bytes)?;
            each(part, bytes)?;
        }
        Ok(runs)
    };
    read().doing(format_args!("reading {}", path.display()))
}

/// Which pages are in a file, without what is in them.
pub fn look(path: &Path, size: u64) -> Result<Vec<Run>, Failure> {
    let look = || -> io::Result<Vec<Run>> {
        let file = open(path)?;
        let length = file.metadata()?.len();
        runs(&mut BufReader::new(file), length, size)
    };
    look().doing(format_args!("reading {}", path.display()))
}

/// Not by way of a link.
pub fn open(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

/// What stands before the pages in a file of this length, which somebody else may have written:
/// pages of a memory of `size`, in order, each once, and a file that is as long as they are.
/// Nothing is believed that was not read, so it takes as much memory as was read, and no more
/// than one run for every other page.
pub fn runs(file: &mut impl Read, length: u64, size: u64) -> io::Result<Vec<Run>> {
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "it is damaged");
    let mut bytes = [0; 8];
    file.read_exact(&mut bytes)?;
    if &bytes != MAGIC {
        return Err(damaged());
    }
    let mut number = || -> io::Result<u64> {
        file.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let count = number()?;
    let mut runs: Vec<Run> = Vec::new();
    // A run is never written right after another: they would be one.
    let mut least = 0;
    let mut pages = 0;
    for _ in 0..count {
        let run = Run {
            first: number()?,
            count: number()?,
        };
        let end = run.first.checked_add(run.count).ok_or_else(damaged)?;
        if run.first < least || run.count == 0 || end > size / PAGE {
            return Err(damaged());
        }
        least = end + 1;
        pages += run.count;
        runs.push(run);
    }
    // Both are bounded by the size of a memory by now.
    let named = MAGIC.len() as u64 + 8 + count * 16;
    if length != named + pages * PAGE {
        return Err(damaged());
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(first: u64, count: u64) -> Run {
        Run { first, count }
    }

    #[test]
    fn pages_come_back_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let runs = [run(1, 300), run(1000, 1)];
        let value = |page: u64| page.to_le_bytes()[0];
        let fill = |part: Run, bytes: &mut [u8]| {
            for (page, chunk) in (part.first..).zip(bytes.chunks_mut(PAGE as usize)) {
                chunk.fill(value(page));
            }
            Ok(())
        };
        write(File::create(&path).unwrap(), &runs, fill).unwrap();
        let mut seen = 0;
        let found = read(&path, 2000 * PAGE, |part, bytes| {
            for (page, chunk) in (part.first..).zip(bytes.chunks(PAGE as usize)) {
                assert!(chunk.iter().all(|byte| *byte == value(page)));
                seen += 1;
            }
            Ok(())
        });
        assert_eq!(found.unwrap(), runs);
        assert_eq!(seen, 301);
        let outside = read(&path, 500 * PAGE, |_, _| Ok(()));
        assert!(outside.unwrap_err().to_string().contains("damaged"));
        std::fs::write(&path, b"SKPAGES1\xff").unwrap();
        read(&path, 500 * PAGE, |_, _| Ok(())).unwrap_err();
    }

    /// A file that says this about itself and has as many pages as given.
    fn file(count: u64, named: &[(u64, u64)], pages: u64) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(count.to_le_bytes());
        for (first, count) in named {
            bytes.extend(first.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        bytes.resize(bytes.len() + (pages * PAGE) as usize, 7);
        bytes
    }

    #[test]
    fn hostile_files_are_refused_before_a_page_is_moved() {
        const ALL: u64 = u64::MAX;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let good = file(2, &[(0, 1), (9, 1)], 2);
        let trailing = [&good[..], &[0]].concat();
        let short = good[..good.len() - 1].to_vec();
        let other = [&b"SKPAGES2"[..], &good[8..]].concat();
        let hostile = [
            ("trailing bytes", trailing),
            ("cut off", short),
            ("another kind", other),
            ("nothing", Vec::new()),
            ("more runs than there are", file(ALL, &[(0, 1)], 1)),
            ("more pages than there are", file(1, &[(0, 10)], 1)),
            ("fewer pages than there are", file(1, &[(0, 1)], 2)),
            ("out of order", file(2, &[(9, 1), (0, 1)], 2)),
            ("the same twice", file(2, &[(3, 1), (3, 1)], 2)),
            ("overlapping", file(2, &[(3, 3), (5, 1)], 4)),
            ("in two what is one", file(2, &[(3, 1), (4, 1)], 2)),
            ("an empty run", file(1, &[(3, 0)], 0)),
            ("past the end", file(1, &[(9, 2)], 2)),
            ("around the end", file(1, &[(ALL, 2)], 2)),
            ("everything", file(1, &[(0, ALL)], 1)),
            ("the last of all", file(1, &[(ALL, 1)], 1)),
        ];
        for (what, bytes) in hostile {
            std::fs::write(&path, bytes).unwrap();
            read(&path, 10 * PAGE, |_, _| panic!("{what}")).expect_err(what);
            look(&path, 10 * PAGE).expect_err(what);
        }
        std::fs::write(&path, good).unwrap();
        assert_eq!(look(&path, 10 * PAGE).unwrap(), [run(0, 1), run(9, 1)]);
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        look(&link, 10 * PAGE).unwrap_err();
    }

    #[test]
    fn runs_are_joined() {
        let mut runs = Vec::new();
        for page in [3, 4, 5, 9] {
            push(&mut runs, page);
        }
        assert_eq!(runs, [run(3, 3), run(9, 1)]);
        assert_eq!(
            union(&runs, &[run(0, 1), run(5, 4), run(20, 2)]),
            [run(0, 1), run(3, 7), run(20, 2)]
        );
    }
}
