//! Points that are made by themselves: around commands, and every so often.
//!
//! They never stand in the way of a command: what can not be made is told as an event.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sandkeep_agent_api::process::StartRequest;
use sandkeep_model::{
    Code, Error, EventKind, Keep, Point, PointKind, PointPolicy, PointReason, PointWhy, Result,
    Sandbox, SandboxId, State,
};
use tokio::{sync::Notify, time::Instant};

use super::{
    Hold,
    risky::{self, Matcher},
    snapshot::PointOrder,
};
use crate::{Keeper, core::Core, registry::Entry, sync::lock};

/// The same trouble is told again after this.
const TELL_AGAIN: Duration = Duration::from_secs(60);
/// On a disk that is fuller than this, in percent, these points give way: the blocks they
/// hold count as the box's own.
const FULL_PCT: u64 = 80;
const GIVING_WAY: Keep = Keep {
    count: 1,
    age_seconds: None,
    bytes: None,
};

/// What is remembered of one box.
#[derive(Default)]
pub struct Auto {
    memory: Mutex<Memory>,
    /// Commands that have ended and whose points are not made yet.
    pending: AtomicUsize,
    settled: Notify,
}

struct Memory {
    /// When a point was made or found needless; at first, since when the box is known.
    last: Instant,
    any: bool,
    told: Option<(String, Instant)>,
    matcher: Option<Arc<Matcher>>,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            last: Instant::now(),
            any: false,
            told: None,
            matcher: None,
        }
    }
}

impl Auto {
    fn looked(&self) {
        let mut memory = lock(&self.memory);
        memory.last = Instant::now();
        memory.any = true;
    }

    fn too_soon(&self, policy: &PointPolicy) -> bool {
        let memory = lock(&self.memory);
        let least = Duration::from_secs(policy.min_interval_seconds);
        memory.any && memory.last.elapsed() < least
    }

    fn due(&self, policy: &PointPolicy) -> bool {
        policy
            .every_seconds
            .is_some_and(|every| lock(&self.memory).last.elapsed() >= Duration::from_secs(every))
    }

    /// Whether this trouble is news.
    fn is_news(&self, message: &str) -> bool {
        let mut memory = lock(&self.memory);
        let known = memory
            .told
            .as_ref()
            .is_some_and(|(told, at)| told == message && at.elapsed() < TELL_AGAIN);
        if !known {
            memory.told = Some((message.to_owned(), Instant::now()));
        }
        !known
    }

    /// Compiled once for as long as the patterns stay the same.
    fn matcher(&self, patterns: &[String]) -> Result<Arc<Matcher>> {
        let mut memory = lock(&self.memory);
        if let Some(matcher) = memory.matcher.as_ref().filter(|m| m.is_of(patterns)) {
            return Ok(Arc::clone(matcher));
        }
        let matcher = Arc::new(Matcher::new(patterns)?);
        memory.matcher = Some(Arc::clone(&matcher));
        Ok(matcher)
    }

    /// Returns when the points of all commands that have ended are made.
    pub async fn settled(&self) {
        loop {
            let settled = self.settled.notified();
            if self.pending.load(Ordering::Acquire) == 0 {
                return;
            }
            settled.await;
        }
    }
}

/// A command that runs. While it is kept the box is not idle, unless it is a terminal: that
/// is only as awake as whoever types into it.
#[derive(Default)]
pub struct Command {
    after: Option<After>,
    _hold: Option<Hold>,
}

struct After {
    core: std::sync::Weak<Core>,
    entry: Arc<Entry>,
    line: String,
}

/// A point that is still to be made, whatever becomes of it.
struct Pending(Arc<Entry>);

impl Pending {
    fn new(entry: Arc<Entry>) -> Self {
        entry.auto.pending.fetch_add(1, Ordering::AcqRel);
        Self(entry)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.auto.pending.fetch_sub(1, Ordering::AcqRel);
        self.0.auto.settled.notify_waiters();
    }
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command")
            .field("line", &self.after.as_ref().map(|after| &after.line))
            .finish_non_exhaustive()
    }
}

