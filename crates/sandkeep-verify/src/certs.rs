//! A certificate authority for the outside, trusted by the private server alone.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use rustls::{
    ServerConfig,
    crypto::CryptoProvider,
    pki_types::PrivateKeyDer,
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

use crate::fault::{Fault, Result};

fn failed(error: impl std::fmt::Display) -> Fault {
    Fault::Cannot(format!("making a certificate: {error}"))
}

/// The configuration of the outside's TLS servers, and the root that vouches for them. `impostor`
/// gets a certificate of an authority that nobody trusts.
pub fn authority(names: &[&str], impostor: &str) -> Result<(Arc<ServerConfig>, String)> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let (known, root) = issue(&provider, names)?;
    let (unknown, _) = issue(&provider, &[impostor])?;
    let resolver = Arc::new(ByName {
        known,
        unknown,
        impostor: impostor.to_owned(),
    });
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(failed)?
        .with_no_client_auth()
        .with_cert_resolver(resolver);
    Ok((Arc::new(config), root))
}

fn key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)
}

fn issue(provider: &CryptoProvider, names: &[&str]) -> Result<(Arc<CertifiedKey>, String)> {
    let mut root = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "sandkeep verify");
    root.distinguished_name = name;
    root.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    root.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let issuer = CertifiedIssuer::self_signed(root, key()?).map_err(failed)?;

    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let leaf_key = key()?;
    let mut leaf = CertificateParams::new(names).map_err(failed)?;
    leaf.use_authority_key_identifier_extension = true;
    let certificate = leaf.signed_by(&leaf_key, &issuer).map_err(failed)?;
    let der = PrivateKeyDer::try_from(leaf_key.serialize_der()).map_err(failed)?;
    let signer = provider
        .key_provider
        .load_private_key(der)
        .map_err(failed)?;
    let certified = CertifiedKey::new(vec![certificate.der().clone()], signer);
    Ok((Arc::new(certified), issuer.pem()))
}

#[derive(Debug)]
struct ByName {
    known: Arc<CertifiedKey>,
    unknown: Arc<CertifiedKey>,
    impostor: String,
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let chosen = if hello.server_name() == Some(&self.impostor) {
            &self.unknown
        } else {
            &self.known
        };
        Some(Arc::clone(chosen))
    }
}
