//! What boxes may reach: every box has its moat from its first moment to its last.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use sandkeep_moat::{
    AttachSpec, BoxMoat, ConnectionRecord, Denial, Hooks, Moat, Traffic,
    policy::{Policy, Source},
};
use sandkeep_model::{Code, Error, EventKind, PointId, Result, SandboxId, State};
use tokio::{
    sync::broadcast::{self, error::RecvError},
    time::Instant,
};

use crate::{
    agent,
    core::Core,
    egress::{BoundTo, Egress, EgressWish},
    isolation::Minimum,
    registry::Entry,
    sync::lock,
};

/// Refusals that wait to be written; a server that can not keep up skips some.
const BELL: usize = 1024;
/// Refusals written in one transaction.
const BATCH: usize = 64;
/// A box may have this many events about refusals at once, and then one more each second:
/// what it tries is its own choice, the ledger is everybody's.
const EVENTS_AT_ONCE: u32 = 32;
const LONGEST_HOST: usize = 255;
const LONGEST_WHY: usize = 512;

/// How boxes reach anything.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// `None`: this host can not have one. Boxes then reach nothing, and whoever asks for
    /// more is told so.
    pub moat: Option<Arc<Moat>>,
    /// What a box may reach whose create says nothing about it.
    pub standing: Policy,
    /// For builds of templates that say nothing.
    pub builds: Policy,
    /// Given to the moat as its hooks, this brings refusals into the event stream.
    pub denials: DenialBell,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            moat: None,
            standing: Policy::air_gapped(),
            builds: Policy::air_gapped(),
            denials: DenialBell::default(),
        }
    }
}

/// Rung for every refusal the moat reports. Never blocks, never grows.
#[derive(Debug, Clone)]
pub struct DenialBell(broadcast::Sender<(SandboxId, Denial)>);

impl Default for DenialBell {
    fn default() -> Self {
        Self(broadcast::channel(BELL).0)
    }
}

impl Hooks for DenialBell {
    fn connection(&self, _record: &ConnectionRecord) {}

    fn denial(&self, id: &SandboxId, denial: &Denial) {
        // Nobody listening is no error.
        let _ = self.0.send((id.clone(), denial.clone()));
    }
}

/// The network side of one box.
pub struct Reach {
    egress: Mutex<Arc<Egress>>,
    /// `None` before it is attached, after it ended, and where there can be no moat.
    moat: Mutex<Option<BoxMoat>>,
    /// The point whose memory it is started from; what it was told about names then counts on.
    from_point: Mutex<Option<PointId>>,
    events: Mutex<Budget>,
    /// What it had moved when somebody asked last.
    moved: AtomicU64,
}

impl Reach {
    pub fn new(egress: Egress) -> Self {
        Self {
            egress: Mutex::new(Arc::new(egress)),
            moat: Mutex::default(),
            from_point: Mutex::default(),
            events: Mutex::new(Budget::full()),
            moved: AtomicU64::new(0),
        }
    }

    /// Whether it moved anything since this was asked last.
    pub fn talked(&self) -> bool {
        let traffic = lock(&self.moat).as_ref().map(BoxMoat::traffic);
        // Where nothing is attached nothing moves.
        let Some(moved) = traffic.as_ref().map(moved) else {
            return false;
        };
        self.moved.swap(moved, Ordering::AcqRel) != moved
    }

    pub fn egress(&self) -> Arc<Egress> {
        Arc::clone(&lock(&self.egress))
    }

    /// Holds at once for a box that is attached. Says whether it is. `policy_too`: a policy
    /// that is set again counts its limits from the beginning, credentials do not.
    pub fn set(&self, egress: Egress, policy_too: bool) -> bool {
        let egress = Arc::new(egress);
        *lock(&self.egress) = Arc::clone(&egress);
        let moat = lock(&self.moat);
        let Some(moat) = &*moat else {
            return false;
        };
        moat.set_bindings(egress.credentials.clone());
        if policy_too {
            moat.set_policy(egress.policy.clone());
        }
        true
    }

    /// The certificate the box must trust for this; `None` when nothing is looked into.
    pub fn authority_for(&self, egress: &Egress) -> Result<Option<String>> {
        if !egress.is_looked_into() {
            return Ok(None);
        }
        match &*lock(&self.moat) {
            Some(moat) => moat.ca_pem().map(Some),
            None => Err(Error::internal("the box has no network")
                .hint("give it a policy again, or make a new one")),
        }
    }

    /// What the box was refused of late, newest first.
    pub fn denials(&self) -> Vec<Denial> {
        let moat = lock(&self.moat);
        moat.as_ref().map(BoxMoat::denials).unwrap_or_default()
    }

