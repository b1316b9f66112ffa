//! Points on a real btrfs: whole or not there, apart from what is made from them.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, State, fill, id, run, sync};
use sandkeep_model::{Code, PointId, SandboxId};
use sandkeep_vault::{ChangeKind, Keep, PointInfo, Vault};
use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

async fn snapshot(vault: &Vault, of: &SandboxId, memory: &[(&str, &[u8])]) -> PointInfo {
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    if !memory.is_empty() {
        let dir = draft.memory(0).unwrap();
        for (name, bytes) in memory {
            fs::write(dir.join(name), bytes).unwrap();
        }
    }
    let draft = vault.take_disk(draft, of).await.unwrap();
    vault.publish_point(draft, of, Keep::ForGood).await.unwrap()
}

fn read(root: &Path) -> String {
    fs::read_to_string(root.join("etc/motd")).unwrap()
}

#[tokio::test]
async fn a_point_stays_what_it_was_and_what_is_made_from_it_is_apart() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let (first, fork) = (id(), id());
    let disk = vault.create_disk(&first, &tiny, 64 * MIB).await.unwrap();
    fs::write(disk.path.join("etc/motd"), "then\n").unwrap();
    let point = snapshot(&vault, &first, &[]).await;
    assert_eq!(point.memory, None);
    fs::write(disk.path.join("etc/motd"), "now\n").unwrap();
    assert_eq!(read(&point.disk), "then\n");
    let refused = fs::write(point.disk.join("etc/motd"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);

    let other = vault
        .disk_from_point(&fork, &point.id, 64 * MIB)
        .await
        .unwrap();
    assert_eq!(read(&other.path), "then\n");
    fs::write(other.path.join("etc/motd"), "elsewhere\n").unwrap();
    assert_eq!(read(&disk.path), "now\n");

    // Neither the box nor the point is needed by what was made from it.
    vault.remove_disk(&first).await.unwrap();
    vault.remove_point(&point.id).await.unwrap();
    vault.remove_point(&point.id).await.unwrap();
    sync(&other.path);
    assert_eq!(read(&other.path), "elsewhere\n");
    assert_eq!(vault.points().await.unwrap(), []);
    assert_eq!(state.staging(), 0);
}

#[tokio::test]
async fn a_rollback_undoes_everything_and_keeps_the_limit() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let limit = 4 * MIB;
    let disk = vault.create_disk(&id, &tiny, limit).await.unwrap();
    let point = snapshot(&vault, &id, &[]).await;
    for name in ["etc", "big"] {
        run("rm", &["-rf", disk.path.join(name).to_str().unwrap()]);
    }
    let back = vault.replace_disk(&id, &point.id, limit).await.unwrap();
    assert_eq!(back, disk, "the same place");
    assert_eq!(read(&disk.path), "hello\n");
    assert!(disk.path.join("big").exists());
    assert_eq!(state.staging(), 0, "what it was is gone");
    let (written, error) = fill(&disk.path.join("mine"), 64 * MIB);
    assert!(error.is_some());
    assert!(written <= limit, "{written} bytes went in");
}

#[tokio::test]
async fn the_limit_holds_for_a_fork() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let (first, fork) = (id(), id());
    vault.create_disk(&first, &tiny, 64 * MIB).await.unwrap();
    let point = snapshot(&vault, &first, &[]).await;
    let limit = 4 * MIB;
    let disk = vault
        .disk_from_point(&fork, &point.id, limit)
        .await
        .unwrap();
    let (written, error) = fill(&disk.path.join("mine"), 64 * MIB);
    assert!(error.is_some());
    assert!(written <= limit, "{written} bytes went in");
    let taken = vault.disk_from_point(&fork, &point.id, limit).await;
    assert_eq!(taken.unwrap_err().code, Code::Conflict);
    let unknown = vault
        .disk_from_point(&id(), &PointId::random(), limit)
        .await
        .unwrap_err();
    assert_eq!(unknown.code, Code::NotFound);
    assert_eq!(state.staging(), 0);
}

