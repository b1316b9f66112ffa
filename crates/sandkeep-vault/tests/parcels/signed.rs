//! Who signed a parcel: nobody can say that it was somebody else.

use super::{
    AS_IT_IS, MIB, State, TakeIn, export,
    forged::{Parts, packed, text},
    id, import, import_by, noise, snapshot,
};
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use sandkeep_model::{Code, ServerKey};
use sandkeep_vault::Vault;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fs;

/// Whose memory is in a parcel that is refused is read by nobody.
const NEVER: TakeIn = |_| panic!("it was read");

/// A vault that exported a point, the parcel, and another vault.
struct Two {
    _here: State,
    there: State,
    from: Vault,
    to: Vault,
    file: Vec<u8>,
}

impl Two {
    async fn new() -> Self {
        let (here, there) = (State::new(), State::new());
        let (from, to) = (here.open().await, there.open().await);
        let file = another(&from, &noise(4000)).await;
        Self {
            _here: here,
            there,
            from,
            to,
            file,
        }
    }

    /// It is refused in these words, and nothing is left of it.
    async fn refused(&self, what: &str, words: &str, file: Vec<u8>) {
        let error = import_by(&self.to, file, Some(NEVER))
            .await
            .expect_err(what);
        assert_eq!(error.code, Code::InvalidArgument, "{what}: {error}");
        assert!(error.message.contains(words), "{what}: {error}");
        assert_eq!(self.to.points().await.unwrap(), [], "{what}");
        assert_eq!(self.there.staging(), 0, "{what}");
    }

    async fn taken(&self, file: Vec<u8>) -> Option<ServerKey> {
        let opened = import(&self.to, file, true).await.unwrap();
        self.to.remove_point(&opened.point.id).await.unwrap();
        opened.signer
    }
}

/// The parcel of one more point.
async fn another(vault: &Vault, pages: &[u8]) -> Vec<u8> {
    let of = id();
    let tiny = super::common::import_tiny(vault, &format!("t{of}")).await;
    let disk = vault.create_disk(&of, &tiny, 64 * MIB).await.unwrap();
    fs::remove_file(disk.path.join("big")).unwrap();
    fs::write(disk.path.join("file"), "what is on the disk").unwrap();
    let point = snapshot(vault, &of, &[("pages", pages)]).await;
    export(vault, &point).await.unwrap()
}

fn changed(label: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut value = serde_json::from_str(label).unwrap();
    change(&mut value);
    value.to_string()
}

/// Somebody with a key of their own.
struct Stranger(Ed25519KeyPair);

impl Stranger {
    fn new() -> Self {
        Self(Ed25519KeyPair::generate().unwrap())
    }

    fn key(&self) -> ServerKey {
        ServerKey::new(self.0.public_key().as_ref().try_into().unwrap())
    }

    fn sign(&self, parts: &mut Parts, text: &str) {
        let text = text.replace("SUM", parts.seal["sha256"].as_str().unwrap());
        let signature = self.0.sign(text.as_bytes());
        parts.seal["signature"] = STANDARD_NO_PAD.encode(signature).into();
    }
}

const SIGNED: &str = "sandkeep parcel sha256 SUM";
const NOT_SO: &str = "and that is not so";

#[tokio::test]
async fn a_tampered_parcel_with_the_right_sums_is_refused() {
    let two = Two::new().await;
    let whole = Parts::of(&two.file);
    assert_eq!(two.taken(whole.pack()).await, Some(two.from.server_key()));

    let at = |needle: &[u8]| {
        let found = whole.body.windows(needle.len()).position(|w| w == needle);
        found.expect("it is there")
    };
    let memory = at(&noise(4000));
    let mut other = whole.clone();
    other.body[memory + 7] ^= 1;
    two.refused("memory", "memory is not what was written", other.pack())
        .await;
    // With the sum of the label, and that of the seal.
    let sum: String = Sha256::digest(&other.body[memory..memory + 4000])
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    other.label = changed(&other.label, |label| {
        label["memory"][0] = serde_json::json!({"name": "pages", "bytes": 4000, "sha256": sum});
    });
    two.refused("old seal", "not what was sealed", other.pack())
        .await;
    other.sum_up();
    two.refused("memory and sums", NOT_SO, other.pack()).await;

    let mut other = whole.clone();
    other.body[at(b"what is on the disk")] ^= 1;
    other.sum_up();
    two.refused("disk", NOT_SO, other.pack()).await;

    let mut other = whole.clone();
    other.label = changed(&other.label, |label| label["point"]["name"] = "mine".into());
    other.sum_up();
    two.refused("label", NOT_SO, other.pack()).await;

    let text = whole.seal["signature"].as_str().unwrap();
    for place in 0..text.len() {
        let mut other = whole.clone();
        let mut flipped = text.as_bytes().to_vec();
        flipped[place] = if flipped[place] == b'A' { b'B' } else { b'A' };
        other.seal["signature"] = String::from_utf8(flipped).unwrap().into();
        two.refused("signature", "no whole exported point", other.pack())
            .await;
    }
}