    pub fn attached(&self) -> bool {
        lock(&self.moat).is_some()
    }

    /// What the box has open is over. For a box that stands still, so that it opens nothing new;
    /// it has its moat when it goes on.
    pub fn hang_up(&self) {
        if let Some(moat) = &*lock(&self.moat) {
            moat.hang_up();
        }
    }

    /// The next time it is attached it comes from the memory of this point.
    pub fn comes_from(&self, point: &PointId) {
        *lock(&self.from_point) = Some(point.clone());
    }

    /// Keeps with a point what the box was told about names.
    pub fn keep_at(&self, point: &PointId) {
        if let Some(moat) = &*lock(&self.moat) {
            moat.keep_at(point.as_str());
        }
    }

    /// Nothing gets out of the box from here on.
    pub fn close(&self) {
        lock(&self.moat).take();
    }
}

fn moved(traffic: &Traffic) -> u64 {
    traffic.bytes_sent.saturating_add(traffic.bytes_received)
}

/// Spent by events, filled by time.
struct Budget {
    left: u32,
    since: Instant,
}

impl Budget {
    fn full() -> Self {
        Self {
            left: EVENTS_AT_ONCE,
            since: Instant::now(),
        }
    }

    fn spend(&mut self) -> bool {
        let seconds = u32::try_from(self.since.elapsed().as_secs()).unwrap_or(u32::MAX);
        if seconds > 0 {
            self.left = self.left.saturating_add(seconds).min(EVENTS_AT_ONCE);
            self.since = Instant::now();
        }
        let some = self.left > 0;
        self.left = self.left.saturating_sub(1);
        some
    }
}

impl Core {
    /// What a box gets that wishes this, or says nothing.
    pub fn reach(&self, wish: EgressWish) -> Result<Egress> {
        self.enforceable(wish.over(&self.config.network.standing.clone().into()))
    }

    /// The same for the build of a template.
    pub fn reach_of_build(&self, wish: EgressWish) -> Result<Egress> {
        self.enforceable(wish.over(&self.config.network.builds.clone().into()))
    }

    fn enforceable(&self, egress: Egress) -> Result<Egress> {
        let nothing = egress.reaches_nothing() && egress.credentials.is_empty();
        if self.config.network.moat.is_none() && !nothing {
            return Err(Error::new(
                Code::NotEnforceable,
                "this host can not bound what a sandbox reaches, so sandboxes have no network here",
            )
            .field("network")
            .hint("ask for no network (profile \"air-gapped\"); `sandkeep doctor` tells what the host lacks"));
        }
        Ok(egress)
    }

    /// Gives a box its moat. Where there is none its namespace has no way out anyway.
    pub async fn attach(&self, entry: &Entry) -> Result<()> {
        let Some(moat) = &self.config.network.moat else {
            return Ok(());
        };
        let egress = entry.reach.egress();
        let from_point = lock(&entry.reach.from_point).clone();
        let spec = AttachSpec {
            id: entry.id.clone(),
            netns: entry.ward.netns(&entry.id).await?,
            policy: egress.policy.clone(),
            bindings: egress.credentials.clone(),
            from_point: from_point.map(|point| point.to_string()),
            copy_of: entry.with(|sandbox| sandbox.identity.parent.clone()),
        };
        let attached = moat.attach(spec).await?;
        // What it moved before is not what it moves now.
        entry
            .reach
            .moved
            .store(moved(&attached.traffic()), Ordering::Release);
        lock(&entry.reach.from_point).take();
        *lock(&entry.reach.moat) = Some(attached);
        Ok(())
    }

    /// Ledger first: what was answered holds after a restart, too.
    pub async fn set_network(
        &self,
        id: &SandboxId,
        wish: EgressWish,
        by: Option<&str>,
    ) -> Result<Arc<Egress>> {
        let entry = self.registry.owned(id)?;
        let _turn = entry.turn.lock().await;
        match entry.state() {
            State::Running => {}
            State::Stopping | State::Gone => return Err(Error::sandbox_not_found(id)),
            state => {
                return Err(Error::conflict(format!("sandbox \"{id}\" is {state}"))
                    .hint("try again when it runs")
                    .retryable(true));
            }
        }
        let policy_too = wish.policy.is_some();
        let egress = self.enforceable(wish.over(&entry.reach.egress()))?;
        self.levels
            .allow(entry.ward.level(), [Minimum::of_policy(&egress.policy)])?;
        self.have_trusted(&entry, &egress).await?;
        let rules = u32::try_from(egress.policy.allow.len()).unwrap_or(u32::MAX);
        let written = self
            .store
            .set_network(id, &egress.to_json(), rules, by)
            .await?;
        if written.is_none() {
            return Err(Error::internal(
                "the ledger had the sandbox in another state",
            ));
        }
        if !entry.reach.set(egress, policy_too) {
            self.attach(&entry).await?;
        }
        Ok(entry.reach.egress())
    }

