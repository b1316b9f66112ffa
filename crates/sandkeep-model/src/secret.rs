//! Values that must not be seen.

use std::fmt;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

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
}
