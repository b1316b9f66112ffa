//! Disks on a real btrfs: apart from each other, held by their limit, gone when removed.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, State, fill, id, noise, run, sync};
use sandkeep_model::Code;
use std::{fs, io::Write as _, path::Path, time::Duration};

const EDQUOT: i32 = 122;

#[tokio::test]
async fn disks_and_their_template_are_apart() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let (a, b) = (id(), id());
    let disk_a = vault.create_disk(&a, &tiny, 64 * MIB).await.unwrap();
    let disk_b = vault.create_disk(&b, &tiny, 64 * MIB).await.unwrap();
    fs::write(disk_a.path.join("etc/motd"), "changed").unwrap();
    fs::remove_file(disk_b.path.join("big")).unwrap();

    let template = vault.template(&tiny).await.unwrap().unwrap();
    let read = |root: &Path| fs::read_to_string(root.join("etc/motd")).unwrap();
    assert_eq!(read(&disk_a.path), "changed");
    assert_eq!(read(&disk_b.path), "hello\n");
    assert_eq!(read(&template.path), "hello\n");
    assert!(disk_a.path.join("big").exists());
    assert!(template.path.join("big").exists());

    let refused = fs::write(template.path.join("etc/motd"), "x").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let mut expected = vec![a, b];
    expected.sort();
    assert_eq!(vault.disks().await.unwrap(), expected);
    assert_eq!(state.staging(), 0);
}

#[tokio::test]
async fn the_limit_holds_and_counts_only_what_the_box_wrote() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    // Half of what the template already holds: it is not charged.
    let limit = 4 * MIB;
    let disk = vault.create_disk(&id, &tiny, limit).await.unwrap();
    let (written, error) = fill(&disk.path.join("mine"), 64 * MIB);
    assert_eq!(error.unwrap().raw_os_error(), Some(EDQUOT));
    assert!(written <= limit, "{written} bytes went in");
    assert!(written + MIB >= limit, "only {written} bytes went in");

    // Overwriting what came from the template is writing too.
    let mut big = fs::File::options()
        .write(true)
        .open(disk.path.join("big"))
        .unwrap();
    let overwrite = big
        .write_all(&noise(MIB as usize))
        .and_then(|()| big.sync_all())
        .unwrap_err();
    assert_eq!(overwrite.raw_os_error(), Some(EDQUOT));
    drop(big);

    fs::remove_file(disk.path.join("mine")).unwrap();
    sync(&disk.path);
    let (again, _) = fill(&disk.path.join("again"), 2 * MIB);
    assert_eq!(again, 2 * MIB, "deleted space can be used again");
}

#[tokio::test]
async fn a_limit_can_be_changed() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 2 * MIB).await.unwrap();
    assert!(fill(&disk.path.join("a"), 8 * MIB).1.is_some());
    vault.set_disk_limit(&id, 32 * MIB).await.unwrap();
    assert_eq!(fill(&disk.path.join("b"), 8 * MIB).0, 8 * MIB);
    vault.set_disk_limit(&id, 0).await.unwrap();
    assert_eq!(fill(&disk.path.join("c"), 40 * MIB).0, 40 * MIB);
    let missing = vault.set_disk_limit(&common::id(), MIB).await.unwrap_err();
    assert_eq!(missing.code, Code::NotFound);
}

#[tokio::test]
async fn usage_is_what_was_written() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 100 * MIB).await.unwrap();
    let fresh = vault.disk_usage(&id).await.unwrap();
    assert!(fresh < MIB, "a fresh disk uses {fresh}");
    fill(&disk.path.join("ten"), 10 * MIB);
    sync(&disk.path);
    let used = vault.disk_usage(&id).await.unwrap();
    assert!((10 * MIB..11 * MIB).contains(&used), "{used}");
    let missing = vault.disk_usage(&common::id()).await.unwrap_err();
    assert_eq!(missing.code, Code::NotFound);
}

#[tokio::test]
async fn a_box_can_not_escape_by_making_subvolumes() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 4 * MIB).await.unwrap();
    let nested = disk.path.join("nested");
    let deep = nested.join("deep");
    run("btrfs", &["subvolume", "create", nested.to_str().unwrap()]);
    run("btrfs", &["subvolume", "create", deep.to_str().unwrap()]);
    let (written, error) = fill(&deep.join("file"), 64 * MIB);
    assert_eq!(error.unwrap().raw_os_error(), Some(EDQUOT));
    assert!(written <= 4 * MIB, "{written} bytes went in");

    vault.remove_disk(&id).await.unwrap();
    assert!(!disk.path.exists());
    assert_eq!(vault.disks().await.unwrap(), []);
}

#[tokio::test]
async fn a_removed_disk_gives_its_space_back() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 0).await.unwrap();
    fill(&disk.path.join("file"), 100 * MIB);
    sync(&disk.path);
    let used = vault.pool().await.unwrap().free_bytes;

    vault.remove_disk(&id).await.unwrap();
    assert!(!disk.path.exists());
    vault.remove_disk(&id).await.unwrap();
    settle(&vault).await;
    sync(&state.path().join("pool"));
    let after = vault.pool().await.unwrap().free_bytes;
    // A seventh of what belongs to nobody is kept for names.
    assert!(after > used + 80 * MIB, "{used} free before, {after} after");
    assert_eq!(groups_above_templates(&state), 0);
}

