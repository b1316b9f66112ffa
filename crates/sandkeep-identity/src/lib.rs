//! Who a box is, and how it proves it.
//!
//! The server is an OIDC issuer: it holds signing keys, publishes the documents verifiers need,
//! and mints short-lived tokens bound to one box and one audience. [`metadata`] is what a box
//! sees of it.

mod claims;
mod issuer;
mod key;
mod key_ring;
pub mod metadata;
mod sessions;
mod urls;

pub use claims::{BoxIdentity, Claims, Lifetime};
pub use issuer::{Issuer, IssuerConfig, JWKS_PATH, Minted, OPENID_CONFIGURATION_PATH, Verified};
pub use key::SigningAlgorithm;
pub use sandkeep_model::{Audience, Label, Scopes};
pub use sessions::Sessions;
pub use urls::{IssuerUrl, TrustDomain};
