//! The pool itself: made once, found again, shared with nobody.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, State, fill, id, import_tiny, run, sync};
use sandkeep_model::Code;
use sandkeep_vault::{PoolKind, QuotaKind, Vault, VaultConfig};
use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::Command,
    time::Duration,
};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[tokio::test]
async fn made_closed_and_without_a_second_cache() {
    let state = State::new();
    let vault = state.open().await;
    let pool = vault.pool().await.unwrap();
    assert_eq!(pool.kind, PoolKind::LoopFile);
    assert_ne!(pool.quota, QuotaKind::None);
    assert!(pool.total_bytes <= 512 * MIB && pool.free_bytes > 256 * MIB);
    for dir in ["", "pool", "pool/templates", "pool/disks", "pool/staging"] {
        assert_eq!(mode(&state.path().join(dir)), 0o700, "{dir:?}");
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts
        .lines()
        .find(|line| line.contains(pool.path.to_str().unwrap()))
        .unwrap();
    assert!(!line.contains("shared:"), "{line}");
    let device = line
        .split("/dev/")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap();
    let direct = fs::read_to_string(format!("/sys/block/{device}/loop/dio")).unwrap();
    assert_eq!(direct.trim(), "1", "the loop device must bypass the cache");
}

#[tokio::test]
async fn found_again_mounted_or_not() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, MIB).await.unwrap();
    fs::write(disk.path.join("mark"), "1").unwrap();
    drop(vault);

    let vault = state.open().await;
    assert_eq!(vault.disks().await.unwrap(), std::slice::from_ref(&id));
    vault.close().await.unwrap();
    assert!(!disk.path.exists(), "unmounted");
    drop(vault);

    let vault = state.open().await;
    assert_eq!(fs::read_to_string(disk.path.join("mark")).unwrap(), "1");
    assert_eq!(vault.templates().await.unwrap().len(), 1);
    let (_, error) = fill(&disk.path.join("more"), 8 * MIB);
    assert!(error.is_some(), "the limit is still there");
}

#[tokio::test]
async fn a_busy_pool_stays_mounted() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let disk = vault.create_disk(&id(), &tiny, MIB).await.unwrap();
    let used = File::open(disk.path.join("etc/motd")).unwrap();
    assert_eq!(vault.close().await.unwrap_err().code, Code::Conflict);
    assert!(disk.path.exists());
    drop(used);
    vault.close().await.unwrap();
}

#[tokio::test]
async fn only_one_vault_at_a_time() {
    let state = State::new();
    let first = state.open().await;
    let second = Vault::open(state.config()).await.unwrap_err();
    assert_eq!(second.code, Code::Conflict);
    assert!(second.message.contains("another sandkeep"), "{second}");
    drop(first);
    state.open().await;
}

#[tokio::test]
async fn what_a_crash_left_is_swept() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let root = vault.template(&tiny).await.unwrap().unwrap().path;
    let root = root.to_str().unwrap();
    let kept = vault.create_disk(&id(), &tiny, MIB).await.unwrap();
    drop(vault);

    let staging = state.path().join("pool/staging");
    let at = |name: &str| staging.join(name).to_str().unwrap().to_owned();
    // A disk before its limit, a template before and after it became read-only, a file.
    run("btrfs", &["subvolume", "snapshot", root, &at("disk")]);
    fs::create_dir_all(staging.join("building/other")).unwrap();
    run("btrfs", &["subvolume", "create", &at("building/root")]);
    fs::write(staging.join("building/root/x"), "x").unwrap();
    fs::create_dir(staging.join("built")).unwrap();
    run(
        "btrfs",
        &["subvolume", "snapshot", "-r", root, &at("built/root")],
    );
    fs::write(staging.join("file"), "x").unwrap();

    let vault = state.open().await;
    assert_eq!(state.staging(), 0);
    assert_eq!(vault.templates().await.unwrap().len(), 1);
    assert!(kept.path.join("etc/motd").exists());
}

#[tokio::test]
async fn a_half_made_pool_file_is_made_anew() {
    let state = State::new();
    fs::create_dir(state.path()).unwrap();
    fs::write(state.path().join("pool.img.new"), "half").unwrap();
    state.open().await;
    assert!(!state.path().join("pool.img.new").exists());
}

#[tokio::test]
async fn grows_when_the_operator_says_so() {
    let mut state = State::sized(256 * MIB);
    drop(state.open().await);
    state.pool_size = 512 * MIB;
    let vault = state.open().await;
    let total = vault.pool().await.unwrap().total_bytes;
    assert!(total > 500 * MIB, "{total}");
}

