//! The vault: the storage pool, the templates in it, and the disks of boxes.
//!
//! A template is a read-only btrfs subvolume, a disk is a writable snapshot of one with
//! a quota on what the box writes. Whatever is made is made under a staging name and
//! moved to its place in one step, so a crash leaves the old state or the new one.

mod account;
mod archive;
mod attend;
mod backing;
mod ballast;
mod base;
mod btrfs;
mod cache;
mod clients;
mod context;
mod diff;
mod disk;
mod doing;
mod form;
mod image;
mod lock;
mod loopdev;
mod memory;
mod mounts;
mod parcel;
mod pieces;
mod point;
mod points;
mod pool;
mod progress;
mod quota;
mod recipe;
mod repair;
mod sizing;
mod sources;
mod space;
mod spare;
mod staging;
mod sum;
mod template;
mod tree;
mod trial;
mod vault;
mod verified;

pub use archive::ImportLimits;
pub use attend::{Attended, StorageState};
pub use ballast::{full as state_disk_full, release_if_full};
pub use diff::{Change, ChangeKind, Diff, DiskReader, disk_reader_main};
pub use disk::Disk;
pub use form::FormDraft;
pub use image::KeptImage;
pub use parcel::{Label, Opened, Room as ParcelRoom, unpack as unpack_parcel};
pub use point::{Keep, PointDraft, PointInfo};
pub use pool::{PoolInfo, PoolKind, read_only as storage_read_only};
pub use progress::{Progress, Stage};
pub use quota::{QuotaKind, Tidied};
pub use repair::{Repaired, repair};
pub use sizing::{Below, kept as kept_size};
pub use template::{Ground, TemplateInfo};
pub use trial::TrialDisk;
pub use vault::{Vault, VaultConfig};
