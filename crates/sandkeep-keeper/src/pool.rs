//! Boxes that wait, started and warm, for somebody to want one.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use sandkeep_agent_client::Agent;
use sandkeep_model::{GoneReason, Isolation, Limits, Result, Sandbox, Secret, State, Timestamp};
use sandkeep_store::{Claim, Idempotency};
use sandkeep_vault::TemplateInfo;
use sandkeep_ward::Ward;
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use crate::{
    agent,
    build::{has_processes, may_go_on},
    core::Core,
    create::{Origin, Plan, Up, blank},
    egress::Egress,
    form,
    isolation::Minimum,
    meters,
    registry::{Entry, Registry},
    sync::lock,
};

/// Refilling waits this long after a claim: the box just handed out goes first.
const GIVE_WAY: Duration = Duration::from_millis(50);
/// But not for ever under a steady stream of claims.
const GIVE_WAY_AT_MOST: Duration = Duration::from_millis(250);
/// Templates and the host may change without anybody telling us.
const LOOK_AGAIN: Duration = Duration::from_secs(15);
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);

/// A box that can be handed out.
pub struct Ready {
    pub entry: Arc<Entry>,
    /// An open connection, so that a claim does not wait for one.
    pub agent: Option<Agent>,
    /// When its template was made: a template made anew is another one.
    pub made_from: Timestamp,
}

pub struct Pool {
    ready: Mutex<VecDeque<Ready>>,
    last_claim: Mutex<Option<Instant>>,
    wake: Notify,
    /// Whether a box is being made for the pool right now.
    filling: watch::Sender<bool>,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            ready: Mutex::default(),
            last_claim: Mutex::default(),
            wake: Notify::new(),
            filling: watch::Sender::new(false),
        }
    }
}

impl Pool {
    pub fn len(&self) -> usize {
        lock(&self.ready).len()
    }

    pub fn put(&self, ready: Ready) {
        lock(&self.ready).push_back(ready);
    }

    /// A box of this template as it is now, at this level.
    fn take(&self, template: &TemplateInfo, ward: &dyn Ward, limits: &Limits) -> Option<Ready> {
        let taken = {
            let mut ready = lock(&self.ready);
            let at = ready.iter().position(|ready| {
                fits(ready, template, ward.level())
                    && (!is_set(template, ward)
                        || ready.entry.with(|b| may_go_on(ward, &b.limits, limits)))
            })?;
            ready.remove(at)
        };
        *lock(&self.last_claim) = Some(Instant::now());
        self.wake.notify_one();
        taken
    }

    /// Any box, to make room.
    pub fn take_any(&self) -> Option<Ready> {
        lock(&self.ready).pop_front()
    }

    /// Takes out a box that ended by itself.
    pub fn drop_dead(&self, entry: &Entry) {
        lock(&self.ready).retain(|ready| ready.entry.id != entry.id);
        self.wake.notify_one();
    }

    /// Has the pool look whether it wants another box.
    pub fn nudge(&self) {
        self.wake.notify_one();
    }

    /// Waits for the box that is being made, if one is; `false` when none is.
    pub async fn filled(&self) -> bool {
        let mut filling = self.filling.subscribe();
        if !*filling.borrow_and_update() {
            return self.len() > 0;
        }
        filling.wait_for(|filling| !filling).await.is_ok()
    }

    /// Takes out all that nobody may have any more: of another template or level, made from
    /// an older version of it, ended, or beyond `size`.
    fn unfit(&self, template: Option<&TemplateInfo>, level: Isolation, size: usize) -> Vec<Ready> {
        let mut ready = lock(&self.ready);
        let mut unfit = Vec::new();
        let mut kept = VecDeque::with_capacity(ready.len());
        for one in ready.drain(..) {
            let fit = template.is_some_and(|template| fits(&one, template, level))
                && one.entry.state() == State::Running
                && kept.len() < size;
            if fit {
                kept.push_back(one);
            } else {
                unfit.push(one);
            }
        }
        *ready = kept;
        unfit
    }

    async fn give_way(&self) {
        let latest = Instant::now() + GIVE_WAY_AT_MOST;
        loop {
            let claimed = *lock(&self.last_claim);
            let until = claimed.map_or(Instant::now(), |claimed| claimed + GIVE_WAY);
            if until <= Instant::now() || Instant::now() >= latest {
                return;
            }
            tokio::time::sleep_until(until.min(latest)).await;
        }
    }
}

