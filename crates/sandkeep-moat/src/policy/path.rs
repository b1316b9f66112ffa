//! The path of a request in one reading, or the reason why it has more than one.
//!
//! Servers decode, cut off, merge and map paths each in their own way, often one behind another.
//! Rules are only kept if the rule and the last of those servers speak of the same path, so a path
//! is decoded once here, and what another server may read as another path is refused.

use std::{borrow::Cow, fmt};

use percent_encoding::percent_decode_str;

/// Why a path has more than one reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ambiguity {
    /// `.` and `..`, also with parameters, or with dots and blanks that some file systems
    /// do not count.
    Dots,
    /// `//`: some servers make one of them.
    Slashes,
    /// `%2f`, `%5c`, `\`: a slash for some, a letter for others.
    HiddenSlash,
    /// `%25`: read differently by those who decode twice.
    HiddenPercent,
    /// `%3b`, `%3f`, `%23`: the end of the path for those who decode first.
    HiddenEnd,
    /// `%00`, `%0a` and the like.
    Control,
    /// `%70`: the same letter to all but those who do not decode.
    NeedlesslyEncoded,
    /// `%u002e`, `%zz`, a percent sign at the end.
    NoEncoding,
    /// Encoded bytes that are no UTF-8, overlong forms of ASCII among them.
    NoUtf8,
    /// Bytes that must be encoded and are not.
    NotEncoded,
    /// Wide and other forms of the characters above, which some servers make plain.
    LooksLikeAscii,
}

impl fmt::Display for Ambiguity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dots => "a part of it is . or .., or some servers take it for that",
            Self::Slashes => "it holds //",
            Self::HiddenSlash => "it holds a backslash, or an encoded slash or backslash",
            Self::HiddenPercent => "it holds an encoded percent sign (%25)",
            Self::HiddenEnd => "it holds an encoded ;, ? or #",
            Self::Control => "it holds an encoded control character",
            Self::NeedlesslyEncoded => "it holds an encoded letter, digit, dot, - or _",
            Self::NoEncoding => "it holds a percent sign without two hexadecimal digits",
            Self::NoUtf8 => "it holds encoded bytes that are not UTF-8",
            Self::NotEncoded => "it holds characters that must be percent-encoded",
            Self::LooksLikeAscii => "it holds a character that some servers take for . / \\ % or ;",
        })
    }
}

/// A path everybody reads alike: decoded, and without what is to be cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainPath<'a> {
    decoded: Cow<'a, str>,
}

impl<'a> PlainPath<'a> {
    /// `sent`: without the query.
    pub fn read(sent: &'a str) -> Result<Self, Ambiguity> {
        look_at_encoded(sent)?;
        let decoded = percent_decode_str(sent)
            .decode_utf8()
            .map_err(|_| Ambiguity::NoUtf8)?;
        if decoded.contains("//") {
            return Err(Ambiguity::Slashes);
        }
        if decoded.chars().any(looks_like_ascii) {
            return Err(Ambiguity::LooksLikeAscii);
        }
        if decoded.split('/').any(is_dots) {
            return Err(Ambiguity::Dots);
        }
        Ok(Self { decoded })
    }

    /// As most servers read it, and as those do that take `;` for the beginning of parameters.
    /// They are the same where there is none.
    pub fn readings(&self) -> (&str, Cow<'_, str>) {
        let whole = self.decoded.as_ref();
        if !whole.contains(';') {
            return (whole, Cow::Borrowed(whole));
        }
        let bare: Vec<&str> = whole
            .split('/')
            .map(|part| part.split(';').next().unwrap_or(part))
            .collect();
        (whole, Cow::Owned(bare.join("/")))
    }
}

