//! The few btrfs calls we need, made straight to the kernel.
//!
//! Layouts are those of `linux/btrfs.h`; each is checked for its size at compile time.

use rustix::fs::{Mode, OFlags};
use std::{
    ffi::{OsStr, c_ulong},
    fs::File,
    io,
    mem::size_of,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

const MAGIC: u32 = 0x94;
pub const WRITE: u32 = 1;
pub const READ: u32 = 2;

pub const fn request(direction: u32, number: u32, size: usize) -> c_ulong {
    ((direction << 30) | ((size as u32) << 16) | (MAGIC << 8) | number) as c_ulong
}

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    /// A name, or with [`SPEC_BY_ID`] an id in the first eight bytes.
    name: [u8; 4040],
}

#[repr(C)]
struct InoLookup {
    treeid: u64,
    objectid: u64,
    name: [u8; 4080],
}

#[repr(C)]
struct FsInfo {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    rest: [u8; 992],
}

#[repr(C)]
struct QuotaCtl {
    cmd: u64,
    status: u64,
}

#[repr(C)]
struct QgroupAssign {
    assign: u64,
    src: u64,
    dst: u64,
}

#[repr(C)]
struct QgroupCreate {
    create: u64,
    qgroupid: u64,
}

#[repr(C)]
struct QgroupLimit {
    qgroupid: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved: [u64; 2],
}

#[repr(C)]
pub struct SearchKey {
    pub tree_id: u64,
    pub min_objectid: u64,
    pub max_objectid: u64,
    pub min_offset: u64,
    pub max_offset: u64,
    pub min_transid: u64,
    pub max_transid: u64,
    pub min_type: u32,
    pub max_type: u32,
    pub nr_items: u32,
    pub unused: u32,
    pub unused_more: [u64; 4],
}

const SEARCH_BUFFER: usize = 16 * 1024;

#[repr(C)]
pub struct Search {
    pub key: SearchKey,
    buf_size: u64,
    pub buf: [u8; SEARCH_BUFFER],
}

#[repr(C)]
struct SubvolInfo {
    treeid: u64,
    name: [u8; 256],
    parent_id: u64,
    dirid: u64,
    generation: u64,
    flags: u64,
    uuids: [[u8; 16]; 3],
    ctransid: u64,
    /// The transaction it was made in.
    otransid: u64,
    rest: [u64; 18],
}

/// What the kernel's number of the call says the size is, without the buffer behind it.
const SEARCH_HEAD: usize = 112;

const _: () = {
    assert!(size_of::<VolArgs>() == 4096);
    assert!(size_of::<VolArgsV2>() == 4096);
    assert!(size_of::<InoLookup>() == 4096);
    assert!(size_of::<FsInfo>() == 1024);
    assert!(size_of::<QgroupLimit>() == 48);
    assert!(size_of::<SearchKey>() == 104);
    assert!(size_of::<Search>() == SEARCH_HEAD + SEARCH_BUFFER);
    assert!(size_of::<SubvolInfo>() == 504);
};

const RESIZE: c_ulong = request(WRITE, 3, size_of::<VolArgs>());
const SYNC: c_ulong = request(0, 8, 0);
const TREE_SEARCH_V2: c_ulong = request(READ | WRITE, 17, SEARCH_HEAD);
const INO_LOOKUP: c_ulong = request(READ | WRITE, 18, size_of::<InoLookup>());
const SNAP_CREATE_V2: c_ulong = request(WRITE, 23, size_of::<VolArgsV2>());
const SUBVOL_CREATE_V2: c_ulong = request(WRITE, 24, size_of::<VolArgsV2>());
const SUBVOL_SETFLAGS: c_ulong = request(WRITE, 26, size_of::<u64>());
const FS_INFO: c_ulong = request(READ, 31, size_of::<FsInfo>());
const QUOTA_CTL: c_ulong = request(READ | WRITE, 40, size_of::<QuotaCtl>());
const QGROUP_ASSIGN: c_ulong = request(WRITE, 41, size_of::<QgroupAssign>());
const QGROUP_CREATE: c_ulong = request(WRITE, 42, size_of::<QgroupCreate>());
const QGROUP_LIMIT: c_ulong = request(READ, 43, size_of::<QgroupLimit>());
const GET_SUBVOL_INFO: c_ulong = request(READ, 60, size_of::<SubvolInfo>());
const SNAP_DESTROY_V2: c_ulong = request(WRITE, 63, size_of::<VolArgsV2>());

