//! Header values of the form `main; key=value; key="quoted value"`.

use percent_encoding::percent_decode_str;

/// A parsed value: the part before the first `;` and the parameters after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Params {
    pub(crate) main: String,
    /// Keys in lower case, in the order they came.
    list: Vec<(String, String)>,
}

impl Params {
    /// Parses a value; `None` when it is malformed.
    pub(crate) fn parse(value: &str) -> Option<Self> {
        let (main, mut rest) = match value.split_once(';') {
            Some((main, rest)) => (main, rest),
            None => (value, ""),
        };
        let mut list = Vec::new();
        loop {
            rest = rest.trim_start_matches([' ', '\t', ';']);
            if rest.is_empty() {
                break;
            }
            let (key, after) = rest.split_once('=')?;
            let key = key.trim().to_ascii_lowercase();
            if key.is_empty() || key.contains(['"', ';', ' ']) {
                return None;
            }
            let after = after.trim_start();
            let (value, next) = match after.strip_prefix('"') {
                Some(quoted) => take_quoted(quoted)?,
                None => {
                    let end = after.find(';').unwrap_or(after.len());
                    (after[..end].trim_end().to_owned(), &after[end..])
                }
            };
            list.push((key, value));
            rest = next.trim_start();
            if !rest.is_empty() && !rest.starts_with(';') {
                return None;
            }
        }
        Some(Self {
            main: main.trim().to_owned(),
            list,
        })
    }

    /// The first value of a key (given in lower case).
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.list
            .iter()
            .find(|(have, _)| have == key)
            .map(|(_, value)| value.as_str())
    }
}

/// Reads up to the closing quote. A backslash escapes only a quote or another
/// backslash, so that Windows paths, which some clients send bare, survive.
fn take_quoted(text: &str) -> Option<(String, &str)> {
    let mut out = String::new();
    let mut chars = text.char_indices().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((out, &text[at + 1..])),
            '\\' => match chars.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => out.push(escaped),
                None => out.push('\\'),
            },
            other => out.push(other),
        }
    }
    None
}

/// Decodes an RFC 8187 value like `UTF-8''na%20me`.
pub(crate) fn decode_extended(value: &str) -> Option<String> {
    let mut pieces = value.splitn(3, '\'');
    let charset = pieces.next()?;
    let (_language, text) = (pieces.next()?, pieces.next()?);
    if !charset.eq_ignore_ascii_case("utf-8") {
        return None;
    }
    Some(percent_decode_str(text).decode_utf8().ok()?.into_owned())
}
