//! One signing key.

use aws_lc_rs::{
    encoding::AsDer as _,
    rand::SystemRandom,
    rsa::KeySize,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, RsaKeyPair},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use jsonwebtoken::{
    Algorithm, DecodingKey, EncodingKey,
    jwk::{Jwk, PublicKeyUse, ThumbprintHash},
};
use sandkeep_model::{Error, Result, Timestamp};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

/// How tokens are signed. Verifiers in the cloud know all three; ES256 is short and quick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SigningAlgorithm {
    #[default]
    #[serde(rename = "ES256")]
    Es256,
    #[serde(rename = "EdDSA")]
    EdDsa,
    #[serde(rename = "RS256")]
    Rs256,
}

impl SigningAlgorithm {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
            Self::Rs256 => "RS256",
        }
    }

    pub(crate) const fn jose(self) -> Algorithm {
        match self {
            Self::Es256 => Algorithm::ES256,
            Self::EdDsa => Algorithm::EdDSA,
            Self::Rs256 => Algorithm::RS256,
        }
    }
}

impl std::str::FromStr for SigningAlgorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Es256, Self::EdDsa, Self::Rs256]
            .into_iter()
            .find(|known| known.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| {
                Error::invalid("algorithm", "this signing algorithm is not known")
                    .hint("choose ES256, EdDSA or RS256")
            })
    }
}

/// A key pair and what it is known by. The private half is never printed.
pub(crate) struct SigningKey {
    /// The RFC 7638 thumbprint of the public half.
    pub kid: String,
    pub algorithm: SigningAlgorithm,
    pub created: Timestamp,
    /// Since when it signs nothing more; it still verifies until its last token has ended.
    pub retired: Option<Timestamp>,
    pub public: Jwk,
    pub signs: EncodingKey,
    pub verifies: DecodingKey,
}

/// A key as it stands in the key file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StoredKey {
    algorithm: SigningAlgorithm,
    created: Timestamp,
    retired: Option<Timestamp>,
    /// DER in base64: PKCS#8, and for RSA PKCS#1.
    private_key: PrivateText,
}

/// Wiped when dropped.
struct PrivateText(Zeroizing<String>);

impl Serialize for PrivateText {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for PrivateText {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self(Zeroizing::new(text)))
    }
}

impl SigningKey {
    pub fn generate(algorithm: SigningAlgorithm, now: Timestamp) -> Result<Self> {
        let fault = |_| Error::internal("making a signing key failed");
        let random = SystemRandom::new();
        let der = match algorithm {
            SigningAlgorithm::Es256 => {
                EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random)
                    .map(|document| Zeroizing::new(document.as_ref().to_vec()))
                    .map_err(fault)?
            }
            SigningAlgorithm::EdDsa => Ed25519KeyPair::generate_pkcs8v1(&random)
                .map(|document| Zeroizing::new(document.as_ref().to_vec()))
                .map_err(fault)?,
            SigningAlgorithm::Rs256 => {
                let pair = RsaKeyPair::generate(KeySize::Rsa2048).map_err(fault)?;
                let pkcs8 = pair.as_der().map_err(fault)?;
                let inner = rsa_private_key(pkcs8.as_ref())
                    .ok_or_else(|| Error::internal("a new RSA key has an unknown form"))?;
                Zeroizing::new(inner.to_vec())
            }
        };
        Self::from_der(algorithm, &der, now, None)
    }

    fn from_der(
        algorithm: SigningAlgorithm,
        der: &[u8],
        created: Timestamp,
        retired: Option<Timestamp>,
    ) -> Result<Self> {
        let signs = match algorithm {
            SigningAlgorithm::Es256 => EncodingKey::from_ec_der(der),
            SigningAlgorithm::EdDsa => EncodingKey::from_ed_der(der),
            SigningAlgorithm::Rs256 => EncodingKey::from_rsa_der(der),
        };
        let fault = |_| Error::internal(format!("a {} key is damaged", algorithm.name()));
        let mut public = Jwk::from_encoding_key(&signs, algorithm.jose()).map_err(fault)?;
        let kid = public.thumbprint(ThumbprintHash::SHA256).map_err(fault)?;
        public.common.key_id = Some(kid.clone());
        public.common.public_key_use = Some(PublicKeyUse::Signature);
        let verifies = DecodingKey::from_jwk(&public).map_err(fault)?;
        Ok(Self {
            kid,
            algorithm,
            created,
            retired,
            public,
            signs,
            verifies,
        })
    }

    pub fn load(stored: &StoredKey) -> Result<Self> {
        let der = STANDARD
            .decode(stored.private_key.0.as_bytes())
            .map(Zeroizing::new)
            .map_err(|_| {
                Error::internal(format!("a {} key is damaged", stored.algorithm.name()))
            })?;
        Self::from_der(stored.algorithm, &der, stored.created, stored.retired)
    }

    /// As it is to be written down once another key signs.
    pub fn store_retired(&self, now: Timestamp) -> StoredKey {
        StoredKey {
            retired: Some(self.retired.unwrap_or(now)),
            ..self.store()
        }
    }

    pub fn store(&self) -> StoredKey {
        StoredKey {
            algorithm: self.algorithm,
            created: self.created,
            retired: self.retired,
            private_key: PrivateText(Zeroizing::new(STANDARD.encode(self.signs.as_bytes()))),
        }
    }
}

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SigningKey")
            .field("kid", &self.kid)
            .field("algorithm", &self.algorithm)
            .field("retired", &self.retired)
            .finish_non_exhaustive()
    }
}

