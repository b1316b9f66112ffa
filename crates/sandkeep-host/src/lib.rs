//! What every ward uses of the host: control groups, ranges of ids, processes, private
//! directories.

pub mod cgroup;
pub mod failure;
pub mod files;
pub mod first;
pub mod idmap;
pub mod lone_file;
pub mod netns;
pub mod proc;
pub mod slots;
pub mod starting;
pub mod stream;
pub mod work;