fn look_at_encoded(sent: &str) -> Result<(), Ambiguity> {
    let bytes = sent.as_bytes();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'%' => {
                let digit = |at: usize| bytes.get(at).and_then(|b| char::from(*b).to_digit(16));
                let (Some(high), Some(low)) = (digit(at + 1), digit(at + 2)) else {
                    return Err(Ambiguity::NoEncoding);
                };
                match u8::try_from(high * 16 + low).unwrap_or_default() {
                    0x2f | 0x5c => return Err(Ambiguity::HiddenSlash),
                    0x25 => return Err(Ambiguity::HiddenPercent),
                    0x3b | 0x3f | 0x23 => return Err(Ambiguity::HiddenEnd),
                    0..0x20 | 0x7f => return Err(Ambiguity::Control),
                    b if b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_') => {
                        return Err(Ambiguity::NeedlesslyEncoded);
                    }
                    _ => {}
                }
                at += 3;
                continue;
            }
            b'\\' => return Err(Ambiguity::HiddenSlash),
            b'#' => return Err(Ambiguity::HiddenEnd),
            0..=0x20 | 0x7f.. => return Err(Ambiguity::NotEncoded),
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// Dots alone, also with blanks behind them, which Windows does not count, and with parameters.
fn is_dots(part: &str) -> bool {
    let bare = part.split(';').next().unwrap_or(part);
    bare.contains('.') && bare.chars().all(|c| c == '.' || c.is_whitespace())
}

/// What best-fit tables and Unicode's compatible forms make one of `. / \ % ;` or a blank of.
fn looks_like_ascii(c: char) -> bool {
    matches!(c,
        '\u{80}'..='\u{a0}'
        | '\u{2000}'..='\u{200f}' | '\u{2024}'..='\u{202f}' | '\u{2044}' | '\u{205f}'..='\u{206f}'
        | '\u{2215}' | '\u{2216}' | '\u{29f5}' | '\u{29f8}' | '\u{29f9}' | '\u{3000}' | '\u{3002}'
        | '\u{fe52}' | '\u{fe54}' | '\u{fe68}' | '\u{fe6a}' | '\u{feff}'
        | '\u{ff01}'..='\u{ff5e}' | '\u{ff61}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_paths_are_decoded() {
        for (sent, decoded) in [
            ("/", "/"),
            ("*", "*"),
            ("/a/b.c/d..e/", "/a/b.c/d..e/"),
            ("/a%20b/%C3%A9", "/a b/é"),
            ("/a/;x=1/b;y", "/a/;x=1/b;y"),
            ("/@scope/.hidden/..x", "/@scope/.hidden/..x"),
        ] {
            assert_eq!(PlainPath::read(sent).unwrap().readings().0, decoded);
        }
        let path = PlainPath::read("/a;x/b;y=1").unwrap();
        assert_eq!(path.readings().1, "/a/b");
    }

    #[test]
    fn each_ambiguity_has_its_reason() {
        use Ambiguity::*;
        for (sent, why) in [
            ("/a/../b", Dots),
            ("/a/%2E%2e/b", NeedlesslyEncoded),
            ("/a/..;x/b", Dots),
            ("/a/.%20/b", Dots),
            ("/a/.../b", Dots),
            ("/a//b", Slashes),
            ("/a%2Fb", HiddenSlash),
            ("/a\\b", HiddenSlash),
            ("/a%5cb", HiddenSlash),
            ("/a%252e", HiddenPercent),
            ("/..%3b/b", HiddenEnd),
            ("/a%3Fb", HiddenEnd),
            ("/a#b", HiddenEnd),
            ("/a%00", Control),
            ("/a%0d%0a", Control),
            ("/%61", NeedlesslyEncoded),
            ("/%u002e", NoEncoding),
            ("/a%", NoEncoding),
            ("/a%2", NoEncoding),
            ("/a%+1", NoEncoding),
            ("/%c0%ae", NoUtf8),
            ("/%e0%80%af", NoUtf8),
            ("/%ff", NoUtf8),
            ("/\u{e9}", NotEncoded),
            ("/a\u{a0}b", NotEncoded),
            ("/%ef%bc%8e", LooksLikeAscii),
            ("/%ef%bc%8f", LooksLikeAscii),
        ] {
            assert_eq!(PlainPath::read(sent), Err(why), "{sent}");
        }
    }
}