const READ_ONLY: u64 = 1 << 1;
const SPEC_BY_ID: u64 = 1 << 4;
const FIRST_INODE: u64 = 256;
const ROOT_TREE: u64 = 1;
/// Under this number the root tree lists what is being removed.
const ORPHANS: u64 = -5_i64 as u64;
const ORPHAN_KEY: u32 = 48;
const ROOT_BACKREF_KEY: u32 = 144;
const ROOT_REF_KEY: u32 = 156;

const LIMIT_REFERENCED: u64 = 1 << 0;
const LIMIT_EXCLUSIVE: u64 = 1 << 1;

/// # Safety
/// `T` must be the structure (or a larger one that begins with it) which `request` names.
pub unsafe fn call<T>(fd: BorrowedFd<'_>, request: c_ulong, args: &mut T) -> io::Result<()> {
    // SAFETY: `fd` is open for the whole call and `args` is a valid, exclusive pointer to
    // what the kernel expects for this request, as the caller promised.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(args)) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn named<const N: usize>(name: &OsStr) -> io::Result<[u8; N]> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() >= N.min(256) || bytes.contains(&0) || bytes.contains(&b'/')
    {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let mut out = [0; N];
    out[..bytes.len()].copy_from_slice(bytes);
    Ok(out)
}

fn split(path: &Path) -> io::Result<(File, &OsStr)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    Ok((open_dir(parent)?, name))
}

