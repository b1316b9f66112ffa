//! The life of a box.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// `creating -> running <-> pausing/paused/resuming -> stopping -> gone`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Creating,
    Running,
    Pausing,
    Paused,
    Resuming,
    Stopping,
    Gone,
}

impl State {
    pub const ALL: [Self; 7] = [
        Self::Creating,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Stopping,
        Self::Gone,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Running => "running",
            Self::Pausing => "pausing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Stopping => "stopping",
            Self::Gone => "gone",
        }
    }

    /// Whether the lifecycle allows this step.
    pub const fn can_become(self, next: Self) -> bool {
        use State::{Creating, Gone, Paused, Pausing, Resuming, Running, Stopping};
        match self {
            Creating => matches!(next, Running | Stopping | Gone),
            // A rollback leaves a running box behind and wakes an older one.
            Running => matches!(next, Pausing | Resuming | Stopping | Gone),
            // A pause that can not be done leaves the box running.
            Pausing => matches!(next, Paused | Running | Stopping | Gone),
            Paused => matches!(next, Resuming | Stopping | Gone),
            Resuming => matches!(next, Running | Paused | Stopping | Gone),
            Stopping => matches!(next, Gone),
            Gone => false,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for State {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|state| state.name() == text)
            .ok_or_else(|| format!("\"{}\" is no state", text.escape_debug()))
    }
}

/// Why a box is gone. Nothing disappears without one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum GoneReason {
    /// Somebody asked for it.
    Killed,
    /// Its time was over.
    Expired,
    /// It was paused for longer than it may be.
    PausedTooLong,
    /// PID 1 of the box ended by itself or was killed from inside.
    Exited,
    /// The kernel ended the whole box because its memory was used up.
    OutOfMemory,
    /// It never came up.
    CreateFailed { message: String },
    /// The server was ended in the middle of making it.
    CreateInterrupted,
    /// It was not there any more when the server came back (host reboot, killed from outside).
    LostWhileServerWasDown,
}

impl fmt::Display for GoneReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed => f.write_str("killed on request"),
            Self::Expired => f.write_str("reached the end of its time"),
            Self::PausedTooLong => {
                f.write_str("was paused for longer than its limit (paused_limit)")
            }
            Self::Exited => f.write_str("its first process ended"),
            Self::OutOfMemory => f.write_str("ended by the kernel: out of memory"),
            Self::CreateFailed { message } => write!(f, "could not be created: {message}"),
            Self::CreateInterrupted => f.write_str("the server stopped while it was being created"),
            Self::LostWhileServerWasDown => {
                f.write_str("was no longer there when the server came back")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_comes_back_from_gone() {
        for next in State::ALL {
            assert!(!State::Gone.can_become(next));
        }
    }

    #[test]
    fn every_state_can_end() {
        for state in State::ALL {
            assert!(
                state == State::Gone || state.can_become(State::Gone),
                "{state}"
            );
            assert_eq!(state.name().parse::<State>().unwrap(), state);
        }
    }
}
