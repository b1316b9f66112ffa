//! Watching the storage: it is grown ahead of those who write, and when that is not possible any
//! more, whoever writes is held until there is room again. A sandbox that is held runs for the
//! ledger and stands still; it can be killed and paused like any other.
//!
//! Who took the room comes first. The others may use their share of what is left, since they may only
//! do what they always did while somebody else, who may be paused by now, filled the storage.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures_util::StreamExt as _;
use sandkeep_model::{Code, Error, EventKind, Result, SandboxId, State, Timestamp, human_bytes};
use sandkeep_vault::{StorageState, state_disk_full, storage_read_only};

use crate::{
    core::Core,
    form, meters,
    registry::{Entry, Registry},
    sync::lock,
    takers::{Taken, Takers},
};

const EVERY: Duration = Duration::from_millis(300);
/// The same while it may be low in a moment: nobody shall take what is left between two looks.
const EVERY_WHILE_NEAR: Duration = Duration::from_millis(50);
/// Sandboxes stopped or let go side by side.
const AT_ONCE: usize = 8;
/// Rounds between two looks for what the ledger was not told.
const LEDGER_EVERY: u32 = 10;
/// Looks at who took the room, while there is none.
const TAKERS_EVERY: Duration = Duration::from_secs(3);
/// Who writes more than this in one round is fast.
const LEAST_FAST: u64 = 1 << 20;
/// Who took less than this part of what the first of all took is none who took the room.
const PART_OF_FIRST: u64 = 16;

/// What was seen last.
#[derive(Default)]
pub struct Storage {
    state: Mutex<StorageState>,
    /// Limits below their own, of sandboxes that may be about to take what is left for all.
    capped: Mutex<HashMap<SandboxId, u64>>,
    /// What disks of running sandboxes held since the storage became low.
    since_low: Mutex<HashMap<SandboxId, Seen>>,
    pub takers: Takers,
    looked_who_took: Mutex<Option<Instant>>,
    /// The work of holding, or letting go, is under way.
    busy: tokio::sync::Mutex<()>,
}

/// Who may hold no more than so much for now.
type Capped = (Arc<Entry>, u64);

#[derive(Debug, Clone, Copy)]
struct Seen {
    first: u64,
    last: u64,
}

/// Why the storage is not well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorageReason {
    Low,
    ReadOnly,
    Overcommitted,
    StateDiskFull,
}

impl StorageReason {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "storage_low",
            Self::ReadOnly => "storage_read_only",
            Self::Overcommitted => "storage_overcommitted",
            Self::StateDiskFull => "state_disk_full",
        }
    }
}

/// How it is with the storage.
#[derive(Debug, Clone)]
pub struct StorageReport {
    pub state: StorageState,
    /// Sandboxes that stand still because of it.
    pub held: usize,
    /// Who took how much of late, most first; only told while it is low.
    pub taken: Vec<Taken>,
    /// What is wrong, and what to do.
    pub reasons: Vec<(StorageReason, Error)>,
}

impl Storage {
    pub fn seen(&self) -> StorageState {
        *lock(&self.state)
    }

    pub fn report(&self, registry: &Registry) -> StorageReport {
        let state = self.seen();
        let held = held_in(registry);
        let mut reasons = Vec::new();
        if state.read_only {
            reasons.push((StorageReason::ReadOnly, storage_read_only()));
        }
        let mut taken = Vec::new();
        if state.low {
            let mut low = low(&state, held);
            low.message.push_str(&self.takers.words());
            reasons.push((StorageReason::Low, low));
            taken = self.takers.latest();
        }
        if state.overcommitted {
            reasons.push((StorageReason::Overcommitted, overcommitted()));
        }
        if state.below_full {
            reasons.push((StorageReason::StateDiskFull, state_disk_full()));
        }
        StorageReport {
            state,
            held,
            taken,
            reasons,
        }
    }
}

fn held_in(registry: &Registry) -> usize {
    let all = registry.all();
    all.iter().filter(|entry| entry.held().is_some()).count()
}

