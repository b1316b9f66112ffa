//! The ledger: every box, what became of it, and every event, in one SQL file.
//!
//! SQLite in WAL mode with `synchronous = NORMAL`: what was acknowledged survives `kill -9`
//! of the server; a power loss may take the last milliseconds, never the file's soundness.
//! One connection writes, so the order of events is the order of commits.

mod events;
mod fault;
mod list;
mod open;
mod prune;
mod read;
mod rows;
mod write;
mod writer;

pub use open::Store;
pub use rows::{Claim, Idempotency, NewBox, Record};
