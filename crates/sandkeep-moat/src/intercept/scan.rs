//! Finds secrets in what comes back, over any number of pieces and in the forms sites use.

use std::{
    error::Error as StdError,
    fmt::{self, Display},
    sync::Arc,
};

use memchr::memchr3;

use super::{
    automaton::{Owners, State},
    decode::Decoder,
    needles::Sought,
};

/// A secret is in what was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reflected;

impl Display for Reflected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the response holds a secret of this sandbox")
    }
}

impl StdError for Reflected {}

/// Looks at one stream in five ways at once: as it is, without each of three kinds of escapes, and
/// without all of them and all that breaks text up.
#[derive(Debug)]
pub struct Scanner {
    sought: Arc<Sought>,
    plain: State,
    percent: View,
    entity: View,
    backslash: View,
    bare: Bare,
    /// Bytes since the last one that may begin an escape; no more than matters.
    straight: usize,
}

#[derive(Debug)]
struct View {
    state: State,
    decoder: Decoder,
}

#[derive(Debug)]
struct Bare {
    state: State,
    decoders: [Decoder; 5],
}

impl View {
    const fn new(decoder: Decoder) -> Self {
        Self { state: 0, decoder }
    }

    fn push(&mut self, sought: &Sought, byte: u8) {
        let Self { state, decoder } = self;
        decoder.push(byte, &mut |byte| sought.automaton.step(state, byte));
    }
}

impl Bare {
    fn push(&mut self, sought: &Sought, byte: u8) {
        let Self { state, decoders } = self;
        let [one, two, three, four, five] = decoders;
        let mut step = |byte| sought.automaton.step_squeezed(state, byte);
        let mut last = |byte| five.push(byte, &mut step);
        let mut fourth = |byte| four.push(byte, &mut last);
        let mut third = |byte| three.push(byte, &mut fourth);
        one.push(byte, &mut |byte| two.push(byte, &mut third));
    }
}

impl Scanner {
    pub fn new(sought: Arc<Sought>) -> Self {
        // Escapes of escapes: twice in a URL, HTML in JSON, JSON in JSON or in HTML.
        let decoders = [
            Decoder::percent(),
            Decoder::percent(),
            Decoder::backslash(),
            Decoder::entity(),
            Decoder::backslash(),
        ];
        Self {
            plain: 0,
            percent: View::new(Decoder::percent()),
            entity: View::new(Decoder::entity()),
            backslash: View::new(Decoder::backslash()),
            bare: Bare { state: 0, decoders },
            straight: sought.reach,
            sought,
        }
    }

    /// Takes the same time for bytes that are part of a secret and for others: only where escapes
    /// may begin matters.
    pub fn push(&mut self, mut piece: &[u8]) -> Result<(), Reflected> {
        while !piece.is_empty() {
            let next = match self.is_open() {
                true => 0,
                false => memchr3(b'%', b'&', b'\\', piece).unwrap_or(piece.len()),
            };
            if next == 0 {
                self.push_one(piece[0]);
                piece = &piece[1..];
                continue;
            }
            let (straight, rest) = piece.split_at(next);
            piece = rest;
            self.push_straight(straight);
        }
        let automaton = &self.sought.automaton;
        match self.states().into_iter().any(|at| automaton.is_found(at)) {
            true => Err(Reflected),
            false => Ok(()),
        }
    }

    fn push_one(&mut self, byte: u8) {
        let Self { sought, .. } = self;
        sought.automaton.step(&mut self.plain, byte);
        self.percent.push(sought, byte);
        self.entity.push(sought, byte);
        self.backslash.push(sought, byte);
        self.bare.push(sought, byte);
        self.straight = 0;
    }

    /// Bytes that are no escapes. After as many of them as a match is long all views but the last
    /// see the same.
    fn push_straight(&mut self, bytes: &[u8]) {
        let automaton = &self.sought.automaton;
        let reach = self.sought.reach;
        let mut rest = bytes;
        if self.straight < reach {
            let mut at = 0;
            let (mut percent, mut entity) = (self.percent.state, self.entity.state);
            let mut backslash = self.backslash.state;
            while at < rest.len() && self.straight < reach {
                let byte = rest[at];
                automaton.step(&mut self.plain, byte);
                automaton.step(&mut percent, byte);
                automaton.step(&mut entity, byte);
                automaton.step(&mut backslash, byte);
                automaton.step_squeezed(&mut self.bare.state, byte);
                // Bytes that are skipped move no view.
                self.straight += usize::from(byte != 0);
                at += 1;
            }
            self.percent.state = percent;
            self.entity.state = entity;
            self.backslash.state = backslash;
            rest = &rest[at..];
        }
        if rest.is_empty() {
            return;
        }
        let (mut plain, mut bare) = (self.plain, self.bare.state);
        for byte in rest {
            automaton.step(&mut plain, *byte);
            automaton.step_squeezed(&mut bare, *byte);
        }
        self.plain = plain;
        self.bare.state = bare;
        for view in [&mut self.percent, &mut self.entity, &mut self.backslash] {
            // What one of them found stays found.
            if !automaton.is_found(view.state) {
                view.state = plain;
            }
        }
    }

