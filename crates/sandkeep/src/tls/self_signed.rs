//! An authority of our own and a certificate for one domain and all names below it, for trying out.
//!
//! The authority can sign for this domain and for loopback only, whoever gets hold of its key.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, PKCS_ECDSA_P256_SHA256, SanType,
};
use rustls::{
    crypto::CryptoProvider,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    sign::CertifiedKey,
};
use sandkeep_model::{Error, Result};
use time::OffsetDateTime;

const DAY: Duration = Duration::from_secs(24 * 3600);
const AUTHORITY_DAYS: u32 = 3650;
/// Made anew at each start. The longest that Apple's clients take.
const LEAF_DAYS: u32 = 397;

pub struct Made {
    pub key: CertifiedKey,
    /// The file clients trust.
    pub authority: PathBuf,
}

/// At least two labels: certificates for `*.localhost` or `*.org` are refused by clients.
pub fn check_domain(domain: &str) -> Result<()> {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    if domain.len() <= 200 && domain.contains('.') && domain.split('.').all(label) {
        return Ok(());
    }
    let shown: String = domain.chars().take(80).collect();
    Err(Error::invalid(
        "tls_self_signed",
        format!(
            "\"{}\" is not a domain of at least two names",
            shown.escape_debug()
        ),
    )
    .hint("write one like boxes.localhost or sandboxes.example.org"))
}

/// The authority of this directory and domain, made on first use, and a fresh certificate of it.
pub fn make(dir: &Path, domain: &str, provider: &CryptoProvider) -> Result<Made> {
    let dir = dir.join(domain);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir)
        .map_err(|error| Error::from(error).context(format!("making {}", dir.display())))?;
    let authority = dir.join("ca.pem");
    let key = authority_key(&dir, &authority, domain)?;
    let issuer = Issuer::new(authority_params(domain)?, key);
    let leaf_key = new_key()?;
    let leaf = leaf_params(domain)?
        .signed_by(&leaf_key, &issuer)
        .map_err(failed)?;
    let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf_key.serialize_der()));
    let key = CertifiedKey::from_der(vec![leaf.der().clone()], der, provider).map_err(failed)?;
    Ok(Made { key, authority })
}

fn authority_key(dir: &Path, authority: &Path, domain: &str) -> Result<KeyPair> {
    let path = dir.join("ca-key.pem");
    if authority.exists()
        && let Ok(text) = fs::read_to_string(&path)
    {
        return KeyPair::from_pem(&text).map_err(failed);
    }
    let key = new_key()?;
    let certificate = authority_params(domain)?
        .self_signed(&key)
        .map_err(failed)?;
    // The key first: a certificate without one would be trusted and of no use.
    write(&path, &key.serialize_pem(), 0o600)?;
    write(authority, &certificate.pem(), 0o644)?;
    Ok(key)
}

fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    let written = || -> std::io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    written().map_err(|error| Error::from(error).context(format!("writing {}", path.display())))
}

fn new_key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)
}

/// The same each time but for its dates: what was signed under it before stays valid.
fn authority_params(domain: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(&format!("Sandkeep for {domain}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let loopback = [
        IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(Ipv6Addr::LOCALHOST),
    ]
    .map(|ip| {
        let bits = if ip.is_ipv4() { 8 } else { 128 };
        GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(ip, bits))
    });
    let mut permitted = vec![
        GeneralSubtree::DnsName(domain.to_owned()),
        GeneralSubtree::DnsName("localhost".to_owned()),
    ];
    permitted.extend(loopback);
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: permitted,
        excluded_subtrees: Vec::new(),
    });
    valid_for(&mut params, AUTHORITY_DAYS);
    Ok(params)
}

fn leaf_params(domain: &str) -> Result<CertificateParams> {
    let names = vec![
        domain.to_owned(),
        format!("*.{domain}"),
        "localhost".to_owned(),
    ];
    let mut params = CertificateParams::new(names).map_err(failed)?;
    params.subject_alt_names.extend([
        SanType::IpAddress(Ipv4Addr::LOCALHOST.into()),
        SanType::IpAddress(Ipv6Addr::LOCALHOST.into()),
    ]);
    params.distinguished_name = named("Sandkeep");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    valid_for(&mut params, LEAF_DAYS);
    Ok(params)
}

fn named(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, "Sandkeep");
    name.push(DnType::CommonName, common_name);
    name
}

fn valid_for(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now();
    params.not_before = OffsetDateTime::from(now - DAY);
    params.not_after = OffsetDateTime::from(now + DAY * days);
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::internal(format!("a certificate could not be made: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domains_that_clients_take() {
        for good in ["boxes.localhost", "a.example.org", "x-1.test"] {
            assert!(check_domain(good).is_ok(), "{good}");
        }
        for bad in [
            "localhost",
            "",
            ".a",
            "a.",
            "A.test",
            "a b.test",
            "*.a.test",
            "-a.test",
        ] {
            let error = check_domain(bad).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("tls_self_signed"), "{bad}");
        }
    }

    #[test]
    fn the_authority_stays_and_its_key_is_private() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let first = make(dir.path(), "boxes.localhost", &provider).unwrap();
        let pem = fs::read_to_string(&first.authority).unwrap();
        let again = make(dir.path(), "boxes.localhost", &provider).unwrap();
        assert_eq!(fs::read_to_string(&again.authority).unwrap(), pem);
        assert!(!pem.contains("PRIVATE"));
        let key = first.authority.with_file_name("ca-key.pem");
        assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o077, 0);
    }
}
