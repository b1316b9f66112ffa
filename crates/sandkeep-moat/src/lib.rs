//! The moat: a box reaches only what its policy names.
//!
//! [`policy`] is pure: it says what is allowed and why. The rest enforces it from outside the
//! box, in a network namespace the host owns and that has no uplink at all: `edge` makes that
//! namespace, `dns` and `proxy` are the only things in it that answer.

pub mod policy;

mod closed_registries;
mod denials;
mod dns;
mod edge;
mod hooks;
mod inside;
mod intercept;
mod kept;
mod limits;
mod memory;
mod moat;
mod own;
mod probe;
mod profiles;
mod proxy;
mod state;
mod traffic;

pub use closed_registries::{ClosedRegistry, closed_registries};
pub use denials::{Denial, Via};
pub use dns::{INSIDE_NAME, UpstreamDns};
pub use edge::{BOX_V4, BOX_V6, INSIDE_V4};
pub use hooks::{
    BoxFuture, ConnectionRecord, Hooks, Inside, Interceptor, NoHooks, Phase, Place, Visit,
};
pub use inside::InsideDesk;
pub use intercept::{InterceptConfig, NoSecrets, SecretSource, SecretUse, TlsInterceptor, Trust};
pub use moat::{AttachSpec, BoxMoat, Moat, MoatConfig};
pub use probe::{Able, probe};
pub use profiles::{NamedProfile, ProfileVersion, Profiles};
pub use proxy::{BoxStream, DialError, Hello, Intercepted, Wayout, parse_client_hello, refusal};
pub use state::{BoxView, Patience, Why};
pub use traffic::Traffic;
