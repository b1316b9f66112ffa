use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf};

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::*;

const CANARY: &str = "canary-5f1d9c77-value";

struct Room {
    _dir: tempfile::TempDir,
    dir: PathBuf,
    key: KeySource,
}

fn room() -> Room {
    let dir = tempfile::tempdir().unwrap();
    Room {
        dir: dir.path().join("secrets"),
        key: KeySource::File(dir.path().join("keys/secrets.key")),
        _dir: dir,
    }
}

impl Room {
    fn open(&self) -> SecretStore {
        SecretStore::open(&self.dir, &self.key).unwrap()
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = fs::read_dir(&self.dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "json"))
            .collect();
        found.sort();
        found
    }
}

fn name(text: &str) -> SecretName {
    text.parse().unwrap()
}

fn note(value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("note".to_owned(), value.to_owned())])
}

#[test]
fn kept_changed_and_deleted_over_restarts() {
    let room = room();
    let store = room.open();
    let made = store
        .create(name("github"), &Secret::new(CANARY), note("ci"))
        .unwrap();
    assert_eq!(made.version, 1);
    drop(store);

    let store = room.open();
    assert_eq!(store.infos(), std::slice::from_ref(&made));
    assert_eq!(store.reveal(&name("github")).unwrap().expose(), CANARY);
    let changed = store
        .update(&name("github"), &Secret::new("second"), None)
        .unwrap();
    assert_eq!((changed.version, &changed.id), (2, &made.id));
    assert_eq!(changed.metadata, note("ci"));
    assert_eq!(store.reveal(&name("github")).unwrap().expose(), "second");
    drop(store);

    let store = room.open();
    assert_eq!(store.get_info(&name("github")).unwrap(), changed);
    assert_eq!(room.files().len(), 1);
    store.delete(&name("github")).unwrap();
    assert_eq!(
        store.reveal(&name("github")).unwrap_err().code,
        Code::NotFound
    );
    assert_eq!(
        store.delete(&name("github")).unwrap_err().code,
        Code::NotFound
    );
    assert!(room.files().is_empty());
    drop(store);
    assert!(room.open().infos().is_empty());
}

#[test]
fn names_are_unique_and_values_bounded() {
    let room = room();
    let store = room.open();
    let put = |value: &str| store.create(name("a"), &Secret::new(value), BTreeMap::new());
    assert_eq!(put("").unwrap_err().code, Code::InvalidArgument);
    let long = "x".repeat(MAX_VALUE_BYTES + 1);
    assert_eq!(put(&long).unwrap_err().code, Code::TooLarge);
    put(&long[1..]).unwrap();
    assert_eq!(put("b").unwrap_err().code, Code::Conflict);
    assert_eq!(
        store
            .update(&name("b"), &Secret::new("b"), None)
            .unwrap_err()
            .code,
        Code::NotFound
    );
    drop(store);
    assert_eq!(room.open().reveal(&name("a")).unwrap().expose(), &long[1..]);
}

#[test]
fn the_largest_record_can_be_read_back() {
    let room = room();
    let store = room.open();
    let metadata = BTreeMap::from([(
        "k".to_owned(),
        "\u{1}".repeat(sandkeep_model::MAX_METADATA_BYTES - 1),
    )]);
    store
        .create(
            name("a"),
            &Secret::new("é".repeat(MAX_VALUE_BYTES / 2)),
            metadata,
        )
        .unwrap();
    drop(store);
    assert!(room.open().damaged().is_empty());
}

#[test]
fn the_value_appears_nowhere() {
    let room = room();
    let store = room.open();
    let secret = Secret::new(CANARY);
    let info = store.create(name("github"), &secret, note("x")).unwrap();
    let mut shown = format!("{store:?} {info:?} {secret:?} {:?}", store.infos());
    shown += &serde_json::to_string(&info).unwrap();
    for result in [
        store.create(name("github"), &secret, note("x")),
        store.update(&name("other"), &secret, None),
        store.create(name("long"), &Secret::new(CANARY.repeat(10_000)), note("x")),
    ] {
        shown += &format!("{0} {0:?}", result.unwrap_err());
    }
    for file in room.files() {
        shown += &fs::read_to_string(&file).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    }
    assert!(!shown.contains("canary"));
    assert!(!shown.contains(&STANDARD.encode(CANARY)[..12]));
}

