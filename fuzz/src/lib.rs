//! What several targets need.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};

/// The sizes of the pieces a stream arrives in, taken from the fuzzer's own bytes.
#[derive(Debug, Clone, Copy)]
pub struct Cuts(u8);

impl Cuts {
    /// The first byte decides on the cuts, the others are the stream.
    pub fn take(data: &[u8]) -> (Self, &[u8]) {
        match data.split_first() {
            Some((seed, rest)) => (Self(*seed), rest),
            None => (Self(0), data),
        }
    }

    /// Pieces of one to eight bytes in an order the seed decides, or of up to 64 for a high seed.
    pub fn of(self, mut stream: &[u8]) -> impl Iterator<Item = &[u8]> {
        let largest = if self.0 < 128 { 8 } else { 64 };
        let mut state = u32::from(self.0) | 1;
        std::iter::from_fn(move || {
            if stream.is_empty() {
                return None;
            }
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let wanted = 1 + (state >> 16) as usize % largest;
            let (piece, rest) = stream.split_at(wanted.min(stream.len()));
            stream = rest;
            Some(piece)
        })
    }
}

/// Reads JSON as `T`; what could be read must survive being written and read again.
pub fn json_round_trip<T>(json: &[u8])
where
    T: Serialize + DeserializeOwned + PartialEq + Debug,
{
    let Ok(value) = serde_json::from_slice::<T>(json) else {
        return;
    };
    let written = serde_json::to_vec(&value).expect("what was read can be written");
    let again: T = serde_json::from_slice(&written).expect("what was written can be read");
    assert_eq!(again, value);
}
