//! TLS interception, only for hosts with a credential or rules about requests: the box talks to
//! us under a certificate of its own authority, we talk to the real host and verify it.
//!
//! Every request is read and decided here, so HTTP rules hold inside TLS, and credentials are
//! added on the far side of the box: it never holds them.
//!
//! It speaks HTTP/1.1 with all who can, and HTTP/2 with those who speak nothing else.
//!
//! What comes back is searched for secrets of at least eight characters, plain and in the usual
//! encodings. How long it is held back, and in what pieces it goes on, does not depend on how much
//! of a secret matches (`gate`), so a box cannot guess its way through one.
//!
//! What this does not do: it stops sites that show what they are sent, not a site that transforms
//! it as the box likes. Bind secrets only to hosts that may know them.

mod attach;
mod authority;
mod automaton;
mod decode;
mod derive;
mod frames;
mod gate;
mod headers;
mod http2;
mod interceptor;
mod keys;
mod needles;
mod relay;
mod scan;
mod scan_body;
mod secrets;
mod session;
mod standing;
mod upstream;

pub use interceptor::{InterceptConfig, TlsInterceptor};
pub use secrets::{NoSecrets, SecretSource, SecretUse};
pub use upstream::Trust;

pub(crate) use authority::Authority;
pub(crate) use headers::{strip_hop_by_hop, strip_response};
pub(crate) use keys::BoxKeys;
