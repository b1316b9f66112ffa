//! What happened, in order, and provably unchanged.
//!
//! One line of JSON per event, each holding the hash of the line before it. Who changes, removes
//! or inserts a line breaks the chain from there on; who cuts the end off is found out by anyone
//! who remembers a [`Head`].

mod audit;
mod entry;
mod line;
mod open;
mod read;
mod scan;
mod segment;
mod verify;
mod writer;

pub use audit::{Audit, AuditConfig};
pub use entry::{Action, Actor, Entry, Text};
pub use line::{Hash, Head, Record};
pub use read::{Filter, Order, Reader, read};
pub use verify::{Broken, Verdict, verify, verify_file};
