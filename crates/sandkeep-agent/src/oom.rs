//! Who dies first when the box runs out of memory: its processes, not PID 1.

use std::ffi::{CStr, CString};
use std::io;

const PATH: &CStr = c"/proc/self/oom_score_adj";
/// Added to the agent's own score when it cannot be lowered below the default.
const DISTANCE: i32 = 100;

/// The score children take, as text ready to be written after fork.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChildScore {
    text: [u8; 8],
    length: usize,
}

/// Makes the agent as safe as the kernel allows, and says what children get.
pub(crate) fn protect() -> ChildScore {
    // Lowering needs a capability the box may not have.
    let _ = write(PATH, b"-1000");
    let own = std::fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    ChildScore::new(own)
}

impl ChildScore {
    pub(crate) fn new(own: i32) -> Self {
        let score = if own < 0 {
            0
        } else {
            (own + DISTANCE).min(1000)
        };
        let digits = score.to_string();
        let mut text = [0; 8];
        text[..digits.len()].copy_from_slice(digits.as_bytes());
        Self {
            text,
            length: digits.len(),
        }
    }

    /// Takes the score. Safe between fork and exec. Raising is always allowed; where there is no
    /// /proc the child keeps the agent's score.
    pub(crate) fn apply(self) {
        let _ = write(PATH, &self.text[..self.length]);
    }

    /// Gives the score to a child that has started its program. An agent that came back from
    /// the disk belongs to the host alone, and so do its children until then: they can not
    /// take it themselves.
    pub(crate) fn give_to(self, pid: i32) {
        if let Ok(path) = CString::new(format!("/proc/{pid}/oom_score_adj")) {
            let _ = write(&path, &self.text[..self.length]);
        }
    }
}

/// Only system calls, because [`ChildScore::apply`] runs after fork.
fn write(path: &CStr, text: &[u8]) -> io::Result<()> {
    use rustix::fs::{Mode, OFlags, open};
    let file = open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_go_before_the_agent() {
        for (own, child) in [(-1000, "0"), (-1, "0"), (0, "100"), (950, "1000")] {
            let score = ChildScore::new(own);
            assert_eq!(&score.text[..score.length], child.as_bytes());
        }
    }
}
