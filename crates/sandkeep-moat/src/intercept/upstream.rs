//! The far side: a verified TLS connection to the real host.

use std::{error::Error as StdError, fmt, io, path::Path, sync::Arc, time::Duration};

use http::Request;
use hyper::{
    Response,
    body::Incoming,
    client::conn::{TrySendError, http1, http2},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use sandkeep_model::{Error, Result};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::task::AbortOnDropHandle;

use super::http2::{PROTOCOL, head_limit};
use crate::{
    policy::Host,
    proxy::{DialError, MAX_HEAD, Wayout},
};

const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);

/// Never the process-wide one: what others install there must not change this.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Whose word is taken for who a host is.
#[derive(Debug, Clone)]
pub enum Trust {
    /// The roots of this host, and these.
    System {
        more: Vec<CertificateDer<'static>>,
    },
    Only(Vec<CertificateDer<'static>>),
}

impl Default for Trust {
    fn default() -> Self {
        Self::System { more: Vec::new() }
    }
}

impl Trust {
    /// The roots of this host, and those in a PEM file.
    pub fn system_and(file: &Path) -> Result<Self> {
        let bad = |why: String| {
            Error::invalid("upstream_ca", format!("{}: {why}", file.display()))
                .hint("it must hold certificates as PEM (-----BEGIN CERTIFICATE-----)")
        };
        let more = CertificateDer::pem_file_iter(file)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| bad(error.to_string()))?;
        if more.is_empty() {
            return Err(bad("there is no certificate in it".to_owned()));
        }
        Ok(Self::System { more })
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        let own = match self {
            Self::System { more } => {
                let found = rustls_native_certs::load_native_certs();
                for error in &found.errors {
                    tracing::warn!(%error, "a trusted root certificate can not be read");
                }
                // System stores hold old certificates that can not be parsed; they do no harm.
                roots.add_parsable_certificates(found.certs);
                more
            }
            Self::Only(own) => own,
        };
        for certificate in own {
            roots.add(certificate.clone()).map_err(|error| {
                Error::invalid("trust", format!("a root certificate is not valid: {error}"))
            })?;
        }
        if roots.is_empty() {
            tracing::warn!("no root certificates: no host under interception can be reached");
        }
        Ok(roots)
    }
}

/// Makes connections to the real hosts.
#[derive(Clone)]
pub struct Connector {
    one: TlsConnector,
    both: TlsConnector,
}

/// What the program in the box speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tongue {
    Http1,
    Http2,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

#[derive(Debug)]
pub enum ConnectError {
    Dial(DialError),
    /// The host could not prove who it is.
    Untrusted(String),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        Self::Dial(error.into())
    }
}

impl From<hyper::Error> for ConnectError {
    fn from(error: hyper::Error) -> Self {
        io::Error::other(error).into()
    }
}

/// An open connection.
pub struct Upstream {
    sender: Sender,
    /// Ends with the session: nothing of a box lives on without it.
    pub driver: AbortOnDropHandle<()>,
}

enum Sender {
    /// For requests one after the other.
    One(http1::SendRequest<Incoming>),
    Many(Many),
}

/// For requests side by side.
#[derive(Clone)]
pub struct Many(http2::SendRequest<Incoming>);

impl Many {
    pub async fn send(&mut self, request: Request<Incoming>) -> Sent {
        self.0.try_send_request(request).await
    }
}

pub type Sent = Result<Response<Incoming>, TrySendError<Request<Incoming>>>;

impl Upstream {
    /// Whether it takes another request. Waits for the end of the one before, where only one
    /// can be under way.
    pub async fn is_ready(&mut self) -> bool {
        match &mut self.sender {
            Sender::One(sender) => sender.ready().await.is_ok(),
            Sender::Many(many) => !many.0.is_closed(),
        }
    }

    pub fn many(&self) -> Option<Many> {
        match &self.sender {
            Sender::One(_) => None,
            Sender::Many(many) => Some(many.clone()),
        }
    }

    pub async fn send(&mut self, request: Request<Incoming>) -> Sent {
        match &mut self.sender {
            Sender::One(sender) => sender.try_send_request(request).await,
            Sender::Many(many) => many.send(request).await,
        }
    }
}

impl Connector {
    pub fn new(trust: &Trust) -> Result<Self> {
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::internal(format!("TLS can not be set up: {error}")))?
            .with_root_certificates(trust.roots()?)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let mut both = config.clone();
        both.alpn_protocols.insert(0, PROTOCOL.to_vec());
        Ok(Self {
            one: TlsConnector::from(Arc::new(config)),
            both: TlsConnector::from(Arc::new(both)),
        })
    }

    /// HTTP/2 is asked for where the box speaks it; whether it is spoken is up to the host.
    pub async fn connect(&self, way: &Wayout, tongue: Tongue) -> Result<Upstream, ConnectError> {
        let stream = way.dial().await.map_err(ConnectError::Dial)?;
        let connector = match tongue {
            Tongue::Http1 => &self.one,
            Tongue::Http2 => &self.both,
        };
        let stream = Self::shake_hands(connector, way.host(), stream).await?;
        if stream.get_ref().1.alpn_protocol() == Some(PROTOCOL) {
            let (sender, driver) = http2::Builder::new(TokioExecutor::new())
                .max_header_list_size(head_limit())
                .handshake(TokioIo::new(stream))
                .await?;
            let driver = tokio::spawn(async move { drop(driver.await) });
            return Ok(Upstream {
                sender: Sender::Many(Many(sender)),
                driver: AbortOnDropHandle::new(driver),
            });
        }
        let (sender, driver) = http1::Builder::new()
            .preserve_header_case(true)
            .max_buf_size(MAX_HEAD)
            .handshake(TokioIo::new(stream))
            .await?;
        let driver = tokio::spawn(async move {
            // The sender sees the same end.
            drop(driver.with_upgrades().await);
        });
        Ok(Upstream {
            sender: Sender::One(sender),
            driver: AbortOnDropHandle::new(driver),
        })
    }

    async fn shake_hands(
        connector: &TlsConnector,
        host: &Host,
        stream: TcpStream,
    ) -> Result<TlsStream<TcpStream>, ConnectError> {
        let name = match host {
            Host::Address(address) => ServerName::from(*address),
            Host::Name(name) => ServerName::try_from(name.clone()).map_err(io::Error::other)?,
        };
        timeout(HANDSHAKE_WITHIN, connector.connect(name, stream))
            .await
            .map_err(io::Error::from)?
            .map_err(|error| match distrust(&error) {
                Some(why) => ConnectError::Untrusted(why),
                None => error.into(),
            })
    }
}

fn distrust(error: &io::Error) -> Option<String> {
    let inner: &(dyn StdError + 'static) = error.get_ref()?;
    match inner.downcast_ref::<rustls::Error>()? {
        rustls::Error::InvalidCertificate(why) => Some(why.to_string()),
        rustls::Error::NoCertificatesPresented => Some("it showed no certificate".to_owned()),
        _ => None,
    }
}