    fn is_open(&self) -> bool {
        let views = [&self.percent, &self.entity, &self.backslash];
        views.into_iter().any(|view| view.decoder.is_open())
            || self.bare.decoders.iter().any(Decoder::is_open)
    }

    fn states(&self) -> [State; 5] {
        let Self { plain, bare, .. } = self;
        let views = [&self.percent, &self.entity, &self.backslash].map(|view| view.state);
        [*plain, views[0], views[1], views[2], bare.state]
    }

    /// Whose secret may have begun at the end of what was seen, with so much of it that it would
    /// give something away.
    pub fn begun(&self) -> Owners {
        let automaton = &self.sought.automaton;
        let owners = self.states().map(|state| automaton.begun(state));
        owners.into_iter().fold(0, |all, own| all | own)
    }
}

impl Sought {
    /// Whether a secret is in these parts, in one of them or over several.
    pub fn is_in<'a>(self: &Arc<Self>, mut parts: impl Iterator<Item = &'a [u8]>) -> bool {
        let mut apart = Scanner::new(Arc::clone(self));
        let mut joined = Scanner::new(Arc::clone(self));
        parts.any(|part| {
            // Between two parts stands what is in no secret.
            apart.push(part).is_err() || apart.push(b"\x01").is_err() || joined.push(part).is_err()
        })
    }
}

