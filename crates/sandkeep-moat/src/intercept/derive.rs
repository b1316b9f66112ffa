//! The key of a box's authority, made anew from a seed of the server.
//!
//! So a server that was restarted has the keys of the boxes it finds, though none was written
//! down: programs in them go on trusting what they trusted.

use aws_lc_rs::{
    agreement::{ECDH_P256, PrivateKey},
    hkdf::{HKDF_SHA256, Salt},
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair},
};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls::pki_types::PrivatePkcs8KeyDer;
use sandkeep_model::{Error, Result, SandboxId, Secret};
use zeroize::Zeroizing;

const SALT: &[u8] = b"sandkeep: authority of a box, 1";
/// One number in four thousand million is no key; twice in a row is a fault elsewhere.
const TRIES: u8 = 4;

pub fn key_of(seed: &Secret, id: &SandboxId) -> Result<KeyPair> {
    (0..TRIES)
        .find_map(|count| derive(seed, id, count))
        .ok_or_else(|| Error::internal("no key could be derived for a box"))
}

fn derive(seed: &Secret, id: &SandboxId, count: u8) -> Option<KeyPair> {
    let mut scalar = Zeroizing::new([0_u8; 32]);
    Salt::new(HKDF_SHA256, SALT)
        .extract(seed.expose().as_bytes())
        .expand(&[id.to_string().as_bytes(), &[count]], HKDF_SHA256)
        .and_then(|key| key.fill(scalar.as_mut_slice()))
        .ok()?;
    let public = PrivateKey::from_private_key(&ECDH_P256, scalar.as_slice())
        .ok()?
        .compute_public_key()
        .ok()?;
    let pair = EcdsaKeyPair::from_private_key_and_public_key(
        &ECDSA_P256_SHA256_ASN1_SIGNING,
        scalar.as_slice(),
        public.as_ref(),
    )
    .ok()?;
    let document = pair.to_pkcs8v1().ok()?;
    let der = PrivatePkcs8KeyDer::from(document.as_ref());
    KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ECDSA_P256_SHA256).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_for_the_same_and_no_other() {
        let (seed, id) = (Secret::random(), SandboxId::random());
        let public =
            |seed: &Secret, id: &SandboxId| key_of(seed, id).unwrap().public_key_raw().to_vec();
        assert_eq!(public(&seed, &id), public(&seed, &id));
        assert_ne!(public(&seed, &id), public(&seed, &SandboxId::random()));
        assert_ne!(public(&seed, &id), public(&Secret::random(), &id));
    }
}