/// Opens a directory, never through a symbolic link at its end.
pub fn open_dir(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

pub fn is_btrfs(path: &Path) -> io::Result<bool> {
    const BTRFS_SUPER_MAGIC: u64 = 0x9123_683E;
    let stat = rustix::fs::statfs(path)?;
    Ok(stat.f_type as u64 & 0xffff_ffff == BTRFS_SUPER_MAGIC)
}

/// Whether the directory is the root of a subvolume.
pub fn is_subvolume(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = std::fs::symlink_metadata(path)?;
    Ok(meta.is_dir() && meta.ino() == FIRST_INODE && is_btrfs(path)?)
}

pub fn create_subvolume(path: &Path) -> io::Result<()> {
    let (parent, name) = split(path)?;
    let mut args = VolArgsV2 {
        fd: 0,
        transid: 0,
        flags: 0,
        unused: [0; 4],
        name: named(name)?,
    };
    // SAFETY: SUBVOL_CREATE_V2 takes `btrfs_ioctl_vol_args_v2`.
    unsafe { call(parent.as_fd(), SUBVOL_CREATE_V2, &mut args) }
}

/// A writable snapshot of the subvolume `source` at `target`.
pub fn snapshot(source: &Path, target: &Path) -> io::Result<()> {
    snapshot_with(source, target, 0)
}

/// A snapshot nobody can write to, from its first moment.
pub fn snapshot_read_only(source: &Path, target: &Path) -> io::Result<()> {
    snapshot_with(source, target, READ_ONLY)
}

fn snapshot_with(source: &Path, target: &Path, flags: u64) -> io::Result<()> {
    let source = open_dir(source)?;
    let (parent, name) = split(target)?;
    let mut args = VolArgsV2 {
        fd: i64::from(source.as_raw_fd()),
        transid: 0,
        flags,
        unused: [0; 4],
        name: named(name)?,
    };
    // SAFETY: SNAP_CREATE_V2 takes `btrfs_ioctl_vol_args_v2`; `source` stays open.
    unsafe { call(parent.as_fd(), SNAP_CREATE_V2, &mut args) }
}

pub fn destroy_subvolume(path: &Path) -> io::Result<()> {
    let (parent, name) = split(path)?;
    let mut args = VolArgsV2 {
        fd: 0,
        transid: 0,
        flags: 0,
        unused: [0; 4],
        name: named(name)?,
    };
    // SAFETY: SNAP_DESTROY_V2 takes `btrfs_ioctl_vol_args_v2`.
    unsafe { call(parent.as_fd(), SNAP_DESTROY_V2, &mut args) }
}

pub fn destroy_subvolume_by_id(pool: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    let mut args = VolArgsV2 {
        fd: 0,
        transid: 0,
        flags: SPEC_BY_ID,
        unused: [0; 4],
        name: [0; 4040],
    };
    args.name[..8].copy_from_slice(&id.to_ne_bytes());
    // SAFETY: SNAP_DESTROY_V2 takes `btrfs_ioctl_vol_args_v2`; with SPEC_BY_ID the kernel
    // reads the first eight bytes of the name's place as the id.
    unsafe { call(pool, SNAP_DESTROY_V2, &mut args) }
}

pub fn set_read_only(path: &Path, read_only: bool) -> io::Result<()> {
    let dir = open_dir(path)?;
    let mut flags = if read_only { READ_ONLY } else { 0 };
    // SAFETY: SUBVOL_SETFLAGS takes one `u64`.
    unsafe { call(dir.as_fd(), SUBVOL_SETFLAGS, &mut flags) }
}

/// The id of the subvolume an open file lies in.
pub fn subvolume_id(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut args = InoLookup {
        treeid: 0,
        objectid: FIRST_INODE,
        name: [0; 4080],
    };
    // SAFETY: INO_LOOKUP takes `btrfs_ioctl_ino_lookup_args`.
    unsafe { call(fd, INO_LOOKUP, &mut args) }?;
    Ok(args.treeid)
}

/// Whether a subvolume of this id exists and is not being deleted: deleting takes away the
/// reference from its directory at once and the rest later.
pub fn subvolume_exists(pool: BorrowedFd<'_>, id: u64) -> io::Result<bool> {
    Ok(!root_items(pool, id, ROOT_BACKREF_KEY)?.is_empty())
}

/// Ids of the subvolumes directly inside the subvolume `parent`, as many as one answer holds.
pub fn children(pool: BorrowedFd<'_>, parent: u64) -> io::Result<Vec<u64>> {
    root_items(pool, parent, ROOT_REF_KEY)
}

/// Whether subvolumes were removed of which the kernel has not freed all yet.
pub fn removes_subvolumes(pool: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(!root_items(pool, ORPHANS, ORPHAN_KEY)?.is_empty())
}

/// Offsets of the items of one kind that the root tree has about a subvolume.
fn root_items(pool: BorrowedFd<'_>, id: u64, kind: u32) -> io::Result<Vec<u64>> {
    let answer = search(
        pool,
        SearchKey {
            tree_id: ROOT_TREE,
            min_objectid: id,
            max_objectid: id,
            min_type: kind,
            max_type: kind,
            ..EVERYTHING
        },
    )?;
    let items = found(&answer.buf, answer.key.nr_items);
    Ok(items.into_iter().map(|(offset, _)| offset).collect())
}

/// Whether anything in the snapshot `now` was written after the snapshot `then`, from which
/// it descends, was made. Only what is newer is looked at; what can not be told counts as
/// written.
pub fn changed_since(then: &Path, now: &Path) -> io::Result<bool> {
    let then = open_dir(then)?;
    let mut info = SubvolInfo {
        treeid: 0,
        name: [0; 256],
        parent_id: 0,
        dirid: 0,
        generation: 0,
        flags: 0,
        uuids: [[0; 16]; 3],
        ctransid: 0,
        otransid: 0,
        rest: [0; 18],
    };
    // SAFETY: GET_SUBVOL_INFO fills `btrfs_ioctl_get_subvol_info_args`.
    unsafe { call(then.as_fd(), GET_SUBVOL_INFO, &mut info) }?;
    let newer = search(
        open_dir(now)?.as_fd(),
        SearchKey {
            min_transid: info.otransid.saturating_add(1),
            nr_items: 1,
            ..EVERYTHING
        },
    )?;
    Ok(newer.key.nr_items > 0)
}

/// All items of the tree that belongs to the descriptor.
pub const EVERYTHING: SearchKey = SearchKey {
    tree_id: 0,
    min_objectid: 0,
    max_objectid: u64::MAX,
    min_offset: 0,
    max_offset: u64::MAX,
    min_transid: 0,
    max_transid: u64::MAX,
    min_type: 0,
    max_type: u32::MAX,
    nr_items: 4096,
    unused: 0,
    unused_more: [0; 4],
};

pub fn search(fd: BorrowedFd<'_>, key: SearchKey) -> io::Result<Box<Search>> {
    let mut args = Box::new(Search {
        key,
        buf_size: SEARCH_BUFFER as u64,
        buf: [0; SEARCH_BUFFER],
    });
    // SAFETY: TREE_SEARCH_V2 takes `btrfs_ioctl_search_args_v2` with `buf_size` bytes of
    // buffer behind it, which is what `Search` is.
    unsafe { call(fd, TREE_SEARCH_V2, &mut *args) }?;
    Ok(args)
}

/// Each item found, with its offset. The answer has transid, objectid, offset (u64), type, length (u32),
/// then the item.
pub fn found(buf: &[u8], count: u32) -> Vec<(u64, &[u8])> {
    const HEAD: usize = 32;
    let mut out = Vec::new();
    let mut rest = buf;
    for _ in 0..count {
        let Some((head, items)) = rest.split_at_checked(HEAD) else {
            break;
        };
        let (Ok(offset), Ok(length)) = (head[16..24].try_into(), head[28..32].try_into()) else {
            break;
        };
        let length = u32::from_ne_bytes(length) as usize;
        let (item, next) = items.split_at_checked(length).unwrap_or((items, &[]));
        out.push((u64::from_ne_bytes(offset), item));
        rest = next;
    }
    out
}

/// The file system's id as the kernel spells it under `/sys/fs/btrfs`.
pub fn fsid(fd: BorrowedFd<'_>) -> io::Result<String> {
    let mut args = FsInfo {
        max_id: 0,
        num_devices: 0,
        fsid: [0; 16],
        rest: [0; 992],
    };
    // SAFETY: FS_INFO fills `btrfs_ioctl_fs_info_args`.
    unsafe { call(fd, FS_INFO, &mut args) }?;
    let hex: String = args.fsid.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    ))
}

