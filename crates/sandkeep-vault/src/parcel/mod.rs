//! A point as one file that can be carried to another machine.
//!
//! It is a tar packed with zstd, so any `tar --zstd -t` can look into it:
//!
//! ```text
//! point.json       the label: format, the point, what of memory and disk is to follow
//! disk/…           the tree, with owners, modes, times, attributes, links and holes
//! memory/NAME      the files of the memory, if there is any
//! seal.json        the SHA-256 of every byte of the tar before it, signed by who the label says
//! ```
//!
//! Reading is strict: what is not in this order, not announced by the label or not under the
//! seal is refused, and nothing is given a name before the seal was compared.

mod pack;
mod seal;
mod unpack;

pub use pack::{label_of, pack};
pub use seal::ParcelKey;
pub use unpack::{Opened, Room, open, unpack};

use sandkeep_model::{Code, Error, Point, Result, ServerKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::io::{self, Write};

use crate::{archive::ImportLimits, memory::MemoryFile, tree::damaged};

/// 1: the sums of the memory are SHA-256.
const FORMATS: std::ops::RangeInclusive<u32> = 1..=2;
const FORMAT: u32 = 2;
const LABEL: &str = "point.json";
const SEAL: &str = "seal.json";
const DISK: &str = "disk";
const MEMORY: &str = "memory";
/// A label has a line for each file of the memory, and little else.
const MAX_LABEL: u64 = 4 << 20;
const MAX_SEAL: u64 = 4096;
/// What one entry may say about itself: attributes, a long path, where its holes are.
const MAX_PAX: u64 = 1 << 20;
const BLOCK: usize = 512;

const PAX_PATH: &str = "path";
const PAX_LINK: &str = "linkpath";
const PAX_TIME: &str = "mtime";
const PAX_SIZE: &str = "GNU.sparse.size";
const PAX_MAP: &str = "GNU.sparse.map";
const PAX_XATTR: &str = "SCHILY.xattr.";
/// Names of attributes that a pax record can not hold, in hexadecimal.
const PAX_ODD_XATTR: &str = "SANDKEEP.xattr.";
/// A tar has no kind for the name of a socket; such an entry is a pipe to others.
const PAX_SOCKET: &str = "SANDKEEP.socket";

/// What a parcel says about itself before anything else.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Label {
    pub format: u32,
    /// The program that wrote it.
    pub made_by: String,
    /// The server that signed it, once its seal was compared; until then anybody can say so.
    /// Parcels from before servers signed have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signer: Option<ServerKey>,
    pub point: Point,
    pub disk: Totals,
    pub memory: Vec<MemoryFile>,
}

/// What the disk in a parcel holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    pub entries: u64,
    /// Without holes.
    pub bytes: u64,
}

impl From<ImportLimits> for Totals {
    fn from(used: ImportLimits) -> Self {
        Self {
            entries: used.entries,
            bytes: used.bytes,
        }
    }
}

impl Label {
    pub fn memory_bytes(&self) -> u64 {
        self.memory
            .iter()
            .fold(0, |sum: u64, file| sum.saturating_add(file.bytes))
    }

    /// Newer formats are told from damage: whoever has one needs a newer program.
    fn read(text: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let wrong = |error: serde_json::Error| no_parcel(&format!("its label is wrong: {error}"));
        let Format { format } = serde_json::from_slice(text).map_err(wrong)?;
        if !FORMATS.contains(&format) {
            return Err(Error::invalid(
                "archive",
                format!("the point was exported in format {format}, this server reads up to format {FORMAT}"),
            )
            .hint("export it with the version of sandkeep that runs here, or import it with a newer one"));
        }
        serde_json::from_slice(text).map_err(wrong)
    }
}

/// Words for a file that is something else or has been changed.
fn no_parcel(why: &str) -> Error {
    Error::invalid("archive", format!("this is no whole exported point: {why}"))
        .hint("export the point again with `sandkeep points export`, and compare both files")
}

fn broken(error: io::Error) -> Error {
    in_a_parcel(damaged(error))
}

