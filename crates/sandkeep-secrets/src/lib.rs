//! Secrets for boxes that no box ever holds: encrypted at rest, written but never read back by
//! the API, and revealed to one place only, the proxy at the edge.

mod cipher;
mod inline;
mod key;
mod record;
mod store;

pub use key::KeySource;
pub use record::SecretInfo;
pub use store::SecretStore;