/// Gives the file system another size. Made smaller, it moves what lies behind its new end.
pub fn resize(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let mut args = VolArgs {
        fd: 0,
        name: named(OsStr::new(&bytes.to_string()))?,
    };
    // SAFETY: RESIZE takes `btrfs_ioctl_vol_args`.
    unsafe { call(fd, RESIZE, &mut args) }
}

/// Writes everything out and wakes the kernel's cleaner, which otherwise gives back the
/// space of removed subvolumes only every half minute.
pub fn sync_and_clean(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: SYNC takes no argument, what is passed is not looked at.
    unsafe { call(fd, SYNC, &mut 0_u64) }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnableQuota {
    Classic = 1,
    /// Kernel 6.7 and newer: counts an extent once, for the subvolume that wrote it.
    Simple = 4,
}

pub fn enable_quota(fd: BorrowedFd<'_>, kind: EnableQuota) -> io::Result<()> {
    let mut args = QuotaCtl {
        cmd: kind as u64,
        status: 0,
    };
    // SAFETY: QUOTA_CTL takes `btrfs_ioctl_quota_ctl_args`.
    unsafe { call(fd, QUOTA_CTL, &mut args) }
}

/// A quota group: level 0 belongs to one subvolume, level 1 sums several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Qgroup {
    pub level: u16,
    pub id: u64,
}

