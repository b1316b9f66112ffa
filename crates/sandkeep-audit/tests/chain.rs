//! Writing, reading, turning over and tampering, with real files.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::{fs, path::PathBuf, time::Duration};

use common::denied;
use sandkeep_audit::{
    Action, Actor, Audit, AuditConfig, Entry, Filter, Order, Record, read, verify, verify_file,
};
use sandkeep_model::{Code, SandboxId, Timestamp};

struct Room {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

fn room() -> Room {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit");
    Room { _dir: dir, path }
}

fn small() -> AuditConfig {
    AuditConfig {
        segment_bytes: 2000,
        ..AuditConfig::default()
    }
}

fn files(room: &Room) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(&room.path)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "jsonl"))
        .collect();
    found.sort();
    found
}

fn all(room: &Room, filter: Filter) -> Vec<Record> {
    read(&room.path, filter)
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap()
}

#[tokio::test]
async fn numbers_follow_each_other_over_restarts_and_segments() {
    let room = room();
    let id = SandboxId::random();
    let mut expected = 0;
    for _ in 0..3 {
        let audit = Audit::open_with(&room.path, small()).unwrap();
        for _ in 0..20 {
            expected += 1;
            let seq = audit.append(denied(&id, "evil.test")).await.unwrap();
            assert_eq!(seq, expected);
        }
        audit.flush().await.unwrap();
        let verdict = audit.verify().unwrap();
        assert!(verdict.is_sound(), "{verdict:?}");
        assert_eq!(verdict.entries, expected);
        assert_eq!(verdict.head.unwrap(), audit.head());
        assert!(audit.healthy());
    }
    assert!(files(&room).len() > 5);
    assert!(
        files(&room)
            .iter()
            .all(|file| fs::metadata(file).unwrap().len() <= 2000)
    );
}

#[tokio::test]
async fn only_one_may_write() {
    let room = room();
    let audit = Audit::open(&room.path).unwrap();
    assert_eq!(Audit::open(&room.path).unwrap_err().code, Code::Conflict);
    drop(audit);
    Audit::open(&room.path).unwrap();
}

#[tokio::test]
async fn read_from_both_ends_with_filters() {
    let room = room();
    let (a, b) = (SandboxId::random(), SandboxId::random());
    let audit = Audit::open_with(&room.path, small()).unwrap();
    for number in 1..=60_i64 {
        let mut entry = denied(if number % 2 == 0 { &a } else { &b }, &format!("h{number}"));
        entry.at = Timestamp::from_millis(number * 1000);
        if number % 10 == 0 {
            entry.action = Action::SecretUsed {
                name: "github".into(),
                host: "api.test".into(),
            };
        }
        audit.append(entry).await.unwrap();
    }
    let numbers = |filter: Filter| -> Vec<u64> {
        audit
            .read(filter)
            .unwrap()
            .map(|record| record.unwrap().seq)
            .collect()
    };
    let oldest = Filter {
        order: Order::OldestFirst,
        ..Filter::default()
    };
    assert_eq!(numbers(oldest.clone()), (1..=60).collect::<Vec<_>>());
    assert_eq!(
        numbers(Filter::default()),
        (1..=60).rev().collect::<Vec<_>>()
    );
    assert_eq!(
        numbers(Filter {
            limit: Some(3),
            sandbox: Some(b),
            ..Filter::default()
        }),
        [59, 57, 55]
    );
    assert_eq!(
        numbers(Filter {
            action: Some("secret_used".into()),
            from: Some(Timestamp::from_millis(20_000)),
            to: Some(Timestamp::from_millis(50_000)),
            ..oldest.clone()
        }),
        [20, 30, 40]
    );
    // Pages, either way.
    for after in 0..=60 {
        let page = numbers(Filter {
            after: Some(after),
            limit: Some(2),
            ..oldest.clone()
        });
        assert_eq!(page, (after + 1..=60).take(2).collect::<Vec<_>>());
        let page = numbers(Filter {
            before: Some(after),
            limit: Some(2),
            ..Filter::default()
        });
        assert_eq!(page, (1..after).rev().take(2).collect::<Vec<_>>());
    }
    assert_eq!(
        numbers(Filter {
            after: Some(20),
            before: Some(23),
            ..Filter::default()
        }),
        [22, 21]
    );
}

#[tokio::test]
async fn a_change_of_any_byte_is_noticed_and_its_line_is_named() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open(&room.path).unwrap();
    for _ in 0..5 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
    }
    let head = audit.head();
    drop(audit);
    let file = files(&room).remove(0);
    let good = fs::read(&file).unwrap();
    let mut line = 1;
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&file, &bad).unwrap();
        let broken = verify(&room.path, Some(&head)).unwrap().broken.unwrap();
        // The end of the last line only shows by what is missing.
        assert!(
            broken.line == line || at == good.len() - 1,
            "byte {at}: {broken:?}"
        );
        if good[at] == b'\n' {
            line += 1;
        }
    }
}

