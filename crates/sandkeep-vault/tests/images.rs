//! Points whose disks are images that a box wrote, every byte of them.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, State, id, run};
use sandkeep_model::{Code, PointId, SandboxId};
use sandkeep_vault::{ChangeKind, Keep, PointInfo, Vault};
use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, symlink},
    path::Path,
    time::{Duration, SystemTime},
};

const DISK: &str = "disk.ext4";

/// An ext4 file system with what is in the directory, made without mounting anything.
fn image_of(tree: &Path, image: &Path) {
    let _none_yet = fs::remove_file(image);
    let (tree, image) = (tree.to_str().unwrap(), image.to_str().unwrap());
    run(
        "mkfs.ext4",
        &["-q", "-F", "-b", "4096", "-d", tree, image, "16m"],
    );
}

async fn point(vault: &Vault, id: &SandboxId) -> PointInfo {
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    let draft = vault.take_disk(draft, id).await.unwrap();
    vault.publish_point(draft, id, Keep::ForGood).await.unwrap()
}

struct Scene {
    _state: State,
    vault: Vault,
    id: SandboxId,
    disk: std::path::PathBuf,
    before: PointInfo,
}

impl Scene {
    async fn new() -> (Self, tempfile::TempDir) {
        let state = State::new();
        let (vault, tiny) = state.with_template().await;
        let id = id();
        let disk = vault.create_disk(&id, &tiny, 64 * MIB).await.unwrap();
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("etc")).unwrap();
        fs::write(tree.path().join("etc/motd"), "hello\n").unwrap();
        fs::write(tree.path().join("etc/same"), vec![7; 300_000]).unwrap();
        fs::write(tree.path().join("big"), vec![1; 100_000]).unwrap();
        symlink("etc/motd", tree.path().join("link")).unwrap();
        // Tools that make images note whole seconds; what is changed later must be seen.
        let long_ago = SystemTime::now() - Duration::from_secs(3600);
        for file in ["etc/motd", "etc/same", "big"] {
            let file = File::options().write(true).open(tree.path().join(file));
            file.unwrap().set_modified(long_ago).unwrap();
        }
        let disk = disk.path.join(DISK);
        image_of(tree.path(), &disk);
        let before = point(&vault, &id).await;
        let scene = Self {
            _state: state,
            vault,
            id,
            disk,
            before,
        };
        (scene, tree)
    }

    async fn refused(&self, what: &str) -> sandkeep_model::Error {
        let after = point(&self.vault, &self.id).await;
        let told = self
            .vault
            .diff_images(&self.before.id, &after.id, DISK, true)
            .await;
        told.expect_err(what)
    }
}

#[tokio::test]
async fn what_changed_in_two_images_is_listed_and_shown() {
    let (scene, tree) = Scene::new().await;
    fs::write(tree.path().join("etc/motd"), "changed\n").unwrap();
    fs::create_dir(tree.path().join("new")).unwrap();
    fs::write(tree.path().join("new/file"), "12345").unwrap();
    fs::remove_file(tree.path().join("big")).unwrap();
    let same = File::options()
        .write(true)
        .open(tree.path().join("etc/same"));
    same.unwrap().write_all_at(b"x", 299_999).unwrap();
    fs::remove_file(tree.path().join("link")).unwrap();
    symlink("elsewhere", tree.path().join("link")).unwrap();
    image_of(tree.path(), &scene.disk);
    let after = point(&scene.vault, &scene.id).await;
    let diff = scene
        .vault
        .diff_images(&scene.before.id, &after.id, DISK, true)
        .await
        .unwrap();
    let told: Vec<_> = diff
        .changes
        .iter()
        .map(|c| (c.path.as_str(), c.kind, c.bytes_before, c.bytes_after))
        .collect();
    use ChangeKind::{Added, Changed, Removed};
    assert_eq!(
        told,
        [
            ("/big", Removed, Some(100_000), None),
            ("/etc/motd", Changed, Some(6), Some(8)),
            ("/etc/same", Changed, Some(300_000), Some(300_000)),
            ("/link", Changed, Some(8), Some(9)),
            ("/new", Added, None, Some(0)),
            ("/new/file", Added, None, Some(5)),
        ]
    );
    let text = diff.changes[1].text.as_deref().unwrap();
    assert!(text.contains("-hello\n+changed\n"), "{text}");
    let none = scene
        .vault
        .diff_images(&after.id, &after.id, DISK, false)
        .await
        .unwrap();
    assert!(none.changes.is_empty() && !none.cut, "{none:?}");
}

#[tokio::test]
async fn a_damaged_image_is_refused_in_words() {
    let (scene, tree) = Scene::new().await;
    let image = || File::options().write(true).open(&scene.disk).unwrap();
    // Not a file system at all.
    fs::write(&scene.disk, vec![0; 1 << 20]).unwrap();
    let error = scene.refused("zeroes").await;
    assert_eq!(error.code, Code::Conflict, "{error}");
    assert!(error.message.contains("can not be read"), "{error}");
    // Cut off.
    image_of(tree.path(), &scene.disk);
    image().set_len(4 << 20).unwrap();
    assert_eq!(scene.refused("cut off").await.code, Code::Conflict);
    // Inodes, directories and all that were overwritten.
    image_of(tree.path(), &scene.disk);
    image().write_all_at(&vec![0xa5; 2 << 20], 8192).unwrap();
    assert_eq!(scene.refused("noise").await.code, Code::Conflict);
}

#[tokio::test]
async fn an_image_that_claims_to_be_huge_takes_no_memory() {
    let (scene, tree) = Scene::new().await;
    for (place, bytes) in [
        // Blocks: more than there are, by far.
        (1024 + 0x4, u32::MAX.to_le_bytes()),
        (1024 + 0x150, u32::MAX.to_le_bytes()),
        // The size of a block, and how many are a group.
        (1024 + 0x18, 40_u32.to_le_bytes()),
        (1024 + 0x20, 1_u32.to_le_bytes()),
    ] {
        image_of(tree.path(), &scene.disk);
        File::options()
            .write(true)
            .open(&scene.disk)
            .unwrap()
            .write_all_at(&bytes, place)
            .unwrap();
        let error = scene.refused("a lie").await;
        assert_eq!(error.code, Code::Conflict, "{place}: {error}");
    }
}

#[tokio::test]
async fn a_link_in_place_of_an_image_is_not_followed() {
    let (scene, tree) = Scene::new().await;
    let elsewhere = tree.path().join("elsewhere");
    image_of(&tree.path().join("etc"), &elsewhere);
    fs::remove_file(&scene.disk).unwrap();
    symlink(&elsewhere, &scene.disk).unwrap();
    let error = scene.refused("a link").await;
    assert!(error.message.contains(DISK), "{error}");
}