impl Qgroup {
    const fn number(self) -> u64 {
        ((self.level as u64) << 48) | self.id
    }
}

pub fn create_qgroup(fd: BorrowedFd<'_>, group: Qgroup) -> io::Result<()> {
    change_qgroup(fd, group, 1)
}

pub fn remove_qgroup(fd: BorrowedFd<'_>, group: Qgroup) -> io::Result<()> {
    change_qgroup(fd, group, 0)
}

fn change_qgroup(fd: BorrowedFd<'_>, group: Qgroup, create: u64) -> io::Result<()> {
    let mut args = QgroupCreate {
        create,
        qgroupid: group.number(),
    };
    // SAFETY: QGROUP_CREATE takes `btrfs_ioctl_qgroup_create_args`.
    unsafe { call(fd, QGROUP_CREATE, &mut args) }
}

pub fn assign_qgroup(fd: BorrowedFd<'_>, member: Qgroup, parent: Qgroup) -> io::Result<()> {
    let mut args = QgroupAssign {
        assign: 1,
        src: member.number(),
        dst: parent.number(),
    };
    // SAFETY: QGROUP_ASSIGN takes `btrfs_ioctl_qgroup_assign_args`.
    unsafe { call(fd, QGROUP_ASSIGN, &mut args) }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitOn {
    Referenced,
    Exclusive,
}

/// Sets a limit; zero lifts it.
pub fn limit_qgroup(fd: BorrowedFd<'_>, group: Qgroup, on: LimitOn, bytes: u64) -> io::Result<()> {
    // The kernel reads all ones as "no limit".
    let value = if bytes == 0 { u64::MAX } else { bytes };
    let (flags, max_referenced, max_exclusive) = match on {
        LimitOn::Referenced => (LIMIT_REFERENCED, value, 0),
        LimitOn::Exclusive => (LIMIT_EXCLUSIVE, 0, value),
    };
    let mut args = QgroupLimit {
        qgroupid: group.number(),
        flags,
        max_referenced,
        max_exclusive,
        reserved: [0; 2],
    };
    // SAFETY: QGROUP_LIMIT takes `btrfs_ioctl_qgroup_limit_args`.
    unsafe { call(fd, QGROUP_LIMIT, &mut args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_calls() {
        assert_eq!(SNAP_CREATE_V2, 0x5000_9417);
        assert_eq!(SNAP_DESTROY_V2, 0x5000_943f);
        assert_eq!(QUOTA_CTL, 0xc010_9428);
        assert_eq!(QGROUP_LIMIT, 0x8030_942b);
        assert_eq!(TREE_SEARCH_V2, 0xc070_9411);
        assert_eq!(GET_SUBVOL_INFO, 0x81f8_943c);
    }

    #[test]
    fn names_that_are_no_names() {
        for bad in ["", "a/b", "a\0b", &"x".repeat(256)] {
            assert!(named::<4040>(OsStr::new(bad)).is_err(), "{bad:?}");
        }
        assert!(named::<4040>(OsStr::new(&"x".repeat(255))).is_ok());
    }

    #[test]
    fn a_cut_answer_of_a_search_is_no_panic() {
        let mut item = [0_u8; 40];
        item[16..24].copy_from_slice(&77_u64.to_ne_bytes());
        item[28..32].copy_from_slice(&8_u32.to_ne_bytes());
        assert_eq!(found(&item, 2), [(77, &[0_u8; 8][..])]);
        assert_eq!(found(&item[..20], 1), []);
        item[28..32].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(found(&item, 5), [(77, &[0_u8; 8][..])]);
    }

    #[test]
    fn qgroup_levels_are_in_the_high_bits() {
        let group = Qgroup { level: 1, id: 258 };
        assert_eq!(group.number(), 0x0001_0000_0000_0102);
    }
}
