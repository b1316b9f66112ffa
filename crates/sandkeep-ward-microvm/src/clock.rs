//! The clock of a machine.
//!
//! It stands still while the machine does. Whatever is told to a machine arrives later than it was said,
//! on an emulated one by a tenth of a second at times; so it is asked what its clock says, which lies
//! between the sending of the question and the arrival of the answer, and moved by the difference.

use crate::record::Live;
use sandkeep_agent_client::Agent;
use sandkeep_model::{Error, Result};
use sandkeep_own_kernel as own_kernel;
use std::{
    io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::time::timeout;

/// What no program of a sandbox minds, in microseconds.
const CLOSE: i64 = 20_000;
/// An answer that took longer says too little.
const SHARP: i64 = 40_000;
const LOOKS: u32 = 6;
/// What no host makes of a clock by being busy.
const FAR: i64 = 1_000_000;
const ROUNDS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(10);

/// The host's, in microseconds since 1970.
pub fn now_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// Whether a clock is right that was set to the host's a moment ago, so that it can only be behind,
/// and said `theirs` before `heard`.
pub fn is_close(theirs: Option<i64>, heard: i64) -> bool {
    theirs.is_some_and(|theirs| (0..=CLOSE).contains(&heard.saturating_sub(theirs)))
}

/// One look at the clock of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    asked: i64,
    theirs: i64,
    heard: i64,
}

impl Look {
    /// How far the clock is behind, as it is most likely, and by how much that may be wrong. The guest
    /// may say anything.
    const fn behind(self) -> (i64, i64) {
        let half = (self.heard - self.asked) / 2;
        ((self.asked + half).saturating_sub(self.theirs), half)
    }

    /// What is to be done about it.
    fn next(self) -> Next {
        let (behind, wrong) = self.behind();
        if wrong > SHARP / 2 {
            Next::LookAgain
        } else if behind.saturating_abs() <= wrong.max(CLOSE / 4) {
            Next::Right
        } else {
            Next::Move(behind)
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Right,
    /// This answer took too long to tell.
    LookAgain,
    Move(i64),
}

/// Has the clock of a machine say what the host's says.
pub async fn set(live: &Live) -> Result<()> {
    let asked = async {
        let mut agent = Agent::over(own_kernel::connect(live).await?).await?;
        set_over(&mut agent).await
    };
    timeout(PATIENCE, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// The same over a connection to its agent.
pub async fn set_over(agent: &mut Agent) -> Result<()> {
    let mut best: Option<Look> = None;
    let mut forward = None;
    for _ in 0..LOOKS {
        let asked = now_us();
        let theirs = agent.clock(forward).await?;
        let look = Look {
            asked,
            theirs,
            heard: now_us(),
        };
        forward = match look.next() {
            Next::Right => return Ok(()),
            Next::Move(behind) => Some(behind),
            Next::LookAgain => None,
        };
        // It was moved: what was seen before is not true any more.
        let sharper = |best: Look| look.behind().1 < best.behind().1;
        if forward.is_none() && best.is_none_or(sharper) {
            best = Some(look);
        } else if forward.is_some() {
            best = None;
        }
    }
    // None was sharp: the one that says most is better than none, if it is clear at all.
    if let Some((behind, wrong)) = best.map(Look::behind)
        && behind.saturating_abs() > wrong
    {
        agent.clock(Some(behind)).await?;
    }
    Ok(())
}

/// Refuses a clock that is far off although it was set: a host that is busy is no reason.
pub async fn check_over(agent: &mut Agent) -> Result<()> {
    for _ in 1..ROUNDS {
        set_over(agent).await?;
        if looked_at(agent).await.is_ok() {
            return Ok(());
        }
    }
    set_over(agent).await?;
    looked_at(agent).await
}

async fn looked_at(agent: &mut Agent) -> Result<()> {
    let asked = now_us();
    let theirs = agent.clock(None).await?;
    let look = Look {
        asked,
        theirs,
        heard: now_us(),
    };
    let (behind, wrong) = look.behind();
    if behind.saturating_abs() - wrong <= FAR {
        return Ok(());
    }
    Err(Error::internal(format!(
        "the clock of the machine is {} ms behind",
        behind / 1000
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(asked: i64, theirs: i64, heard: i64) -> Look {
        Look {
            asked: asked * 1000,
            theirs: theirs * 1000,
            heard: heard * 1000,
        }
    }

    #[test]
    fn a_guest_that_lies_about_its_clock_ended_the_wake() {
        for theirs in [i64::MIN, i64::MAX] {
            let look = Look {
                asked: 1_000_000,
                theirs,
                heard: 1_000_010,
            };
            assert!(matches!(look.next(), Next::Move(_)), "{look:?}");
            assert!(!is_close(Some(theirs), look.heard));
        }
    }

    #[test]
    fn a_clock_is_moved_by_what_it_is_behind() {
        // Asked at 1000, heard at 1010: it was read at about 1005.
        assert_eq!(look(1000, 1004, 1010).next(), Next::Right);
        assert_eq!(look(1000, 905, 1010).next(), Next::Move(100_000));
        assert_eq!(look(1000, 3005, 1010).next(), Next::Move(-2_000_000));
        // It may be behind by nothing or by 200 ms.
        assert_eq!(look(1000, 1000, 1200).next(), Next::LookAgain);
    }

    #[test]
    fn what_an_order_was_answered_with_is_enough_if_it_came_at_once() {
        assert!(is_close(Some(1_000_000), 1_010_000));
        assert!(!is_close(Some(1_000_000), 1_060_000));
        // It runs ahead of the host's: that can not be right.
        assert!(!is_close(Some(1_010_000), 1_000_000));
        assert!(!is_close(None, 1_000_000));
    }
}