impl Command {
    /// Whether its end is of interest.
    pub fn has_more_to_do(&self) -> bool {
        self.after
            .as_ref()
            .is_some_and(|after| after.entry.with(wants_after))
    }

    /// It has ended, and whoever watched it knows. The point that may belong to it is made
    /// before anything else is done with the box.
    pub fn ended(mut self) {
        let Some(After { core, entry, line }) = self.after.take() else {
            return;
        };
        let wanted = entry.with(wants_after);
        let Some(core) = core.upgrade().filter(|_| wanted) else {
            return;
        };
        let pending = Pending::new(entry);
        let tasks = core.tasks.clone();
        tasks.spawn(async move {
            let reason = PointReason::of_command(PointWhy::AfterExec, &line, None);
            core.auto_point(&pending.0, reason).await;
        });
    }
}

fn wants_after(sandbox: &Sandbox) -> bool {
    let policy = sandbox.time.points.as_ref();
    policy.is_some_and(|policy| policy.after_exec)
}

/// Refuses rules nobody can follow.
pub fn check(policy: &PointPolicy) -> Result<()> {
    policy.check("auto_points")?;
    Matcher::new(&policy.before_matching).map(drop)
}

impl Keeper {
    /// To be called before every command that somebody starts from outside: makes the points
    /// the rule of the box wants. Never fails; a box that can not run a command says so itself.
    pub async fn command(&self, id: &SandboxId, start: &StartRequest) -> Command {
        let Ok(entry) = self.core.registry.owned(id) else {
            return Command::default();
        };
        entry.auto.settled().await;
        let line = risky::line(start);
        if let Some(reason) = reason_before(&entry, &line)
            && self.awake(id).await.is_ok()
        {
            let (core, of) = (Arc::clone(&self.core), Arc::clone(&entry));
            let made = self.core.finish(async move {
                core.auto_point(&of, reason).await;
                Ok(())
            });
            if let Err(error) = made.await {
                tracing::debug!(%id, %error, "no point before a command");
            }
        }
        Command {
            _hold: start.pty.is_none().then(|| entry.activity.hold()),
            after: Some(After {
                core: self.core.me.clone(),
                entry,
                line,
            }),
        }
    }

    /// Changes when points are made of a box by themselves; `None`: never.
    pub async fn set_point_policy(
        &self,
        id: &SandboxId,
        policy: Option<PointPolicy>,
    ) -> Result<Sandbox> {
        if let Some(policy) = &policy {
            check(policy)?;
        }
        let policy = policy.filter(|policy| !policy.is_off());
        let core = Arc::clone(&self.core);
        let entry = core.registry.owned(id)?;
        self.core
            .finish(async move {
                let _turn = entry.turn.lock().await;
                if matches!(entry.state(), State::Stopping | State::Gone) {
                    return Err(Error::sandbox_not_found(&entry.id));
                }
                let mut time = entry.with(|sandbox| sandbox.time.clone());
                time.points.clone_from(&policy);
                if !core.store.set_time(&entry.id, &time).await? {
                    return Err(Error::sandbox_not_found(&entry.id));
                }
                entry.amend(|sandbox| sandbox.time.points = policy);
                let told = [(&entry.id, EventKind::PointPolicyChanged)];
                core.store.note(&told).await?;
                core.thin_out(&entry).await;
                Ok(entry.sandbox())
            })
            .await
    }
}

/// Why a point is due before this command; a pattern says more than "every command".
fn reason_before(entry: &Entry, line: &str) -> Option<PointReason> {
    let policy = entry.with(|sandbox| sandbox.time.points.clone())?;
    if !policy.before_matching.is_empty() {
        match entry.auto.matcher(&policy.before_matching) {
            Ok(matcher) => {
                if let Some(pattern) = matcher.fits(line) {
                    let pattern = Some(pattern.to_owned());
                    let why = PointWhy::BeforeMatching;
                    return Some(PointReason::of_command(why, line, pattern));
                }
            }
            Err(error) => tracing::warn!(id = %entry.id, %error, "patterns of a box"),
        }
    }
    policy
        .before_exec
        .then(|| PointReason::of_command(PointWhy::BeforeExec, line, None))
}

