//! Points as files: what comes out elsewhere is what went in, or nothing.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;
#[path = "parcels/forged.rs"]
mod forged;
#[path = "parcels/signed.rs"]
mod signed;

use common::{MIB, State, id, noise};
use forged::Forged;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use sandkeep_model::{
    Code, EngineBuild, Error, Isolation, Limits, Point, PointId, PointKind, Result, SandboxId,
    Timestamp,
};
use sandkeep_vault::{ImportLimits, Keep, Label, Opened, Vault};
use sha2::{Digest as _, Sha256};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink},
    },
    path::Path,
    sync::{Arc, Mutex},
};

fn point_of(id: PointId, sandbox: &SandboxId, memory: bool) -> Point {
    Point {
        id,
        sandbox_id: sandbox.clone(),
        parent: None,
        name: Some("packed".to_owned()),
        tags: vec!["one".to_owned()],
        kind: PointKind::Snapshot,
        reason: None,
        engine: memory.then(|| EngineBuild {
            name: "engine".to_owned(),
            build: "1".to_owned(),
        }),
        why_disk_only: None,
        created_at: Timestamp::from_millis(1),
        bytes: 0,
        added_bytes: 0,
        isolation: Isolation::Gvisor,
        template: "tiny".parse().unwrap(),
        limits: Limits::default(),
    }
}

async fn snapshot(vault: &Vault, of: &SandboxId, memory: &[(&str, &[u8])]) -> Point {
    let draft = vault.begin_point(PointId::random()).await.unwrap();
    if !memory.is_empty() {
        let dir = draft.memory(0).unwrap();
        for (name, bytes) in memory {
            fs::write(dir.join(name), bytes).unwrap();
        }
    }
    let draft = vault.take_disk(draft, of).await.unwrap();
    let made = vault.publish_point(draft, of, Keep::ForGood).await.unwrap();
    point_of(made.id, of, !memory.is_empty())
}

/// Where an export goes.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

async fn export(vault: &Vault, point: &Point) -> Result<Vec<u8>> {
    let label = vault.label(point).await?;
    let sink = Sink::default();
    vault.export_point(label, sink.clone()).await?;
    Ok(sink.0.lock().unwrap().clone())
}

/// Takes memory in as it is.
type TakeIn = fn(&Path) -> Result<()>;
const AS_IT_IS: TakeIn = |_| Ok(());

async fn import(vault: &Vault, file: Vec<u8>, memory: bool) -> Result<Opened> {
    import_by(vault, file, memory.then_some(AS_IT_IS)).await
}

async fn import_by(vault: &Vault, file: Vec<u8>, take_in: Option<TakeIn>) -> Result<Opened> {
    let limits = ImportLimits::default();
    vault
        .import_point(io::Cursor::new(file), limits, move |_| Ok(take_in))
        .await
}

