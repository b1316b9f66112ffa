//! The disk below the pool is a small ext4 of the test's own, which it fills.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, id, import_tiny, noise, run, sync};
use sandkeep_model::{Code, PointId};
use sandkeep_vault::{Keep, StorageState, Vault, VaultConfig, kept_size, repair};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};
use tempfile::TempDir;

/// An ext4 of so many MiB, and a state directory on it. All of it goes with the value.
struct Small {
    dir: TempDir,
}

impl Small {
    fn new(mib: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk");
        File::create(&image).unwrap().set_len(mib * MIB).unwrap();
        let image = image.to_str().unwrap();
        run("mkfs.ext4", &["-q", "-F", "-m", "0", image]);
        let small = Self { dir };
        fs::create_dir(small.root()).unwrap();
        let root = small.root();
        run("mount", &["-o", "loop", image, root.to_str().unwrap()]);
        small
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn state(&self) -> PathBuf {
        self.root().join("state")
    }

    fn image(&self) -> PathBuf {
        self.state().join("pool.img")
    }

    fn config(&self, size: Option<u64>) -> VaultConfig {
        VaultConfig {
            state_dir: self.state(),
            pool_dir: None,
            pool_size_bytes: size,
            allow_unlimited_disk: false,
            disk_reader: None,
        }
    }

    async fn open(&self, size: Option<u64>) -> Vault {
        // The one before is in use until it has told the kernel to hurry.
        for _ in 0..100 {
            match Vault::open(self.config(size)).await {
                Err(error) if error.code == Code::Conflict => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                opened => return opened.unwrap(),
            }
        }
        panic!("the storage is in use");
    }

    /// Something else on the host takes all there is.
    fn fill(&self) {
        let file = File::options()
            .create(true)
            .append(true)
            .open(self.root().join("filler"))
            .unwrap();
        let mut step = 256 * MIB;
        while step >= 4096 {
            let at = file.metadata().unwrap().len();
            let flags = rustix::fs::FallocateFlags::empty();
            if rustix::fs::fallocate(&file, flags, at, step).is_err() {
                step /= 2;
            }
        }
    }

    fn give_back(&self) {
        fs::remove_file(self.root().join("filler")).unwrap();
    }

    fn is_whole(&self) -> bool {
        let meta = fs::metadata(self.image()).unwrap();
        meta.blocks() * 512 >= meta.len()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let detach = rustix::mount::UnmountFlags::DETACH;
        while rustix::mount::unmount(self.state().join("pool"), detach).is_ok() {}
        while rustix::mount::unmount(self.root(), detach).is_ok() {}
    }
}

/// Writes until the kernel says no, in larger pieces than `fill`; how much went in.
fn pour(path: &Path, at_most: u64) -> (u64, Option<io::Error>) {
    let chunk = noise(4 * MIB as usize);
    let mut file = File::create(path).unwrap();
    let mut written = 0;
    while written < at_most {
        let step = file.write(&chunk).and_then(|count| {
            if written % (64 * MIB) == 0 {
                file.sync_data()?;
            }
            Ok(count)
        });
        match step {
            Ok(count) => written += count as u64,
            Err(error) => return (written, Some(error)),
        }
    }
    match file.sync_data() {
        Ok(()) => (written, None),
        Err(error) => (written, Some(error)),
    }
}

/// Has the kernel write its books and tidy up.
fn sync_all(pool: &Path) {
    run("btrfs", &["filesystem", "sync", pool.to_str().unwrap()]);
    std::thread::sleep(Duration::from_millis(50));
}

fn is_read_only(root: &Path) -> bool {
    let stat = rustix::fs::statvfs(root).unwrap();
    stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY)
}

