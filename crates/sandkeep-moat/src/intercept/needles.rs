//! What gives a secret away: the value, and its look where it can not be decoded on the way.

use std::{
    fmt,
    hash::{Hash, Hasher},
};

use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
};
use zeroize::Zeroizing;

use super::{
    automaton::{Automaton, Needle, Owners},
    decode,
};

/// Shorter values would be found everywhere by chance.
pub const SHORTEST_SOUGHT: usize = 8;
/// Of longer values the end is sought, this long: that of a signed token is its signature, while
/// tokens of one issuer all begin alike.
const WINDOW: usize = 192;
/// More than this of a beginning is told by nothing that comes back in pieces.
const TELLING: usize = 6;
const LEAST_TELLING: usize = 4;
/// What stands between the letters of a text that was broken up: lines of base64, pairs of
/// hexadecimal digits, soft line breaks of mail, backslashes of JSON in JSON.
const SQUEEZED: &[u8] = b" \t\r\n:,-=\\";
/// Every other byte of UTF-16, three of four of UTF-32.
const SKIPPED: &[u8] = b"\0";

type Text = Zeroizing<Vec<u8>>;

/// The texts to look for.
#[derive(Default)]
pub struct Needles {
    texts: Vec<(Text, Owners)>,
    /// Whose text is added now.
    owner: Owners,
    /// The longest value, not in any other form.
    longest: usize,
}

/// What is looked for, ready for use.
pub struct Sought {
    pub automaton: Automaton,
    /// So much of what came is always held back: no form of a secret is longer.
    pub hold: usize,
    /// What lies further back than this plays no part in a match.
    pub reach: usize,
}

impl Hash for Needles {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for (text, owners) in &self.texts {
            (text.as_slice(), owners).hash(state);
        }
        self.longest.hash(state);
    }
}

impl fmt::Debug for Needles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Needles({})", self.texts.len())
    }
}

impl fmt::Debug for Sought {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sought({})", self.hold)
    }
}

impl Needles {
    /// What is added from here on is of the secret with this number.
    pub fn of(&mut self, number: usize) {
        self.owner = 1 << number.min(63);
    }

    /// Looks for a value. Forms that are decoded on the way (see `scan`) are not listed here.
    pub fn add_value(&mut self, value: &str) {
        let last = value.len().saturating_sub(WINDOW);
        let value = &value[value.ceil_char_boundary(last)..];
        if value.len() < SHORTEST_SOUGHT {
            return;
        }
        self.longest = self.longest.max(value.len());
        self.add(value.as_bytes());
        if value.contains(' ') {
            // In forms a space is a plus.
            self.add(Zeroizing::new(value.replace(' ', "+")).as_bytes());
        }
        let hex = value.bytes().map(|byte| format!("{byte:02x}"));
        self.add(Zeroizing::new(hex.collect::<String>()).as_bytes());
        if !value.is_ascii() {
            for turn in [u16::to_le_bytes, u16::to_be_bytes] {
                let wide = value.encode_utf16().flat_map(turn);
                self.add(&Zeroizing::new(wide.collect::<Vec<u8>>()));
            }
        }
        self.add_base64(value.as_bytes());
        // As it stands in JSON, which then was encoded.
        let json = Zeroizing::new(serde_json::Value::from(value).to_string());
        let json = &json[1..json.len() - 1];
        for escaped in [json.to_owned(), json.replace('/', "\\/")] {
            if escaped != value {
                self.add_base64(Zeroizing::new(escaped).as_bytes());
            }
        }
    }

    /// In both alphabets, and wherever it may begin in what was encoded.
    fn add_base64(&mut self, value: &[u8]) {
        for before in 0..3 {
            let mut whole = Zeroizing::new(vec![0; before]);
            whole.extend_from_slice(value);
            // Only the characters that are made of the value alone.
            let characters = (before * 8).div_ceil(6)..whole.len() * 8 / 6;
            for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
                let encoded = Zeroizing::new(engine.encode(&*whole));
                self.add(&encoded.as_bytes()[characters.clone()]);
            }
        }
    }

    /// Name and password in base64. It matters where the password alone is too short to be sought.
    pub fn add_pair(&mut self, value: &str, encoded: &str) {
        if value.len() < SHORTEST_SOUGHT {
            self.longest = self.longest.max(encoded.len());
            self.add(encoded.as_bytes());
        }
    }

    fn add(&mut self, text: &[u8]) {
        let letters = |byte: &u8| !SQUEEZED.contains(byte);
        let squeezed = Zeroizing::new(text.iter().copied().filter(letters).collect::<Vec<_>>());
        for text in [text, &squeezed] {
            let known = (self.texts.iter_mut()).find(|(known, _)| known.as_slice() == text);
            match known {
                Some((_, owners)) => *owners |= self.owner,
                None if text.len() < SHORTEST_SOUGHT => {}
                None => {
                    let text = Zeroizing::new(text.to_vec());
                    self.texts.push((text, self.owner));
                }
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    pub fn sought(&self) -> Sought {
        let needles: Vec<Needle<'_>> = self
            .texts
            .iter()
            .map(|(text, owners)| Needle {
                text,
                owners: *owners,
                telling: (text.len() / 3).clamp(LEAST_TELLING, TELLING),
            })
            .collect();
        let reach = self.texts.iter().map(|(text, _)| text.len()).max();
        let reach = reach.unwrap_or_default();
        Sought {
            automaton: Automaton::new(&needles, SKIPPED, SQUEEZED),
            // Every character as the longest escape, or every byte with three others.
            hold: (self.longest * decode::LONGEST).max(reach * 4),
            reach,
        }
    }
}
