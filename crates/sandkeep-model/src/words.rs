//! Text of others in words of ours: names of files, arguments, what programs said. Whoever chose it
//! must not write to a terminal with it, pretend to be another line, or be endless.

use std::fmt::Write as _;

/// Of a message, in bytes; what is longer is cut.
pub const LONGEST: usize = 1900;
const CUT: char = '…';

/// The same text with every character visible: others are written as Rust writes them. It is cut at
/// [`LONGEST`]. What is printable stays as it is.
pub fn printable(text: impl Into<String>) -> String {
    let text = text.into();
    if text.len() <= LONGEST && text.chars().all(is_visible) {
        return text;
    }
    let mut made = String::new();
    for c in text.chars() {
        let before = made.len();
        if is_visible(c) {
            made.push(c);
        } else {
            made.extend(c.escape_default());
        }
        if made.len() > LONGEST - CUT.len_utf8() {
            made.truncate(before);
            made.push(CUT);
            break;
        }
    }
    made
}

/// Bytes that need not be text; those that are none are written `\xff`.
pub fn of_bytes(bytes: &[u8]) -> String {
    let mut made = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        made.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _infallible = write!(made, "\\x{byte:02x}");
        }
    }
    made
}

/// Neither a control character, nor one that shows nothing or changes how others are shown.
fn is_visible(c: char) -> bool {
    !c.is_control()
        && !matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_wrote_to_terminals() {
        for (raw, told) in [
            (
                "plain \"text\" \\ 'ü' 漢 /tmp/x",
                "plain \"text\" \\ 'ü' 漢 /tmp/x",
            ),
            ("/tmp/\x1b[31mred\x07", "/tmp/\\u{1b}[31mred\\u{7}"),
            (
                "a\nError: b\r\tc\0\x7f\u{9b}",
                "a\\nError: b\\r\\tc\\u{0}\\u{7f}\\u{9b}",
            ),
            (
                "gpj.\u{202e}exe\u{200b}\u{2028}",
                "gpj.\\u{202e}exe\\u{200b}\\u{2028}",
            ),
        ] {
            assert_eq!(printable(raw), told);
            assert_eq!(printable(told), told, "what was escaped stays as it is");
        }
    }

    #[test]
    fn a_name_without_end_was_told_without_end() {
        let exact = "x".repeat(LONGEST);
        assert_eq!(printable(exact.clone()), exact);
        for endless in [
            "x".repeat(1 << 20),
            "漢".repeat(1 << 16),
            "\x1b".repeat(1 << 16),
        ] {
            let told = printable(endless);
            assert!(
                told.len() <= LONGEST && told.ends_with(CUT),
                "{}",
                told.len()
            );
            assert!(told.len() > LONGEST - 16);
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_told_apart() {
        assert_eq!(of_bytes("ü/\n".as_bytes()), "ü/\n");
        assert_eq!(of_bytes(b"a\xff\xc3(\xe2\x82"), "a\\xff\\xc3(\\xe2\\x82");
    }
}
