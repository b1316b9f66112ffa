//! The outside's resolver: it knows a few names and notes every question.

use std::net::{Ipv4Addr, UdpSocket};

use crate::world::{EVIL, GOOD, PRIVATE, Seen, held};

fn address(name: &str) -> Option<Ipv4Addr> {
    match name {
        "good.test" | "open.test" | "narrow.test" | "echo.test" | "other.test"
        | "impostor.test" => Some(GOOD),
        "evil.test" => Some(EVIL),
        "rebound.test" => Some(PRIVATE),
        _ => None,
    }
}

pub fn serve(socket: &UdpSocket, seen: &Seen) {
    let mut buffer = [0; 4096];
    while let Ok((size, from)) = socket.recv_from(&mut buffer) {
        if let Some(answer) = buffer.get(..size).and_then(|query| answer(query, seen)) {
            // Who asked may be gone.
            let _ = socket.send_to(&answer, from);
        }
    }
}

fn answer(query: &[u8], seen: &Seen) -> Option<Vec<u8>> {
    let mut labels: Vec<String> = Vec::new();
    let mut at = 12;
    loop {
        let size = usize::from(*query.get(at)?);
        if size == 0 {
            break;
        }
        let label = query.get(at + 1..at + 1 + size)?;
        labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
        at += 1 + size;
    }
    let question = query.get(12..at + 5)?;
    let kind = u16::from_be_bytes([*query.get(at + 1)?, *query.get(at + 2)?]);
    let name = labels.join(".");
    let known = address(&name);
    held(&seen.questions).push(name);
    let found = known.filter(|_| kind == 1);
    let mut out = query.get(..2)?.to_vec();
    // A response, with recursion; "no such name" for what is not known.
    out.extend([0x81, if known.is_some() { 0x80 } else { 0x83 }, 0, 1]);
    out.extend([0, u8::from(found.is_some()), 0, 0, 0, 0]);
    out.extend_from_slice(question);
    if let Some(address) = found {
        // The name of the question, A, IN, 30 seconds.
        out.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 30, 0, 4]);
        out.extend(address.octets());
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_are_answered_and_every_question_is_noted() {
        let seen = Seen::default();
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x04good\x04test\0\0\x01\0\x01";
        let out = answer(query, &seen).unwrap();
        assert!(out.ends_with(&GOOD.octets()));
        let query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x04data\x04evil\x04test\0\0\x10\0\x01";
        assert_eq!(answer(query, &seen).unwrap()[3] & 15, 3);
        assert_eq!(*held(&seen.questions), ["good.test", "data.evil.test"]);
        assert_eq!(answer(b"short", &seen), None);
    }
}