#[tokio::test]
async fn removed_swapped_and_missing_lines_are_noticed() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open(&room.path).unwrap();
    for number in 0..6 {
        audit
            .append(denied(&id, &format!("h{number}")))
            .await
            .unwrap();
    }
    let head = audit.head();
    drop(audit);
    let file = files(&room).remove(0);
    let good = fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = good.split_inclusive('\n').collect();
    let broken_at = |lines: &[&str]| {
        fs::write(&file, lines.concat()).unwrap();
        verify(&room.path, Some(&head))
            .unwrap()
            .broken
            .map(|b| b.line)
    };
    assert_eq!(broken_at(&lines), None);
    let mut removed = lines.clone();
    removed.remove(2);
    assert_eq!(broken_at(&removed), Some(3));
    let mut swapped = lines.clone();
    swapped.swap(1, 2);
    assert_eq!(broken_at(&swapped), Some(2));
    let mut twice = lines.clone();
    twice.insert(3, lines[3]);
    assert_eq!(broken_at(&twice), Some(5));
    // The first lines gone, or the last ones: found by the name and by the remembered head.
    assert_eq!(broken_at(&lines[1..]), Some(1));
    assert_eq!(broken_at(&lines[..5]), Some(0));
    assert_eq!(broken_at(&[]), Some(0));
    // Nobody remembers: cutting whole lines off the end is the one thing that does not show.
    fs::write(&file, lines[..5].concat()).unwrap();
    assert!(verify(&room.path, None).unwrap().is_sound());
}

#[tokio::test]
async fn a_log_written_anew_does_not_fit_a_remembered_head() {
    let (room, forged) = (room(), room());
    let id = SandboxId::random();
    let audit = Audit::open(&room.path).unwrap();
    let other = Audit::open(&forged.path).unwrap();
    for _ in 0..3 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
        other.append(denied(&id, "good.test")).await.unwrap();
    }
    let verdict = verify(&forged.path, Some(&audit.head())).unwrap();
    assert_eq!(verdict.broken.unwrap().line, 3);
}

#[tokio::test]
async fn a_missing_segment_is_noticed() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open_with(&room.path, small()).unwrap();
    for _ in 0..40 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
    }
    let files = files(&room);
    fs::rename(&files[2], room.path.join("aside")).unwrap();
    let broken = audit.verify().unwrap().broken.unwrap();
    assert_eq!(files[3].file_name().unwrap(), broken.segment.as_str());
    assert_eq!(broken.line, 1);
    // Old ones that were archived are no fault.
    for file in &files[..2] {
        fs::remove_file(file).unwrap();
    }
    let verdict = audit.verify().unwrap();
    assert!(verdict.is_sound(), "{verdict:?}");
    assert!(verdict.first.unwrap() > 1);
}

/// Whatever part of the last line is there, the log opens, says so, and the chain holds.
#[tokio::test]
async fn a_torn_last_line_is_cut_and_put_on_record() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open(&room.path).unwrap();
    for _ in 0..3 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
    }
    drop(audit);
    let file = files(&room).remove(0);
    let good = fs::read(&file).unwrap();
    let start = good[..good.len() - 1]
        .iter()
        .rposition(|b| *b == b'\n')
        .unwrap()
        + 1;
    for end in start + 1..good.len() {
        fs::write(&file, &good[..end]).unwrap();
        let audit = Audit::open(&room.path).unwrap();
        audit.flush().await.unwrap();
        let verdict = audit.verify().unwrap();
        assert!(verdict.is_sound(), "cut at {end}: {verdict:?}");
        let last = audit
            .read(Filter::default())
            .unwrap()
            .next()
            .unwrap()
            .unwrap();
        assert_eq!(last.seq, 3);
        assert!(
            matches!(last.action, Action::LogRepaired { bytes_cut, .. } if bytes_cut == (end - start) as u64)
        );
    }
    // A machine that lost power may leave zeros.
    fs::write(&file, [&good[..], &[0; 100_000]].concat()).unwrap();
    let audit = Audit::open(&room.path).unwrap();
    audit.flush().await.unwrap();
    assert!(audit.verify().unwrap().is_sound());
    assert_eq!(audit.head().seq, 4);
}

#[tokio::test]
async fn a_torn_first_line_of_a_segment_is_cut_too() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open_with(&room.path, small()).unwrap();
    while files(&room).len() < 3 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
    }
    drop(audit);
    let last = files(&room).pop().unwrap();
    fs::write(&last, b"{\"seq\":").unwrap();
    let audit = Audit::open_with(&room.path, small()).unwrap();
    audit.append(denied(&id, "evil.test")).await.unwrap();
    assert!(audit.verify().unwrap().is_sound());
    drop(audit);
    // The same with nothing at all in it.
    fs::write(&last, b"").unwrap();
    let audit = Audit::open_with(&room.path, small()).unwrap();
    audit.append(denied(&id, "evil.test")).await.unwrap();
    assert!(audit.verify().unwrap().is_sound());
}

