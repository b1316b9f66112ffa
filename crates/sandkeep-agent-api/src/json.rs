//! The corners of proto3 JSON that serde does not do by itself.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

const STANDARD: GeneralPurpose = engine(&alphabet::STANDARD);
const URL_SAFE: GeneralPurpose = engine(&alphabet::URL_SAFE);

const fn engine(alphabet: &alphabet::Alphabet) -> GeneralPurpose {
    let config =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    GeneralPurpose::new(alphabet, config)
}

/// Bytes that travel as base64: written in the standard alphabet with padding, read in either
/// alphabet with or without it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blob(pub Bytes);

impl From<Vec<u8>> for Blob {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Bytes::from(bytes))
    }
}

impl From<&[u8]> for Blob {
    fn from(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

impl Serialize for Blob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Blob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        STANDARD
            .decode(text.as_bytes())
            .or_else(|_| URL_SAFE.decode(text.as_bytes()))
            .map(Self::from)
            .map_err(|_| de::Error::custom("not base64"))
    }
}

/// `int64`: a string on the wire, a number accepted as well.
pub(crate) mod int64 {
    use super::{Deserialize, Deserializer, Serializer, de};

    // serde's `with` hands over a reference.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn serialize<S: Serializer>(value: &i64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(i64),
            Text(String),
            Null(()),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => Ok(number),
            Either::Text(text) => text.parse().map_err(|_| de::Error::custom("not an int64")),
            Either::Null(()) => Ok(0),
        }
    }
}

/// In proto3 JSON `null` means the default value.
pub(crate) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_in_every_spelling() {
        for text in ["\"+/8=\"", "\"+/8\"", "\"-_8=\"", "\"-_8\""] {
            let blob: Blob = serde_json::from_str(text).unwrap();
            assert_eq!(&blob.0[..], [0xfb, 0xff]);
        }
        assert_eq!(
            serde_json::to_string(&Blob::from(vec![0xfb, 0xff])).unwrap(),
            "\"+/8=\""
        );
        assert!(serde_json::from_str::<Blob>("\"a b\"").is_err());
    }
}
