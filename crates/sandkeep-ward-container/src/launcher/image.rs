//! Files of CRIU's images: two numbers, then messages, each after its length.

use prost::Message;
use std::{fs, io, path::Path};

/// The first number of every file; the second is its kind.
pub const MAGIC: u32 = 0x5456_4319;

/// The messages of a file of this kind.
pub fn messages(bytes: &[u8], kind: u32) -> io::Result<Vec<&[u8]>> {
    let mut rest = bytes;
    if [number(&mut rest)?, number(&mut rest)?] != [MAGIC, kind] {
        return Err(bad());
    }
    let mut all = Vec::new();
    while !rest.is_empty() {
        let length = usize::try_from(number(&mut rest)?).map_err(|_| bad())?;
        let (message, more) = rest.split_at_checked(length).ok_or_else(bad)?;
        all.push(message);
        rest = more;
    }
    Ok(all)
}

/// The one message of a file that has no more.
pub fn only<T: Message + Default>(path: &Path, kind: u32) -> io::Result<T> {
    let bytes = fs::read(path)?;
    match messages(&bytes, kind)?[..] {
        [message] => T::decode(message).map_err(io::Error::other),
        _ => Err(bad()),
    }
}

/// All messages of a file, none where there is no such file.
pub fn all<T: Message + Default>(path: &Path, kind: u32) -> io::Result<Vec<T>> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    messages(&bytes, kind)?
        .into_iter()
        .map(|message| T::decode(message).map_err(io::Error::other))
        .collect()
}

pub fn bad() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it is no image of ours")
}

fn number(rest: &mut &[u8]) -> io::Result<u32> {
    let (four, more) = rest.split_first_chunk().ok_or_else(bad)?;
    *rest = more;
    Ok(u32::from_le_bytes(*four))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A file as CRIU writes it.
    pub fn file(kind: u32, messages: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [MAGIC, kind]
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect();
        for message in messages {
            let length = u32::try_from(message.len()).unwrap();
            bytes.extend(length.to_le_bytes());
            bytes.extend(message);
        }
        bytes
    }

    #[test]
    fn what_criu_writes_is_read_and_nothing_else() {
        let written = file(7, &[b"one".to_vec(), Vec::new()]);
        assert_eq!(messages(&written, 7).unwrap(), [&b"one"[..], b""]);
        assert!(messages(&written, 8).is_err());
        assert!(messages(&written[..written.len() - 1], 7).is_err());
        assert!(messages(&written[..13], 7).is_err());
        assert!(messages(b"", 7).is_err());
    }
}
