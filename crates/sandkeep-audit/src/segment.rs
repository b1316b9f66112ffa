//! The files of a log. Each is named by the number of its first line.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use sandkeep_model::{Error, Result};

use crate::{
    line::parse,
    scan::{Forward, Line},
};

const PREFIX: &str = "audit-";
const SUFFIX: &str = ".jsonl";
const DIGITS: usize = 20;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Segment {
    pub first: u64,
    pub path: PathBuf,
}

impl Segment {
    pub fn new(dir: &Path, first: u64) -> Self {
        Self {
            first,
            path: dir.join(format!("{PREFIX}{first:0DIGITS$}{SUFFIX}")),
        }
    }

    /// A file by itself. Under another name than ours it begins wherever it begins.
    pub fn alone(path: &Path) -> Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str());
        let mut segment = Self {
            first: name.and_then(number).unwrap_or(0),
            path: path.to_owned(),
        };
        if segment.first == 0
            && let Some(Line::Whole(line)) = Forward::new(segment.open_to_read()?)
                .next()
                .map_err(|error| segment.doing("reading", error))?
            && let Ok(record) = parse(&line)
        {
            segment.first = record.seq;
        }
        Ok(segment)
    }

    /// All segments, oldest first.
    pub fn list(dir: &Path) -> Result<Vec<Self>> {
        let fault = |error: std::io::Error| {
            Error::from(error).context(format!("reading {}", dir.display()))
        };
        let mut found = Vec::new();
        for item in std::fs::read_dir(dir).map_err(fault)? {
            let name = item.map_err(fault)?.file_name();
            if let Some(first) = name.to_str().and_then(number) {
                found.push(Self::new(dir, first));
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    pub fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    pub fn open_to_read(&self) -> Result<File> {
        File::open(&self.path).map_err(|error| self.doing("opening", error))
    }

    pub fn open_to_write(&self) -> Result<File> {
        OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&self.path)
            .map_err(|error| self.doing("opening", error))
    }

    pub fn doing(&self, what: &str, error: std::io::Error) -> Error {
        Error::from(error).context(format!("{what} {}", self.path.display()))
    }
}

fn number(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    if digits.len() != DIGITS || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_like_numbers_and_strangers_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for first in [1_000, 9, 1] {
            Segment::new(dir.path(), first).open_to_write().unwrap();
        }
        for stranger in ["audit-1.jsonl", "audit-0000000000000000000x.jsonl", ".lock"] {
            std::fs::write(dir.path().join(stranger), "").unwrap();
        }
        let firsts: Vec<u64> = Segment::list(dir.path())
            .unwrap()
            .iter()
            .map(|segment| segment.first)
            .collect();
        assert_eq!(firsts, [1, 9, 1_000]);
    }
}