/// The PKCS#1 key inside a PKCS#8 document: the signer takes RSA keys only in that form.
fn rsa_private_key(pkcs8: &[u8]) -> Option<&[u8]> {
    const SEQUENCE: u8 = 0x30;
    const INTEGER: u8 = 0x02;
    const OCTETS: u8 = 0x04;
    let (outer, rest) = der_value(pkcs8, SEQUENCE)?;
    if !rest.is_empty() {
        return None;
    }
    let (_version, after) = der_value(outer, INTEGER)?;
    let (_algorithm, after) = der_value(after, SEQUENCE)?;
    der_value(after, OCTETS).map(|(key, _)| key)
}

/// The content of the value `der` begins with, if it has this tag, and what follows it.
fn der_value(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    if found != tag {
        return None;
    }
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let count = usize::from(first & 0x7f);
        if count == 0 || count > 4 {
            return None;
        }
        let (bytes, rest) = rest.split_at_checked(count)?;
        let length = bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        (length, rest)
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_key_is_kept_and_found_again() {
        for algorithm in [
            SigningAlgorithm::Es256,
            SigningAlgorithm::EdDsa,
            SigningAlgorithm::Rs256,
        ] {
            let key = SigningKey::generate(algorithm, Timestamp::now()).unwrap();
            let text = serde_json::to_string(&key.store()).unwrap();
            let again = SigningKey::load(&serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(again.kid, key.kid);
            assert_eq!(again.public, key.public);
            assert_eq!(
                algorithm.name().parse::<SigningAlgorithm>().unwrap(),
                algorithm
            );
            // 43 characters of base64url: 256 bits.
            assert_eq!(key.kid.len(), 43);
        }
    }

    #[test]
    fn the_private_half_is_not_shown() {
        let key = SigningKey::generate(SigningAlgorithm::Rs256, Timestamp::now()).unwrap();
        let private = key.store().private_key.0;
        let shown = format!("{key:?} {}", serde_json::to_string(&key.public).unwrap());
        for start in (0..private.len() - 24).step_by(24) {
            // The modulus is public and part of the private form too; base64 hides it at odd
            // offsets, so only the exponents and primes at the end are looked for.
            if start > private.len() / 2 {
                assert!(!shown.contains(&private[start..start + 24]));
            }
        }
        assert!(
            !serde_json::to_string(&key.public)
                .unwrap()
                .contains("\"d\"")
        );
    }

    #[test]
    fn damaged_keys_are_refused_in_words() {
        let key = SigningKey::generate(SigningAlgorithm::Es256, Timestamp::now()).unwrap();
        let mut stored = key.store();
        stored.private_key = PrivateText(Zeroizing::new("AAAA".into()));
        assert!(
            SigningKey::load(&stored)
                .unwrap_err()
                .message
                .contains("damaged")
        );
        stored.private_key = PrivateText(Zeroizing::new("*".into()));
        assert!(SigningKey::load(&stored).is_err());
        assert!(rsa_private_key(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]).is_none());
        assert!(rsa_private_key(&[]).is_none());
    }
}
