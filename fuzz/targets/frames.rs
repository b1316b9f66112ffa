//! Connect frames, whatever the cuts: a decoder fed in pieces finds what one fed at once finds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent_api::{Decoder, EndStream, Frame, FrameError};
use sandkeep_fuzz::Cuts;

const LIMIT: usize = 300;

fuzz_target!(|data: &[u8]| {
    let (cuts, stream) = Cuts::take(data);
    let whole = decode(&[stream]);
    let cut: Vec<&[u8]> = cuts.of(stream).collect();
    assert_eq!(decode(&cut), whole);
    for frame in &whole.0 {
        let (Frame::Message(json) | Frame::End(json)) = frame;
        assert!(json.len() <= LIMIT);
        if let Frame::End(json) = frame {
            drop(serde_json::from_slice::<EndStream>(json));
        }
    }
});

fn decode(pieces: &[&[u8]]) -> (Vec<Frame>, Result<(), FrameError>) {
    let mut decoder = Decoder::new(LIMIT);
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Err(error)),
            }
        }
    }
    (frames, decoder.finish())
}
