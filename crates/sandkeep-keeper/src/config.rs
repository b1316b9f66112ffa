use std::time::Duration;

use sandkeep_model::{IsolationWish, Limits, PointPolicy, ServerKey, TemplateName};

use crate::{NetworkConfig, isolation::IsolationRule};

/// How the keeper of one server behaves.
#[derive(Debug, Clone)]
pub struct KeeperConfig {
    pub limits: Limiting,
    pub pool: PoolConfig,
    pub isolation: IsolationRule,
    /// At most this many boxes at once, pooled ones included.
    pub max_boxes: usize,
    /// The longest time a box may be given; `None` lets a box have no end.
    pub max_lifetime: Option<Duration>,
    /// How long a box may be paused before it is ended; `None`: as long as it likes, if it has no
    /// limit of its own.
    pub paused_limit: Option<Duration>,
    /// How long rows of boxes that are gone, and their events, are kept.
    pub keep_history: Duration,
    pub network: NetworkConfig,
    /// When points are made by themselves of boxes whose create says nothing.
    pub points: Option<PointPolicy>,
    /// Servers whose points are taken with their memory also where that is read with the rights
    /// of this host.
    pub trusted_servers: Vec<ServerKey>,
}

/// What a box gets that asks for nothing, and the most any box may ask for.
#[derive(Debug, Clone, Copy)]
pub struct Limiting {
    pub default: Limits,
    pub most: Limits,
}

/// The boxes that wait, already started, for somebody to want one.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// 0: no pool; boxes left in the ledger by an earlier server are ended.
    pub size: usize,
    pub template: TemplateName,
    /// The level they wait at.
    pub isolation: IsolationWish,
}