fn low(state: &StorageState, held: usize) -> Error {
    let who = match held {
        0 => String::new(),
        1 => "; one sandbox that wrote is held".to_owned(),
        held => format!("; {held} sandboxes that wrote are held"),
    };
    Error::new(
        Code::DiskFull,
        format!(
            "the storage is nearly full: {} of {} are left{who}",
            human_bytes(state.free_bytes),
            human_bytes(state.total_bytes),
        ),
    )
    .hint(
        "delete a sandbox, points or templates; or free space on the disk below it, or raise \
         `storage_size` and restart. Who is held goes on by itself then",
    )
}

fn overcommitted() -> Error {
    Error::new(
        Code::DiskFull,
        "the disk below the storage has not got all that the storage was promised",
    )
    .hint("free space on that disk: what is promised is set aside then by itself")
}

impl Core {
    /// Refuses what needs room while there is next to none.
    pub fn check_storage(&self) -> Result<()> {
        let state = self.storage.seen();
        if state.read_only {
            return Err(storage_read_only());
        }
        if state.low {
            return Err(low(&state, held_in(&self.registry)));
        }
        Ok(())
    }

    /// Why nobody can talk to a sandbox that is held.
    pub fn held(&self, id: &SandboxId) -> Error {
        let state = self.storage.seen();
        low(&state, held_in(&self.registry))
            .context(format!("sandbox \"{id}\" is held because it wrote"))
            .retryable(true)
    }

