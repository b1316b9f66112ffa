//! The certificate authority of one box. Its key exists only in the memory of the server.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SerialNumber,
};
use rustls::{
    ServerConfig,
    crypto::CryptoProvider,
    pki_types::PrivateKeyDer,
    server::NoServerSessionStorage,
    sign::{CertifiedKey, SigningKey, SingleCertAndKey},
};
use sandkeep_model::{Error, Result, SandboxId, Secret};
use time::OffsetDateTime;

use super::{derive::key_of, http2, upstream::provider};
use crate::policy::Host;

/// Longer than boxes live. Only the one box trusts it.
const AUTHORITY_DAYS: u32 = 400;
const LEAF_DAYS: u32 = 7;
/// Clocks in microVMs that slept lag behind.
const BACKDATED_DAYS: u32 = 1;
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Hosts whose certificate is kept; more make the oldest go.
const KEPT_LEAVES: usize = 128;
const HTTP_1: &[u8] = b"http/1.1";

pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    pem: String,
    provider: Arc<CryptoProvider>,
    /// One key for all leaves: making one costs more than signing a certificate.
    leaf_key: KeyPair,
    leaf_signer: Arc<dyn SigningKey>,
    leaves: Mutex<HashMap<Host, Leaf>>,
}

struct Leaf {
    made: Instant,
    config: Arc<ServerConfig>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authority")
    }
}

fn failed(error: impl fmt::Display) -> Error {
    Error::internal(format!("a certificate could not be made: {error}"))
}

fn new_key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)
}

impl Authority {
    /// With a seed, what was signed before with the same seed and box goes on being trusted.
    pub fn new(id: &SandboxId, seed: Option<&Secret>) -> Result<Self> {
        let provider = provider();
        let mut params = CertificateParams::default();
        params.distinguished_name = named(&format!("Sandkeep box {id}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        valid_for(&mut params, AUTHORITY_DAYS);
        params.serial_number = Some(random_serial(&provider)?);
        let key = match seed {
            Some(seed) => key_of(seed, id)?,
            None => new_key()?,
        };
        let issuer = CertifiedIssuer::self_signed(params, key).map_err(failed)?;
        let leaf_key = new_key()?;
        let der = PrivateKeyDer::try_from(leaf_key.serialize_der()).map_err(failed)?;
        let leaf_signer = provider
            .key_provider
            .load_private_key(der)
            .map_err(failed)?;
        Ok(Self {
            pem: issuer.pem(),
            issuer,
            provider,
            leaf_key,
            leaf_signer,
            leaves: Mutex::default(),
        })
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// What to be towards the box when it wants this host.
    pub fn server_for(&self, host: &Host) -> Result<Arc<ServerConfig>> {
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(leaf) = leaves.get(host)
            && leaf.made.elapsed() < DAY
        {
            return Ok(Arc::clone(&leaf.config));
        }
        if leaves.len() >= KEPT_LEAVES
            && let Some(oldest) = leaves
                .iter()
                .min_by_key(|(_, leaf)| leaf.made)
                .map(|(host, _)| host.clone())
        {
            leaves.remove(&oldest);
        }
        let config = Arc::new(self.mint(host)?);
        let leaf = Leaf {
            made: Instant::now(),
            config: Arc::clone(&config),
        };
        leaves.insert(host.clone(), leaf);
        Ok(config)
    }

    fn mint(&self, host: &Host) -> Result<ServerConfig> {
        let name = host.to_string();
        let mut params = CertificateParams::new(vec![name]).map_err(failed)?;
        // A common name has at most 64 characters; the host stands in the alternative names.
        params.distinguished_name = named("Sandkeep interception");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        valid_for(&mut params, LEAF_DAYS);
        params.serial_number = Some(random_serial(&self.provider)?);
        let certificate = params
            .signed_by(&self.leaf_key, &self.issuer)
            .map_err(failed)?;
        let certified = CertifiedKey::new(
            vec![certificate.der().clone()],
            Arc::clone(&self.leaf_signer),
        );
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
        // In the order of our liking: HTTP/1.1 is the smaller thing to get right.
        config.alpn_protocols = vec![HTTP_1.to_vec(), http2::PROTOCOL.to_vec()];
        // Nothing of a session is kept for the next one: less memory, and no session outlives a
        // change of policy.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

fn named(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, "Sandkeep");
    name.push(DnType::CommonName, common_name);
    name
}

fn valid_for(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now();
    params.not_before = OffsetDateTime::from(now - DAY * BACKDATED_DAYS);
    params.not_after = OffsetDateTime::from(now + DAY * days);
}

/// By default rcgen takes the hash of the key, which is the same for all leaves here; two
/// certificates of one issuer with one number are refused by some clients.
fn random_serial(provider: &CryptoProvider) -> Result<SerialNumber> {
    let mut bytes = [0_u8; 16];
    provider
        .secure_random
        .fill(&mut bytes)
        .map_err(|_| failed("no random numbers"))?;
    // Positive, and of one length.
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

#[cfg(test)]
mod tests {
    use rustls::{
        ClientConfig, ClientConnection, RootCertStore, ServerConnection,
        pki_types::{CertificateDer, pem::PemObject},
    };

    use super::*;

    fn authority() -> Authority {
        Authority::new(&SandboxId::random(), None).unwrap()
    }

    #[test]
    fn every_box_has_its_own() {
        let (one, other) = (authority(), authority());
        assert!(one.pem().starts_with("-----BEGIN CERTIFICATE-----"));
        assert!(!one.pem().contains("PRIVATE"));
        assert_ne!(one.pem(), other.pem());
    }

    /// Whether a client that trusts `pem` gets along with the server.
    fn gets_along(pem: &str, server: Arc<ServerConfig>) -> bool {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
            .unwrap();
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "a.test".try_into().unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut server = ServerConnection::new(server).unwrap();
        while client.is_handshaking() {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut bytes.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                client.read_tls(&mut rest).unwrap();
                if client.process_new_packets().is_err() {
                    return false;
                }
            }
        }
        true
    }

    #[test]
    fn a_box_goes_on_trusting_a_server_with_the_same_seed() {
        let host: Host = "a.test".parse().unwrap();
        let (seed, id) = (Secret::random(), SandboxId::random());
        let before = Authority::new(&id, Some(&seed)).unwrap();
        let after = Authority::new(&id, Some(&seed)).unwrap();
        assert!(gets_along(before.pem(), after.server_for(&host).unwrap()));
        let other = Authority::new(&SandboxId::random(), Some(&seed)).unwrap();
        assert!(!gets_along(before.pem(), other.server_for(&host).unwrap()));
        let without = Authority::new(&id, None).unwrap();
        assert!(!gets_along(
            before.pem(),
            without.server_for(&host).unwrap()
        ));
        let elsewhere = after.server_for(&"b.test".parse().unwrap());
        assert!(!gets_along(before.pem(), elsewhere.unwrap()));
    }

    #[test]
    fn leaves_are_kept_and_bounded() {
        let authority = authority();
        let host = |at: usize| format!("n{at}.test").parse::<Host>().unwrap();
        let first = authority.server_for(&host(0)).unwrap();
        assert!(Arc::ptr_eq(
            &first,
            &authority.server_for(&host(0)).unwrap()
        ));
        for at in 1..=KEPT_LEAVES {
            authority.server_for(&host(at)).unwrap();
        }
        let leaves = authority.leaves.lock().unwrap();
        assert_eq!(leaves.len(), KEPT_LEAVES);
        assert!(!leaves.contains_key(&host(0)));
    }
}
