//! What people and programs see.

use std::io::{self, IsTerminal, Write};

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::args::{Color, Global};

/// How to print.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub json: bool,
    colour: bool,
}

impl Output {
    pub fn new(global: &Global) -> Self {
        let colour = match global.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => {
                // Any value but the empty one counts, as the convention has it.
                let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
                !refused && !dumb && io::stdout().is_terminal()
            }
        };
        Self {
            json: global.json,
            colour,
        }
    }

    pub const fn colour(&self) -> bool {
        self.colour
    }

    /// One line of text.
    pub fn line(&self, text: &str) -> io::Result<()> {
        writeln!(io::stdout().lock(), "{text}")
    }

    /// Beside the results: for people, whatever is done with those.
    pub fn warn(&self, text: &str) -> io::Result<()> {
        writeln!(io::stderr().lock(), "warning: {}", clean(text))
    }

    /// The same for what is no trouble.
    pub fn note(&self, text: &str) -> io::Result<()> {
        writeln!(io::stderr().lock(), "{}", clean(text))
    }

    /// A value, indented for reading.
    pub fn json(&self, value: &impl Serialize) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(value)?;
        self.line(&text)?;
        Ok(())
    }

    /// A value on one line, for streams.
    pub fn json_line(&self, value: &impl Serialize) -> anyhow::Result<()> {
        let text = serde_json::to_string(value)?;
        self.line(&text)?;
        Ok(())
    }

    /// Rows under headings. Every cell is cleaned: parts of it may come out of a box.
    pub fn table(&self, headings: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
        self.line(render(headings, rows, io::stdout().is_terminal()).trim_end())
    }

    pub fn good(&self, text: &str) -> String {
        self.painted("32", text)
    }

    pub fn warning(&self, text: &str) -> String {
        self.painted("33", text)
    }

    pub fn bad(&self, text: &str) -> String {
        self.painted("31", text)
    }

    fn painted(&self, code: &str, text: &str) -> String {
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

fn render(headings: &[&str], rows: &[Vec<String>], fit_terminal: bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if fit_terminal {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(headings.to_vec());
    for row in rows {
        table.add_row(row.iter().map(|cell| clean(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let text = table.to_string();
    text.lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n")
}

/// Takes out of somebody else's text what would drive a terminal or hide what is written:
/// control characters, and the marks that turn the direction of writing.
pub fn clean(text: &str) -> String {
    let hidden = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    text.chars()
        .filter(|&c| !c.is_control() && !hidden(c))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_table_drives_the_terminal() {
        let hostile = "a\x1b]0;owned\x07\x1b[2J\u{9b}31mb\r\nc\u{202e}d".to_owned();
        let text = render(&["NAME"], &[vec![hostile]], false);
        assert!(
            !text.chars().any(|c| c.is_control() && c != '\n'),
            "{text:?}"
        );
        assert!(!text.contains('\u{202e}'));
        assert_eq!(
            text.lines().count(),
            2,
            "a cell can not make a line: {text:?}"
        );
    }

    #[test]
    fn plain_text_stays_as_it_is() {
        assert_eq!(clean("naïve 日本 [ok]"), "naïve 日本 [ok]");
    }

    #[test]
    fn columns_stand_under_their_headings() {
        let rows = [
            vec!["i1".to_owned(), "running".to_owned()],
            vec!["i22222".to_owned(), "gone".to_owned()],
        ];
        let text = render(&["ID", "STATE"], &rows, false);
        let column = text.lines().next().unwrap().find("STATE").unwrap();
        assert_eq!(text.lines().nth(1).unwrap().find("running"), Some(column));
        assert_eq!(text.lines().nth(2).unwrap().find("gone"), Some(column));
    }
}