    /// Looks after the storage, for ever.
    pub async fn watch_storage(self: Arc<Self>) {
        for round in 0_u32.. {
            let state = self.storage.seen();
            let pause = match state.near && !state.low {
                true => EVERY_WHILE_NEAR,
                false => EVERY,
            };
            tokio::select! {
                () = self.closing.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            self.look_at_storage().await;
            if round.is_multiple_of(LEDGER_EVERY) {
                self.catch_ledger_up().await;
            }
        }
    }

    /// One round. Holding and letting go may take their time; the room is looked after meanwhile.
    pub async fn look_at_storage(&self) {
        let before = self.storage.seen();
        let held = held_in(&self.registry);
        let state = match self.vault.attend().await {
            Ok(state) => state,
            Err(error) => {
                tracing::warn!(%error, "looking after the storage");
                return;
            }
        };
        *lock(&self.storage.state) = state;
        meters::storage(&state, held);
        if state.is_well() != before.is_well() {
            tell(&state);
        }
        let Some(core) = self.me.upgrade() else {
            return;
        };
        if state.low && !state.read_only {
            self.look_who_took_if_due().await;
            let Ok((writers, to_cap)) = self.writers(&state).await else {
                return;
            };
            for (entry, most) in to_cap {
                self.cap(&entry, most).await;
            }
            if !writers.is_empty() {
                self.tasks
                    .spawn(async move { core.hold_all(writers, state).await });
            }
        } else if !state.low {
            lock(&self.storage.since_low).clear();
            *lock(&self.storage.looked_who_took) = None;
            self.note_who_holds_what().await;
            if held > 0 || !lock(&self.storage.capped).is_empty() {
                self.tasks.spawn(async move { core.let_all_go().await });
            }
        }
    }

    async fn look_who_took_if_due(&self) {
        let looked = *lock(&self.storage.looked_who_took);
        if looked.is_some_and(|at| at.elapsed() < TAKERS_EVERY) {
            return;
        }
        *lock(&self.storage.looked_who_took) = Some(Instant::now());
        if let Err(error) = self.look_who_took().await {
            tracing::warn!(%error, "looking at who took the room");
            return;
        }
        let words = self.storage.takers.words();
        if looked.is_none() && !words.is_empty() {
            tracing::warn!("the storage is nearly full{words}");
        }
    }

    /// Who must stop: of those who took the room whoever goes on writing, and everybody who used up his
    /// share of what is left. Once the reserve is touched also all who have a kernel of their own: that
    /// takes a refusal for a broken disk. And what those who took the room may hold until the next look.
    async fn writers(&self, state: &StorageState) -> Result<(Vec<Arc<Entry>>, Vec<Capped>)> {
        let running: HashMap<SandboxId, Arc<Entry>> = self
            .registry
            .all()
            .into_iter()
            .filter(|entry| {
                entry.state() == State::Running && !entry.pooled() && entry.held().is_none()
            })
            .map(|entry| (entry.id.clone(), entry))
            .collect();
        let holds = self
            .vault
            .held_by(running.keys().cloned().collect())
            .await?;
        let taken = self.storage.takers.latest();
        let first = taken.first().map_or(0, |first| first.bytes);
        let took: HashMap<SandboxId, u64> =
            taken.into_iter().map(|one| (one.id, one.bytes)).collect();
        let fast = (state.total_bytes / 1024).max(LEAST_FAST);
        let share = fast.max(state.spare_bytes / (running.len() as u64 + 1));
        let mut since_low = lock(&self.storage.since_low);
        let capped = lock(&self.storage.capped);
        let (mut writers, mut takers) = (Vec::new(), Vec::new());
        for (id, bytes) in holds {
            let seen = since_low.entry(id.clone()).or_insert(Seen {
                first: bytes,
                last: bytes,
            });
            let last = std::mem::replace(&mut seen.last, bytes);
            let since = bytes.saturating_sub(seen.first);
            let Some(entry) = running.get(&id) else {
                continue;
            };
            let took = took.get(&id).copied().unwrap_or(0).max(since);
            let is_taker = took >= first / PART_OF_FIRST;
            let goes_on = bytes.saturating_sub(last) > fast && is_taker;
            let machine = entry.ward.disk_form().is_some();
            if goes_on || since > share || (state.spent && machine) {
                writers.push(Arc::clone(entry));
            }
            if is_taker && !machine {
                takers.push((Arc::clone(entry), bytes));
            }
        }
        // One who is faster than we look gets no further than to where something is left for the others.
        let part = state.spare_bytes.saturating_sub(state.grant_bytes) / takers.len().max(1) as u64;
        let part = part.max(fast);
        takers.retain_mut(|(entry, most)| {
            *most = most.saturating_add(part);
            capped
                .get(&entry.id)
                .is_none_or(|cap| most.abs_diff(*cap) > fast)
        });
        Ok((writers, takers))
    }

    async fn hold_all(&self, writers: Vec<Arc<Entry>>, state: StorageState) {
        let Ok(_busy) = self.storage.busy.try_lock() else {
            return;
        };
        futures_util::stream::iter(writers)
            .for_each_concurrent(AT_ONCE, |entry| async move {
                self.hold(&entry, &state).await;
            })
            .await;
    }

    async fn hold(&self, entry: &Entry, state: &StorageState) {
        // Somebody is at work with it; the next round comes soon.
        let Ok(_turn) = entry.turn.try_lock() else {
            return;
        };
        if entry.state() != State::Running || entry.held().is_some() {
            return;
        }
        // Whoever comes from here on is told, and does not wait.
        entry.set_held(Some(Timestamp::now()));
        // To stop what is about to be written takes a while, and the room that is left belongs to
        // the others. A kernel in a box would take a refusal for a broken disk; it stops at once.
        if entry.ward.disk_form().is_none() {
            self.limit_to_what_it_has(entry).await;
        }
        if let Err(error) = entry.ward.freeze(&entry.id).await {
            tracing::warn!(id = %entry.id, %error, "a box that writes could not be held");
            if let Err(error) = self.own_limit_again(entry).await {
                tracing::warn!(id = %entry.id, %error, "its limit");
            }
            entry.set_held(None);
            return;
        }
        let taken = self.storage.takers.of(&entry.id);
        let (took_bytes, image_bytes) = (taken.bytes, taken.images);
        let free_bytes = state.free_bytes;
        tracing::warn!(
            id = %entry.id, free = free_bytes, took = took_bytes, of_it_images = image_bytes,
            "held: it writes and the storage is nearly full"
        );
        let low = EventKind::StorageLow {
            free_bytes,
            took_bytes,
            image_bytes,
        };
        self.note(entry, low).await;
    }

    /// Leaves the others their part of what all may write until the next look.
    async fn cap(&self, entry: &Entry, most: u64) {
        // Whoever is at work with it may set its limit.
        let Ok(_turn) = entry.turn.try_lock() else {
            return;
        };
        if entry.state() != State::Running || entry.held().is_some() {
            return;
        }
        let own = Self::own_limit(entry);
        if own > 0 && own <= most {
            return;
        }
        match self.vault.set_disk_limit(&entry.id, most.max(1)).await {
            Ok(()) => {
                lock(&self.storage.capped).insert(entry.id.clone(), most);
            }
            Err(error) => {
                tracing::warn!(id = %entry.id, %error, "it may take what is left for all");
            }
        }
    }

    async fn limit_to_what_it_has(&self, entry: &Entry) {
        let held = self.vault.held_by(vec![entry.id.clone()]).await;
        let bytes = held
            .ok()
            .and_then(|held| held.first().map(|(_, bytes)| *bytes));
        let Some(bytes) = bytes else { return };
        // Zero would lift the limit.
        if let Err(error) = self.vault.set_disk_limit(&entry.id, bytes.max(1)).await {
            tracing::warn!(id = %entry.id, %error, "a box that writes keeps its limit");
        }
    }

    /// The limit it was given, after it was held. Of one that a server before this one held, too.
    pub async fn own_limit_again(&self, entry: &Entry) -> Result<()> {
        if self.vault.is_read_only() {
            return Ok(());
        }
        let own = Self::own_limit(entry);
        self.vault.set_disk_limit(&entry.id, own).await?;
        lock(&self.storage.capped).remove(&entry.id);
        Ok(())
    }

    fn own_limit(entry: &Entry) -> u64 {
        let limits = entry.with(|sandbox| sandbox.limits);
        form::quota(entry.ward.as_ref(), &limits)
    }

    /// Whether its limit is not its own.
    pub fn is_capped(&self, id: &SandboxId) -> bool {
        lock(&self.storage.capped).contains_key(id)
    }

    async fn note(&self, entry: &Entry, kind: EventKind) {
        if entry.pooled() {
            return;
        }
        if let Err(error) = self.store.note(&[(&entry.id, kind)]).await {
            tracing::warn!(id = %entry.id, %error, "noting who is held");
        }
    }

    async fn let_all_go(&self) {
        let Ok(_busy) = self.storage.busy.try_lock() else {
            return;
        };
        let held = self.registry.all().into_iter();
        futures_util::stream::iter(held.filter(|entry| entry.held().is_some()))
            .for_each_concurrent(AT_ONCE, |entry| async move {
                let _turn = entry.turn.lock().await;
                if let Err(error) = self.let_go(&entry).await {
                    tracing::warn!(id = %entry.id, %error, "letting a box go on");
                }
            })
            .await;
        let capped: Vec<SandboxId> = lock(&self.storage.capped).keys().cloned().collect();
        for id in capped {
            let Some(entry) = self.registry.find(&id) else {
                lock(&self.storage.capped).remove(&id);
                continue;
            };
            // Who is at work with it now is asked again in the next round.
            let Ok(_turn) = entry.turn.try_lock() else {
                continue;
            };
            if let Err(error) = self.own_limit_again(&entry).await {
                tracing::warn!(%id, %error, "it keeps a lower limit");
            }
        }
    }

    /// Lets a box go on that is held, if it is. The caller has the turn.
    pub async fn let_go(&self, entry: &Entry) -> Result<()> {
        if entry.held().is_none() {
            return Ok(());
        }
        if let Err(error) = self.own_limit_again(entry).await {
            tracing::warn!(id = %entry.id, %error, "its own limit is tried again");
            lock(&self.storage.capped).insert(entry.id.clone(), 0);
        }
        if entry.state() == State::Running {
            entry.ward.thaw(&entry.id).await?;
            tracing::info!(id = %entry.id, "it goes on: there is room in the storage");
            self.note(entry, EventKind::StorageBack).await;
        }
        entry.set_held(None);
        Ok(())
    }

    /// What the ledger could not be told because its disk was full.
    async fn catch_ledger_up(&self) {
        for entry in self.registry.all() {
            if entry.pooled() || !entry.is_unwritten() {
                continue;
            }
            if let Ok(_turn) = entry.turn.try_lock() {
                self.tell_ledger(&entry).await;
            }
        }
    }
}

fn tell(state: &StorageState) {
    if state.is_well() {
        tracing::info!(free = state.free_bytes, "the storage is well again");
    } else {
        tracing::error!(?state, "the storage is not well");
    }
}