#[tokio::test]
async fn too_small_a_pool_is_refused() {
    let state = State::sized(MIB);
    let error = Vault::open(state.config()).await.unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert_eq!(fs::read_dir(state.path().join("pool")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_foreign_mount_is_left_alone() {
    let state = State::new();
    let pool = state.path().join("pool");
    fs::create_dir_all(&pool).unwrap();
    run("mount", &["-t", "tmpfs", "none", pool.to_str().unwrap()]);
    let error = Vault::open(state.config()).await.unwrap_err();
    assert_eq!(error.code, Code::Conflict);
    assert!(error.message.contains("tmpfs"), "{error}");
}

#[tokio::test]
async fn a_directory_of_the_operator() {
    let owner = State::new();
    let owners = owner.open().await;
    let dir = owners.pool().await.unwrap().path.join("for-sandkeep");
    let state = State::new();
    let config = VaultConfig {
        pool_dir: Some(dir.clone()),
        ..state.config()
    };
    let vault = Vault::open(config.clone()).await.unwrap();
    let pool = vault.pool().await.unwrap();
    assert_eq!((pool.kind, &pool.path), (PoolKind::Operator, &dir));
    assert!(!state.path().join("pool.img").exists());
    let tiny = import_tiny(&vault, "tiny").await;
    let disk = vault.create_disk(&id(), &tiny, 2 * MIB).await.unwrap();
    assert!(fill(&disk.path.join("x"), 8 * MIB).1.is_some());

    let other = State::new();
    let second = VaultConfig {
        state_dir: other.path(),
        ..config
    };
    let error = Vault::open(second).await.unwrap_err();
    assert_eq!(error.code, Code::Conflict, "two servers, one pool");
}

#[tokio::test]
async fn without_btrfs_only_when_allowed() {
    let state = State::new();
    let plain = tempfile::tempdir().unwrap();
    let mut config = VaultConfig {
        pool_dir: Some(plain.path().join("pool")),
        ..state.config()
    };
    let refused = Vault::open(config.clone()).await.unwrap_err();
    assert_eq!(refused.code, Code::HostNotReady);
    assert!(refused.hint.unwrap().contains("btrfs"));

    config.allow_unlimited_disk = true;
    let vault = Vault::open(config).await.unwrap();
    let pool = vault.pool().await.unwrap();
    assert_eq!(
        (pool.kind, pool.quota),
        (PoolKind::PlainDirectory, QuotaKind::None)
    );
    let tiny = import_tiny(&vault, "tiny").await;
    let (a, b) = (id(), id());
    let disk_a = vault.create_disk(&a, &tiny, MIB).await.unwrap();
    let disk_b = vault.create_disk(&b, &tiny, MIB).await.unwrap();
    fs::write(disk_a.path.join("etc/motd"), "changed").unwrap();
    assert_eq!(
        fs::read_to_string(disk_b.path.join("etc/motd")).unwrap(),
        "hello\n"
    );
    assert!(vault.disk_usage(&a).await.unwrap() >= 8 * MIB);
    vault.remove_disk(&a).await.unwrap();
    assert_eq!(vault.disks().await.unwrap(), [b]);
}

#[tokio::test]
async fn older_kernels_have_classic_quotas() {
    let state = State::new();
    fs::create_dir(state.path()).unwrap();
    let image = state.path().join("pool.img");
    File::create(&image).unwrap().set_len(512 * MIB).unwrap();
    let output = Command::new("mkfs.btrfs")
        .args(["-q", "-R", "quota"])
        .arg(&image)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");

    let (vault, tiny) = state.with_template().await;
    assert_eq!(vault.pool().await.unwrap().quota, QuotaKind::Classic);
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 4 * MIB).await.unwrap();
    let (written, error) = fill(&disk.path.join("mine"), 32 * MIB);
    assert_eq!(error.unwrap().raw_os_error(), Some(122));
    assert!((3 * MIB..=4 * MIB).contains(&written), "{written}");
    sync(&disk.path);
    let used = vault.disk_usage(&id).await.unwrap();
    assert!((2 * MIB..5 * MIB).contains(&used), "{used}");

    vault.remove_disk(&id).await.unwrap();
    let mut removed = 0;
    for _ in 0..600 {
        let tidied = vault.tidy().await.unwrap();
        removed += tidied.groups_removed;
        if tidied.groups_waiting == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let graves = fs::read_dir(state.path().join("pool/graves"))
        .unwrap()
        .count();
    assert_eq!(graves, 0, "{removed} groups were removed");
}
