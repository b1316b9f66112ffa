//! The words of Sandkeep: ids, states, limits, requests, records and errors.
//!
//! Pure types without I/O. Everything that comes from outside is parsed here once
//! and travels as a type from then on.

mod auto;
mod e2b;
mod error;
mod event;
mod id;
mod identity;
mod isolation;
mod latched;
mod limits;
mod name;
mod page;
mod point;
mod recipe;
mod sandbox;
mod secret;
mod secret_name;
mod server_key;
mod state;
mod time;
mod usage;
pub mod words;

pub use auto::{
    KEEP_TAG, Keep, LONGEST_PATTERN, MOST_PATTERNS, PointPolicy, PointReason, PointWhy,
};
pub use e2b::{E2bSettings, HostMask};
pub use error::{Code, Error, Result};
pub use event::{Event, EventKind};
pub use id::{SandboxId, random_bytes, random_token};
pub use identity::{Audience, Identity, Label, NamedTokens, PLAIN_PATTERN, Scopes, TokenName};
pub use isolation::{Isolation, IsolationWish};
pub use latched::Latched;
pub use limits::{Limits, LimitsWish, human_bytes};
pub use name::{MAX_METADATA_BYTES, NameError, TemplateName, check_env, check_metadata};
pub use page::{ListFilter, Order, Page, PageToken};
pub use point::{
    BoxTime, EngineBuild, MOST_TAGS, POINT_NAME_PATTERN, POINT_PATTERN, Pause, PauseMode, Point,
    PointId, PointKind, TimeWish, check_point_name, check_point_tags, point_not_found,
};
pub use recipe::{
    BoxDefaults, BuildId, Built, ColdLevel, FILES_KEY_PATTERN, LONGEST_READY, MODE_PATTERN,
    MOST_STEPS, Ready, ReadyCheck, Recipe, Step, build_not_found, check_files_key,
};
pub use sandbox::{
    CreateSandbox, ENVD_VERSION, Expiry, OnTimeout, PortAccess, Sandbox, Template, traffic_token,
};
pub use secret::{API_KEY_PREFIX, Secret};
pub use secret_name::SecretName;
pub use server_key::ServerKey;
pub use state::{GoneReason, State};
pub use time::Timestamp;
pub use usage::{Sample, Usage};
