//! Uploads: whatever the cuts, the same parts with the same bytes, or the same refusal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_agent::fs::multipart::{Event, Multipart, MultipartError, PartHead};
use sandkeep_fuzz::Cuts;

#[derive(Debug, PartialEq, Eq)]
struct Part {
    head: PartHead,
    data: Vec<u8>,
    ended: bool,
}

fuzz_target!(|data: &[u8]| {
    let (cuts, data) = Cuts::take(data);
    // The first line is the content type, if it has the form of one.
    let end = data.iter().position(|b| *b == b'\n').unwrap_or(0);
    let content_type = std::str::from_utf8(&data[..end]).unwrap_or_default();
    let parser = || {
        Multipart::from_content_type(content_type)
            .or_else(|_| Multipart::new("b"))
            .expect("a plain boundary")
    };
    let body = &data[end..];
    let body = body.strip_prefix(b"\n").unwrap_or(body);
    let cut: Vec<&[u8]> = cuts.of(body).collect();
    assert_eq!(read(parser(), &cut), read(parser(), &[body]));
});

fn read(mut parser: Multipart, pieces: &[&[u8]]) -> (Vec<Part>, Result<(), MultipartError>) {
    let mut parts: Vec<Part> = Vec::new();
    for piece in pieces {
        let pushed = parser.push(piece, |event| {
            match event {
                Event::Part(head) => {
                    assert!(parts.last().is_none_or(|part| part.ended));
                    parts.push(Part {
                        head,
                        data: Vec::new(),
                        ended: false,
                    });
                }
                Event::Data(bytes) => open(&mut parts).data.extend_from_slice(bytes),
                Event::PartEnd => open(&mut parts).ended = true,
            }
            Ok::<_, MultipartError>(())
        });
        if let Err(error) = pushed {
            forget_unsettled(&mut parts);
            return (parts, Err(error));
        }
    }
    let finished = parser.finish();
    if finished.is_err() {
        forget_unsettled(&mut parts);
    }
    (parts, finished)
}

fn open(parts: &mut [Part]) -> &mut Part {
    let last = parts.last_mut().expect("data belongs to a part");
    assert!(!last.ended);
    last
}

/// How much of a part comes out before its body turns out to be broken depends on the cuts.
fn forget_unsettled(parts: &mut [Part]) {
    if let Some(last) = parts.last_mut().filter(|part| !part.ended) {
        last.data.clear();
    }
}
