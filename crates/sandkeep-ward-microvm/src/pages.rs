//! Pages of memory in a file: which ones, then what is in them. Pages that are not named are
//! as before, so a file of this kind is a whole memory over nothing, or a change over another.

use sandkeep_host::failure::{Doing as _, Failure};
use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read as _, Write as _},
    path::Path,
};

pub const PAGE: u64 = 4096;
const MAGIC: &[u8; 8] = b"SKPAGES1";
/// Pages moved at once.
const CHUNK: u64 = 256;
/// A machine of a terabyte in single pages; more was not written by us.
const MOST_RUNS: u64 = 1 << 28;

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
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "it is damaged");
    let mut read = || -> io::Result<Vec<Run>> {
        let mut file = BufReader::with_capacity(1 << 20, File::open(path)?);
        let mut number = {
            let mut bytes = [0; 8];
            file.read_exact(&mut bytes)?;
            if &bytes != MAGIC {
                return Err(damaged());
            }
            move |file: &mut BufReader<File>| -> io::Result<u64> {
                file.read_exact(&mut bytes)?;
                Ok(u64::from_le_bytes(bytes))
            }
        };
        let count = number(&mut file)?;
        if count > MOST_RUNS {
            return Err(damaged());
        }
        let mut runs = Vec::new();
        for _ in 0..count {
            let run = Run {
                first: number(&mut file)?,
                count: number(&mut file)?,
            };
            let end = run.first.checked_add(run.count).ok_or_else(damaged)?;
            if run.count == 0 || end > size / PAGE {
                return Err(damaged());
            }
            runs.push(run);
        }
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
