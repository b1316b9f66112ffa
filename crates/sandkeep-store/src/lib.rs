//! The ledger.

/// The ledger; clones share one.
#[derive(Debug, Clone)]
pub struct Store;