/// What is removed is free in a moment.
async fn until(vault: &Vault, what: &str, done: impl Fn(&StorageState) -> bool) -> StorageState {
    for _ in 0..1200 {
        let state = vault.attend().await.unwrap();
        if done(&state) {
            return state;
        }
        vault.tidy().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never: {what}: {:?}", vault.attend().await);
}

#[tokio::test]
async fn one_disk_within_its_limit_broke_the_pool_of_all() {
    let small = Small::new(2048);
    let vault = small.open(None).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let (culprit, neighbour) = (id(), id());
    let fills = vault.create_disk(&culprit, &tiny, 10 << 30).await.unwrap();
    let other = vault
        .create_disk(&neighbour, &tiny, 10 << 30)
        .await
        .unwrap();
    assert!(vault.attend().await.unwrap().is_well());

    // As the server does meanwhile.
    let mut part = 0;
    while !vault.attend().await.unwrap().low {
        part += 1;
        let (_, error) = pour(&fills.path.join(part.to_string()), 32 * MIB);
        assert!(error.is_none(), "refused though there was room: {error:?}");
    }
    assert!(part > 32, "{part}");
    let (written, error) = pour(&fills.path.join("x"), 4 << 30);
    assert_eq!(error.unwrap().raw_os_error(), Some(122), "{written}");
    assert!(!is_read_only(&small.state().join("pool")));
    let state = vault.attend().await.unwrap();
    assert!(state.low && !state.overcommitted, "{state:?}");
    // The others have a part of the reserve, a little in each round.
    assert!(vault.attend().await.unwrap().low);
    fs::write(other.path.join("note"), "still here").unwrap();
    sync(&other.path);
    let refused = vault.create_disk(&id(), &tiny, MIB).await.unwrap_err();
    assert_eq!(refused.code, Code::DiskFull);
    assert!(refused.message.contains("storage"), "{refused}");
    assert!(refused.hint.unwrap().contains("delete"));

    vault.remove_disk(&culprit).await.unwrap();
    until(&vault, "there is room again", StorageState::is_well).await;
    vault.create_disk(&id(), &tiny, MIB).await.unwrap();
    assert_eq!(fs::read(other.path.join("note")).unwrap(), b"still here");
}

#[tokio::test]
async fn something_else_filled_the_disk_and_the_pool_went_read_only() {
    let small = Small::new(6144);
    let vault = small.open(None).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let culprit = id();
    let disk = vault.create_disk(&culprit, &tiny, 10 << 30).await.unwrap();
    assert!(vault.attend().await.unwrap().growable_bytes > 1 << 30);
    small.fill();
    // All that was set aside is the pool's, to the last byte.
    let (written, error) = pour(&disk.path.join("x"), 8 << 30);
    assert_eq!(error.unwrap().raw_os_error(), Some(122), "{written}");
    assert!(written > 256 * MIB, "{written}");
    sync(&disk.path);
    assert!(!is_read_only(&small.state().join("pool")));
    assert!(small.is_whole());
    let state = vault.attend().await.unwrap();
    assert!(
        state.low && state.below_full && state.growable_bytes == 0,
        "{state:?}"
    );
    // A server that starts now.
    drop(vault);
    let vault = small.open(None).await;
    assert_eq!(vault.disks().await.unwrap(), std::slice::from_ref(&culprit));
    // Room on the disk below is enough.
    small.give_back();
    until(&vault, "it grew", StorageState::is_well).await;
    small.fill();
    vault.remove_disk(&culprit).await.unwrap();
    until(&vault, "it is free", |state| !state.low).await;
    assert!(!is_read_only(&small.state().join("pool")));
}

#[tokio::test]
async fn the_server_itself_can_fill_a_pool_and_still_delete() {
    let small = Small::new(2048);
    let vault = small.open(Some(512 * MIB)).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let kept = id();
    vault.create_disk(&kept, &tiny, 10 << 30).await.unwrap();
    // Of no disk: nothing limits it.
    let pool = small.state().join("pool");
    let (_, error) = pour(&pool.join("filler"), 1 << 30);
    assert!(error.is_some());
    let mut names = 0;
    while fs::write(pool.join(format!("name-{names}")), [7; 2000]).is_ok() && names < 200_000 {
        names += 1;
    }
    sync(&pool);
    vault.remove_disk(&kept).await.unwrap();
    assert!(vault.disks().await.unwrap().is_empty());
    assert!(!is_read_only(&pool));
    fs::remove_file(pool.join("filler")).unwrap();
    until(&vault, "there is room again", |state| !state.low).await;
}

#[tokio::test]
async fn the_size_is_kept_and_one_that_does_not_fit_is_refused() {
    let small = Small::new(2048);
    let refused = Vault::open(small.config(Some(50 << 30))).await.unwrap_err();
    assert_eq!(refused.code, Code::DiskFull);
    assert_eq!(refused.field.as_deref(), Some("storage_size"));
    assert!(!small.image().exists());

    drop(small.open(Some(512 * MIB)).await);
    let vault = small.open(None).await;
    assert!(vault.pool().await.unwrap().total_bytes <= 512 * MIB);
    assert_eq!(kept_size(&small.state()), Some(512 * MIB));
    drop(vault);
    let refused = Vault::open(small.config(Some(50 << 30))).await.unwrap_err();
    assert_eq!(refused.code, Code::DiskFull);
    // On a full disk the size that was taken once is no reason not to start.
    small.fill();
    drop(small.open(Some(512 * MIB)).await);
}

#[tokio::test]
async fn a_sparse_pool_of_an_earlier_version_becomes_whole() {
    let small = Small::new(3072);
    fs::create_dir(small.state()).unwrap();
    let image = small.image();
    // As 0.1.0 made it.
    File::create(&image).unwrap().set_len(100 << 30).unwrap();
    let path = image.to_str().unwrap();
    run(
        "mkfs.btrfs",
        &["-q", "-f", "-K", "-m", "single", "-d", "single", path],
    );
    let vault = small.open(None).await;
    assert!(small.is_whole());
    assert!(fs::metadata(&image).unwrap().len() < 3 << 30);
    assert_eq!(kept_size(&small.state()), Some(100 << 30));
    let tiny = import_tiny(&vault, "tiny").await;
    let disk = vault.create_disk(&id(), &tiny, 10 << 30).await.unwrap();
    small.fill();
    let (_, error) = pour(&disk.path.join("x"), 8 << 30);
    assert_eq!(error.unwrap().raw_os_error(), Some(122));
    assert!(!is_read_only(&small.state().join("pool")));
}

#[tokio::test]
async fn holes_that_something_else_made_are_filled() {
    let small = Small::new(2048);
    let vault = small.open(Some(512 * MIB)).await;
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let image = File::options().write(true).open(small.image()).unwrap();
    rustix::fs::fallocate(&image, flags, 400 * MIB, 64 * MIB).unwrap();
    assert!(!small.is_whole());
    assert!(!vault.attend().await.unwrap().overcommitted);
    assert!(small.is_whole());
}

#[tokio::test]
async fn room_far_beyond_what_is_used_goes_back_to_the_disk() {
    let small = Small::new(8192);
    let vault = small.open(None).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let (large, stays) = (id(), id());
    let note = vault.create_disk(&stays, &tiny, 10 << 30).await.unwrap();
    let disk = vault.create_disk(&large, &tiny, 10 << 30).await.unwrap();
    for part in 0..12 {
        // As the server does, several times a second.
        vault.attend().await.unwrap();
        let (_, error) = pour(&disk.path.join(part.to_string()), 256 * MIB);
        assert!(error.is_none(), "{error:?}");
    }
    fs::write(note.path.join("note"), "moved").unwrap();
    sync(&note.path);
    let grown = vault.attend().await.unwrap().total_bytes;
    assert!(grown > 3 << 30, "{grown}");
    vault.remove_disk(&large).await.unwrap();
    until(&vault, "it is free", |state| state.free_bytes > 3 << 30).await;
    for _ in 0..8 {
        vault.attend_at_rest().await.unwrap();
    }
    let state = vault.attend().await.unwrap();
    assert!(state.total_bytes < grown, "{grown} {state:?}");
    assert!(small.is_whole() && state.is_well(), "{state:?}");
    assert_eq!(fs::read(note.path.join("note")).unwrap(), b"moved");
}

#[tokio::test]
async fn a_pool_that_is_read_only_opens_and_is_repaired() {
    let small = Small::new(2048);
    let vault = small.open(Some(512 * MIB)).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let kept = id();
    let disk = vault.create_disk(&kept, &tiny, MIB).await.unwrap();
    drop(vault);
    let pool = small.state().join("pool");
    let pool_text = pool.to_str().unwrap();
    run("sync", &[]);
    run("mount", &["-o", "remount,ro", pool_text]);

    let vault = small.open(None).await;
    assert!(vault.is_read_only() && vault.attend().await.unwrap().read_only);
    assert_eq!(vault.templates().await.unwrap().len(), 1);
    assert!(disk.path.join("etc/motd").exists());
    let refused = vault.create_disk(&id(), &tiny, MIB).await.unwrap_err();
    assert_eq!(refused.code, Code::HostNotReady);
    assert!(refused.hint.unwrap().contains("sandkeep storage repair"));
    let config = small.config(None);
    let busy = repair(&config, false).unwrap_err();
    assert_eq!(busy.code, Code::Conflict, "a server runs");
    drop(vault);
    // Somebody, elsewhere, still has it mounted.
    let mut user = std::process::Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sleep", "600"])
        .spawn()
        .unwrap();
    let ns = format!("/proc/{}/ns/mnt", user.id());
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    while fs::read_link(&ns).unwrap() == own {
        std::thread::sleep(Duration::from_millis(10));
    }
    let refused = repair(&config, false).unwrap_err();
    assert!(refused.hint.unwrap().contains("--end-sandboxes"));
    let reaper = std::thread::spawn(move || user.wait());
    let done = repair(&config, true).unwrap();
    assert!(!done.was_well && done.ended >= 1, "{done:?}");
    reaper.join().unwrap().unwrap();
    let vault = small.open(None).await;
    assert!(!vault.is_read_only());
    vault.create_disk(&id(), &tiny, MIB).await.unwrap();
    assert_eq!(vault.disks().await.unwrap().len(), 2);
}

#[tokio::test]
async fn what_an_attacker_took_was_not_free_for_a_minute_after_it_was_deleted() {
    let small = Small::new(2048);
    let vault = small.open(Some(1 << 30)).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let attacker = id();
    let disk = vault.create_disk(&attacker, &tiny, 10 << 30).await.unwrap();
    // The kernel does nothing by itself.
    let pool = small.state().join("pool");
    let pool = pool.to_str().unwrap();
    run("mount", &["-o", "remount,commit=300", pool]);
    let mut part = 0;
    while !vault.attend().await.unwrap().low {
        part += 1;
        pour(&disk.path.join(part.to_string()), 32 * MIB);
    }
    sync(&disk.path);
    vault.remove_disk(&attacker).await.unwrap();
    // What the server does several times a second, and no upkeep.
    for _ in 0..1200 {
        if vault.attend().await.unwrap().is_well() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not free: {:?}", vault.attend().await);
}

#[tokio::test]
async fn images_took_the_storage_down_to_where_others_are_held() {
    let small = Small::new(2048);
    let vault = small.open(Some(1 << 30)).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let owner = id();
    vault.create_disk(&owner, &tiny, 64 * MIB).await.unwrap();
    vault.attend().await.unwrap();
    // One that is larger than it may be is refused while it is written.
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    let (draft, place) = vault.memory_of_at_most(draft, 64 * MIB).await.unwrap();
    let (written, error) = pour(&place.join("pages"), 1 << 30);
    assert_eq!(error.unwrap().raw_os_error(), Some(122), "{written}");
    assert!(written <= 64 * MIB, "{written}");
    let why = vault.why_no_memory(draft, 64 * MIB).await.unwrap();
    assert_eq!(why.code, Code::NotEnforceable);
    assert!(why.message.contains("larger than 64"), "{why}");
    until(&vault, "what was written of it is free", |state| {
        state.free_bytes > 700 * MIB
    })
    .await;
    // All together end before the storage is low.
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    let (draft, place) = vault.memory_of_at_most(draft, 0).await.unwrap();
    let mut written = 0;
    let refused = loop {
        let (more, error) = pour(&place.join(written.to_string()), 32 * MIB);
        written += more;
        if let Some(error) = error {
            break error;
        }
        assert!(written < 2 << 30, "{written}");
        let state = vault.attend().await.unwrap();
        assert!(!state.low, "{written} {state:?}");
    };
    assert_eq!(refused.raw_os_error(), Some(122), "{written}");
    assert!(written > 256 * MIB, "{written}");
    let why = vault.why_no_memory(draft, 0).await.unwrap();
    assert_eq!(why.code, Code::DiskFull, "{why}");
    assert!(!vault.attend().await.unwrap().low);
    // A small one has room again, and is there when it is a point.
    until(&vault, "it is free", |state| state.free_bytes > 700 * MIB).await;
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    let (draft, place) = vault.memory_of_at_most(draft, 64 * MIB).await.unwrap();
    fs::write(place.join("pages"), noise(MIB as usize)).unwrap();
    let draft = vault.take_disk(draft, &owner).await.unwrap();
    let point = vault.publish_point(draft, &owner, Keep::ForGood).await;
    let point = vault.verified_point(&point.unwrap().id).await.unwrap();
    assert_eq!(point.memory_bytes, MIB);
    let images = vault.images().await.unwrap();
    assert_eq!((images.len(), images[0].bytes), (1, MIB));
    assert_eq!(images[0].sandbox, owner);
    vault.remove_point(&point.id).await.unwrap();
    assert!(vault.images().await.unwrap().is_empty());
}

/// The kernel took empty pieces for names back, and then there was no room for a name for a moment.
#[tokio::test]
async fn a_small_file_of_a_neighbour_was_refused_now_and_then() {
    let small = Small::new(2048);
    let vault = small.open(Some(1024 * MIB)).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let (culprit, neighbour) = (id(), id());
    let taken = vault.create_disk(&culprit, &tiny, 8 << 30).await.unwrap();
    let quiet = vault.create_disk(&neighbour, &tiny, 8 << 30).await.unwrap();
    loop {
        let state = vault.attend().await.unwrap();
        if state.low {
            break;
        }
        let (_, error) = pour(
            &taken.path.join(format!("{}", state.free_bytes)),
            state.spare_bytes.min(64 * MIB),
        );
        assert!(error.is_none(), "{error:?}");
    }
    for round in 0..40 {
        // While it is low that has the kernel tidy up.
        vault.attend().await.unwrap();
        sync_all(&small.state().join("pool"));
        let name = quiet.path.join(round.to_string());
        fs::write(&name, "small").unwrap_or_else(|error| panic!("round {round}: {error}"));
        sync(&name);
    }
}

#[tokio::test]
async fn a_limit_that_was_lowered_could_not_be_raised() {
    let small = Small::new(1024);
    let vault = small.open(Some(512 * MIB)).await;
    let tiny = import_tiny(&vault, "tiny").await;
    let id = id();
    let disk = vault.create_disk(&id, &tiny, 256 * MIB).await.unwrap();
    let (_, error) = pour(&disk.path.join("first"), 32 * MIB);
    assert!(error.is_none(), "{error:?}");
    // As it is held: it may keep what it has.
    vault.set_disk_limit(&id, 16 * MIB).await.unwrap();
    let refused = fs::write(disk.path.join("second"), "second").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(122));
    vault.set_disk_limit(&id, 256 * MIB).await.unwrap();
    let (_, error) = pour(&disk.path.join("third"), 32 * MIB);
    assert!(error.is_none(), "{error:?}");
}