#[tokio::test]
async fn damaged_memory_is_refused_in_words() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    let point = snapshot(&vault, &id, &[("pages", b"0123456789"), ("core", b"")]).await;
    assert_eq!(point.memory_bytes, 10);
    assert_eq!(vault.verified_point(&point.id).await.unwrap(), point);
    let pages = point.memory.unwrap().join("pages");
    for wrong in [&b"0123456780"[..], b"012345678", b""] {
        fs::write(&pages, wrong).unwrap();
        let error = vault.verified_point(&point.id).await.unwrap_err();
        assert_eq!(error.code, Code::Conflict);
        assert!(error.message.contains("\"pages\""), "{error}");
    }
    fs::remove_file(&pages).unwrap();
    assert!(vault.verified_point(&point.id).await.is_err());
    let manifest = state
        .path()
        .join("pool/points")
        .join(point.id.as_str())
        .join("manifest.json");
    fs::write(&manifest, "{").unwrap();
    let error = vault.verified_point(&point.id).await.unwrap_err();
    assert!(error.message.contains("damaged"), "{error}");
    vault.remove_point(&point.id).await.unwrap();
    assert_eq!(vault.points().await.unwrap(), []);
}

/// Long enough for the vault to trust the times of files.
const SETTLED: Duration = Duration::from_millis(50);

#[tokio::test]
async fn memory_that_changed_after_it_was_compared_is_refused() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    let point = snapshot(&vault, &id, &[("pages", b"0123456789"), ("core", b"x")]).await;
    let pages = point.memory.clone().unwrap().join("pages");
    thread::sleep(SETTLED);
    for _ in 0..2 {
        assert_eq!(vault.verified_point(&point.id).await.unwrap(), point);
    }
    // Somebody who takes care to leave size and time as they were.
    let time = fs::metadata(&pages).unwrap().modified().unwrap();
    let mut file = fs::OpenOptions::new().write(true).open(&pages).unwrap();
    file.write_all(b"1").unwrap();
    file.set_modified(time).unwrap();
    let error = vault.verified_point(&point.id).await.unwrap_err();
    assert!(error.message.contains("\"pages\""), "{error}");
    // And another file in its place.
    fs::write(pages.with_extension("new"), "012345678_").unwrap();
    fs::rename(pages.with_extension("new"), &pages).unwrap();
    assert!(vault.verified_point(&point.id).await.is_err());
    fs::write(&pages, "0123456789").unwrap();
    assert_eq!(vault.verified_point(&point.id).await.unwrap(), point);
}

fn manifest_of(state: &State, point: &PointInfo) -> PathBuf {
    let points = state.path().join("pool/points");
    points.join(point.id.as_str()).join("manifest.json")
}

#[tokio::test]
async fn points_from_before_blake3_are_compared_too() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    let point = snapshot(&vault, &id, &[("pages", b"abc")]).await;
    let manifest = manifest_of(&state, &point);
    let text = fs::read_to_string(&manifest).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let new = value["memory"][0].as_object_mut().unwrap();
    assert!(new.remove("blake3").is_some(), "{text}");
    // `printf abc | sha256sum`
    let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    new.insert("sha256".to_owned(), sum.into());
    fs::write(&manifest, value.to_string()).unwrap();
    drop(vault);
    let vault = state.open().await;
    assert_eq!(vault.verified_point(&point.id).await.unwrap(), point);
    fs::write(point.memory.as_ref().unwrap().join("pages"), "abd").unwrap();
    assert!(vault.verified_point(&point.id).await.is_err());
    // Without any sum nothing can be told.
    value["memory"][0].as_object_mut().unwrap().remove("sha256");
    fs::write(&manifest, value.to_string()).unwrap();
    fs::write(point.memory.as_ref().unwrap().join("pages"), "abc").unwrap();
    assert!(vault.verified_point(&point.id).await.is_err());
}

