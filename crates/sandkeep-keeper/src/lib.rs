//! The life of boxes: create, pool, expire, adopt after a crash, sweep.
//!
//! The keeper decides whether something may happen in the state a box is in, lets vault
//! and ward do it, and writes it to the ledger before and after.

mod adopt;
mod after_restore;
mod agent;
mod build;
mod config;
mod core;
mod create;
mod egress;
mod events;
mod expiry;
mod form;
mod idempotency;
mod isolation;
mod keeper;
mod meters;
mod network;
mod pool;
mod reattach;
mod registry;
mod samples;
mod stop;
mod storage;
mod sync;
mod takers;
mod time;
mod upkeep;

pub use build::{BuildFault, BuildLine, BuildStatus, BuildView, BuildWish, LevelView, LineLevel};
pub use config::{KeeperConfig, Limiting, PoolConfig};
pub use egress::{BoundTo, Egress, EgressWish};
pub use isolation::{Candidate, IsolationRule};
pub use keeper::{BoxFinder, BoxView, HostReport, Keeper, LevelReport};
pub use network::{DenialBell, NetworkConfig};
pub use storage::{StorageReason, StorageReport};
pub use takers::Taken;
pub use time::{
    Command, Counts, Export, ForkWish, Hold, Imported, PauseWish, Place, PointUse, PointWish,
    Timeline, check_point_policy,
};