/// Upkeep until the kernel has freed everything.
async fn settle(vault: &sandkeep_vault::Vault) {
    for _ in 0..600 {
        if vault.tidy().await.unwrap().groups_waiting == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("quota groups are still waiting");
}

/// Quota groups other than those of the pool itself and of the templates.
fn groups_above_templates(state: &State) -> usize {
    let pool = state.path().join("pool");
    let output = std::process::Command::new("btrfs")
        .args(["filesystem", "show", "--raw"])
        .arg(&pool)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let fsid = text
        .split("uuid: ")
        .nth(1)
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap();
    let listed = fs::read_dir(format!("/sys/fs/btrfs/{fsid}/qgroups")).unwrap();
    let names: Vec<String> = listed
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("_2") || name.starts_with("1_"))
        .collect();
    let templates = fs::read_dir(pool.join("templates")).unwrap().count();
    names.len() - templates
}

#[tokio::test]
async fn disks_made_ahead_are_as_good_as_any() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    vault.prepare_disks(&tiny).await.unwrap();
    let ahead = state.staging();
    assert!(ahead > 0);
    vault.prepare_disks(&tiny).await.unwrap();
    assert_eq!(state.staging(), ahead, "no more than enough");

    // It becomes a disk, with the limit it is given then.
    let own = id();
    let disk = vault.create_disk(&own, &tiny, 4 * MIB).await.unwrap();
    assert_eq!(state.staging(), ahead - 1);
    let motd = fs::read_to_string(disk.path.join("etc/motd")).unwrap();
    assert_eq!(motd, "hello\n");
    let (written, error) = fill(&disk.path.join("mine"), 64 * MIB);
    assert_eq!(error.unwrap().raw_os_error(), Some(EDQUOT));
    assert!(written <= 4 * MIB, "{written} bytes went in");

    // Those of a template that is gone go with it, and so does what is left at the end.
    vault.remove_template(&tiny).await.unwrap();
    assert_eq!(state.staging(), 0);
    vault.prepare_disks(&tiny).await.unwrap();
    assert_eq!(state.staging(), 0);
    vault.remove_disk(&own).await.unwrap();
    settle(&vault).await;
    assert_eq!(groups_above_templates(&state), 0);
}

#[tokio::test]
async fn disks_made_ahead_end_with_the_vault() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    vault.prepare_disks(&tiny).await.unwrap();
    assert!(state.staging() > 0);
    vault.close().await.unwrap();
}

#[tokio::test]
async fn one_disk_per_box_and_only_from_what_exists() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    vault.create_disk(&id, &tiny, MIB).await.unwrap();
    let twice = vault.create_disk(&id, &tiny, MIB).await.unwrap_err();
    assert_eq!(twice.code, Code::Conflict);
    let nothing = "nothing".parse().unwrap();
    let unknown = vault
        .create_disk(&common::id(), &nothing, MIB)
        .await
        .unwrap_err();
    assert_eq!(unknown.code, Code::NotFound);
    assert_eq!(vault.disks().await.unwrap(), [id]);
    assert_eq!(state.staging(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (vault, tiny) = (vault.clone(), tiny.clone());
        tasks.spawn(async move {
            let id = id();
            let disk = vault.create_disk(&id, &tiny, MIB).await.unwrap();
            fs::write(disk.path.join("me"), id.as_str()).unwrap();
            (id, disk)
        });
    }
    let made = tasks.join_all().await;
    for (id, disk) in &made {
        assert_eq!(
            fs::read_to_string(disk.path.join("me")).unwrap(),
            id.as_str()
        );
    }
    for (id, _) in &made {
        vault.remove_disk(id).await.unwrap();
    }
    assert_eq!(vault.disks().await.unwrap(), []);
}

#[tokio::test]
async fn a_full_pool_says_so_and_recovers() {
    let state = State::sized(256 * MIB);
    let (vault, tiny) = state.with_template().await;
    let glutton = id();
    let disk = vault.create_disk(&glutton, &tiny, 0).await.unwrap();
    fill(&disk.path.join("all"), 400 * MIB);
    let refused = vault.create_disk(&id(), &tiny, MIB).await.unwrap_err();
    assert_eq!(refused.code, Code::DiskFull);
    assert!(refused.message.contains("is full"), "{refused}");
    assert!(refused.hint.unwrap().contains("delete sandboxes"));
    assert_eq!(state.staging(), 0);
    assert_eq!(vault.disks().await.unwrap(), std::slice::from_ref(&glutton));

    vault.remove_disk(&glutton).await.unwrap();
    settle(&vault).await;
    sync(&state.path().join("pool"));
    vault.create_disk(&id(), &tiny, MIB).await.unwrap();
}

#[tokio::test]
async fn a_removed_template_does_not_take_its_disks_along() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let disk = vault.create_disk(&id(), &tiny, MIB).await.unwrap();
    vault.remove_template(&tiny).await.unwrap();
    assert!(vault.templates().await.unwrap().is_empty());
    sync(&disk.path);
    let kept = fs::read(disk.path.join("big")).unwrap();
    assert!(kept == noise(8 * MIB as usize), "the disk kept its content");
    let again = vault.remove_template(&tiny).await.unwrap_err();
    assert_eq!(again.code, Code::NotFound);
}
