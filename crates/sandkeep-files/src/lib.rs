//! Files only the server may see: private, and written whole or not at all.

mod private_dir;

pub use private_dir::{DirLock, PrivateDir};
