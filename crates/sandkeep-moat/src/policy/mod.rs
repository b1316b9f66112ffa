//! What a box may reach, as types: parsed once, decided in one place.

mod address;
mod binding;
mod decide;
mod document;
mod e2b;
mod host;
mod path;
mod profile;
mod ranges;
mod refusal;
mod registries;
mod rule;
mod shipped;

pub use address::{AddressGuard, Forbidden};
pub use binding::{Binding, MAX_BINDINGS, Place, Source};
pub use decide::{Decision, Explanation, HttpTarget, Target, explain};
pub use document::{EgressLimits, MAX_RULES, Policy, Standing};
pub use e2b::{E2bNetwork, E2bRule, E2bTransform};
pub use host::{Host, HostError};
pub use path::{Ambiguity, PlainPath};
pub use profile::Profile;
pub use ranges::{Addresses, Ranges};
pub use refusal::{Asked, LookupFailure, Reason, Refusal};
pub use registries::Registries;
pub use rule::{HttpRule, PathPattern, Ports, Rule, To};