/// What is wrong with an archive, said of a parcel.
fn in_a_parcel(error: Error) -> Error {
    if error.code == Code::InvalidArgument {
        return no_parcel(&error.message);
    }
    error
}

/// The records of a pax header. Values may hold anything, so each is as long as it says.
fn records(mut bytes: &[u8]) -> Result<Vec<(&str, &[u8])>> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let (record, rest) = record(bytes).ok_or_else(|| no_parcel("a header is malformed"))?;
        out.push(record);
        bytes = rest;
    }
    Ok(out)
}

type Record<'a> = (&'a str, &'a [u8]);

/// `LENGTH KEY=VALUE\n`; the length counts all of it.
fn record(bytes: &[u8]) -> Option<(Record<'_>, &[u8])> {
    let space = bytes.iter().take(20).position(|b| *b == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let line = bytes.get(space + 1..length)?;
    let (end, line) = line.split_last()?;
    let equals = line.iter().position(|b| *b == b'=')?;
    let key = std::str::from_utf8(&line[..equals]).ok()?;
    (*end == b'\n').then_some(((key, &line[equals + 1..]), &bytes[length..]))
}

/// Counts what was written so far into the sum that becomes the seal.
struct Summed<W> {
    inner: W,
    sum: Sha256,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.sum.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The sum of what was read, one block behind: the header of the seal is not under it.
#[derive(Default)]
struct Behind {
    sum: Sha256,
    last: Vec<u8>,
    /// All of it, with the last block.
    count: u64,
}

impl Behind {
    fn take(&mut self, bytes: &[u8]) {
        self.count += bytes.len() as u64;
        self.last.extend_from_slice(bytes);
        let old = self.last.len().saturating_sub(BLOCK);
        self.sum.update(&self.last[..old]);
        self.last.drain(..old);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sum::hex;

    #[test]
    fn records_are_as_long_as_they_say() {
        let read = records(b"9 a=b\nc\n\n6 k=v\n").unwrap();
        assert_eq!(read, [("a", &b"b\nc\n"[..]), ("k", b"v")]);
        for bad in [
            &b"5 a=b\n"[..],
            b"99 a=b\n",
            b"x a=b\n",
            b"6 a=bc",
            b"6 abcd\n",
            b"0 ",
            b"1 a=b",
            b"18446744073709551615 a=b\n",
        ] {
            assert!(records(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn noise_is_refused_and_breaks_nothing() {
        let whole = b"30 mtime=1600000000.000000001\n21 GNU.sparse.size=3\n".to_vec();
        assert_eq!(records(&whole).unwrap().len(), 2);
        let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
        let mut roll = |most: usize| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            usize::try_from(dice >> 11).unwrap() % most
        };
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..=roll(4) {
                let place = roll(bytes.len());
                bytes[place] = u8::try_from(roll(256)).unwrap();
            }
            bytes.truncate(roll(whole.len() + 1));
            for (key, value) in records(&bytes).unwrap_or_default() {
                assert!(key.len() + value.len() < bytes.len());
            }
            assert!(Label::read(&bytes).is_err());
        }
    }

    #[test]
    fn a_newer_format_is_named() {
        let error = Label::read(br#"{"format": 7, "anything": []}"#).unwrap_err();
        assert!(error.message.contains("format 7"), "{error}");
        for bad in [&b""[..], b"{}", b"[1]", br#"{"format": 1}"#] {
            let error = Label::read(bad).unwrap_err();
            assert!(error.message.contains("no whole exported point"), "{error}");
        }
    }

    #[test]
    fn the_sum_stays_one_block_behind() {
        let bytes: Vec<u8> = (0..3 * BLOCK).map(|n| (n % 251) as u8).collect();
        let mut behind = Behind::default();
        for part in bytes.chunks(100) {
            behind.take(part);
        }
        let mut expected = Sha256::new();
        expected.update(&bytes[..2 * BLOCK]);
        assert_eq!(hex(behind.sum), hex(expected));
    }
}
