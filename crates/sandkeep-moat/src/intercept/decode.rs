//! Takes text out of the forms in which sites show it, one byte after the other.

/// The longest escape that is read. Longer ones (more zeros than anybody writes) stay as they are.
pub const LONGEST: usize = 10;

/// One way to write a character with others.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// `%2F`, `%u002F`
    Percent,
    /// `&sol;`, `&#47;`, `&#x2F;`, with and without the semicolon
    Entity,
    /// `\/`, `\u002F`, `\x2F`, `\057`. Not `\u{2F}`: what ends in a brace must be no letter, see
    /// `scan::may_begin_a_secret`, and encoders do not write it.
    Backslash,
}

/// What a few bytes mean.
enum Meaning {
    /// That depends on the next one.
    Open,
    Nothing,
    Character(u32),
    /// A byte by itself, which may be part of a character.
    Byte(u8),
    /// This, without the last byte.
    CharacterBefore(u32),
}

/// Turns escapes of one form into what they stand for; everything else goes through.
#[derive(Debug)]
pub struct Decoder {
    form: Form,
    /// The beginning of an escape.
    open: [u8; LONGEST],
    length: usize,
}

impl Decoder {
    const fn new(form: Form) -> Self {
        Self {
            form,
            open: [0; LONGEST],
            length: 0,
        }
    }

    pub const fn percent() -> Self {
        Self::new(Form::Percent)
    }

    pub const fn entity() -> Self {
        Self::new(Form::Entity)
    }

    pub const fn backslash() -> Self {
        Self::new(Form::Backslash)
    }

    pub const fn is_open(&self) -> bool {
        self.length > 0
    }

    pub fn push(&mut self, byte: u8, out: &mut impl FnMut(u8)) {
        let first = match self.form {
            Form::Percent => b'%',
            Form::Entity => b'&',
            Form::Backslash => b'\\',
        };
        if self.length == 0 && byte != first {
            return out(byte);
        }
        self.open[self.length] = byte;
        self.length += 1;
        let open = self.open;
        let seen = &open[..self.length];
        let before = &seen[..seen.len() - 1];
        let again = match self.form.meaning(seen) {
            Meaning::Open if seen.len() < LONGEST => return,
            Meaning::Character(code) => {
                write(code, out);
                false
            }
            Meaning::Byte(byte) => {
                out(byte);
                false
            }
            Meaning::CharacterBefore(code) => {
                write(code, out);
                true
            }
            Meaning::Open | Meaning::Nothing => {
                before.iter().for_each(|byte| out(*byte));
                true
            }
        };
        self.length = 0;
        if again {
            // It may begin another one. The first byte of an escape is never looked at twice.
            if byte == first && seen.len() > 1 {
                self.open[0] = byte;
                self.length = 1;
            } else {
                out(byte);
            }
        }
    }
}

fn write(code: u32, out: &mut impl FnMut(u8)) {
    // Halves of a surrogate pair are in no secret that fits into a header.
    let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
    let mut bytes = [0; 4];
    character
        .encode_utf8(&mut bytes)
        .bytes()
        .for_each(&mut *out);
}

impl Form {
    fn meaning(self, seen: &[u8]) -> Meaning {
        let rest = &seen[1..];
        match self {
            Self::Percent => match rest {
                [b'u' | b'U', digits @ ..] => exactly(4, digits),
                digits => match exactly(2, digits) {
                    Meaning::Character(code) => {
                        Meaning::Byte(u8::try_from(code).expect("two digits are one byte"))
                    }
                    other => other,
                },
            },
            Self::Entity => match rest {
                [b'#', b'x' | b'X', digits @ ..] => reference(16, digits),
                [b'#', digits @ ..] => reference(10, digits),
                name => named(name),
            },
            Self::Backslash => match rest {
                [] => Meaning::Open,
                [b'u', digits @ ..] => exactly(4, digits),
                [b'x', digits @ ..] => exactly(2, digits),
                [b'0'..=b'7'] | [b'0'..=b'7', b'0'..=b'7'] => Meaning::Open,
                [b'0'..=b'3', b'0'..=b'7', b'0'..=b'7'] => number(8, rest),
                [c @ (b'/' | b'"' | b'\'' | b'\\')] => Meaning::Character(u32::from(*c)),
                [b'n'] => Meaning::Character(0x0a),
                [b'r'] => Meaning::Character(0x0d),
                [b't'] => Meaning::Character(0x09),
                _ => Meaning::Nothing,
            },
        }
    }
}

fn number(radix: u32, digits: &[u8]) -> Meaning {
    let mut code = 0_u32;
    for digit in digits {
        let Some(digit) = char::from(*digit).to_digit(radix) else {
            return Meaning::Nothing;
        };
        code = code.saturating_mul(radix).saturating_add(digit);
    }
    match digits {
        [] => Meaning::Nothing,
        _ => Meaning::Character(code),
    }
}

