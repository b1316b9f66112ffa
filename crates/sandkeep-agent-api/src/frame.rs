//! Connect stream frames: one flag byte, a 32-bit big-endian length, that many bytes of JSON.

use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;

use crate::{ConnectError, EndStream};

/// Flag byte and length.
pub const HEADER_LEN: usize = 5;
/// Flag of the last frame of a stream.
pub const FLAG_END: u8 = 0b10;
const FLAG_COMPRESSED: u8 = 0b01;

/// The largest message the host takes from an agent.
pub const DEFAULT_MAX_MESSAGE: usize = 4 << 20;
/// The largest message the agent takes from a caller.
pub const DEFAULT_MAX_REQUEST: usize = 8 << 20;

/// One frame of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// A message, still JSON.
    Message(Bytes),
    /// The end of the stream, still JSON (`{}` or an [`EndStream`] with an error).
    End(Bytes),
}

/// Bytes that are not a stream of frames.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("message of {announced} bytes is larger than the limit of {limit} bytes")]
    TooLarge { announced: u64, limit: usize },
    #[error("compressed frames are not supported")]
    Compressed,
    #[error("unknown frame flags {0:#04x}")]
    Flags(u8),
    #[error("the stream ended in the middle of a frame")]
    Truncated,
}

impl From<FrameError> for ConnectError {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::TooLarge { .. } => Self::resource_exhausted(error.to_string()),
            FrameError::Compressed => Self::unimplemented(error.to_string()),
            FrameError::Flags(_) | FrameError::Truncated => {
                Self::invalid_argument(error.to_string())
            }
        }
    }
}

/// Cuts a byte stream into frames.
///
/// It holds only bytes that really arrived: the announced length is checked against the limit but
/// never used to allocate. After an error the stream has no meaning any more and the decoder
/// repeats the error.
#[derive(Debug)]
pub struct Decoder {
    buffer: BytesMut,
    max_message: usize,
    failed: Option<FrameError>,
}

impl Decoder {
    /// A decoder that refuses messages above `max_message` bytes.
    #[must_use]
    pub fn new(max_message: usize) -> Self {
        Self {
            buffer: BytesMut::new(),
            max_message,
            failed: None,
        }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// The next whole frame, or `None` until more bytes arrive.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        match self.parse() {
            Err(error) => {
                self.buffer = BytesMut::new();
                self.failed = Some(error.clone());
                Err(error)
            }
            whole => whole,
        }
    }

    /// Says whether the stream may end here.
    pub fn finish(&self) -> Result<(), FrameError> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None if self.buffer.is_empty() => Ok(()),
            None => Err(FrameError::Truncated),
        }
    }

    fn parse(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some(&[flags, a, b, c, d]) = self.buffer.first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        if flags & FLAG_COMPRESSED != 0 {
            return Err(FrameError::Compressed);
        }
        if flags & !FLAG_END != 0 {
            return Err(FrameError::Flags(flags));
        }
        let announced = u32::from_be_bytes([a, b, c, d]);
        let length = usize::try_from(announced).unwrap_or(usize::MAX);
        if length > self.max_message {
            let announced = u64::from(announced);
            return Err(FrameError::TooLarge {
                announced,
                limit: self.max_message,
            });
        }
        if self.buffer.len() - HEADER_LEN < length {
            return Ok(None);
        }
        self.buffer.advance(HEADER_LEN);
        let payload = self.buffer.split_to(length).freeze();
        Ok(Some(if flags & FLAG_END == 0 {
            Frame::Message(payload)
        } else {
            Frame::End(payload)
        }))
    }
}

/// A message frame. Fails only for values JSON cannot express, or above 4 GiB.
pub fn encode_message<T: Serialize>(message: &T) -> Result<Bytes, ConnectError> {
    encode(0, message)
}

/// The frame that ends a stream, cleanly or with an error.
#[must_use]
pub fn encode_end(error: Option<ConnectError>) -> Bytes {
    // A struct of strings always becomes JSON; a bare end frame is the answer if it ever does not.
    encode(FLAG_END, &EndStream { error })
        .unwrap_or_else(|_| Bytes::from_static(b"\x02\x00\x00\x00\x02{}"))
}

fn encode<T: Serialize>(flags: u8, value: &T) -> Result<Bytes, ConnectError> {
    let mut out = vec![flags, 0, 0, 0, 0];
    serde_json::to_writer(&mut out, value)
        .map_err(|error| ConnectError::internal(format!("cannot encode message: {error}")))?;
    let length = u32::try_from(out.len() - HEADER_LEN)
        .map_err(|_| ConnectError::resource_exhausted("message is larger than a frame can hold"))?;
    out[1..HEADER_LEN].copy_from_slice(&length.to_be_bytes());
    Ok(Bytes::from(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let mut bytes = encode_message(&serde_json::json!({"a": 1}))
            .unwrap()
            .to_vec();
        bytes.extend_from_slice(&encode_end(None));
        bytes
    }

    #[test]
    fn frames_arrive_whatever_the_cuts() {
        let bytes = sample();
        for cut in 1..bytes.len() {
            let mut decoder = Decoder::new(64);
            let mut frames = Vec::new();
            for part in bytes.chunks(cut) {
                decoder.push(part);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    frames.push(frame);
                }
            }
            decoder.finish().unwrap();
            assert_eq!(
                frames,
                [
                    Frame::Message(Bytes::from_static(b"{\"a\":1}")),
                    Frame::End(Bytes::from_static(b"{}"))
                ],
            );
        }
    }

    #[test]
    fn a_huge_announced_length_is_refused_without_allocating() {
        let mut decoder = Decoder::new(16);
        decoder.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        let refused = Err(FrameError::TooLarge {
            announced: 0xffff_ffff,
            limit: 16,
        });
        assert_eq!(decoder.next_frame(), refused);
        decoder.push(&sample());
        assert_eq!(decoder.next_frame(), refused);
    }

    #[test]
    fn a_long_message_announced_but_not_sent_costs_nothing() {
        let mut decoder = Decoder::new(1 << 30);
        decoder.push(&[0, 0x3f, 0xff, 0xff, 0xff, b'{']);
        assert_eq!(decoder.next_frame(), Ok(None));
        assert!(decoder.buffer.capacity() < 4096);
        assert_eq!(decoder.finish(), Err(FrameError::Truncated));
    }

    #[test]
    fn flags_we_do_not_know_are_refused() {
        for flags in [1u8, 3, 4, 0x80] {
            let mut decoder = Decoder::new(16);
            decoder.push(&[flags, 0, 0, 0, 0]);
            assert!(decoder.next_frame().is_err());
        }
    }

    #[test]
    fn an_error_end_frame_carries_code_and_message() {
        let frame = encode_end(Some(ConnectError::deadline_exceeded(
            "context deadline exceeded",
        )));
        assert_eq!(frame[0], FLAG_END);
        let end: EndStream = serde_json::from_slice(&frame[HEADER_LEN..]).unwrap();
        assert_eq!(end.error.unwrap().message, "context deadline exceeded");
    }
}
