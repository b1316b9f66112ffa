//! `kill -9` in the middle of writing.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
};

use common::denied;
use sandkeep_audit::{Audit, AuditConfig, Filter};
use sandkeep_model::SandboxId;

const CHILD: &str = "SANDKEEP_AUDIT_TEST_CHILD";
const ROUNDS: usize = 5;

fn config() -> AuditConfig {
    AuditConfig {
        segment_bytes: 20_000,
        ..AuditConfig::default()
    }
}

/// Writes for ever, and says each number once it was given.
fn write_for_ever(dir: &Path) -> ! {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let audit = Audit::open_with(dir, config()).unwrap();
    let id = SandboxId::random();
    loop {
        let seq = runtime
            .block_on(audit.append(denied(&id, "evil.test")))
            .unwrap();
        let mut out = std::io::stdout().lock();
        writeln!(out, "seq {seq}").unwrap();
        out.flush().unwrap();
    }
}

/// The test runs itself once more as the writer that is killed.
#[test]
fn no_acknowledged_entry_is_lost_by_kill_9() {
    if let Some(dir) = std::env::var_os(CHILD) {
        write_for_ever(Path::new(&dir));
    }
    let room = tempfile::tempdir().unwrap();
    let dir = room.path().join("audit");
    let mut acknowledged = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "no_acknowledged_entry_is_lost_by_kill_9",
                "--nocapture",
            ])
            .env(CHILD, &dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let numbers = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .filter_map(|line| line.unwrap().strip_prefix("seq ")?.parse::<u64>().ok());
        for (count, seq) in numbers.enumerate() {
            acknowledged = acknowledged.max(seq);
            if count == 100 + 37 * round {
                // SIGKILL; what it still says until it is dead is read below.
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        let audit = Audit::open_with(&dir, config()).unwrap();
        let verdict = audit.verify().unwrap();
        assert!(verdict.is_sound(), "{verdict:?}");
        assert!(verdict.entries >= acknowledged);
        let read = audit.read(Filter::default()).unwrap().count() as u64;
        assert!(read >= verdict.entries);
    }
    assert!(acknowledged > 500);
}