#[tokio::test]
async fn a_signature_of_another_parcel_is_refused() {
    let two = Two::new().await;
    let second = another(&two.from, b"others").await;
    let (first, mut second) = (Parts::of(&two.file), Parts::of(&second));
    second.seal["signature"] = first.seal["signature"].clone();
    two.refused("replayed", NOT_SO, second.pack()).await;
    second.seal = first.seal.clone();
    two.refused("whole seal", "not what was sealed", second.pack())
        .await;
    second.label = first.label.clone();
    two.refused("seal and label", "memory", second.pack()).await;
}

#[tokio::test]
async fn nobody_signs_for_another_server() {
    let two = Two::new().await;
    let whole = Parts::of(&two.file);
    let stranger = Stranger::new();

    // With its own key, and the name of the other.
    let mut other = whole.clone();
    stranger.sign(&mut other, SIGNED);
    two.refused("forged", NOT_SO, other.pack()).await;
    // The other way round.
    let mut other = whole.clone();
    other.label = changed(&other.label, |label| {
        label["signer"] = stranger.key().to_string().into();
    });
    other.sum_up();
    two.refused("swapped", NOT_SO, other.pack()).await;
    // What it signs for something else is no parcel.
    for text in ["SUM", "sandkeep token sha256 SUM"] {
        stranger.sign(&mut other, text);
        two.refused("for something else", NOT_SO, other.pack())
            .await;
    }
    // Whoever signs says so, and is told as who it is.
    stranger.sign(&mut other, SIGNED);
    assert_eq!(two.taken(other.pack()).await, Some(stranger.key()));

    // Two names are none.
    let mut twice = other.clone();
    let name = format!("\"signer\":\"{}\",\"signer\":", two.from.server_key());
    twice.label = twice.label.replacen("\"signer\":", &name, 1);
    twice.sum_up();
    stranger.sign(&mut twice, SIGNED);
    two.refused("two names", "its label is wrong", twice.pack())
        .await;
    for wrong in ["", "ed25519:", "ed25519:AAAA", "somebody"] {
        other.label = changed(&other.label, |label| label["signer"] = wrong.into());
        other.sum_up();
        two.refused(wrong, "its label is wrong", other.pack()).await;
    }
}

#[tokio::test]
async fn a_parcel_without_a_signature_is_of_nobody() {
    let two = Two::new().await;
    let whole = Parts::of(&two.file);
    let strip = |seal: &mut Value| seal.as_object_mut().unwrap().remove("signature");

    let mut other = whole.clone();
    strip(&mut other.seal);
    two.refused("missing", NOT_SO, other.pack()).await;
    other.seal["signature"] = Value::Null;
    two.refused("null", NOT_SO, other.pack()).await;

    let mut other = whole.clone();
    other.label = changed(&other.label, |label| {
        label.as_object_mut().unwrap().remove("signer");
    });
    other.sum_up();
    two.refused("by nobody", "does not say by whom", other.pack())
        .await;
    strip(&mut other.seal);
    assert_eq!(two.taken(other.pack()).await, None);
}

#[tokio::test]
async fn nothing_comes_after_the_seal_and_nothing_is_missing() {
    let two = Two::new().await;
    let whole = Parts::of(&two.file);
    let tar = whole.tar();
    let sealed = &tar[..tar.len() - 1024];
    for end in [0, 1, 511, 512, 513, 1023] {
        let cut = packed(&tar[..sealed.len() + end]);
        two.refused("cut off", "no whole exported point", cut).await;
    }
    let mut padded = tar.clone();
    padded.resize(tar.len() + 4096, 0);
    assert!(two.taken(packed(&padded)).await.is_some());

    let with = |name: &str, content: &str| {
        let mut more = tar::Builder::new(Vec::new());
        text(&mut more, name, content);
        [sealed, &more.into_inner().unwrap()].concat()
    };
    let seal = whole.seal.to_string();
    for (name, content) in [
        ("seal.json", seal.as_str()),
        ("memory/pages", "others"),
        ("disk/file", "others"),
    ] {
        two.refused(
            "second",
            "something follows its seal",
            packed(&with(name, content)),
        )
        .await;
    }
    let mut behind = tar.clone();
    behind.extend_from_slice(&tar);
    two.refused("behind", "something follows its end", packed(&behind))
        .await;
    let twice = [packed(&tar), packed(&tar)].concat();
    two.refused("frame", "something follows its end", twice)
        .await;
    import_by(&two.to, two.file.clone(), Some(AS_IT_IS))
        .await
        .unwrap();
}
