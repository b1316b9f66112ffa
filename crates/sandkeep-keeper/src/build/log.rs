//! What a build says.

use sandkeep_model::Timestamp;
use serde::{Deserialize, Serialize};

/// Lines of one build; what comes after is counted, not kept.
pub const MOST_LINES: usize = 20_000;
const LONGEST_LINE: usize = 2048;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LineLevel {
    Info,
    Warn,
    Error,
}

/// One line, of the build itself or of a command in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildLine {
    pub at: Timestamp,
    pub level: LineLevel,
    /// `base`, the number of the step from 1, or `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    pub message: String,
}

impl BuildLine {
    pub fn new(level: LineLevel, step: &str, message: &str) -> Self {
        Self {
            at: Timestamp::now(),
            level,
            step: Some(step.to_owned()),
            message: tame(message),
        }
    }
}

/// Somebody else's text: no control characters, no novels.
pub fn tame(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control() || *c == '\t')
        .take(LONGEST_LINE)
        .collect()
}

/// Makes lines of what a command writes.
#[derive(Default)]
pub struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that are whole now.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut whole = Vec::new();
        for &byte in bytes {
            if byte == b'\n' || self.rest.len() >= 4 * LONGEST_LINE {
                whole.extend(self.end());
            }
            if byte != b'\n' {
                self.rest.push(byte);
            }
        }
        whole
    }

    /// What came after the last newline.
    pub fn end(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.rest);
        let text = String::from_utf8_lossy(&line);
        // Progress bars write one line over and over.
        let last = text.trim_end_matches('\r').rsplit('\r').next()?;
        let tamed = tame(last);
        (!tamed.trim().is_empty()).then_some(tamed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_and_tame() {
        let mut lines = Lines::default();
        assert!(lines.feed(b"one").is_empty());
        assert_eq!(
            lines.feed(b" line\ntwo\x1b[2J\r\n10%\r90%\rdone\n\nrest"),
            ["one line", "two[2J", "done"]
        );
        assert_eq!(lines.end().as_deref(), Some("rest"));
        assert_eq!(lines.end(), None);
        assert!(lines.feed(&vec![b'x'; 100_000]).len() > 5);
    }
}
