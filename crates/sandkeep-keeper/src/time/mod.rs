//! Time: pausing, waking, points, forks and rollbacks.
//!
//! The ledger decides. A step is written before anything irreversible is done, and what is
//! found at the next start is brought to one side of it: `pausing` goes on running,
//! `resuming` rests again and is woken. A box that wakes up from a point takes its disk from
//! there whenever it may have moved on, so an interrupted wake-up loses nothing.

mod activity;
mod adopt;
mod api;
mod auto;
mod carry;
mod failed;
mod fork;
mod idle;
mod named;
mod pause;
mod points;
mod resume;
mod risky;
mod rollback;
mod snapshot;

pub use activity::{Activity, Counts, Hold};
pub use adopt::Rest;
pub use api::{ForkWish, Forked, PauseWish, Place, PointWish, Timeline};
pub use auto::{Auto, Command, check as check_point_policy};
pub use carry::{Export, Imported};
pub use failed::FailedWakes;
pub use named::PointUse;
pub use snapshot::PointOrder;
