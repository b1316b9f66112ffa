//! Looking after the room in the pool: it grows ahead of those who write, and what all sandboxes
//! together may write never passes what there is.

use sandkeep_model::{Result, SandboxId};
use std::{
    os::fd::AsFd as _,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::task::JoinHandle;

use crate::{
    backing::Backing,
    ballast, btrfs, disk,
    doing::Doing as _,
    pool::PoolKind,
    sizing::{self, Below},
    space::Space,
    vault::{Inner, Vault, off_thread},
};

const MIB: u64 = 1 << 20;

/// So much that was freed is worth the work of having it back at once.
const WORTH_A_COMMIT: u64 = 8 * MIB;
/// The kernel is not told to hurry more often than this.
const HURRY_EVERY: Duration = Duration::from_secs(1);

const EVERY: Duration = Duration::from_millis(300);

/// Looks after the room as long as it is kept.
#[derive(Debug)]
pub struct Attended(JoinHandle<()>);

impl Drop for Attended {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How it is with the storage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StorageState {
    pub total_bytes: u64,
    /// Promises to writers are not in it.
    pub free_bytes: u64,
    /// How much larger the storage may become now.
    pub growable_bytes: u64,
    /// Free on the disk of the state directory.
    pub below_free_bytes: u64,
    /// So little is left that whoever writes must stop, and nothing new is begun.
    pub low: bool,
    /// Soon it may be: so little is left that a fast writer gets there before one looks twice.
    pub near: bool,
    /// What sandboxes may still write before the reserve is touched.
    pub spare_bytes: u64,
    /// What all of them together may write of the reserve until the next look.
    pub grant_bytes: u64,
    /// Room is short, and some may have been freed that the kernel has not given back yet.
    pub freeing: bool,
    /// Even the reserve is touched: a sandbox that writes is refused.
    pub spent: bool,
    /// The disk of the state directory has next to nothing left.
    pub below_full: bool,
    /// Nothing can be written at all.
    pub read_only: bool,
    /// The disk below has not got all that the pool was promised: a write may fail there.
    pub overcommitted: bool,
}

impl StorageState {
    pub const fn is_well(&self) -> bool {
        !(self.low || self.below_full || self.read_only || self.overcommitted)
    }
}

/// One round.
pub fn attend(vault: &Inner) -> Result<StorageState> {
    let below = Below::of(&vault.state_dir)?;
    if let Err(error) = ballast::release_if_full(&vault.state_dir) {
        tracing::warn!(%error, "room kept for a full disk");
    }
    let pool = &vault.pool;
    let mut state = StorageState {
        below_free_bytes: below.free,
        below_full: ballast::is_full(below),
        read_only: pool.is_read_only(),
        ..StorageState::default()
    };
    let mut space = pool.space()?;
    if let Some(backing) = &pool.backing {
        if !state.read_only {
            grow_ahead(backing, &mut space, below, || pool.space())?;
        }
        state.overcommitted = !keep_whole(backing);
    }
    state.growable_bytes = pool.growable(&space)?;
    state.total_bytes = space.total;
    state.free_bytes = space.free;
    let mut left = space.free;
    if state.overcommitted {
        // What the disk below has not got cannot be written.
        left = left.min(below.spare());
    }
    let names = sizing::watermark_for_names(space.total);
    // What was kept free once may be used up by the server itself.
    let reserve = sizing::reserve(space.total);
    // Once low, it takes more than a little to be well again: else those who are held would be
    // let go at the first byte that somebody frees.
    let was_low = vault.was_low.load(Ordering::Relaxed);
    let (mark, names_mark) = match (sizing::watermark(space.total), was_low) {
        (mark, true) => (mark + mark / 4, names + names / 4),
        (mark, false) => (mark, names),
    };
    state.near = left < 2 * mark;
    state.low = left < mark || space.free_for_names < names_mark;
    vault.was_low.store(state.low, Ordering::Relaxed);
    // The limit of all disks together is as exact as this.
    state.spare_bytes = left.saturating_sub(reserve);
    state.spent = left <= reserve + reserve / 8 + 8 * MIB || space.free_for_names < names / 2;
    if !state.read_only && pool.kind != PoolKind::PlainDirectory {
        let most = left + space.promised;
        let before_reserve = most.saturating_sub(reserve);
        state.grant_bytes = most.saturating_sub(reserve / 2).min(reserve / 8);
        // Below the reserve there is a little for everybody in each round: who takes more than that is
        // seen, and held.
        let (more, exact) = match state.low {
            true => (before_reserve.max(state.grant_bytes), MIB),
            false => (before_reserve, 16 * MIB),
        };
        let dir = btrfs::open_dir(&pool.root).doing_to("opening", &pool.root)?;
        if let Err(error) = vault.quota.limit_sum(dir.as_fd(), more, exact) {
            tracing::warn!(%error, "the limit of all sandboxes together stays as it was");
        }
        let for_images = match state.low {
            true => 0,
            false => left.saturating_sub(space.left_by_images()),
        };
        if let Err(error) = vault.quota.limit_images(dir.as_fd(), for_images, 8 * MIB) {
            tracing::warn!(%error, "the limit of all images together stays as it was");
        }
        // What programs overwrite and delete shows nowhere before the kernel wrote its books.
        state.freeing = state.low
            || left < 2 * space.left_by_images()
                && (space.pinned >= WORTH_A_COMMIT
                    || btrfs::removes_subvolumes(dir.as_fd()).unwrap_or(false));
    }
    Ok(state)
}

fn grow_ahead(
    backing: &Backing,
    space: &mut Space,
    below: Below,
    look: impl FnOnce() -> Result<Space>,
) -> Result<()> {
    let ahead = sizing::ahead_of(space.total, below.free);
    let names = 2 * sizing::watermark_for_names(space.total);
    let missing = ahead
        .saturating_sub(space.free)
        .max(names.saturating_sub(space.free_for_names));
    // Not for every few bytes.
    if missing < ahead / 8 && space.free_for_names >= names {
        return Ok(());
    }
    if backing.growable(space.total, below) < MIB {
        return Ok(());
    }
    match backing.grow(missing) {
        Ok(0) => Ok(()),
        Ok(_) => {
            *space = look()?;
            Ok(())
        }
        // Somebody else took it meanwhile. What is allocated already is ours.
        Err(error) => {
            tracing::warn!(%error, "the storage could not grow");
            Ok(())
        }
    }
}

fn keep_whole(backing: &Backing) -> bool {
    let whole = || backing.is_whole().unwrap_or(true);
    if whole() {
        return true;
    }
    if let Err(error) = backing.fill_holes() {
        tracing::debug!(%error, "the pool file has holes");
    }
    whole()
}

/// Now and then, when nobody waits for it.
fn attend_at_rest(vault: &Inner) -> Result<()> {
    if vault.pool.is_read_only() {
        return Ok(());
    }
    ballast::take(&vault.state_dir)?;
    let Some(backing) = &vault.pool.backing else {
        return Ok(());
    };
    backing.mend_tail()?;
    match backing.give_back(vault.pool.space()?.free) {
        Ok(0) => {}
        Ok(bytes) => tracing::info!(bytes, "the storage gave room back to the disk below"),
        Err(error) => tracing::debug!(%error, "the storage could not give room back"),
    }
    Ok(())
}

async fn tell_to_free(vault: &Arc<Inner>) {
    let vault = Arc::clone(vault);
    let told = off_thread(move || {
        let root = &vault.pool.root;
        let dir = btrfs::open_dir(root).doing_to("opening", root)?;
        btrfs::sync_and_clean(dir.as_fd()).doing_to("writing out", root)
    });
    if let Err(error) = told.await {
        tracing::debug!(%error, "telling the kernel to free what was removed");
    }
}

impl Vault {
    /// One round of looking after the room; to be called several times a second.
    pub async fn attend(&self) -> Result<StorageState> {
        let state = self.run(attend).await?;
        if state.freeing && !state.read_only {
            self.hurry();
        }
        Ok(state)
    }

    /// The kernel gives the room of what was removed back half a minute later, or two of them:
    /// first the tree goes, and its blocks are usable after that was written down. Told so, it
    /// does each at once. Nobody waits here for it; who is held goes on as soon as it shows.
    fn hurry(&self) {
        let vault = Arc::clone(&self.inner);
        if vault.hurrying.swap(true, Ordering::AcqRel) {
            return;
        }
        tokio::spawn(async move {
            tell_to_free(&vault).await;
            tokio::time::sleep(HURRY_EVERY).await;
            vault.hurrying.store(false, Ordering::Release);
        });
    }

    /// Has the kernel give back what was removed, and waits a little for it.
    pub async fn free_now(&self) {
        for _ in 0..2 {
            tell_to_free(&self.inner).await;
            tokio::time::sleep(HURRY_EVERY).await;
        }
    }

    /// Does that until the guard is dropped, where there is no keeper to do it.
    pub fn attended(&self) -> Attended {
        let vault = self.clone();
        Attended(tokio::spawn(async move {
            loop {
                if let Err(error) = vault.attend().await {
                    tracing::warn!(%error, "looking after the storage");
                }
                tokio::time::sleep(EVERY).await;
            }
        }))
    }

    /// The same for what has time: a minute or so.
    pub async fn attend_at_rest(&self) -> Result<()> {
        self.run(attend_at_rest).await
    }

    pub fn is_read_only(&self) -> bool {
        self.inner.pool.is_read_only()
    }

    /// What disks hold, with what their sandboxes are writing right now. Those of which nobody
    /// knows are left out.
    pub async fn held_by(&self, ids: Vec<SandboxId>) -> Result<Vec<(SandboxId, u64)>> {
        self.run(move |vault| {
            let mut found = Vec::with_capacity(ids.len());
            for id in ids {
                if let Ok(Some(bytes)) = disk::held(vault, &id) {
                    found.push((id, bytes));
                }
            }
            Ok(found)
        })
        .await
    }
}
