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
/// In two forms at a time this much of the end is sought: such texts are many and long.
const WINDOW_OF_TWO: usize = 24;
/// More than this of a beginning is told by nothing that comes back in pieces.
const TELLING: usize = 6;
const LEAST_TELLING: usize = 4;
/// What stands between the letters of a text that was broken up: lines of base64, pairs of
/// hexadecimal digits, soft line breaks of mail, backslashes of JSON in JSON.
const SQUEEZED: &[u8] = b" \t\r\n:,-=\\";
/// Every other byte of UTF-16, three of four of UTF-32.
const SKIPPED: &[u8] = b"\0";

type Text = Zeroizing<Vec<u8>>;

/// A text to look for.
struct Sign {
    text: Text,
    owners: Owners,
    /// From this many bytes on its beginning gives something away.
    telling: usize,
    /// In how many forms at a time the value is in it, one in another.
    forms: usize,
}

/// The texts to look for.
#[derive(Default)]
pub struct Needles {
    texts: Vec<Sign>,
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
        for sign in &self.texts {
            (sign.text.as_slice(), sign.owners).hash(state);
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
        let one = Form::new(1, 1);
        self.add(value.as_bytes(), one);
        if value.contains(' ') {
            // In forms a space is a plus.
            self.add(Zeroizing::new(value.replace(' ', "+")).as_bytes(), one);
        }
        if !value.is_ascii() {
            for wide in utf16(value) {
                self.add(&wide, one);
            }
        }
        self.add_encoded(value.as_bytes(), one);
        // As it stands in JSON, which then was encoded.
        let json = Zeroizing::new(serde_json::Value::from(value).to_string());
        let json = &json[1..json.len() - 1];
        for escaped in [json.to_owned(), json.replace('/', "\\/")] {
            if escaped != value {
                self.add_encoded(Zeroizing::new(escaped).as_bytes(), one);
            }
        }
        self.add_twice_encoded(value);
    }

    /// In two of the forms that are not decoded on the way.
    fn add_twice_encoded(&mut self, value: &str) {
        let last = value.len().saturating_sub(WINDOW_OF_TWO);
        let value = &value[value.ceil_char_boundary(last)..];
        let two = Form::new(2, value.len());
        // What encodes twice may do it in upper case the first time.
        for digits in [hex(value.as_bytes()), upper_hex(value.as_bytes())] {
            self.add_encoded(&digits, two);
        }
        for inner in base64(value.as_bytes()) {
            self.add_encoded(&inner, two);
        }
        for wide in utf16(value) {
            self.add_encoded(&wide, two);
        }
    }

    /// In hexadecimal digits and in base64.
    fn add_encoded(&mut self, text: &[u8], form: Form) {
        self.add(&hex(text), form);
        for encoded in base64(text) {
            self.add(&encoded, form);
        }
    }

    /// Name and password in base64. It matters where the password alone is too short to be sought.
    pub fn add_pair(&mut self, value: &str, encoded: &str) {
        if value.len() < SHORTEST_SOUGHT {
            self.longest = self.longest.max(encoded.len());
            self.add(encoded.as_bytes(), Form::new(1, 1));
        }
    }

    fn add(&mut self, text: &[u8], form: Form) {
        let letters = |byte: &u8| !SQUEEZED.contains(byte);
        let squeezed = Zeroizing::new(text.iter().copied().filter(letters).collect::<Vec<_>>());
        for text in [text, &squeezed] {
            let known = (self.texts.iter_mut()).find(|known| known.text.as_slice() == text);
            match known {
                Some(known) => known.owners |= self.owner,
                None if text.len() < SHORTEST_SOUGHT => {}
                None => self.texts.push(Sign {
                    text: Zeroizing::new(text.to_vec()),
                    owners: self.owner,
                    telling: form.telling(text.len()),
                    forms: form.count,
                }),
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
            .map(|sign| Needle {
                text: &sign.text,
                owners: sign.owners,
                telling: sign.telling,
            })
            .collect();
        let longest = |forms: usize| {
            let of_these = self.texts.iter().filter(|sign| sign.forms == forms);
            let lengths = of_these.map(|sign| sign.text.len());
            lengths.max().unwrap_or_default()
        };
        let (one, two) = (longest(1), longest(2));
        Sought {
            automaton: Automaton::new(&needles, SKIPPED, SQUEEZED),
            // Every character as the longest escape, or every byte with three others; what is in
            // two forms already, broken up once more.
            hold: (self.longest * decode::LONGEST).max(one * 4).max(two * 2),
            reach: one.max(two),
        }
    }
}

/// How a text came out of a value.
#[derive(Clone, Copy)]
struct Form {
    count: usize,
    /// Of so many bytes of the value. Only where there are more forms than one.
    value: usize,
}

impl Form {
    const fn new(count: usize, value: usize) -> Self {
        Self { count, value }
    }

    /// From how many bytes on a beginning of a text of this length gives something away.
    fn telling(self, length: usize) -> usize {
        match self.count {
            1 => (length / 3).clamp(LEAST_TELLING, TELLING),
            // As many bytes of the value as in the other forms; they take more room here.
            _ => (self.value / 3).clamp(LEAST_TELLING, TELLING) * length / self.value,
        }
    }
}

fn hex(bytes: &[u8]) -> Text {
    let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
    Zeroizing::new(digits.collect::<String>().into_bytes())
}

fn upper_hex(bytes: &[u8]) -> Text {
    let mut digits = hex(bytes);
    digits.make_ascii_uppercase();
    digits
}

/// In both alphabets, and wherever it may begin in what was encoded.
fn base64(bytes: &[u8]) -> Vec<Text> {
    let mut all = Vec::new();
    for before in 0..3 {
        let mut whole = Zeroizing::new(vec![0; before]);
        whole.extend_from_slice(bytes);
        // Only the characters that are made of these bytes alone.
        let characters = (before * 8).div_ceil(6)..whole.len() * 8 / 6;
        for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
            let encoded = Zeroizing::new(engine.encode(&*whole));
            let text = Zeroizing::new(encoded.as_bytes()[characters.clone()].to_vec());
            if !all.contains(&text) {
                all.push(text);
            }
        }
    }
    all
}

/// In both orders of bytes. Of ASCII alone both are the same but for the zeros around them.
fn utf16(value: &str) -> Vec<Text> {
    let turned = [u16::to_le_bytes, u16::to_be_bytes].map(|turn| {
        let wide = value.encode_utf16().flat_map(turn);
        Zeroizing::new(wide.collect::<Vec<u8>>())
    });
    match turned {
        [little, _] if value.is_ascii() => {
            vec![Zeroizing::new(little[..little.len() - 1].to_vec())]
        }
        both => both.into(),
    }
}