fn digits_so_far(radix: u32, digits: &[u8]) -> Meaning {
    match number(radix, digits) {
        Meaning::Nothing if !digits.is_empty() => Meaning::Nothing,
        _ => Meaning::Open,
    }
}

fn exactly(count: usize, digits: &[u8]) -> Meaning {
    match digits_so_far(16, digits) {
        Meaning::Open if digits.len() == count => number(16, digits),
        other => other,
    }
}

fn reference(radix: u32, seen: &[u8]) -> Meaning {
    match seen {
        [digits @ .., b';'] => number(radix, digits),
        _ => match (digits_so_far(radix, seen), seen) {
            (Meaning::Nothing, [digits @ .., _]) => match number(radix, digits) {
                Meaning::Character(code) => Meaning::CharacterBefore(code),
                other => other,
            },
            (other, _) => other,
        },
    }
}

/// Names of the characters that stand in secrets and addresses.
const NAMES: [(&[u8], u8); 38] = [
    (b"amp", b'&'),
    (b"lt", b'<'),
    (b"gt", b'>'),
    (b"quot", b'"'),
    (b"apos", b'\''),
    (b"plus", b'+'),
    (b"sol", b'/'),
    (b"bsol", b'\\'),
    (b"equals", b'='),
    (b"lowbar", b'_'),
    (b"underbar", b'_'),
    (b"hyphen", b'-'),
    (b"dash", b'-'),
    (b"period", b'.'),
    (b"comma", b','),
    (b"colon", b':'),
    (b"semi", b';'),
    (b"excl", b'!'),
    (b"quest", b'?'),
    (b"num", b'#'),
    (b"dollar", b'$'),
    (b"percnt", b'%'),
    (b"commat", b'@'),
    (b"ast", b'*'),
    (b"midast", b'*'),
    (b"hat", b'^'),
    (b"grave", b'`'),
    (b"vert", b'|'),
    (b"verbar", b'|'),
    (b"lpar", b'('),
    (b"rpar", b')'),
    (b"lsqb", b'['),
    (b"rsqb", b']'),
    (b"lbrack", b'['),
    (b"rbrack", b']'),
    (b"lcub", b'{'),
    (b"rcub", b'}'),
    (b"tab", b'\t'),
];
/// These are read without a semicolon as well.
const OLD_NAMES: usize = 4;

fn named(seen: &[u8]) -> Meaning {
    let (last, name) = match seen.split_last() {
        Some((last, name)) => (*last, name),
        None => return Meaning::Open,
    };
    if last.is_ascii_alphanumeric() {
        return Meaning::Open;
    }
    let known = |names: &[(&[u8], u8)]| {
        let found = names.iter().find(|(own, _)| own.eq_ignore_ascii_case(name));
        found.map(|(_, byte)| u32::from(*byte))
    };
    match last {
        b';' => known(&NAMES).map_or(Meaning::Nothing, Meaning::Character),
        _ => known(&NAMES[..OLD_NAMES]).map_or(Meaning::Nothing, Meaning::CharacterBefore),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(mut decoder: Decoder, text: &str) -> String {
        let mut out = Vec::new();
        // What is open at the end shows with what follows.
        for byte in text.bytes().chain(*b"\n") {
            decoder.push(byte, &mut |byte| out.push(byte));
        }
        assert_eq!(out.pop(), Some(b'\n'), "{text}");
        String::from_utf8_lossy(&out).into_owned()
    }

    #[test]
    fn percent() {
        for (text, expected) in [
            ("a%2fb%2Fc", "a/b/c"),
            ("%67hp", "ghp"),
            ("100% %zz %4 %%41", "100% %zz %4 %A"),
            ("%u002f%U0041", "/A"),
            ("%u00", "%u00"),
            ("gar%c3%a7on", "gar\u{e7}on"),
        ] {
            assert_eq!(decoded(Decoder::percent(), text), expected, "{text}");
        }
    }

    #[test]
    fn entities() {
        for (text, expected) in [
            ("a&#43;b&#x2B;c&#X2b;&plus;", "a+b+c++"),
            ("&#43b&#0043;&#000043;", "+b++"),
            ("&amp;&ampx&lt 1 &AMP;", "&&ampx< 1 &"),
            (
                "a & b &; &#; &#x; &unknown; &&sol;",
                "a & b &; &#; &#x; &unknown; &/",
            ),
            ("&#43&#43", "++"),
            ("&averyveryverylongname;", "&averyveryverylongname;"),
        ] {
            assert_eq!(decoded(Decoder::entity(), text), expected, "{text}");
        }
    }

    #[test]
    fn backslashes() {
        for (text, expected) in [
            (r#"a\/b\"c\\d"#, r#"a/b"c\d"#),
            (r"\u002f\u0041\x42\103", "/ABC"),
            (r"\q \u00g \x4 \8 \u{41}", r"\q \u00g \x4 \8 \u{41}"),
            (r"a\nb", "a\nb"),
            (r"\\u0041", r"\u0041"),
        ] {
            assert_eq!(decoded(Decoder::backslash(), text), expected, "{text}");
        }
    }
}
