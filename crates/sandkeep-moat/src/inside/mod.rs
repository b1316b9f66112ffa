//! What a box can ask its moat, at `sandkeep.internal` and 169.254.169.254: why something is
//! refused, what its policy is, what was refused. Everything else there is somebody else's.

mod desk;
mod query;
mod words;

pub use desk::InsideDesk;
