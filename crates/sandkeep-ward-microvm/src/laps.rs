//! Where the time of a start goes, for the log.

use std::{
    fmt::{self, Write as _},
    time::Instant,
};

#[derive(Debug)]
pub struct Laps {
    last: Instant,
    text: String,
}

impl Laps {
    pub fn begin() -> Self {
        Self {
            last: Instant::now(),
            text: String::new(),
        }
    }

    /// Notes the time since the one before.
    pub fn lap(&mut self, name: &str) {
        let now = Instant::now();
        let ms = (now - self.last).as_secs_f64() * 1000.0;
        self.last = now;
        let gap = if self.text.is_empty() { "" } else { ", " };
        // Writing to a string does not fail.
        let _written = write!(self.text, "{gap}{name} {ms:.1} ms");
    }
}

impl fmt::Display for Laps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