    /// Before anything is looked into, so that no program in the box meets a certificate it
    /// does not know.
    async fn have_trusted(&self, entry: &Entry, egress: &Egress) -> Result<()> {
        if !egress.is_looked_into() {
            return Ok(());
        }
        if !entry.reach.attached() {
            self.attach(entry).await?;
        }
        if let Some(authority) = entry.reach.authority_for(egress)? {
            let mut agent = agent::agent(entry.ward.as_ref(), &entry.id).await?;
            agent.trust(&authority).await?;
        }
        Ok(())
    }

    pub fn bound(&self) -> Vec<BoundTo> {
        let mut bound = Vec::new();
        for entry in self.registry.all() {
            for binding in &entry.reach.egress().credentials {
                if let Source::Secret(secret) = &binding.source {
                    bound.push(BoundTo {
                        sandbox_id: entry.id.clone(),
                        secret: secret.clone(),
                        host: binding.host.to_string(),
                        port: binding.port,
                    });
                }
            }
        }
        bound
    }

    pub fn denials(&self, id: &SandboxId) -> Result<Vec<Denial>> {
        let entry = self.registry.owned(id)?;
        match self.at_rest(&entry) {
            Some((_, denials)) => Ok(denials),
            None => Ok(entry.reach.denials()),
        }
    }

    /// What is kept of a box that is not attached, because it is paused.
    fn at_rest(&self, entry: &Entry) -> Option<(Traffic, Vec<Denial>)> {
        let moat = self.config.network.moat.as_ref()?;
        (!entry.reach.attached()).then(|| moat.kept(&entry.id))
    }

    pub fn traffic(&self, id: &SandboxId) -> Result<Traffic> {
        let entry = self.registry.owned(id)?;
        if let Some((traffic, _)) = self.at_rest(&entry) {
            return Ok(traffic);
        }
        let moat = lock(&entry.reach.moat);
        Ok(moat.as_ref().map(BoxMoat::traffic).unwrap_or_default())
    }

    /// Brings refusals into the event stream, for ever.
    pub async fn tell_denials(self: Arc<Self>) {
        let mut bell = self.config.network.denials.0.subscribe();
        loop {
            let first = tokio::select! {
                () = self.closing.cancelled() => return,
                rung = bell.recv() => rung,
            };
            let mut batch = Vec::new();
            match first {
                Ok(denied) => batch.push(denied),
                Err(RecvError::Closed) => return,
                Err(RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "refusals came faster than events are written");
                }
            }
            while batch.len() < BATCH
                && let Ok(denied) = bell.try_recv()
            {
                batch.push(denied);
            }
            batch.retain(|(id, _)| self.may_tell(id));
            let kinds: Vec<_> = batch
                .iter()
                .map(|(id, denial)| (id, told(denial)))
                .collect();
            if kinds.is_empty() {
                continue;
            }
            if let Err(error) = self.store.note(&kinds).await {
                tracing::warn!(%error, "refusals are not in the ledger");
            }
        }
    }

    /// Not of boxes that are nobody's, and of none without end.
    fn may_tell(&self, id: &SandboxId) -> bool {
        self.registry
            .owned(id)
            .is_ok_and(|entry| lock(&entry.reach.events).spend())
    }
}

fn told(denial: &Denial) -> EventKind {
    let short = |text: &str, most: usize| text.chars().take(most).collect();
    EventKind::EgressDenied {
        host: short(&denial.host, LONGEST_HOST),
        port: denial.port,
        reason: denial.reason.name().to_owned(),
        why: short(&denial.why, LONGEST_WHY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn a_box_can_not_fill_the_ledger_with_its_refusals() {
        let mut budget = Budget::full();
        let spent = (0..1000).filter(|_| budget.spend()).count();
        assert_eq!(spent, 32);
        tokio::time::advance(Duration::from_secs(3)).await;
        let spent = (0..1000).filter(|_| budget.spend()).count();
        assert_eq!(spent, 3);
        tokio::time::advance(Duration::from_secs(3600)).await;
        let spent = (0..1000).filter(|_| budget.spend()).count();
        assert_eq!(spent, 32);
    }
}