/// Whether a beginning of a secret could stand at the end of this, of any secret made of what
/// secrets are made of: so it tells nothing about the one that is sought.
pub fn may_begin_a_secret(seen: &[u8]) -> bool {
    let between = |byte: &&u8| !b" \t\r\n:,-=\\\0".contains(byte);
    match seen.iter().rev().find(between) {
        Some(b'{' | b'}' | b'[' | b']' | b'(' | b')' | b'<' | b'>' | b'"' | b'\'' | b'`') => false,
        Some(byte) => *byte > b' ' && *byte != 0x7f,
        None => !seen.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intercept::needles::Needles;

    const SECRETS: [&str; 2] = [
        "ghp_9fK2mXq7Lw0ZtRb4",
        "wJalrXUtn-FEMI/K7MDENG_bPx+RfiCYEX=",
    ];

    fn sought(values: &[&str]) -> Arc<Sought> {
        let mut needles = Needles::default();
        for (at, value) in values.iter().enumerate() {
            needles.of(at);
            needles.add_value(value);
        }
        Arc::new(needles.sought())
    }

    fn scanner(values: &[&str]) -> Scanner {
        Scanner::new(sought(values))
    }

    fn forms(secret: &str) -> Vec<String> {
        let each = |form: &dyn Fn(u32) -> String| {
            secret
                .chars()
                .map(|c| form(u32::from(c)))
                .collect::<String>()
        };
        vec![
            secret.to_owned(),
            secret.to_lowercase(),
            each(&|c| format!("%{c:02X}")),
            each(&|c| format!("%25{c:02x}")),
            each(&|c| format!("&#{c};")),
            each(&|c| format!("&#x{c:x}")),
            each(&|c| format!("\\u{c:04x}")),
            each(&|c| format!("\\\\u{c:04x}")),
            each(&|c| format!("\\x{c:02x}")),
            each(&|c| format!("%5Cu{c:04x}")),
            each(&|c| format!("{c:02x}:")),
            each(&|c| format!("{}\0", char::from_u32(c).unwrap())),
            each(&|c| format!("{}\r\n", char::from_u32(c).unwrap())),
            // Each letter in another form.
            secret
                .chars()
                .enumerate()
                .map(|(at, c)| match at % 4 {
                    0 => format!("%{:02x}", u32::from(c)),
                    1 => c.to_string(),
                    2 => format!("&#{};", u32::from(c)),
                    _ => format!("\\u{:04x}", u32::from(c)),
                })
                .collect(),
        ]
    }

    #[test]
    fn found_in_all_forms_wherever_it_is_split() {
        for secret in SECRETS {
            let sought = sought(&[secret]);
            let scanner = || Scanner::new(Arc::clone(&sought));
            for form in forms(secret) {
                let text = format!("say & 100% \\o/ {form} end");
                let bytes = text.as_bytes();
                for at in 0..bytes.len() {
                    let mut scanner = scanner();
                    let (one, other) = bytes.split_at(at);
                    let found = scanner.push(one).is_err() || scanner.push(other).is_err();
                    assert!(found, "{text} at {at}");
                }
                for size in 1..7 {
                    let mut scanner = scanner();
                    let found = bytes.chunks(size).any(|piece| scanner.push(piece).is_err());
                    assert!(found, "{text} in pieces of {size}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_secret_passes_in_all_pieces() {
        let text =
            "ghp_9fK2mXq7Lw0ZtRb5 %67hp_9fK2mXq7Lw0ZtRb &#103;hp_9fK2mXq7Lw0ZtR \\u0067hp_9f";
        for size in 1..text.len() {
            let mut scanner = scanner(&SECRETS);
            for piece in text.as_bytes().chunks(size) {
                assert_eq!(scanner.push(piece), Ok(()));
            }
            assert_eq!(scanner.begun(), 1, "in pieces of {size}");
        }
    }

    /// The fast ways through a piece see what the slow one sees.
    #[test]
    fn pieces_make_no_difference_to_chance_texts() {
        let letters = b"abAB%&\\6162#;x0u- \0\n";
        let secret = "ab-AB6162ab";
        let mut chance = 7_u32;
        let mut next = || {
            chance = chance.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (chance >> 16) as usize
        };
        let mut found = 0;
        let sought = sought(&[secret]);
        for _ in 0..3000 {
            let mut text: Vec<u8> = (0..next() % 60)
                .map(|_| letters[next() % letters.len()])
                .collect();
            if next() % 2 == 0 {
                text.extend(forms(secret)[next() % 14].bytes());
            }
            text.extend((0..next() % 40).map(|_| letters[next() % letters.len()]));
            let mut slow = Scanner::new(Arc::clone(&sought));
            let mut whole = Scanner::new(Arc::clone(&sought));
            let by_bytes = text.chunks(1).try_for_each(|piece| slow.push(piece));
            let at = next() % (text.len() + 1);
            let in_two = whole
                .push(&text[..at])
                .and_then(|()| whole.push(&text[at..]));
            assert_eq!(by_bytes, in_two, "{}", String::from_utf8_lossy(&text));
            if by_bytes.is_ok() {
                assert_eq!(slow.states(), whole.states());
            }
            found += usize::from(by_bytes.is_err());
        }
        assert!(found > 1000, "{found}");
    }

    #[test]
    fn base64_wherever_it_begins_and_in_lines() {
        use base64::{
            Engine as _,
            engine::general_purpose::{STANDARD, URL_SAFE},
        };
        for secret in SECRETS {
            for before in 0..7 {
                let text = format!("{}{secret}\"}}", "?".repeat(before));
                for encoded in [STANDARD.encode(&text), URL_SAFE.encode(&text)] {
                    let lines: Vec<_> = encoded.as_bytes().chunks(11).collect();
                    assert!(scanner(&[secret]).push(encoded.as_bytes()).is_err());
                    assert!(scanner(&[secret]).push(&lines.join(&b"\r\n"[..])).is_err());
                    assert!(scanner(&[secret]).push(&lines.join(&b"\\n"[..])).is_err());
                }
            }
        }
    }

    #[test]
    fn in_two_forms_at_a_time_wherever_it_begins() {
        use base64::{
            Engine as _,
            engine::general_purpose::{STANDARD, URL_SAFE},
        };
        let hex = |bytes: &[u8]| -> String {
            let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
            digits.collect()
        };
        let long = format!("{}{}", "x".repeat(300), SECRETS[1]);
        for secret in [
            SECRETS[0],
            SECRETS[1],
            "letters8",
            "gar\u{e7}on-\u{43b}",
            &long,
        ] {
            let scanner = scanner(&[secret]);
            let sought = &scanner.sought;
            for before in 0..7 {
                let text = format!("{}{secret}\"}}", "?".repeat(before));
                let wide = |turn: fn(u16) -> [u8; 2]| -> Vec<u8> {
                    text.encode_utf16().flat_map(turn).collect()
                };
                let digits = hex(text.as_bytes());
                for inner in [
                    STANDARD.encode(&text).into_bytes(),
                    URL_SAFE.encode(&text).into_bytes(),
                    digits.clone().into_bytes(),
                    digits.to_uppercase().into_bytes(),
                    wide(u16::to_le_bytes),
                    wide(u16::to_be_bytes),
                ] {
                    for outer in [
                        STANDARD.encode(&inner),
                        URL_SAFE.encode(&inner),
                        hex(&inner),
                        hex(&inner).to_uppercase(),
                        inner.iter().map(|byte| format!("%{byte:02x}")).collect(),
                        inner
                            .iter()
                            .flat_map(|byte| [char::from(*byte), '\0'])
                            .collect(),
                    ] {
                        // Bytes that are no ASCII are no text again.
                        if !outer.is_ascii() {
                            continue;
                        }
                        let mut scanner = Scanner::new(Arc::clone(sought));
                        let found = scanner.push(outer.as_bytes()).is_err();
                        assert!(found, "{secret} after {before} in {outer}");
                        let wrapped: Vec<_> = outer.as_bytes().chunks(19).collect();
                        let mut scanner = Scanner::new(Arc::clone(sought));
                        let found = scanner.push(&wrapped.join(&b"\r\n"[..])).is_err();
                        assert!(found || outer.contains('%'), "{secret} in lines in {outer}");
                    }
                }
            }
        }
    }

    /// Forms in forms are long, so more of them must have come to be told from chance.
    #[test]
    fn beginnings_tell_as_much_in_two_forms_as_in_one() {
        let secret = SECRETS[0];
        let digits: Vec<String> = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        let twice: Vec<String> = digits
            .iter()
            .map(|pair| pair.bytes().map(|byte| format!("{byte:02x}")).collect())
            .collect();
        for (bytes, owners) in [(5, 0), (6, 1)] {
            let mut scanner = scanner(&[secret]);
            scanner.push(twice[..bytes].concat().as_bytes()).unwrap();
            assert_eq!(scanner.begun(), owners, "{bytes} bytes");
        }
    }

    #[test]
    fn a_table_stays_small_and_no_more_is_held_back() {
        let token = "github_pat_11ABCDEFG0abcdefghijk_LMNOPQRS";
        let sought = sought(&[token]);
        assert!(
            sought.automaton.bytes() < 600 << 10,
            "{}",
            sought.automaton.bytes()
        );
        assert_eq!(sought.hold, token.len() * 10);
    }

    #[test]
    fn long_values_are_found_by_their_end_and_odd_ones_too() {
        let long: String = (0..600_u32)
            .map(|at| format!("{:05x}", at * 2_654_435))
            .collect();
        let long = &long[..3000];
        assert!(scanner(&[long]).push(long.as_bytes()).is_err());
        assert!(scanner(&[long]).push(&long.as_bytes()[2700..]).is_err());
        assert!(scanner(&[long]).push(&long.as_bytes()[..2700]).is_ok());
        let phrase = "correct horse & staple";
        assert!(
            scanner(&[phrase])
                .push(b"q=correct+horse+%26+staple")
                .is_err()
        );
        let wide = "gar\u{e7}on-\u{43a}\u{43b}\u{44e}\u{447}";
        let utf16: Vec<u8> = wide.encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert!(scanner(&[wide]).push(&utf16).is_err());
        assert!(scanner(&["1234567"]).push(b"1234567").is_ok());
    }

    #[test]
    fn a_beginning_tells_from_a_few_letters_on_and_of_whom() {
        let values = ["sk-live-AAAAAAAAAAAAAAAA", "sk-live-BBBBBBBBBBBBBBBB"];
        for (seen, owners) in [
            ("sk-li", 0),
            ("sk-liv", 3),
            ("sk-live-A", 1),
            ("%73k-live-B", 2),
            ("sk-live-AB", 0),
        ] {
            let mut scanner = scanner(&values);
            scanner.push(seen.as_bytes()).unwrap();
            assert_eq!(scanner.begun(), owners, "{seen}");
        }
    }

    #[test]
    fn ends_that_no_secret_begins_at() {
        for seen in ["data: {}\n\n", "[1]", "<p>\r\n", "\"x\"", "\u{1}", ""] {
            assert!(!may_begin_a_secret(seen.as_bytes()), "{seen}");
        }
        for seen in ["ghp_", "x \r\n", "--", "&#43;", "%4", "gh\0"] {
            assert!(may_begin_a_secret(seen.as_bytes()), "{seen}");
        }
    }

    #[test]
    fn in_one_header_or_in_two() {
        let mut needles = Needles::default();
        needles.of(0);
        needles.add_value("very-secret");
        let sought = Arc::new(needles.sought());
        let is_in = |parts: &[&str]| sought.is_in(parts.iter().map(|part| part.as_bytes()));
        assert!(is_in(&["x", "a very-secret"]));
        assert!(is_in(&["very-", "secret"]));
        assert!(!is_in(&["secret", "very-"]));
        assert!(!format!("{sought:?} {needles:?}").contains("very"));
    }
}
