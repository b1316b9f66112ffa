//! What a machine at rest gives back to the host.
//!
//! Linux keeps what it has read and written of files as long as nobody in the machine wants the
//! memory. Of a machine that does nothing the host wants it: when there was no work for a while
//! the kernel is asked, once, to let go of what came since the machine began. What it had then
//! it shares with others, so that nobody would gain by it.

use std::fs;
use std::time::Duration;

use sandkeep_agent_api::machine::GROUP;

use crate::metrics::{cpu_used, files_in_memory};

/// Seldom: whoever looks has the machine work.
const LOOK: Duration = Duration::from_secs(10);
/// Processor time between two looks that is no work.
const FLOOR: Duration = Duration::from_millis(100);
/// Looks in a row without work.
const RESTED: u32 = 3;
/// Bytes for which it is worth reading files again later.
const WORTHWHILE: u64 = 32 << 20;

/// Goes on for as long as the machine.
pub(crate) async fn give_back() {
    let mut shared = files_in_memory();
    let mut rest = Rest::default();
    loop {
        tokio::time::sleep(LOOK).await;
        if !rest.begins(cpu_used()) {
            continue;
        }
        let more = files_in_memory().saturating_sub(shared);
        if more >= WORTHWHILE {
            // It takes a while, and what can not be let go of stays.
            let asked = move || fs::write(format!("{GROUP}/memory.reclaim"), more.to_string());
            let _as_much_as_went = tokio::task::spawn_blocking(asked).await;
            shared = shared.min(files_in_memory());
        }
    }
}

/// How long nothing was done.
#[derive(Debug, Default)]
struct Rest {
    used: Duration,
    quiet: u32,
}

impl Rest {
    /// Whether the machine has just been found to rest; told once until it has worked again.
    fn begins(&mut self, used: Duration) -> bool {
        let worked = used.saturating_sub(self.used) > FLOOR;
        self.used = used;
        self.quiet = if worked {
            0
        } else {
            self.quiet.saturating_add(1)
        };
        self.quiet == RESTED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rest_is_told_once() {
        let mut rest = Rest::default();
        let looks = [5000, 5010, 5020, 5030, 5040, 9000, 9001, 9002, 9101, 9102];
        let told = looks.map(|ms| rest.begins(Duration::from_millis(ms)));
        assert_eq!(
            told,
            [
                false, false, false, true, false, false, false, false, true, false
            ]
        );
    }
}