#[test]
fn a_change_of_any_byte_of_a_record_is_noticed() {
    let room = room();
    room.open()
        .create(name("github"), &Secret::new(CANARY), note("ci"))
        .unwrap();
    let file = room.files().remove(0);
    let good = fs::read(&file).unwrap();
    let noticed = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        let store = room.open();
        assert_eq!(store.damaged().len(), 1);
        // The file is named, so that somebody can look.
        let told = store.damaged()[0].to_string();
        assert!(told.contains(file.file_name().unwrap().to_str().unwrap()));
        assert!(store.infos().is_empty());
        assert!(store.reveal(&name("github")).is_err());
    };
    for at in 0..good.len() {
        for change in [1, 32] {
            let mut bad = good.clone();
            bad[at] ^= change;
            noticed(&bad);
        }
        noticed(&good[..at]);
    }
    noticed(&[&good[..], b" "].concat());
    fs::write(&file, &good).unwrap();
    assert_eq!(
        room.open().reveal(&name("github")).unwrap().expose(),
        CANARY
    );
}

#[test]
fn records_can_not_be_swapped() {
    let room = room();
    let store = room.open();
    for (which, value) in [("a", "value of a"), ("b", "value of b")] {
        store
            .create(name(which), &Secret::new(value), BTreeMap::new())
            .unwrap();
    }
    drop(store);
    let files = room.files();
    let read =
        |path| -> serde_json::Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let (first, own) = (read(&files[0]), read(&files[1]));
    let text = fs::read_to_string(&files[1]).unwrap();
    let spliced = text
        .replace(
            own["nonce"].as_str().unwrap(),
            first["nonce"].as_str().unwrap(),
        )
        .replace(
            own["ciphertext"].as_str().unwrap(),
            first["ciphertext"].as_str().unwrap(),
        );
    fs::write(&files[1], spliced).unwrap();
    let store = room.open();
    assert_eq!(store.damaged().len(), 1);
    assert_eq!(store.infos().len(), 1);
    drop(store);
    // A whole record under the name of another file.
    fs::copy(&files[0], &files[1]).unwrap();
    let store = room.open();
    assert!(store.damaged()[0].message.contains("another id"));
    assert_eq!(store.infos().len(), 1);
}

#[test]
fn a_wrong_key_is_told_by_name_and_a_lost_one_at_once() {
    let room = room();
    room.open()
        .create(name("github"), &Secret::new(CANARY), BTreeMap::new())
        .unwrap();
    let KeySource::File(path) = &room.key else {
        unreachable!()
    };
    let own = fs::read_to_string(path).unwrap();
    fs::write(path, "00".repeat(32)).unwrap();
    let store = room.open();
    assert!(
        store.damaged()[0]
            .message
            .contains("github was encrypted with another key")
    );
    drop(store);
    fs::remove_file(path).unwrap();
    let error = SecretStore::open(&room.dir, &room.key).unwrap_err();
    assert!(error.message.contains("missing"), "{error}");
    // The same key by a command opens it again.
    let command = KeySource::Command(vec!["/bin/echo".into(), own.trim().to_owned()]);
    let store = SecretStore::open(&room.dir, &command).unwrap();
    assert_eq!(store.reveal(&name("github")).unwrap().expose(), CANARY);
}

#[test]
fn one_server_at_a_time() {
    let room = room();
    let _store = room.open();
    assert_eq!(
        SecretStore::open(&room.dir, &room.key).unwrap_err().code,
        Code::Conflict
    );
}

#[test]
fn values_without_a_name_are_kept_until_nobody_needs_them() {
    let room = room();
    let store = room.open();
    let value = Secret::new(CANARY);
    let name = store.keep_inline(&value).unwrap();
    assert_eq!(store.keep_inline(&value).unwrap(), name);
    assert_ne!(store.keep_inline(&Secret::new("another")).unwrap(), name);
    assert!(store.infos().is_empty(), "they are nobody's");
    let refused = store.create(name.clone(), &value, BTreeMap::new());
    assert_eq!(refused.unwrap_err().field.as_deref(), Some("name"));
    drop(store);
    let store = room.open();
    assert_eq!(store.reveal(&name).unwrap(), value);
    let later = Timestamp::from_millis(Timestamp::now().millis() + 60_000);
    let in_use = [name.clone()].into();
    assert_eq!(store.sweep_inline(&in_use, Timestamp::from_millis(0)), 0);
    assert_eq!(store.sweep_inline(&in_use, later), 1);
    assert_eq!(store.sweep_inline(&Default::default(), later), 1);
    assert!(store.reveal(&name).is_err());
}

#[test]
fn subkeys_are_of_the_key_and_the_purpose() {
    let room = room();
    let store = room.open();
    let one = store.subkey("one").unwrap();
    assert_ne!(one, store.subkey("two").unwrap());
    drop(store);
    assert_eq!(room.open().subkey("one").unwrap(), one);
    assert_ne!(self::room().open().subkey("one").unwrap(), one);
}
