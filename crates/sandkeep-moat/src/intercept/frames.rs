//! The frames of a WebSocket, as far as it takes to look at what is in them.

/// What a server may not send here: masked or packed frames, lengths in a longer form than needed,
/// kinds that are not defined. The payload could not be searched, or hides between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unreadable;

/// Where in a stream of frames we are.
#[derive(Debug, Default)]
pub struct Frames {
    head: Vec<u8>,
    /// What follows of the payload.
    left: u64,
    control: bool,
}

/// What the next bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Head,
    Data,
    /// Of a ping, pong or close, which may stand between two pieces of a message.
    Control,
}

const LONGEST_CONTROL: u64 = 125;

impl Frames {
    /// How many of these bytes belong together, and what they are. There is at least one.
    pub fn next(&mut self, bytes: &[u8]) -> Result<(usize, Part), Unreadable> {
        if self.left > 0 {
            let whole = usize::try_from(self.left).unwrap_or(usize::MAX);
            let count = bytes.len().min(whole);
            self.left -= count as u64;
            let part = match self.control {
                true => Part::Control,
                false => Part::Data,
            };
            return Ok((count, part));
        }
        for (at, byte) in bytes.iter().enumerate() {
            self.head.push(*byte);
            if let Some(length) = self.length()? {
                self.control = self.head[0] & 8 != 0;
                if self.control && length > LONGEST_CONTROL {
                    return Err(Unreadable);
                }
                self.left = length;
                self.head.clear();
                return Ok((at + 1, Part::Head));
            }
        }
        Ok((bytes.len(), Part::Head))
    }

    fn length(&self) -> Result<Option<u64>, Unreadable> {
        let Some((first, rest)) = self.head.split_first() else {
            return Ok(None);
        };
        if first & 0x70 != 0 || !matches!(first & 0x0f, 0..=2 | 8..=10) {
            return Err(Unreadable);
        }
        let (length, least) = match rest {
            [] => return Ok(None),
            [masked, ..] if masked & 0x80 != 0 => return Err(Unreadable),
            [126, long @ ..] if long.len() < 2 => return Ok(None),
            [127, long @ ..] if long.len() < 8 => return Ok(None),
            [126, long @ ..] => (long, 126),
            [127, long @ ..] => (long, 1 << 16),
            [short, ..] => return Ok(Some(u64::from(*short))),
        };
        let length = length
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        match length >= least && length < 1 << 63 {
            true => Ok(Some(length)),
            false => Err(Unreadable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(stream: &[u8], size: usize) -> Result<(Vec<u8>, Vec<u8>), Unreadable> {
        let mut frames = Frames::default();
        let (mut data, mut control) = (Vec::new(), Vec::new());
        for mut piece in stream.chunks(size) {
            while !piece.is_empty() {
                let (count, part) = frames.next(piece)?;
                match part {
                    Part::Head => {}
                    Part::Data => data.extend_from_slice(&piece[..count]),
                    Part::Control => control.extend_from_slice(&piece[..count]),
                }
                piece = &piece[count..];
            }
        }
        Ok((data, control))
    }

    #[test]
    fn payloads_come_out_of_any_pieces() {
        let mut stream = vec![0x01, 2, b'a', b'b', 0x89, 1, b'?', 0x80, 0, 0x82, 126, 1, 0];
        stream.extend_from_slice(&[7; 256]);
        stream.extend_from_slice(&[0x82, 127, 0, 0, 0, 0, 0, 1, 0, 0]);
        stream.extend_from_slice(&[9; 65536]);
        let expected = [b"ab", &[7; 256][..], &[9; 65536]].concat();
        for size in [1, 2, 3, 5, 1000, 70_000] {
            let got = parts(&stream, size).unwrap();
            assert_eq!(got, (expected.clone(), b"?".to_vec()), "{size}");
        }
    }

    #[test]
    fn what_can_not_be_looked_into_is_refused() {
        let long_ping = [&[0x89, 126, 0, 200][..], &[0; 200]].concat();
        for stream in [
            &[0xc1, 1, 1][..],
            &[0x81, 0x81, 0, 0, 0, 0, 1],
            &[0x83, 0],
            &[0x8b, 0],
            &[0x81, 126, 0, 125],
            &[0x81, 127, 0, 0, 0, 0, 0, 0, 255, 255],
            &[0x81, 127, 0x80, 0, 0, 0, 0, 0, 0, 0],
            &long_ping,
        ] {
            assert_eq!(parts(stream, 1), Err(Unreadable), "{stream:?}");
        }
    }
}
