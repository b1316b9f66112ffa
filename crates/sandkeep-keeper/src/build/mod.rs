//! Templates from recipes: steps run in a box, the result is kept with what it started.
//!
//! A build has a name, a log and an end; it outlives whoever asked for it. Its boxes are
//! nobody's: they stay `creating` in the ledger, so that a server that died in the middle
//! clears them away like anything half made. The template changes in one step at the end.

mod api;
mod layers;
mod log;
mod make;
mod record;
mod steps;
mod warm;
mod workshop;

pub use api::BuildWish;
pub use log::{BuildLine, LineLevel};
pub use record::{BuildFault, BuildStatus, BuildView, Builds};
pub use warm::{LevelView, has_processes, may_go_on};
