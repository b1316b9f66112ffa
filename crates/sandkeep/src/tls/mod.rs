//! TLS on the server's own port: a certificate of the operator's, or one for trying out.

mod certificate;
mod self_signed;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ServerConfig, crypto::CryptoProvider};
use sandkeep_model::{Error, Result};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use certificate::Certificate;
pub use self_signed::check_domain;

/// The first byte of every TLS connection: a handshake record.
const HANDSHAKE: u8 = 0x16;

/// Where the certificate comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TlsSettings {
    Files { cert: PathBuf, key: PathBuf },
    SelfSigned { domain: String },
}

/// What turns a connection into an encrypted one.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    /// What clients must trust, where it is our own.
    pub authority: Option<PathBuf>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls")
            .field("authority", &self.authority)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Files are looked at again and again from now on, and taken when they are others.
    pub fn open(settings: &TlsSettings, state: &Path) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let (certificate, authority) = match settings {
            TlsSettings::Files { cert, key } => {
                let certificate = Certificate::read(cert, key, Arc::clone(&provider))?;
                tokio::spawn(Arc::clone(&certificate).follow());
                (certificate, None)
            }
            TlsSettings::SelfSigned { domain } => {
                let made = self_signed::make(&state.join("tls"), domain, &provider)?;
                (Certificate::fixed(made.key), Some(made.authority))
            }
        };
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(config(certificate, provider)?)),
            authority,
        })
    }

    pub async fn accept<IO>(&self, stream: IO) -> io::Result<TlsStream<IO>>
    where
        IO: AsyncRead + AsyncWrite + Unpin,
    {
        self.acceptor.accept(stream).await
    }
}

fn config(certificate: Arc<Certificate>, provider: Arc<CryptoProvider>) -> Result<ServerConfig> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::internal(format!("setting up TLS: {error}")))?
        .with_no_client_auth()
        .with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// How a client begins to speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begins {
    Encrypted,
    Plain,
    /// It left without a word.
    Nothing,
}

/// Waits for the first byte, and leaves it there.
pub async fn begins(stream: &TcpStream) -> io::Result<Begins> {
    let mut first = [0];
    Ok(match stream.peek(&mut first).await? {
        0 => Begins::Nothing,
        _ if first[0] == HANDSHAKE => Begins::Encrypted,
        _ => Begins::Plain,
    })
}

/// Whether nobody but this machine hears what is said on a connection from there.
pub fn is_here(peer: SocketAddr) -> bool {
    match peer.ip() {
        IpAddr::V4(ip) => ip.is_loopback(),
        IpAddr::V6(ip) => {
            ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_here() {
        for (peer, here) in [
            ("127.0.0.1:5", true),
            ("[::1]:5", true),
            ("[::ffff:127.0.0.1]:5", true),
            ("10.0.0.1:5", false),
            ("[::ffff:10.0.0.1]:5", false),
        ] {
            assert_eq!(is_here(peer.parse().unwrap()), here, "{peer}");
        }
    }
}
