//! The terminal this program runs in.

use std::io;

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde::Serialize;

/// Puts the terminal of standard input into raw mode until dropped, so that every key
/// (Ctrl-C too) goes to the box.
#[derive(Debug)]
pub struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    pub fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nothing can be done if it fails, and the shell resets the terminal anyway.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

/// The terminal does not show what is typed until dropped.
#[derive(Debug)]
pub struct HiddenInput {
    before: Termios,
}

impl HiddenInput {
    pub fn enter() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut hidden = before.clone();
        hidden.local_modes.remove(LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Flush, &hidden)?;
        Ok(Self { before })
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        // Nothing can be done if it fails, and the shell resets the terminal anyway.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WindowSize {
    pub cols: u16,
    pub rows: u16,
}

impl WindowSize {
    /// The size of the terminal, or the usual one when there is none.
    pub fn current() -> Self {
        match tcgetwinsize(io::stdout()).or_else(|_| tcgetwinsize(io::stdin())) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => Self {
                cols: size.ws_col,
                rows: size.ws_row,
            },
            _ => Self { cols: 80, rows: 24 },
        }
    }
}
