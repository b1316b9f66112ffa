//! Values that must not be seen.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use std::fmt;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// What every API key begins with that the server makes. It is no secret.
pub const API_KEY_PREFIX: &str = "e2b_";

/// A key or token. It can not be printed or serialised by accident, is compared in
/// constant time and is wiped when dropped; [`Secret::expose`] is the one way to the text.
#[derive(Clone)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(Zeroizing::new(text.into()))
    }

    /// 48 random characters: more than 240 bits.
    pub fn random() -> Self {
        Self::new(crate::random_token(48))
    }

    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Another secret for one purpose, the same every time; it does not lead back to this one.
    /// Only for secrets that cannot be guessed, as [`Secret::random`] makes them.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> Self {
        let digest = Sha256::new()
            .chain_update(purpose)
            .chain_update([0])
            .chain_update(self.expose())
            .finalize();
        Self::new(URL_SAFE_NO_PAD.encode(digest))
    }

    /// Whether `given` is this secret, without telling by the time it takes.
    pub fn matches(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.matches(other.0.as_bytes())
    }
}

impl Eq for Secret {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_printed() {
        let secret = Secret::new("hunter2");
        assert_eq!(
            format!("{secret:?} {:?}", Some(&secret)),
            "[secret] Some([secret])"
        );
        assert!(secret.matches(b"hunter2"));
        assert!(!secret.matches(b"hunter"));
        assert_ne!(Secret::random(), Secret::random());
    }

    #[test]
    fn derived_ones_differ_by_purpose_and_stay_the_same() {
        let secret = Secret::new("hunter2");
        assert_eq!(secret.derive("a"), Secret::new("hunter2").derive("a"));
        assert_ne!(secret.derive("a"), secret.derive("b"));
        assert_ne!(secret.derive("a"), Secret::new("hunter3").derive("a"));
        assert_eq!(secret.derive("a").expose().len(), 43);
    }
}