fn fits(ready: &Ready, template: &TemplateInfo, level: Isolation) -> bool {
    ready.made_from == template.created_at
        && ready
            .entry
            .with(|sandbox| sandbox.template == template.name && sandbox.isolation == level)
}

/// Whether boxes of it have what can not change any more: processes, or the size of a machine.
fn is_set(template: &TemplateInfo, ward: &dyn Ward) -> bool {
    has_processes(template) || ward.disk_form().is_some()
}

/// Tells that the pool is being filled, until dropped.
struct Filling<'a>(&'a Pool);

impl<'a> Filling<'a> {
    fn begin(pool: &'a Pool) -> Self {
        pool.filling.send_replace(true);
        Self(pool)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.0.filling.send_replace(false);
    }
}

impl Core {
    /// A pooled box for this plan, made its owner's. `None`: none fits.
    pub async fn claim_any(
        &self,
        plan: &Plan,
        given: Option<&Idempotency>,
    ) -> Result<Option<Sandbox>> {
        let Some(template) = &plan.template else {
            return Ok(None);
        };
        let (ward, limits) = (plan.ward.as_ref(), &plan.limits);
        while let Some(ready) = self.pool.take(template, ward, limits) {
            self.count_pool();
            let claimed = self.claim(ready, plan, given).await?;
            if claimed.is_some() {
                return Ok(claimed);
            }
        }
        Ok(None)
    }

    /// `None`: this one was not fit and has been ended.
    async fn claim(
        &self,
        ready: Ready,
        plan: &Plan,
        given: Option<&Idempotency>,
    ) -> Result<Option<Sandbox>> {
        let now = Timestamp::now();
        let request = &plan.request;
        let end_at = match self.first_end(now, request.expiry) {
            Ok(end_at) => end_at,
            Err(error) => {
                self.pool.put(ready);
                return Err(error);
            }
        };
        let entry = ready.entry;
        let _turn = entry.turn.lock().await;
        if entry.state() != State::Running || !entry.pooled() {
            return Ok(None);
        }
        let before = entry.sandbox();
        let sandbox = Sandbox {
            limits: plan.limits,
            started_at: now,
            end_at,
            on_timeout: request.on_timeout,
            ports: request.ports,
            e2b: request.e2b.clone(),
            env: request.env.clone(),
            metadata: request.metadata.clone(),
            identity: request.identity.clone(),
            time: plan.time(None, self.config.points.as_ref()),
            access_token: Secret::random(),
            ..before.clone()
        };
        let network = plan.network.to_json();
        let claim = Claim {
            id: &sandbox.id,
            limits: &sandbox.limits,
            started_at: sandbox.started_at,
            end_at: sandbox.end_at,
            on_timeout: sandbox.on_timeout,
            ports: sandbox.ports,
            e2b: &sandbox.e2b,
            env: &sandbox.env,
            metadata: &sandbox.metadata,
            identity: &sandbox.identity,
            time: &sandbox.time,
            access_token: &sandbox.access_token,
            network: Some(&network),
            idempotency: given,
            by: request.by.as_deref(),
        };
        let identity = agent::identity_of(&sandbox);
        let authority = entry.reach.authority_for(&plan.network);
        let ward = entry.ward.as_ref();
        // Side by side; if one of them fails the box is ended, so the order does not matter.
        let (written, known, limited) = tokio::join!(
            self.store.claim(&claim),
            agent::introduce(ready.agent, ward, &sandbox.id, &identity, authority),
            self.change_limits(&entry, &before.limits, &sandbox.limits),
        );
        let owned = matches!(written, Ok(Some(_)));
        if owned {
            entry.claimed(sandbox.clone());
            entry.reach.set(plan.network.clone(), true);
        }
        let ready = known.and(limited);
        if owned && ready.is_ok() {
            Registry::clear_trail(&entry);
            self.deadlines.moved(&sandbox.id, None, sandbox.end_at);
            return Ok(Some(sandbox));
        }
        let message = match &ready {
            Err(error) => error.message.clone(),
            Ok(()) => "the ledger did not take it".to_owned(),
        };
        tracing::warn!(id = %entry.id, %message, "a pooled box was not fit");
        entry.ending(GoneReason::CreateFailed { message }, false);
        if let Err(error) = self.clear_away(&entry).await {
            tracing::warn!(id = %entry.id, %error, "clearing it away, too");
        }
        written?;
        Ok(None)
    }

