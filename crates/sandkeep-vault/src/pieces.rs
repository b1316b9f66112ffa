//! The pieces that a btrfs is handed out in, as far as names lie in them.
//!
//! `mkfs.btrfs` puts all names into a piece of 8 MiB, of which the kernel keeps nearly six for itself. The
//! pieces for names that are set aside later stay empty for long, and the kernel takes an empty one
//! back whenever it tidies up: what was in it can be handed out again only when its books are written.
//! On a full storage every write that needs a name is refused until then. So names are moved into a
//! piece of the kernel's own size while the storage is new: one that is used is never taken back.

use std::{
    io,
    mem::size_of,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use crate::btrfs::{self, EVERYTHING, READ, SearchKey, WRITE, call, found, request, search};

const MIB: u64 = 1 << 20;
/// What `mkfs.btrfs` makes. The kernel makes a tenth of the file system, of which there are at
/// least 128 MiB.
const SMALL: u64 = 8 * MIB;

const CHUNK_TREE: u64 = 3;
const FIRST_CHUNK: u64 = 256;
const CHUNK_KEY: u32 = 228;
/// What a piece is for, and what a balance is about.
const FOR_NAMES: u64 = 1 << 2;
const BY_ADDRESS: u64 = 1 << 4;

#[repr(C, packed)]
#[derive(Clone, Copy)]
struct BalanceArgs {
    profiles: u64,
    usage: u64,
    device: u64,
    device_range: [u64; 2],
    first: u64,
    behind: u64,
    target: u64,
    flags: u64,
    limit: u64,
    stripes: [u32; 2],
    unused: [u64; 6],
}

#[repr(C)]
struct Balance {
    flags: u64,
    state: u64,
    contents: BalanceArgs,
    names: BalanceArgs,
    system: BalanceArgs,
    progress: [u64; 3],
    unused: [u64; 72],
}

const _: () = {
    assert!(size_of::<BalanceArgs>() == 136);
    assert!(size_of::<Balance>() == 1024);
};

const BALANCE: std::ffi::c_ulong = request(READ | WRITE, 32, size_of::<Balance>());

const NOTHING: BalanceArgs = BalanceArgs {
    profiles: 0,
    usage: 0,
    device: 0,
    device_range: [0; 2],
    first: 0,
    behind: 0,
    target: 0,
    flags: 0,
    limit: 0,
    stripes: [0; 2],
    unused: [0; 6],
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    address: u64,
    bytes: u64,
}

/// Moves names out of the piece that `mkfs.btrfs` made, if they are still in it. Small pieces that the kernel
/// made of the last of a storage come after a larger one.
pub fn widen_names(root: &Path) -> io::Result<bool> {
    let dir = btrfs::open_dir(root)?;
    let first = for_names(dir.as_fd())?
        .into_iter()
        .min_by_key(|piece| piece.address);
    let Some(first) = first.filter(|first| first.bytes <= SMALL) else {
        return Ok(false);
    };
    move_names_out_of(dir.as_fd(), first)?;
    Ok(true)
}

fn for_names(pool: BorrowedFd<'_>) -> io::Result<Vec<Piece>> {
    let answer = search(
        pool,
        SearchKey {
            tree_id: CHUNK_TREE,
            min_objectid: FIRST_CHUNK,
            max_objectid: FIRST_CHUNK,
            min_type: CHUNK_KEY,
            max_type: CHUNK_KEY,
            ..EVERYTHING
        },
    )?;
    let pieces = found(&answer.buf, answer.key.nr_items);
    Ok(pieces.into_iter().filter_map(piece_for_names).collect())
}

/// An item: length, owner, length of a stripe and type, eight bytes each, and more.
fn piece_for_names((address, item): (u64, &[u8])) -> Option<Piece> {
    let number = |at: usize| -> Option<u64> {
        let bytes = item.get(at..at + 8)?;
        bytes.try_into().ok().map(u64::from_le_bytes)
    };
    (number(24)? & FOR_NAMES != 0).then_some(())?;
    Some(Piece {
        address,
        bytes: number(0)?,
    })
}

fn move_names_out_of(pool: BorrowedFd<'_>, piece: Piece) -> io::Result<()> {
    let mut args = Balance {
        flags: FOR_NAMES,
        state: 0,
        contents: NOTHING,
        names: BalanceArgs {
            first: piece.address,
            behind: piece.address.saturating_add(piece.bytes),
            flags: BY_ADDRESS,
            ..NOTHING
        },
        system: NOTHING,
        progress: [0; 3],
        unused: [0; 72],
    };
    // SAFETY: BALANCE_V2 takes `btrfs_ioctl_balance_args`.
    unsafe { call(pool, BALANCE, &mut args) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_item_is_no_piece() {
        let mut item = [0_u8; 32];
        item[..8].copy_from_slice(&(8 * MIB).to_le_bytes());
        item[24] = 4;
        let piece = Piece {
            address: 7,
            bytes: 8 * MIB,
        };
        assert_eq!(piece_for_names((7, &item)), Some(piece));
        assert_eq!(piece_for_names((7, &item[..31])), None);
        // One for contents.
        item[24] = 1;
        assert_eq!(piece_for_names((7, &item)), None);
    }

    #[test]
    fn number_of_the_call() {
        assert_eq!(BALANCE, 0xc400_9420);
    }
}
