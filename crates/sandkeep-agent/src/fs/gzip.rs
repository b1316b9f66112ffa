//! Uploads that come compressed, unpacked piece by piece.

use flate2::write::MultiGzDecoder;
use std::io::{self, Write};

/// Unpacked bytes are handed on once there are this many.
const PIECE_BYTES: usize = 64 * 1024;

/// A gzip stream being unpacked. However well the input was packed, no more
/// than about one piece of output is held.
#[derive(Debug)]
pub(crate) struct Inflate {
    decoder: MultiGzDecoder<Vec<u8>>,
    empty: bool,
}

impl Inflate {
    pub(crate) fn new() -> Self {
        Self {
            decoder: MultiGzDecoder::new(Vec::new()),
            empty: true,
        }
    }

    /// Unpacks `packed` and gives the result to `out` in pieces. Errors of
    /// the stream itself go through `bad`.
    pub(crate) fn push<E>(
        &mut self,
        packed: &[u8],
        bad: impl Fn(&io::Error) -> E,
        mut out: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = packed;
        while !rest.is_empty() {
            self.empty = false;
            // One call unpacks a bounded amount, whatever is in it.
            let used = self.decoder.write(rest).map_err(|error| bad(&error))?;
            if used == 0 {
                return Err(bad(&io::ErrorKind::WriteZero.into()));
            }
            rest = &rest[used..];
            if self.decoder.get_ref().len() >= PIECE_BYTES {
                self.hand_on(&mut out)?;
            }
        }
        self.hand_on(&mut out)
    }

    /// The packed stream is over; it must be whole.
    pub(crate) fn finish<E>(
        mut self,
        bad: impl Fn(&io::Error) -> E,
        mut out: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.empty {
            return Ok(());
        }
        self.decoder.try_finish().map_err(|error| bad(&error))?;
        self.hand_on(&mut out)
    }

    fn hand_on<E>(&mut self, out: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let piece = self.decoder.get_mut();
        if piece.is_empty() {
            return Ok(());
        }
        let result = out(piece);
        piece.clear();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;

    fn pack(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).expect("pack");
        encoder.finish().expect("pack")
    }

    fn unpack(packed: &[u8], chunk: usize) -> Result<(Vec<u8>, usize), String> {
        let mut inflate = Inflate::new();
        let mut all = Vec::new();
        let mut largest = 0;
        let mut out = |piece: &[u8]| {
            largest = largest.max(piece.len());
            all.extend_from_slice(piece);
            Ok::<_, String>(())
        };
        for part in packed.chunks(chunk) {
            inflate.push(part, io::Error::to_string, &mut out)?;
        }
        inflate.finish(io::Error::to_string, &mut out)?;
        Ok((all, largest))
    }

    #[test]
    fn unpacks_however_it_is_cut() {
        let plain: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let packed = pack(&plain);
        for chunk in [1, 7, 4096, packed.len()] {
            assert_eq!(unpack(&packed, chunk).expect("unpack").0, plain, "{chunk}");
        }
        let twice = [pack(b"one "), pack(b"two")].concat();
        assert_eq!(unpack(&twice, 5).expect("members").0, b"one two");
        assert_eq!(unpack(b"", 1).expect("empty").0, b"");
    }

    #[test]
    fn a_bomb_is_unpacked_in_small_pieces() {
        let packed = pack(&vec![0; 4 << 20]);
        let (plain, largest) = unpack(&packed, packed.len()).expect("unpack");
        assert_eq!(plain.len(), 4 << 20);
        assert!(largest <= 4 * PIECE_BYTES, "{largest}");
    }

    #[test]
    fn broken_streams_are_refused() {
        let packed = pack(b"hello hello hello");
        assert!(unpack(&packed[..packed.len() - 3], 64).is_err());
        assert!(unpack(b"plain text", 64).is_err());
        let mut damaged = packed.clone();
        let last = damaged.len() - 5;
        damaged[last] ^= 0xff;
        assert!(unpack(&damaged, 64).is_err());
        assert!(unpack(&[&packed[..], b"garbage behind"].concat(), 64).is_err());
    }
}