    async fn change_limits(&self, entry: &Entry, from: &Limits, to: &Limits) -> Result<()> {
        if from == to {
            return Ok(());
        }
        if from.disk_mib != to.disk_mib {
            self.vault
                .set_disk_limit(&entry.id, form::quota(entry.ward.as_ref(), to))
                .await?;
        }
        let same_but_disk = Limits {
            disk_mib: to.disk_mib,
            ..*from
        };
        if same_but_disk == *to {
            return Ok(());
        }
        entry.ward.set_limits(&entry.id, to).await
    }

    fn count_pool(&self) {
        meters::pool(self.pool.len(), self.config.pool.size);
    }

    /// Keeps the pool at its size, for ever.
    pub async fn keep_pool(self: Arc<Self>) {
        let mut retry = FIRST_RETRY;
        loop {
            let pause = match self.fill().await {
                Ok(()) => {
                    retry = FIRST_RETRY;
                    LOOK_AGAIN
                }
                Err(error) => {
                    tracing::warn!(%error, retry_in = ?retry, "the pool could not be filled");
                    let pause = retry;
                    retry = (retry * 2).min(LAST_RETRY);
                    pause
                }
            };
            self.count_pool();
            tokio::select! {
                () = self.closing.cancelled() => return,
                () = self.pool.wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Ends what is unfit, then makes one box after the other until there are enough.
    async fn fill(&self) -> Result<()> {
        let wanted = &self.config.pool;
        loop {
            self.pool.give_way().await;
            if self.closing.is_cancelled() {
                return Ok(());
            }
            let template = self.vault.template(&wanted.template).await?;
            let minimum = template.as_ref().and_then(Minimum::of_template);
            let ward = self.levels.choose(wanted.isolation, [minimum])?;
            for unfit in self
                .pool
                .unfit(template.as_ref(), ward.level(), wanted.size)
            {
                self.discard(&unfit.entry).await;
            }
            self.count_pool();
            let Some(template) = template else {
                return Ok(());
            };
            if self.pool.len() >= wanted.size || self.registry.len() >= self.config.max_boxes {
                return Ok(());
            }
            let _filling = Filling::begin(&self.pool);
            match self.make_ready(&template, ward).await? {
                Some(ready) => self.pool.put(ready),
                None => return Ok(()),
            }
        }
    }

    /// One more box for the pool; `None` when the server is full.
    async fn make_ready(
        &self,
        template: &TemplateInfo,
        ward: Arc<dyn Ward>,
    ) -> Result<Option<Ready>> {
        let limits = self.limits_of(template)?;
        let warm = self.warm_for(template, ward.as_ref(), &limits).await?;
        let mut sandbox = blank(&template.name, ward.as_ref(), limits, Timestamp::now());
        if let Some(built) = &template.built {
            sandbox.env.clone_from(&built.env);
            sandbox.time.defaults = built.defaults.clone();
        }
        let entry = Entry::new(sandbox, ward, true, Egress::default());
        let turn = entry.turn.lock().await;
        if !self.registry.add_within(&entry, self.config.max_boxes) {
            return Ok(None);
        }
        let origin = match &warm {
            Some(warm) => Origin::Warm(template, warm),
            None => Origin::Template(template),
        };
        let up = self.bring_up(&entry, None, None, origin).await?;
        self.start_what_it_is_for(&entry, &up, Some(template))
            .await?;
        let Up { live, agent, .. } = up;
        let reached = match agent {
            Some(agent) => Ok(agent),
            None => agent::agent(entry.ward.as_ref(), &entry.id).await,
        };
        let mut agent = match reached {
            Ok(agent) => agent,
            Err(error) => return Err(self.give_up(&entry, error).await),
        };
        if let Err(error) = agent.warm().await {
            // It works cold, too.
            tracing::warn!(id = %entry.id, %error, "warming a pooled box");
        }
        self.settle(&entry, &live, None).await?;
        drop(turn);
        Ok(Some(Ready {
            entry,
            agent: Some(agent),
            made_from: template.created_at,
        }))
    }
}
