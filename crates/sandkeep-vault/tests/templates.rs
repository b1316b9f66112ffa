//! Templates from archives nobody vouches for.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{MIB, State, add_dir, add_file, header, id, noise, tiny_tar};
use sandkeep_model::{Code, Error, TemplateName};
use sandkeep_vault::{ImportLimits, Progress, TemplateInfo, Vault};
use std::{
    fs,
    io::{self, Read, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    sync::{Arc, Mutex},
};
use tar::EntryType;

async fn import(vault: &Vault, tar: Vec<u8>) -> Result<TemplateInfo, Error> {
    let name: TemplateName = "imported".parse().unwrap();
    vault
        .import_reader(&name, io::Cursor::new(tar), ImportLimits::default(), |_| {})
        .await
}

/// An entry with a path the `tar` crate itself would refuse to write.
fn raw(tar: &mut tar::Builder<Vec<u8>>, kind: EntryType, path: &str, link: &str, body: &[u8]) {
    let mut header = header(kind, body.len() as u64, 0o644, 0);
    let old = header.as_old_mut();
    old.name[..path.len()].copy_from_slice(path.as_bytes());
    old.linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_cksum();
    tar.append(&header, body).unwrap();
}

fn raw_tar(entries: &[(EntryType, &str, &str)]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (kind, path, link) in entries {
        let body: &[u8] = if *kind == EntryType::Regular {
            b"evil"
        } else {
            b""
        };
        raw(&mut tar, *kind, path, link, body);
    }
    tar.into_inner().unwrap()
}

#[tokio::test]
async fn a_root_comes_in_as_it_was() {
    let state = State::new();
    let vault = state.open().await;
    let mut tar = tar::Builder::new(Vec::new());
    add_dir(&mut tar, "./", 0o755);
    add_dir(&mut tar, "./tmp/", 0o1777);
    add_file(&mut tar, "./usr/bin/sudo", b"#!", 0o4755, 0);
    add_file(&mut tar, "./home/user/x", b"mine", 0o600, 1000);
    raw(&mut tar, EntryType::Symlink, "bin", "/usr/bin", b"");
    raw(
        &mut tar,
        EntryType::Link,
        "usr/bin/su",
        "./usr/bin/sudo",
        b"",
    );
    raw(&mut tar, EntryType::Char, "dev/null", "", b"");
    raw(&mut tar, EntryType::Block, "dev/sda", "", b"");
    // Through a link whose target is absolute: inside the new root, not on the host.
    add_file(&mut tar, "bin/tool", b"tool", 0o755, 0);
    let info = import(&vault, tar.into_inner().unwrap()).await.unwrap();

    let root = &info.path;
    let meta = |path: &str| fs::symlink_metadata(root.join(path)).unwrap();
    assert_eq!(meta("tmp").permissions().mode() & 0o7777, 0o1777);
    assert_eq!(meta("usr/bin/sudo").permissions().mode() & 0o7777, 0o4755);
    assert_eq!(
        (meta("home/user/x").uid(), meta("home/user/x").gid()),
        (1000, 1000)
    );
    assert_eq!(meta("home/user/x").mtime(), 1_700_000_000);
    assert_eq!(meta("usr/bin/su").ino(), meta("usr/bin/sudo").ino());
    assert_eq!(
        fs::read_link(root.join("bin")).unwrap(),
        Path::new("/usr/bin")
    );
    assert_eq!(fs::read(root.join("usr/bin/tool")).unwrap(), b"tool");
    assert!(!root.join("dev/null").exists() && !root.join("dev/sda").exists());
    assert_eq!(info.origin, "imported from a stream");
}

#[tokio::test]
async fn packed_archives_and_their_progress() {
    let state = State::new();
    let vault = state.open().await;
    let dir = tempfile::tempdir().unwrap();
    let plain = tiny_tar();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let packed = [
        ("plain", plain.clone()),
        ("gzip", gzip.finish().unwrap()),
        ("zstd", zstd::encode_all(plain.as_slice(), 1).unwrap()),
    ];
    for (name, bytes) in packed {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let seen: Arc<Mutex<Vec<Progress>>> = Arc::default();
        let tell = Arc::clone(&seen);
        let name: TemplateName = name.parse().unwrap();
        let info = vault
            .import_tar(&name, &path, ImportLimits::default(), move |step| {
                tell.lock().unwrap().push(step);
            })
            .await
            .unwrap();
        assert_eq!(
            fs::read_to_string(info.path.join("etc/motd")).unwrap(),
            "hello\n"
        );
        assert!(info.size_bytes >= 8 * MIB && info.size_bytes < 9 * MIB);
        assert!(!seen.lock().unwrap().is_empty());
    }
    let names: Vec<String> = vault
        .templates()
        .await
        .unwrap()
        .iter()
        .map(|info| info.name.to_string())
        .collect();
    assert_eq!(names, ["gzip", "plain", "zstd"]);
}

#[tokio::test]
async fn tricks_with_paths_are_refused() {
    let state = State::new();
    let vault = state.open().await;
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs::write(&victim, "safe").unwrap();
    let out = outside.path().to_str().unwrap();
    let victim_name = victim.to_str().unwrap();
    let through = format!("d/{}", "victim");
    let (file, link, hard) = (EntryType::Regular, EntryType::Symlink, EntryType::Link);
    let tricks: [&[(EntryType, &str, &str)]; 8] = [
        &[(file, "../victim", "")],
        &[(file, "a/../../victim", "")],
        &[(file, victim_name, "")],
        &[(link, "d", out), (file, &through, "")],
        &[(hard, "h", victim_name)],
        &[(hard, "h", "../../victim")],
        &[(link, "d", out), (hard, "h", &through)],
        &[(link, "a", "b"), (link, "b", "a"), (file, "a/x", "")],
    ];
    for trick in tricks {
        let error = import(&vault, raw_tar(trick)).await.unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{trick:?}: {error}");
        assert!(error.message.contains("refused"), "{trick:?}: {error}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "safe", "{trick:?}");
        assert_eq!(
            fs::read_dir(outside.path()).unwrap().count(),
            1,
            "{trick:?}"
        );
        assert_eq!(state.staging(), 0, "{trick:?}");
    }
    assert!(vault.templates().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_link_upwards_ends_at_the_root() {
    let state = State::new();
    let vault = state.open().await;
    let tar = raw_tar(&[
        (EntryType::Symlink, "up", "../../../.."),
        (EntryType::Regular, "up/file", ""),
    ]);
    let info = import(&vault, tar).await.unwrap();
    assert_eq!(fs::read(info.path.join("file")).unwrap(), b"evil");
}

#[tokio::test]
async fn sizes_are_bounded() {
    let state = State::new();
    let vault = state.open().await;
    let name: TemplateName = "bomb".parse().unwrap();
    let bounds = [
        ImportLimits {
            bytes: MIB,
            entries: 100,
        },
        ImportLimits {
            bytes: 100 * MIB,
            entries: 2,
        },
    ];
    for limits in bounds {
        let packed = zstd::encode_all(tiny_tar().as_slice(), 1).unwrap();
        let error = vault
            .import_reader(&name, io::Cursor::new(packed), limits, |_| {})
            .await
            .unwrap_err();
        assert_eq!(error.code, Code::TooLarge, "{error}");
        assert_eq!(state.staging(), 0);
    }
}

#[tokio::test]
async fn broken_archives_leave_nothing() {
    let state = State::new();
    let vault = state.open().await;
    let mut foreign = tar::Builder::new(Vec::new());
    add_file(&mut foreign, "x", b"x", 0o644, 100_000);
    let whole = tiny_tar();
    let broken = [
        whole[..whole.len() / 2].to_vec(),
        noise(100_000),
        Vec::new(),
        foreign.into_inner().unwrap(),
        b"\x1f\x8b\x08nonsense".to_vec(),
        b"\x28\xb5\x2f\xfdnonsense".to_vec(),
    ];
    for (number, tar) in broken.into_iter().enumerate() {
        let error = import(&vault, tar).await.unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{number}: {error}");
        assert_eq!(state.staging(), 0, "{number}");
    }
    assert!(vault.templates().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_full_pool_ends_an_import_cleanly() {
    let state = State::sized(160 * MIB);
    let vault = state.open().await;
    let mut tar = tar::Builder::new(Vec::new());
    add_file(&mut tar, "big", &noise(200 * MIB as usize), 0o644, 0);
    let error = import(&vault, tar.into_inner().unwrap()).await.unwrap_err();
    assert_eq!(error.code, Code::DiskFull, "{error}");
    assert_eq!(state.staging(), 0);
    assert!(vault.templates().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_name_is_taken_once() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let before = vault.template(&tiny).await.unwrap().unwrap();
    let again = vault
        .import_reader(
            &tiny,
            io::Cursor::new(tiny_tar()),
            ImportLimits::default(),
            |_| {},
        )
        .await
        .unwrap_err();
    assert_eq!(again.code, Code::Conflict);
    assert_eq!(vault.template(&tiny).await.unwrap().unwrap(), before);
    vault.remove_template(&tiny).await.unwrap();
    common::import_tiny(&vault, "tiny").await;
}

#[tokio::test]
async fn a_damaged_template_hides_no_other() {
    let state = State::new();
    let (vault, tiny) = state.with_template().await;
    let other = common::import_tiny(&vault, "other").await;
    let manifest = state.path().join("pool/templates/tiny/template.json");
    fs::write(manifest, "{").unwrap();
    let error = vault.create_disk(&id(), &tiny, MIB).await.unwrap_err();
    assert!(error.message.contains("damaged"), "{error}");
    let names: Vec<TemplateName> = vault
        .templates()
        .await
        .unwrap()
        .into_iter()
        .map(|info| info.name)
        .collect();
    assert_eq!(names, [other]);
}

#[tokio::test]
async fn a_reader_that_fails_is_told_apart() {
    struct Failing;
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(5))
        }
    }
    let state = State::new();
    let vault = state.open().await;
    let name: TemplateName = "x".parse().unwrap();
    let error = vault
        .import_reader(&name, Failing, ImportLimits::default(), |_| {})
        .await
        .unwrap_err();
    assert_eq!(error.code, Code::Internal, "{error}");
    assert_eq!(state.staging(), 0);
}