#[tokio::test]
async fn a_point_for_one_run_is_worth_nothing_in_the_next() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    fs::write(draft.memory(0).unwrap().join("pages"), "abc").unwrap();
    let draft = vault.take_disk(draft, &id).await.unwrap();
    let point = vault.publish_point(draft, &id, Keep::ThisRun).await;
    let point = point.unwrap();
    assert_eq!(vault.verified_point(&point.id).await.unwrap(), point);
    drop(vault);
    let vault = state.open().await;
    let error = vault.verified_point(&point.id).await.unwrap_err();
    assert!(error.message.contains("damaged"), "{error}");
}

#[tokio::test]
async fn what_is_not_published_was_never_there() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    let draft = vault.take_disk(draft, &id).await.unwrap();
    drop(draft);
    assert_eq!(state.staging(), 0);

    // A server that is killed drops nothing: the next one sweeps.
    let point = snapshot(&vault, &id, &[("pages", b"whole")]).await;
    let left = state.path().join("pool/staging/left");
    fs::create_dir_all(left.join("memory")).unwrap();
    fs::write(left.join("memory/pages"), "half").unwrap();
    let (source, target) = (point.disk.to_str().unwrap(), left.join("disk"));
    let target = target.to_str().unwrap();
    run("btrfs", &["subvolume", "snapshot", "-r", source, target]);
    drop(vault);
    let vault = state.open().await;
    assert_eq!(state.staging(), 0);
    assert_eq!(
        vault.points().await.unwrap(),
        std::slice::from_ref(&point.id)
    );
    assert_eq!(vault.verified_point(&point.id).await.unwrap(), point);
}

#[tokio::test]
async fn two_points_are_compared() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    let before = snapshot(&vault, &id, &[]).await;
    fs::write(disk.path.join("etc/motd"), "changed\n").unwrap();
    fs::write(disk.path.join("new"), "12345").unwrap();
    fs::remove_file(disk.path.join("big")).unwrap();
    let after = snapshot(&vault, &id, &[]).await;
    let diff = vault.diff(&before.id, &after.id, true).await.unwrap();
    let told: Vec<_> = diff
        .changes
        .iter()
        .map(|change| (change.path.as_str(), change.kind))
        .collect();
    assert_eq!(
        told,
        [
            ("/big", ChangeKind::Removed),
            ("/etc/motd", ChangeKind::Changed),
            ("/new", ChangeKind::Added),
        ]
    );
    let text = diff.changes[1].text.as_deref().unwrap();
    assert!(text.contains("-hello\n+changed\n"), "{text}");
    let none = vault.diff(&after.id, &after.id, false).await.unwrap();
    assert!(none.changes.is_empty());
}

#[tokio::test]
async fn a_disk_nobody_wrote_to_is_known_as_the_same() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
    // A tree of one block is written anew by every snapshot; a real one has many.
    for n in 0..2000 {
        fs::write(disk.path.join(format!("etc/file-{n}")), "x").unwrap();
    }
    let first = snapshot(&vault, &id, &[]).await;
    let take = async |unless: &PointId| {
        let draft = vault.begin_point(PointId::random()).await.unwrap();
        vault.take_changed_disk(draft, &id, unless).await.unwrap()
    };
    assert!(take(&first.id).await.is_none(), "nothing was written");
    assert_eq!(state.staging(), 0, "what was not needed is gone");
    fs::write(disk.path.join("etc/file-7"), "y").unwrap();
    let changed = take(&first.id).await.unwrap();
    let second = vault
        .publish_point(changed, &id, Keep::ForGood)
        .await
        .unwrap();
    assert!(take(&second.id).await.is_none());

    // A disk that was put back is what it was at the point, too.
    vault.replace_disk(&id, &first.id, 64 * MIB).await.unwrap();
    assert!(take(&first.id).await.is_none());
    fs::remove_file(disk.path.join("etc/file-8")).unwrap();
    assert!(take(&first.id).await.is_some());
    // A point that is not there can not be compared with.
    assert!(take(&PointId::random()).await.is_some());
}
