//! The ledger: every box, what became of it, and every event, in one SQL file.
//!
//! SQLite in WAL mode with `synchronous = NORMAL`: what was acknowledged survives `kill -9`
//! of the server. A power loss may take what the kernel had not written out yet, never the
//! file's soundness; the boxes it tells of are gone with the host then, too.
//! One connection writes, so the order of events is the order of commits.

mod ahead;
mod events;
mod fault;
mod list;
mod open;
mod points;
mod prune;
mod read;
mod rows;
mod time;
mod write;
mod writer;

pub use open::Store;
pub use rows::{Claim, Idempotency, NewBox, Record};
pub use time::{TimeStep, WardNote};
