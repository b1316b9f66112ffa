//! AES-256-GCM. Each value has its own random nonce, and is bound to what is written beside it.

use aws_lc_rs::{
    aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey},
    digest, hkdf,
};
use sandkeep_model::{Error, Result, Secret};
use zeroize::{Zeroize as _, Zeroizing};

use crate::key::{Key, hex};

pub(crate) struct Cipher {
    key: RandomizedNonceKey,
    /// Tells keys apart without telling anything of them.
    pub key_id: String,
    subkeys: hkdf::Prk,
}

/// A value nobody can read without the key.
pub(crate) struct Sealed {
    pub nonce: Vec<u8>,
    pub ciphertext: Vec<u8>,
}

impl Cipher {
    pub fn new(key: &Key) -> Result<Self> {
        let mut named = digest::Context::new(&digest::SHA256);
        named.update(b"sandkeep secrets key id\0");
        named.update(key.as_ref());
        Ok(Self {
            key_id: hex(&named.finish().as_ref()[..8]),
            key: RandomizedNonceKey::new(&AES_256_GCM, key.as_ref())
                .map_err(|_| Error::internal("the secrets key has the wrong length"))?,
            subkeys: hkdf::Salt::new(hkdf::HKDF_SHA256, b"sandkeep secrets subkeys")
                .extract(key.as_ref()),
        })
    }

    /// The same for the same key and purpose; from it nobody gets to the key or another one.
    pub fn subkey(&self, purpose: &str) -> Result<Secret> {
        let mut bytes = Zeroizing::new([0_u8; 32]);
        self.subkeys
            .expand(&[purpose.as_bytes()], hkdf::HKDF_SHA256)
            .and_then(|key| key.fill(bytes.as_mut_slice()))
            .map_err(|_| Error::internal("deriving a key failed"))?;
        Ok(Secret::new(hex(bytes.as_slice())))
    }

    pub fn seal(&self, secret: &Secret, beside: &[u8]) -> Result<Sealed> {
        // Room for the tag: a vector that grows leaves a copy of the value behind.
        let mut bytes = Vec::with_capacity(secret.expose().len() + AES_256_GCM.tag_len());
        bytes.extend_from_slice(secret.expose().as_bytes());
        match self
            .key
            .seal_in_place_append_tag(Aad::from(beside), &mut bytes)
        {
            Ok(nonce) => Ok(Sealed {
                nonce: nonce.as_ref().to_vec(),
                ciphertext: bytes,
            }),
            Err(_) => {
                bytes.zeroize();
                Err(Error::internal("encrypting a secret failed"))
            }
        }
    }

    /// `None` if the key is another one, or if anything was changed.
    pub fn open(&self, sealed: &Sealed, beside: &[u8]) -> Option<Secret> {
        let nonce: [u8; NONCE_LEN] = sealed.nonce.as_slice().try_into().ok()?;
        let mut bytes = Zeroizing::new(sealed.ciphertext.clone());
        let plain = self
            .key
            .open_in_place(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(beside),
                &mut bytes,
            )
            .ok()?;
        std::str::from_utf8(plain).ok().map(Secret::new)
    }
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cipher({})", self.key_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_opens_but_the_whole_as_it_was() {
        let cipher = Cipher::new(&Zeroizing::new([7; 32])).unwrap();
        let other = Cipher::new(&Zeroizing::new([8; 32])).unwrap();
        let secret = Secret::new("canary");
        let sealed = cipher.seal(&secret, b"name").unwrap();
        assert_eq!(cipher.open(&sealed, b"name").unwrap(), secret);
        assert!(cipher.open(&sealed, b"nam").is_none());
        assert!(other.open(&sealed, b"name").is_none());
        assert_ne!(cipher.key_id, other.key_id);
        let again = cipher.seal(&secret, b"name").unwrap();
        assert_ne!(again.nonce, sealed.nonce);
        for short in [0, 1, 15] {
            let cut = Sealed {
                nonce: sealed.nonce.clone(),
                ciphertext: sealed.ciphertext[..short].to_vec(),
            };
            assert!(cipher.open(&cut, b"name").is_none());
        }
    }
}
