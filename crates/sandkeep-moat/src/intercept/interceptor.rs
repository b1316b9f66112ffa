//! Taking over a connection.

use std::{fmt, io, sync::Arc};

use sandkeep_model::Result;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    secrets::{NoSecrets, SecretSource},
    session,
    standing::Standings,
    upstream::{Connector, Trust},
};
use crate::{
    hooks::{BoxFuture, Interceptor},
    policy::{Host, Reason, Refusal},
    proxy::{BoxStream, Intercepted, Wayout},
    state::BoxView,
};

#[derive(Clone)]
pub struct InterceptConfig {
    pub trust: Trust,
    pub secrets: Arc<dyn SecretSource>,
}

impl Default for InterceptConfig {
    fn default() -> Self {
        Self {
            trust: Trust::default(),
            secrets: Arc::new(NoSecrets),
        }
    }
}

impl fmt::Debug for InterceptConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterceptConfig").finish_non_exhaustive()
    }
}

/// The interceptor of the moat, for all boxes of a server.
#[derive(Debug)]
pub struct TlsInterceptor {
    connector: Connector,
    config: InterceptConfig,
    standings: Standings,
}

impl TlsInterceptor {
    /// Reads the roots of this host: do it once.
    pub fn new(config: InterceptConfig) -> Result<Self> {
        Ok(Self {
            connector: Connector::new(&config.trust)?,
            config,
            standings: Standings::default(),
        })
    }
}

impl Interceptor for TlsInterceptor {
    fn wants(&self, from: &BoxView, host: &Host, port: u16) -> bool {
        !from.0.keys.for_host(host, port).is_empty()
    }

    fn serve(&self, connection: Intercepted) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Intercepted { stream, way } = connection;
            let Some(stream) = accept(stream, &way).await else {
                return;
            };
            let standing = self.standings.of(way.id());
            let secrets = Arc::clone(&self.config.secrets);
            session::serve(stream, way, self.connector.clone(), secrets, standing).await;
        })
    }
}

async fn accept(stream: BoxStream, way: &Wayout) -> Option<TlsStream<BoxStream>> {
    let state = &way.view().0;
    let made = state
        .authority()
        .and_then(|authority| authority.server_for(way.host()));
    let config = match made {
        Ok(config) => config,
        Err(error) => {
            tracing::error!(box_id = %state.id, host = %way.host(), %error, "no interception");
            return None;
        }
    };
    let handshake = TlsAcceptor::from(config).accept(stream);
    match timeout(state.shared.patience.decide_within, handshake).await {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            if let Some((why, hint)) = reason(&error) {
                way.deny(
                    &way.host().to_string(),
                    Refusal::new(Reason::Untrusted, why, hint),
                );
            }
            None
        }
        Err(_) => None,
    }
}

/// What somebody should know about a handshake that failed, and what to do.
fn reason(error: &io::Error) -> Option<(&'static str, &'static str)> {
    use rustls::{AlertDescription as Alert, Error};
    match error.get_ref()?.downcast_ref()? {
        Error::AlertReceived(
            Alert::UnknownCA | Alert::BadCertificate | Alert::CertificateUnknown,
        ) => Some((
            "the program in the box does not trust the certificate authority of the box",
            "let it use the trust store of the system (/etc/ssl/certs/ca-certificates.crt)",
        )),
        Error::NoApplicationProtocol => Some((
            "the program in the box speaks neither HTTP/1.1 nor HTTP/2, and requests to this host are seen one by one",
            "let it use one of them, or ask for this host without credentials and HTTP rules",
        )),
        _ => None,
    }
}
