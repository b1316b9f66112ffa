//! Exported points, as a server opens them that trusts nobody.
//!
//! Bytes alone hardly ever get past the sums of zstd, tar and the seal, so three kinds are
//! tried: bytes as they are, packed bytes, and entries with all sums right and a signature.
#![no_main]

use std::{fs, io::Write as _, path::Path, sync::LazyLock};

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use libfuzzer_sys::fuzz_target;
use sandkeep_model::ServerKey;
use sandkeep_vault::{ImportLimits, ParcelRoom, unpack_parcel};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};
use tempfile::TempDir;

const MOST: ImportLimits = ImportLimits {
    bytes: 1 << 20,
    entries: 64,
};
/// What entries are built from most of the time: noise alone would rarely be a path or a record.
const NAMES: [&str; 16] = [
    "disk",
    "disk/",
    "disk/a",
    "disk/a/b",
    "disk/../a",
    "disk/l",
    "disk/l/x",
    "memory/pages",
    "memory/../pages",
    "memory//pages",
    "seal.json",
    "point.json",
    "/disk/a",
    "../../../beside",
    "disk/a/../../..",
    "..",
];
const KINDS: [EntryType; 9] = [
    EntryType::Regular,
    EntryType::Directory,
    EntryType::Symlink,
    EntryType::Link,
    EntryType::Fifo,
    EntryType::XHeader,
    EntryType::Char,
    EntryType::GNULongName,
    EntryType::GNUSparse,
];

/// Of memory; what is in it beside the room must stay as it is.
static PLACE: LazyLock<TempDir> = LazyLock::new(|| {
    let place = TempDir::new_in("/dev/shm").expect("a place");
    fs::write(place.path().join("beside"), "mine").expect("a file");
    place
});

/// A server that signs whatever is tried.
static SIGNER: LazyLock<Ed25519KeyPair> =
    LazyLock::new(|| Ed25519KeyPair::from_seed_unchecked(&[7; 32]).expect("a key"));
/// Stands in labels for its public half.
const NAMED: &str = "SIGNER";

fn signer() -> ServerKey {
    ServerKey::new(SIGNER.public_key().as_ref().try_into().expect("a key"))
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    let file = match kind % 4 {
        0 => rest.to_vec(),
        1 => packed(rest),
        _ => packed(&built(rest)),
    };
    let place = PLACE.path();
    let (disk, memory) = (place.join("room/disk"), place.join("room/memory"));
    let unpacked = unpack_parcel(&file[..], &MOST, |label| {
        for dir in [&disk, &memory] {
            fs::create_dir_all(dir).expect("room");
        }
        assert!(label.disk.entries <= MOST.entries && label.disk.bytes <= MOST.bytes);
        let room = ParcelRoom {
            disk: fs::File::open(&disk).expect("room").into(),
            memory: (kind & 0x80 == 0).then(|| memory.clone()),
        };
        Ok(((), room))
    });
    if let Ok((label, ())) = unpacked {
        // Nobody else can sign.
        assert!(label.signer.is_none_or(|key| key == signer()));
        let there = names(&memory);
        let named: Vec<_> = label.memory.iter().map(|file| file.name.clone()).collect();
        assert!(there.is_empty() || there == named, "{there:?} {named:?}");
    }
    assert_eq!(
        fs::read(place.join("beside")).expect("it is there"),
        b"mine"
    );
    if place.join("room").exists() {
        assert_eq!(names(&place.join("room")), ["disk", "memory"]);
        fs::remove_dir_all(place.join("room")).expect("it goes");
    }
    assert_eq!(names(place), ["beside"]);
});

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .expect("a directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("zstd");
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

/// A label, entries as the bytes say, and the right seal.
fn built(data: &[u8]) -> Vec<u8> {
    let (label, mut rest) = cut(data);
    let named = String::from_utf8_lossy(label).replace(NAMED, &signer().to_string());
    let signed = named.contains("signer");
    let label = if signed { named.as_bytes() } else { label };
    let mut tar = Vec::new();
    add(&mut tar, b"point.json", EntryType::Regular, label);
    while let Some((&[kind, name, about], left)) = rest.split_first_chunk() {
        let (data, left) = cut(left);
        rest = left;
        let named = match NAMES.get(usize::from(name)) {
            Some(name) => name.as_bytes(),
            None => &data[..data.len().min(90)],
        };
        let kind = KINDS[usize::from(kind) % KINDS.len()];
        let data = if about < 200 { data } else { &[] };
        add(&mut tar, named, kind, data);
    }
    let sum: String = Sha256::digest(&tar)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let signature = SIGNER.sign(format!("sandkeep parcel sha256 {sum}").as_bytes());
    let seal = if signed {
        let signature = STANDARD_NO_PAD.encode(signature);
        format!(r#"{{"sha256":"{sum}","signature":"{signature}"}}"#)
    } else {
        format!(r#"{{"sha256":"{sum}"}}"#)
    };
    add(&mut tar, b"seal.json", EntryType::Regular, seal.as_bytes());
    tar.resize(tar.len() + 1024, 0);
    tar
}

/// As many bytes as the first two say.
fn cut(data: &[u8]) -> (&[u8], &[u8]) {
    match data.split_first_chunk() {
        Some((&length, rest)) => {
            rest.split_at(usize::from(u16::from_le_bytes(length)).min(rest.len()))
        }
        None => (&[], &[]),
    }
}

fn add(tar: &mut Vec<u8>, name: &[u8], kind: EntryType, data: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(data.len() as u64);
    let short = name.len().min(100);
    header.as_mut_bytes()[..short].copy_from_slice(&name[..short]);
    if matches!(kind, EntryType::Symlink | EntryType::Link) {
        let short = data.len().min(100);
        header.as_mut_bytes()[157..157 + short].copy_from_slice(&data[..short]);
        header.set_size(0);
    }
    header.set_cksum();
    tar.extend(header.as_bytes());
    if header.entry_size().is_ok_and(|size| size > 0) {
        tar.extend(data);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
}