/// A tree with everything a box can have in it.
fn furnish(root: &Path) {
    let at = |name: &str| root.join(name);
    fs::write(at("suid"), "program").unwrap();
    chown(at("suid"), Some(0), Some(44)).unwrap();
    fs::set_permissions(at("suid"), fs::Permissions::from_mode(0o4755)).unwrap();
    let capability = [1, 0, 0, 2, 10, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (name, value) in [
        ("security.capability", &capability[..]),
        ("user.lines", b"a\nb=c\n"),
        ("user.odd=name", b"\0\x01"),
    ] {
        rustix::fs::setxattr(at("suid"), name, value, XattrFlags::empty()).unwrap();
    }
    fs::hard_link(at("suid"), at("etc/same")).unwrap();
    symlink("/nowhere/../../etc//shadow", at("link")).unwrap();
    symlink("x/".repeat(150), at("longlink")).unwrap();
    let deep = at(&format!("{}/{}", "d".repeat(200), "e".repeat(200)));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("leaf"), "deep").unwrap();
    fs::write(root.join(OsStr::from_bytes(b"not \xff text\n")), "").unwrap();
    rustix::fs::mknodat(
        CWD,
        at("pipe"),
        FileType::Fifo,
        Mode::from_raw_mode(0o622),
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.write_all_at(b"begin", 0).unwrap();
    sparse.write_all_at(&noise(5000), 900 * MIB).unwrap();
    sparse.set_len(4096 * MIB).unwrap();
    fs::create_dir(at("mine")).unwrap();
    chown(at("mine"), Some(1000), Some(1000)).unwrap();
    rustix::fs::setxattr(at("mine"), "user.dir", b"yes", XattrFlags::empty()).unwrap();
    for (name, seconds) in [("mine", 1_600_000_000), ("link", -5), ("sparse", 17)] {
        let stamp = Timespec {
            tv_sec: seconds,
            tv_nsec: 123_456_789,
        };
        let times = Timestamps {
            last_access: stamp,
            last_modification: stamp,
        };
        rustix::fs::utimensat(CWD, at(name), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}

/// All there is to know about a tree, to be compared with another.
fn describe(root: &Path) -> Vec<String> {
    let mut out = Vec::new();
    let mut stack = vec![root.to_owned()];
    while let Some(path) = stack.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let mut names = vec![0; 65_536];
        let count = rustix::fs::llistxattr(&path, &mut names[..]).unwrap();
        let mut xattrs: Vec<_> = names[..count]
            .split(|b| *b == 0)
            .filter(|name| !name.is_empty())
            .map(|name| {
                let mut value = vec![0; 65_536];
                let name = OsStr::from_bytes(name);
                let length = rustix::fs::lgetxattr(&path, name, &mut value[..]).unwrap();
                (name.to_owned(), value[..length].to_vec())
            })
            .collect();
        xattrs.sort();
        let content = if meta.is_file() && meta.len() < 64 * MIB {
            fs::read(&path).unwrap()
        } else if meta.is_symlink() {
            fs::read_link(&path)
                .unwrap()
                .into_os_string()
                .as_bytes()
                .to_vec()
        } else {
            Vec::new()
        };
        let size = if meta.is_dir() { 0 } else { meta.len() };
        out.push(format!(
            "{:?} {:o} {}:{} {size} x{} {}.{} {xattrs:?} {:x?}",
            path.strip_prefix(root).unwrap(),
            meta.mode(),
            meta.uid(),
            meta.gid(),
            if meta.is_dir() { 1 } else { meta.nlink() },
            meta.mtime(),
            meta.mtime_nsec(),
            Sha256::digest(&content),
        ));
        if meta.is_dir() {
            stack.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    out.sort();
    out
}

#[tokio::test]
async fn what_comes_out_elsewhere_is_what_went_in() {
    let (here, there) = (State::new(), State::new());
    let (vault, tiny) = here.with_template().await;
    let of = id();
    let disk = vault.create_disk(&of, &tiny, 64 * MIB).await.unwrap();
    furnish(&disk.path);
    let pages = noise(3 << 20);
    let point = snapshot(&vault, &of, &[("pages", &pages), ("core", b"")]).await;
    let file = export(&vault, &point).await.unwrap();
    assert!(
        file.len() < 16 << 20,
        "holes are not packed: {}",
        file.len()
    );

    let other = there.open().await;
    let opened = import(&other, file.clone(), true).await.unwrap();
    assert_eq!(opened.point, point);
    assert!(opened.memory);
    assert_eq!(opened.signer, Some(vault.server_key()));
    let found = other.verified_point(&point.id).await.unwrap();
    assert_eq!(found, opened.info);
    let from = vault.verified_point(&point.id).await.unwrap();
    assert_eq!(describe(&from.disk), describe(&found.disk));
    let (sparse, suid) = (found.disk.join("sparse"), found.disk.join("suid"));
    assert!(
        fs::metadata(&sparse).unwrap().blocks() * 512 < MIB,
        "holes stay holes"
    );
    let mut end = vec![0; 5000];
    File::open(&sparse)
        .unwrap()
        .read_exact_at(&mut end, 900 * MIB)
        .unwrap();
    assert_eq!(end, noise(5000));
    let same = found.disk.join("etc/same");
    assert_eq!(
        fs::metadata(suid).unwrap().ino(),
        fs::metadata(same).unwrap().ino()
    );
    let memory = found.memory.unwrap();
    assert_eq!(fs::read(memory.join("pages")).unwrap(), pages);
    let refused = fs::write(found.disk.join("new"), "x").unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
    // Boxes are made from it as from any other.
    let fork = id();
    let disk = other
        .disk_from_point(&fork, &point.id, 4 * MIB)
        .await
        .unwrap();
    let (written, error) = common::fill(&disk.path.join("more"), 64 * MIB);
    assert!(error.is_some() && written <= 4 * MIB, "{written}");

    let twice = import(&other, file.clone(), true).await.unwrap_err();
    assert_eq!(twice.code, Code::Conflict);
    other.remove_point(&point.id).await.unwrap();
    let opened = import(&other, file, false).await.unwrap();
    assert!(!opened.memory);
    assert_eq!(other.verified_point(&point.id).await.unwrap().memory, None);
    assert_eq!(there.staging(), 0);
}

/// Whoever will read the memory sees it first: what it changes is what the point vouches for.
#[tokio::test]
async fn memory_is_taken_in_before_it_is_summed_up() {
    let (here, there) = (State::new(), State::new());
    let (vault, tiny) = here.with_template().await;
    let of = id();
    vault.create_disk(&of, &tiny, 64 * MIB).await.unwrap();
    let point = snapshot(&vault, &of, &[("pages", b"pages"), ("note", b"old")]).await;
    let file = export(&vault, &point).await.unwrap();

    let other = there.open().await;
    let refuse: TakeIn = |_| Err(Error::conflict("not mine"));
    let refused = import_by(&other, file.clone(), Some(refuse)).await;
    assert_eq!(refused.unwrap_err().message, "not mine");
    assert_eq!(other.points().await.unwrap(), []);
    assert_eq!(there.staging(), 0);

    let rename: TakeIn = |image| {
        assert_eq!(fs::read(image.join("pages"))?, b"pages");
        Ok(fs::write(image.join("note"), "a new one")?)
    };
    import_by(&other, file, Some(rename)).await.unwrap();
    drop(other);
    // One that has nothing in memory of it compares all of it.
    let other = there.open().await;
    let found = other.verified_point(&point.id).await.unwrap();
    let note = found.memory.unwrap().join("note");
    assert_eq!(fs::read(&note).unwrap(), b"a new one");
    // It is carried on as it is now.
    let again = export(&other, &point).await.unwrap();
    vault.remove_point(&point.id).await.unwrap();
    import(&vault, again, true).await.unwrap();
}

#[tokio::test]
async fn what_is_not_whole_leaves_nothing() {
    let (here, there) = (State::new(), State::new());
    let (vault, tiny) = here.with_template().await;
    let of = id();
    let disk = vault.create_disk(&of, &tiny, 64 * MIB).await.unwrap();
    // A small one, so that many can be tried.
    fs::remove_file(disk.path.join("big")).unwrap();
    fs::write(disk.path.join("some"), noise(30_000)).unwrap();
    let point = snapshot(&vault, &of, &[("pages", &noise(20_000))]).await;
    let file = export(&vault, &point).await.unwrap();
    let other = there.open().await;
    let size = file.len();
    let mut tried = 0;
    for place in (0..12)
        .chain((0..90).map(|n| n * size / 90))
        .chain(size - 40..size)
    {
        let mut flipped = file.clone();
        flipped[place] ^= 1 << (place % 8);
        let opened = import(&other, flipped, true).await;
        // Zstd has bits that mean nothing; whatever is taken must be what was sealed.
        if let Ok(opened) = opened {
            assert_eq!(opened.point, point, "byte {place}");
            let found = other.verified_point(&point.id).await.unwrap();
            let from = vault.verified_point(&point.id).await.unwrap();
            assert_eq!(describe(&from.disk), describe(&found.disk), "byte {place}");
            other.remove_point(&point.id).await.unwrap();
            continue;
        }
        tried += 1;
    }
    assert!(tried > 120, "only {tried} were refused");
    for length in (0..20).map(|n| n * size / 20).chain(size - 8..size) {
        let error = import(&other, file[..length].to_vec(), true)
            .await
            .unwrap_err();
        assert_eq!(
            error.code,
            Code::InvalidArgument,
            "{length} of {size}: {error}"
        );
    }
    let mut longer = file.clone();
    longer.push(0);
    assert!(import(&other, longer, true).await.is_err());
    // The reader sees whether it is wanted before anything is written.
    let refuse = |_: &Label| Err::<Option<TakeIn>, _>(Error::conflict("not wanted"));
    let reader = io::Cursor::new(file);
    let limits = ImportLimits::default();
    let error = other
        .import_point(reader, limits, refuse)
        .await
        .unwrap_err();
    assert_eq!(error.message, "not wanted");
    assert_eq!(other.points().await.unwrap(), []);
    assert_eq!(there.staging(), 0);

    // Nor does a damaged point become a file.
    let pages = vault
        .verified_point(&point.id)
        .await
        .unwrap()
        .memory
        .unwrap()
        .join("pages");
    fs::write(&pages, noise(19_999)).unwrap();
    assert!(export(&vault, &point).await.is_err());
    fs::write(&pages, vec![0; 20_000]).unwrap();
    let error = export(&vault, &point).await.unwrap_err();
    assert!(error.message.contains("damaged"), "{error}");
}

#[tokio::test]
async fn forged_files_are_refused_in_words() {
    use tar::EntryType::{Block, Link, Regular, Symlink};
    let state = State::new();
    let vault = state.open().await;
    let outside = state.path().join("outside");
    fs::create_dir(&outside).unwrap();

    // By hand is no crime.
    let mut good = Forged::new(2, 5);
    good.dir("disk/").add(b"disk/file", Regular, b"", b"hello");
    let opened = import(&vault, good.pack(), true).await.unwrap();
    assert_eq!(fs::read(opened.info.disk.join("file")).unwrap(), b"hello");
    vault.remove_point(&opened.point.id).await.unwrap();

    // Nor is the format from before BLAKE3. `printf abc | sha256sum`
    let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    for (content, whole) in [(&b"abc"[..], true), (b"abd", false)] {
        let mut old = Forged::new(1, 0);
        old.label["point"]["engine"] = serde_json::json!({"name": "runsc", "build": "1"});
        old.label["memory"] = serde_json::json!([{"name": "pages", "bytes": 3, "sha256": sum}]);
        old.dir("disk/").add(b"memory/pages", Regular, b"", content);
        match import(&vault, old.pack(), true).await {
            Ok(opened) => {
                assert!(whole);
                let found = vault.verified_point(&opened.point.id).await.unwrap();
                assert_eq!(
                    fs::read(found.memory.unwrap().join("pages")).unwrap(),
                    b"abc"
                );
                vault.remove_point(&opened.point.id).await.unwrap();
            }
            Err(error) => {
                assert!(!whole && error.message.contains("memory"), "{error}");
            }
        }
    }

    let mut tricks: Vec<(&str, Forged)> = Vec::new();
    let mut trick = |words: &'static str, entries, bytes, make: &dyn Fn(&mut Forged)| {
        let mut forged = Forged::new(entries, bytes);
        forged.dir("disk/");
        make(&mut forged);
        tricks.push((words, forged));
    };
    trick("\"..\"", 2, 1, &|f| {
        f.add(b"disk/../x", Regular, b"", b"x");
    });
    trick("should be", 2, 1, &|f| {
        f.add(b"/etc/passwd", Regular, b"", b"x");
    });
    trick("should be", 1, 0, &|f| {
        f.add(b"diskless", Regular, b"", b"");
    });
    trick("kind", 2, 0, &|f| {
        f.add(b"disk/sda", Block, b"", b"");
    });
    trick("links nowhere", 2, 0, &|f| {
        f.add(b"disk/l", Link, b"/etc/passwd", b"");
    });
    trick("\"..\"", 2, 0, &|f| {
        f.add(b"disk/l", Link, b"disk/../../x", b"");
    });
    trick("more than 1 files", 1, 1, &|f| {
        f.add(b"disk/a", Regular, b"", b"x");
    });
    trick("unpacks to more", 2, 3, &|f| {
        f.add(b"disk/a", Regular, b"", b"hello");
    });
    trick("less than its label", 3, 5, &|f| {
        f.add(b"disk/a", Regular, b"", b"hello");
    });
    trick("attribute", 2, 0, &|f| {
        f.pax("SCHILY.xattr.trusted.overlay.opaque", b"y");
        f.dir("disk/a");
    });
    trick("holes", 2, 5, &|f| {
        f.pax("GNU.sparse.size", b"3");
        f.add(b"disk/a", Regular, b"", b"hello");
    });
    trick("memory is not what", 1, 0, &|f| {
        f.add(b"memory/pages", Regular, b"", b"x");
    });
    trick("longer than 255", 2, 0, &|f| {
        f.pax("path", format!("disk/{}", "n".repeat(300)).as_bytes());
        f.dir("disk/a");
    });
    trick("deeper than", 2, 0, &|f| {
        f.pax("path", format!("disk/{}", "n/".repeat(700)).as_bytes());
        f.dir("disk/a");
    });
    trick("no path", 2, 0, &|f| {
        f.pax("path", format!("disk/{}", "n/".repeat(3000)).as_bytes());
        f.dir("disk/a");
    });
    trick("too large", 2, 0, &|f| {
        f.pax("comment", &vec![b'x'; 2 << 20]);
        f.dir("disk/a");
    });
    trick("can not be reached", 3, 1, &|f| {
        // A link that leads out leads nowhere here.
        let target = outside.as_os_str().as_bytes();
        f.add(b"disk/out", Symlink, target, b"");
        f.add(b"disk/out/file", Regular, b"", b"x");
    });
    trick("at most 1048576", u64::MAX, 0, &|_| {});
    trick("unpacks to", 1, u64::MAX, &|_| {});
    for (words, mut forged) in tricks {
        let limits = ImportLimits {
            bytes: 1 << 40,
            entries: 1_048_576,
        };
        let reader = io::Cursor::new(forged.pack());
        let error = vault
            .import_point(reader, limits, |_| Ok(Some(AS_IT_IS)))
            .await
            .expect_err(words);
        assert!(error.message.contains(words), "{words:?}: {error}");
        assert!(
            matches!(error.code, Code::InvalidArgument | Code::TooLarge),
            "{error:?}"
        );
    }
    // More than the pool has room for is refused before it is unpacked.
    let error = import(&vault, Forged::new(1, 8 << 30).dir("disk/").pack(), true).await;
    assert_eq!(error.unwrap_err().code, Code::DiskFull);
    let mut newer = Forged::new(1, 0);
    newer.label["format"] = 3.into();
    let error = import(&vault, newer.dir("disk/").pack(), true)
        .await
        .unwrap_err();
    assert!(error.message.contains("format 3"), "{error}");
    // What says it is small is not unpacked beyond that.
    let mut bomb = Forged::new(2, 3);
    bomb.dir("disk/")
        .add(b"disk/zeros", Regular, b"", &vec![0; 32 << 20]);
    let error = import(&vault, bomb.pack(), true).await.unwrap_err();
    assert!(error.message.contains("unpacks to more"), "{error}");
    for nothing in [&b""[..], b"x", b"\x28\xb5\x2f\xfd", &noise(5000)] {
        let error = import(&vault, nothing.to_vec(), true).await.unwrap_err();
        assert!(error.message.contains("no whole exported point"), "{error}");
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    assert_eq!(vault.points().await.unwrap(), []);
    assert_eq!(state.staging(), 0);
}
