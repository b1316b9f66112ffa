//! The agent's own log: a short memory the host reads, so that nothing is written in the box.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use sandkeep_agent_api::Timestamp;
use sandkeep_agent_api::host::{LogEntry, LogLevel};

const MAX_ENTRIES: usize = 1000;
const MAX_MESSAGE: usize = 512;

/// The last entries.
#[derive(Debug, Default)]
pub(crate) struct Log(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    last_seq: u64,
    ring: VecDeque<LogEntry>,
}

impl Log {
    /// Adds an entry; a long message is cut.
    pub(crate) fn add(&self, level: LogLevel, mut message: String) {
        if message.len() > MAX_MESSAGE {
            message.truncate(message.floor_char_boundary(MAX_MESSAGE));
            message.push('…');
            message.shrink_to_fit();
        }
        let now = Timestamp::now();
        let timestamp_ms = now.seconds * 1000 + i64::from(now.nanos / 1_000_000);
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.last_seq += 1;
        let seq = entries.last_seq;
        if entries.ring.len() == MAX_ENTRIES {
            entries.ring.pop_front();
        }
        entries.ring.push_back(LogEntry {
            seq,
            timestamp_ms,
            level,
            message,
        });
    }

    /// The entries after that number.
    pub(crate) fn after(&self, seq: u64) -> Vec<LogEntry> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries
            .ring
            .iter()
            .filter(|entry| entry.seq > seq)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_entries_make_room_and_long_ones_are_cut() {
        let log = Log::default();
        for number in 0..1500 {
            log.add(
                LogLevel::Info,
                format!("entry {number} {}", "é".repeat(600)),
            );
        }
        let all = log.after(0);
        assert_eq!(all.len(), MAX_ENTRIES);
        assert_eq!(all[0].seq, 501);
        assert!(all[0].message.len() < MAX_MESSAGE + 8);
        assert_eq!(log.after(1499).len(), 1);
    }
}