impl Core {
    /// Called with each sample of a running box.
    pub fn look_due(self: &Arc<Self>, entry: &Arc<Entry>) {
        let due = entry.with(|sandbox| {
            let policy = sandbox.time.points.as_ref();
            policy.is_some_and(|policy| entry.auto.due(policy))
        });
        if !due {
            return;
        }
        // Not again while this one is made.
        entry.auto.looked();
        let (core, entry) = (Arc::clone(self), Arc::clone(entry));
        self.tasks.spawn(async move {
            core.auto_point(&entry, PointReason::every()).await;
        });
    }

    /// Makes a point if the box still wants one and it would hold something new.
    async fn auto_point(&self, entry: &Arc<Entry>, reason: PointReason) {
        let _turn = entry.turn.lock().await;
        let Some(policy) = entry.with(|sandbox| sandbox.time.points.clone()) else {
            return;
        };
        if entry.state() != State::Running {
            return;
        }
        let may_wait = matches!(reason.why, PointWhy::BeforeExec | PointWhy::AfterExec);
        if may_wait && entry.auto.too_soon(&policy) {
            return;
        }
        match self.make_auto_point(entry, &policy, reason.clone()).await {
            Ok(made) => {
                entry.auto.looked();
                if made.is_some() {
                    self.thin_out(entry).await;
                }
            }
            Err(error) => {
                tracing::warn!(id = %entry.id, %error, "a point was not made by itself");
                if !entry.auto.is_news(&error.message) {
                    return;
                }
                let message = error.message;
                let told = [(&entry.id, EventKind::PointNotMade { reason, message })];
                if let Err(error) = self.store.note(&told).await {
                    tracing::warn!(id = %entry.id, %error, "telling that there is no point");
                }
            }
        }
    }

    async fn make_auto_point(
        &self,
        entry: &Arc<Entry>,
        policy: &PointPolicy,
        reason: PointReason,
    ) -> Result<Option<Point>> {
        self.check_storage()?;
        if self.nearly_full(entry).await {
            self.remove_surplus(entry, GIVING_WAY).await;
            return Err(Error::new(
                Code::DiskFull,
                format!(
                    "the disk of the sandbox is more than {FULL_PCT} % full; points that were made by themselves give way"
                ),
            ));
        }
        let mut order = PointOrder::of(PointKind::Auto);
        order.reason = Some(reason);
        if policy.memory {
            // Writing the memory cuts every connection.
            if entry.activity.unused().await {
                return self.point_now(entry, None, order).await.map(Some);
            }
            order.why_disk_only = Some(
                "somebody is connected, whom writing the memory would have cut off".to_owned(),
            );
        }
        self.point_if_changed(entry, order).await
    }

    async fn nearly_full(&self, entry: &Entry) -> bool {
        let limit = entry.with(|sandbox| sandbox.limits.disk_bytes());
        let used = self.vault.disk_usage(&entry.id).await.unwrap_or(0);
        limit > 0 && used > limit / 100 * FULL_PCT
    }

    /// Removes what the rule of a box no longer keeps.
    pub async fn thin_out(&self, entry: &Entry) {
        let policy = entry.with(|sandbox| sandbox.time.points.clone());
        if let Some(policy) = policy {
            self.remove_surplus(entry, policy.keep).await;
        }
    }

    /// For all boxes.
    pub async fn thin_all_out(&self) {
        for entry in self.registry.all() {
            self.thin_out(&entry).await;
        }
    }

    async fn remove_surplus(&self, entry: &Entry, keep: Keep) {
        let points = match self.store.points_of(&entry.id).await {
            Ok(points) => points,
            Err(error) => {
                tracing::warn!(id = %entry.id, %error, "listing the points of a box");
                return;
            }
        };
        for point in keep.surplus(&points, sandkeep_model::Timestamp::now()) {
            match self.delete_point(&point.id).await {
                Ok(()) => tracing::debug!(point = %point.id, "a point was not kept any longer"),
                // It is what a paused box wakes up from, or somebody was faster.
                Err(error) => tracing::debug!(point = %point.id, %error, "a point stays"),
            }
        }
    }
}
