//! How many neighbours the kernel knows, in all networks together.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use crate::fault::{Doing as _, Fault, Result};

/// Only the network that the machine began with shows them, so they are opened before it is left.
#[derive(Debug)]
pub struct Tables {
    six: io::Result<File>,
    four: io::Result<File>,
}

impl Tables {
    pub fn open() -> Self {
        Self {
            six: File::open("/proc/net/stat/ndisc_cache"),
            four: File::open("/proc/net/stat/arp_cache"),
        }
    }

    /// Entries for IPv6 and for IPv4.
    pub fn entries(&self) -> Result<(u64, u64)> {
        Ok((count(&self.six)?, count(&self.four)?))
    }
}

fn count(table: &io::Result<File>) -> Result<u64> {
    let file = table.as_ref().map_err(|error| {
        Fault::Cannot(format!(
            "the kernel shows its table of neighbours only in the first network of the machine: {error}"
        ))
    })?;
    let mut buffer = [0; 4096];
    let size = file
        .read_at(&mut buffer, 0)
        .doing("reading the table of neighbours")?;
    let text = String::from_utf8_lossy(buffer.get(..size).unwrap_or_default());
    text.lines()
        .nth(1)
        .and_then(|line| line.split_whitespace().next())
        .and_then(|hex| u64::from_str_radix(hex, 16).ok())
        .ok_or_else(|| Fault::cannot("the kernel tells nothing of its neighbours"))
}