#[tokio::test]
async fn a_changed_last_line_is_not_built_upon() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open(&room.path).unwrap();
    audit.append(denied(&id, "evil.test")).await.unwrap();
    drop(audit);
    let file = files(&room).remove(0);
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("evil", "good")).unwrap();
    let error = Audit::open(&room.path).unwrap_err();
    assert!(error.message.contains("damaged"), "{error}");
    assert_eq!(
        fs::read_to_string(&file).unwrap(),
        text.replace("evil", "good")
    );
}

#[tokio::test]
async fn a_damaged_line_does_not_hide_the_others() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open(&room.path).unwrap();
    for _ in 0..3 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
    }
    let file = files(&room).remove(0);
    let text = fs::read_to_string(&file).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines[1] = "garbage";
    fs::write(&file, format!("{}\n", lines.join("\n"))).unwrap();
    let found: Vec<_> = audit.read(Filter::default()).unwrap().collect();
    assert!(found[0].is_ok() && found[1].is_err() && found[2].is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_make_one_chain() {
    let room = room();
    let audit = Audit::open_with(
        &room.path,
        AuditConfig {
            segment_bytes: 50_000,
            queue: 4,
            ..AuditConfig::default()
        },
    )
    .unwrap();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let audit = audit.clone();
            tokio::spawn(async move {
                let id = SandboxId::random();
                let mut last = 0;
                for _ in 0..100 {
                    let seq = audit.append(denied(&id, "evil.test")).await.unwrap();
                    assert!(seq > last);
                    last = seq;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let verdict = audit.verify().unwrap();
    assert!(verdict.is_sound(), "{verdict:?}");
    assert_eq!(verdict.entries, 800);
}

/// Entries are refused aloud when the queue is full, and the log tells how many.
#[tokio::test]
async fn a_full_queue_is_told() {
    let room = room();
    let audit = Audit::open_with(
        &room.path,
        AuditConfig {
            queue: 1,
            sync_every: Duration::ZERO,
            ..AuditConfig::default()
        },
    )
    .unwrap();
    let id = SandboxId::random();
    let mut refused = 0_u64;
    for _ in 0..200_000 {
        if let Err(error) = audit.record(denied(&id, "evil.test")) {
            assert_eq!(error.code, Code::ResourceExhausted);
            refused += 1;
        } else if refused > 0 {
            break;
        }
    }
    assert!(refused > 0);
    audit.flush().await.unwrap();
    let told: u64 = all(&room, Filter::default())
        .iter()
        .map(|record| match record.action {
            Action::EntriesLost { count } => count,
            _ => 0,
        })
        .sum();
    assert_eq!(told, refused);
    assert!(audit.healthy());
}

#[tokio::test]
async fn everything_is_durable_when_the_last_handle_is_gone() {
    let room = room();
    let audit = Audit::open(&room.path).unwrap();
    for _ in 0..500 {
        audit
            .record(Entry::now(
                Actor::server(),
                None,
                Action::SecretDeleted { name: "a".into() },
            ))
            .unwrap();
    }
    drop(audit);
    assert_eq!(all(&room, Filter::default()).len(), 500);
}

#[tokio::test]
async fn what_waits_for_its_turn_is_never_lost() {
    let room = room();
    let id = SandboxId::random();
    let config = AuditConfig {
        queue: 2,
        ..AuditConfig::default()
    };
    let audit = Audit::open_with(&room.path, config).unwrap();
    for number in 0..500 {
        audit.record_in_turn(denied(&id, &format!("n{number}.test")));
    }
    let written = async {
        while audit.head().seq < 500 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), written)
        .await
        .unwrap();
    audit.room().await;
    let found = all(&room, Filter::default());
    assert_eq!(found.len(), 500);
    assert!(audit.healthy());
}

#[tokio::test]
async fn one_file_is_checked_by_itself() {
    let room = room();
    let id = SandboxId::random();
    let audit = Audit::open_with(&room.path, small()).unwrap();
    for _ in 0..30 {
        audit.append(denied(&id, "evil.test")).await.unwrap();
    }
    drop(audit);
    let moved = room.path.join("second.txt");
    fs::copy(&files(&room)[1], &moved).unwrap();
    let verdict = verify_file(&moved).unwrap();
    assert!(verdict.is_sound(), "{verdict:?}");
    assert!(verdict.first.unwrap() > 1);
    let text = fs::read_to_string(&moved).unwrap();
    fs::write(&moved, text.replacen("evil.test", "good.test", 1)).unwrap();
    let broken = verify_file(&moved).unwrap().broken.unwrap();
    assert_eq!((broken.segment.as_str(), broken.line), ("second.txt", 1));
    assert!(verify_file(&room.path.join("none")).is_err());
}
