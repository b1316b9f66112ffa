//! Reading and writing the small files of a cgroup directory.

use crate::failure::{Doing, Failure};
use std::{fmt::Display, fs, io, path::Path};

pub fn write(dir: &Path, file: &str, value: impl Display + Copy) -> Result<(), Failure> {
    let value = value.to_string();
    // Not `fs::write`: these files must not be created or truncated.
    write_raw(&dir.join(file), &value)
        .doing(format_args!("writing {value} to {}/{file}", dir.display()))
}

/// Like [`write`], for files that are not on every kernel.
pub fn write_if_there(dir: &Path, file: &str, value: impl Display + Copy) -> Result<(), Failure> {
    match write(dir, file, value) {
        Err(failure) if failure.source.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn write_raw(path: &Path, value: &str) -> io::Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new()
        .write(true)
        .open(path)?
        .write_all(value.as_bytes())
}

pub fn read(dir: &Path, file: &str) -> Result<String, Failure> {
    fs::read_to_string(dir.join(file)).doing(format_args!("reading {}/{file}", dir.display()))
}

pub fn read_number(dir: &Path, file: &str) -> Result<u64, Failure> {
    let text = read(dir, file)?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "not a number"))
        .doing(format_args!("reading {}/{file}", dir.display()))
}

/// The number after `key` in a file of `key number` lines; 0 when the key is not there.
pub fn keyed(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == key)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyed_takes_whole_names_only() {
        let text = "oom 3\noom_kill 2\noom_kill_disable x\n";
        assert_eq!(keyed(text, "oom"), 3);
        assert_eq!(keyed(text, "oom_kill"), 2);
        assert_eq!(keyed(text, "oom_kill_disable"), 0);
        assert_eq!(keyed(text, "none"), 0);
    }
}
