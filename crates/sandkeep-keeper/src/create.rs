//! Making a box.

use std::{
    any::Any,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::FutureExt as _;
use sandkeep_agent_api::host::InitRequest;
use sandkeep_agent_client::Agent;
use sandkeep_model::{
    BoxDefaults, BoxTime, Code, CreateSandbox, E2bSettings, Error, Expiry, GoneReason, Identity,
    IsolationWish, Limits, OnTimeout, Point, PointId, PointPolicy, PortAccess, Result, Sandbox,
    SandboxId, Secret, State, TemplateName, Timestamp, check_env, check_metadata,
};
use sandkeep_store::{Idempotency, NewBox};
use sandkeep_vault::{Disk, TemplateInfo};
use sandkeep_ward::{BoxSpec, LiveBox, Ward};

use crate::{
    after_restore, agent,
    config::Limiting,
    core::Core,
    egress::{Egress, EgressWish},
    form, idempotency,
    isolation::Minimum,
    meters::{self, Path},
    registry::Entry,
    time::check_point_policy,
};

const AFTER_A_START: Duration = Duration::from_millis(50);

/// A request that may be carried out.
pub struct Plan {
    pub request: CreateSandbox,
    /// What it is made from: a template, or else a point.
    pub template: Option<TemplateInfo>,
    pub from: Option<Point>,
    /// What the template was when it was ready, if that fits this request.
    pub warm: Option<Point>,
    /// What commands get that say nothing, by the template.
    pub defaults: BoxDefaults,
    pub ward: Arc<dyn Ward>,
    pub limits: Limits,
    pub network: Egress,
}

/// What a new box begins as.
#[derive(Debug, Clone, Copy)]
pub enum Origin<'a> {
    /// The files of a template.
    Template(&'a TemplateInfo),
    /// What a template was when it was ready, or else its files.
    Warm(&'a TemplateInfo, &'a Point),
    Point(&'a Point),
}

/// A box that came up.
pub struct Up {
    pub live: LiveBox,
    /// A connection to its agent, if somebody had to talk to it.
    pub agent: Option<Agent>,
    /// Its processes were there already.
    pub restored: bool,
}

impl Plan {
    pub fn origin(&self) -> Result<Origin<'_>> {
        match (&self.template, &self.from) {
            (Some(template), _) => Ok(match &self.warm {
                Some(warm) => Origin::Warm(template, warm),
                None => Origin::Template(template),
            }),
            (None, Some(point)) => Ok(Origin::Point(point)),
            (None, None) => Err(Error::internal("a box made from nothing")),
        }
    }

    fn made_from(&self) -> &TemplateName {
        match (&self.template, &self.from) {
            (Some(template), _) => &template.name,
            (None, Some(point)) => &point.template,
            (None, None) => &self.request.template,
        }
    }

    /// What the new box knows about time.
    pub fn time(&self, head: Option<PointId>, points: Option<&PointPolicy>) -> BoxTime {
        let wish = &self.request.time;
        let points = wish.points.as_ref().or(points);
        BoxTime {
            auto_resume: wish.auto_resume,
            pause_files_only: wish.pause_files_only,
            idle_seconds: wish.idle_seconds,
            paused_limit_seconds: wish.paused_limit_seconds,
            lease_seconds: match self.request.expiry {
                Expiry::Never => None,
                Expiry::After(time) => Some(time.as_secs().max(1)),
            },
            points: points.filter(|policy| !policy.is_off()).cloned(),
            head,
            head_written: 0,
            pause: None,
            defaults: self.defaults.clone(),
        }
    }
}

impl Core {
    /// Makes the box a request asks for, or gives the one made for it before.
    pub async fn create(
        self: Arc<Self>,
        request: CreateSandbox,
        network: EgressWish,
    ) -> Result<Sandbox> {
        let given = idempotency::given(&request, &network)?;
        self.check_storage()?;
        let plan = self.plan(request, network).await?;
        let flying = match given {
            None => None,
            Some(given) => {
                let flying = self.flights.take_off(given).await?;
                if let Some(sandbox) = self.made_before(&flying.given).await? {
                    return Ok(sandbox);
                }
                Some(flying)
            }
        };
        self.make(&plan, flying.as_ref().map(|flying| &flying.given))
            .await
    }

    async fn plan(&self, request: CreateSandbox, network: EgressWish) -> Result<Plan> {
        check_env(&request.env)?;
        check_metadata(&request.metadata)?;
        if request.time.idle_seconds == Some(0) {
            return Err(Error::invalid(
                "idle_seconds",
                "a sandbox can not be idle for 0 seconds",
            ));
        }
        if request.time.paused_limit_seconds == Some(0) {
            return Err(Error::invalid(
                "paused_limit_seconds",
                "a sandbox must be allowed to be paused for 1 second at least",
            ));
        }
        if let Some(points) = &request.time.points {
            check_point_policy(points)?;
        }
        self.first_end(Timestamp::now(), request.expiry)?;
        if let Some(point) = request.time.from_point.clone() {
            return self.plan_from(request, &point, network).await;
        }
        let network = self.reach(network)?;
        let template = match self.vault.template(&request.template).await? {
            Some(template) => template,
            None => return Err(self.no_template(&request.template).await),
        };
        let minima = [
            Minimum::of_template(&template),
            Minimum::of_policy(&network.policy),
        ];
        let ward = self.levels.choose(request.isolation, minima)?;
        let limits = request
            .limits
            .resolve(&self.limits_of(&template)?, &self.config.limits.most)?;
        let warm = self.warm_for(&template, ward.as_ref(), &limits).await?;
        let (request, defaults) = inherit(request, Some(&template))?;
        Ok(Plan {
            request,
            template: Some(template),
            from: None,
            warm,
            defaults,
            ward,
            limits,
            network,
        })
    }

    /// What a box of this template gets that asks for nothing.
    pub fn limits_of(&self, template: &TemplateInfo) -> Result<Limits> {
        let Limiting { default, most } = &self.config.limits;
        match &template.built {
            Some(built) => built.limits.resolve(default, most).map_err(|error| {
                error.context(format!("the limits of template \"{}\"", template.name))
            }),
            None => Ok(*default),
        }
    }

    /// A box from a point has the limits of the box it was, unless it asks for others.
    async fn plan_from(
        &self,
        request: CreateSandbox,
        point: &PointId,
        network: EgressWish,
    ) -> Result<Plan> {
        let point = self.point(point).await?;
        let limits = request
            .limits
            .resolve(&point.limits, &self.config.limits.most)?;
        let network = self.reach(network)?;
        let template = self.vault.template(&point.template).await?;
        let minima = [
            template.as_ref().and_then(Minimum::of_template),
            Minimum::of_policy(&network.policy),
        ];
        let ward = match request.isolation {
            IsolationWish::Level(level) if point.has_memory() && level != point.isolation => {
                return Err(Error::invalid(
                    "isolation",
                    format!(
                        "point \"{}\" holds memory of isolation level {}",
                        point.id, point.isolation
                    ),
                ));
            }
            IsolationWish::Auto if point.has_memory() => {
                let level = IsolationWish::Level(point.isolation);
                self.levels.choose(level, minima)?
            }
            wish => self.levels.choose(wish, minima)?,
        };
        self.same_form(point.isolation, ward.as_ref())?;
        self.usable(&point, ward.as_ref()).await?;
        let (request, defaults) = inherit(request, template.as_ref())?;
        Ok(Plan {
            request,
            template: None,
            from: Some(point),
            warm: None,
            defaults,
            ward,
            limits,
            network,
        })
    }

    pub async fn no_template(&self, name: &TemplateName) -> Error {
        let there = self.vault.templates().await.unwrap_or_default();
        let there: Vec<_> = there.iter().map(|t| t.name.as_str()).collect();
        Error::not_found(format!("template '{name}' not found"))
            .field("template")
            .hint(if there.is_empty() {
                "there is no template yet; make one with `sandkeep template build`".to_owned()
            } else {
                format!("there are: {}", there.join(", "))
            })
    }

    async fn make(&self, plan: &Plan, given: Option<&Idempotency>) -> Result<Sandbox> {
        let begun = Instant::now();
        match self.claim_any(plan, given).await {
            Ok(None) => {}
            Ok(Some(sandbox)) => {
                meters::created(Path::Pool, begun.elapsed());
                return Ok(sandbox);
            }
            Err(error) => {
                meters::create_failed(Path::Pool);
                return Err(error);
            }
        }
        let head = plan.from.as_ref().map(|point| point.id.clone());
        let made = self.make_cold(plan, given, head).await;
        match &made {
            Ok(_) => meters::created(Path::Cold, begun.elapsed()),
            Err(_) => meters::create_failed(Path::Cold),
        }
        made
    }

    /// `head` is where in time the new box says it comes from.
    pub async fn make_cold(
        &self,
        plan: &Plan,
        given: Option<&Idempotency>,
        head: Option<PointId>,
    ) -> Result<Sandbox> {
        let now = Timestamp::now();
        let request = &plan.request;
        let sandbox = Sandbox {
            end_at: self.first_end(now, request.expiry)?,
            on_timeout: request.on_timeout,
            ports: request.ports,
            e2b: request.e2b.clone(),
            env: request.env.clone(),
            metadata: request.metadata.clone(),
            identity: request.identity.clone(),
            time: plan.time(head, self.config.points.as_ref()),
            ..blank(plan.made_from(), plan.ward.as_ref(), plan.limits, now)
        };
        let entry = Entry::new(sandbox, Arc::clone(&plan.ward), false, plan.network.clone());
        // Taken before anybody can find the box: who wants to end it waits for us.
        let _turn = entry.turn.lock().await;
        self.make_room(&entry).await?;
        let up = self
            .bring_up(&entry, given, request.by.as_deref(), plan.origin()?)
            .await?;
        self.start_what_it_is_for(&entry, &up, plan.template.as_ref())
            .await?;
        let live = up.live;
        // Its time counts from when it can be used.
        let end_at = self
            .first_end(Timestamp::now(), request.expiry)
            .unwrap_or_else(|_| entry.end_at());
        self.settle(&entry, &live, end_at).await?;
        self.deadlines.moved(&entry.id, None, end_at);
        Ok(entry.sandbox())
    }

    /// From a registered entry to a box whose agent knows who it is. On error nothing is
    /// left of the box but the ledger's word about it. The caller has the turn.
    pub async fn bring_up(
        &self,
        entry: &Arc<Entry>,
        given: Option<&Idempotency>,
        by: Option<&str>,
        origin: Origin<'_>,
    ) -> Result<Up> {
        let Ok(_slot) = self.starts.acquire().await else {
            return Err(Error::internal("the keeper is closed"));
        };
        let sandbox = entry.sandbox();
        let network = entry.reach.egress().to_json();
        let new = NewBox {
            sandbox: &sandbox,
            pooled: entry.pooled(),
            network: Some(&network),
            idempotency: given,
            by,
        };
        // Side by side: a disk without a row is found and removed at the next start.
        let (written, disk) = tokio::join!(
            self.store.insert(new),
            self.make_disk(entry, &sandbox, origin)
        );
        if let Origin::Template(template) = origin {
            self.prepare_disks(&template.name);
        }
        if let Err(error) = written {
            self.never_was(entry).await;
            return Err(error.context("creating a sandbox"));
        }
        // A panic in here would leave the box `creating` for ever, and end the task that fills
        // the pool. Nothing half changed is looked at again: the box is cleared away.
        let started = AssertUnwindSafe(self.start(entry, &sandbox, disk, origin))
            .catch_unwind()
            .await
            .unwrap_or_else(|panic| {
                tracing::error!(id = %entry.id, panic = panic_text(panic.as_ref()), "a panic while a box was made");
                Err(Error::internal("the work ended early; the server's log tells more")
                    .context("starting the box"))
            });
        match started {
            Ok(up) => Ok(up),
            Err(error) => Err(self.give_up(entry, error).await),
        }
    }

    async fn make_disk(
        &self,
        entry: &Entry,
        sandbox: &Sandbox,
        origin: Origin<'_>,
    ) -> Result<Disk> {
        let ward = entry.ward.as_ref();
        match origin {
            Origin::Point(point) | Origin::Warm(_, point) => {
                self.vault
                    .disk_from_point(&sandbox.id, &point.id, form::quota(ward, &sandbox.limits))
                    .await
            }
            Origin::Template(template) => {
                self.template_disk(ward, &sandbox.id, &template.name, &sandbox.limits)
                    .await
            }
        }
    }

    async fn start(
        &self,
        entry: &Entry,
        sandbox: &Sandbox,
        disk: Result<Disk>,
        origin: Origin<'_>,
    ) -> Result<Up> {
        let disk = disk.map_err(|error| error.context("making the disk"));
        let identity = agent::identity_of(sandbox).of_generation(agent::new_generation());
        let (disk, image) = match origin {
            Origin::Warm(template, point) => {
                let restored = self.restore_warm(entry, sandbox, disk, point).await;
                match restored {
                    Ok(up) => {
                        after_restore::run(entry.ward.as_ref(), sandbox).await?;
                        return Ok(up);
                    }
                    Err(error) => {
                        let disk = self.cool_down(entry, sandbox, template, point, &error);
                        (disk.await?, None)
                    }
                }
            }
            Origin::Point(point) if point.has_memory() => {
                // Compared when the box was planned.
                let image = self.image_in(point).await?;
                entry.reach.comes_from(&point.id);
                (disk?, Some(image))
            }
            Origin::Point(_) | Origin::Template(_) => (disk?, None),
        };
        let (live, agent) = self
            .start_on(entry, sandbox, disk, image.as_deref(), &identity)
            .await?;
        if image.is_some() {
            after_restore::run(entry.ward.as_ref(), sandbox).await?;
        }
        Ok(Up {
            live,
            agent,
            restored: image.is_some(),
        })
    }

    /// Processes on a disk, from memory or cold; then an agent that knows who it is and a way
    /// out. With the connection on which it was told, if it was told on one.
    pub async fn start_on(
        &self,
        entry: &Entry,
        sandbox: &Sandbox,
        disk: Disk,
        image: Option<&std::path::Path>,
        identity: &InitRequest,
    ) -> Result<(LiveBox, Option<Agent>)> {
        let spec = BoxSpec {
            id: entry.id.clone(),
            root: disk.path,
            limits: sandbox.limits,
            hostname: entry.id.to_string(),
            introduction: entry.ward.introduces().then(|| identity.clone()),
        };
        let live = self
            .begin_on(entry, spec, image)
            .await
            .map_err(|error| error.context("starting the box"))?;
        let talk = async {
            if entry.ward.introduces() {
                return Ok(None);
            }
            let mut agent = agent::agent(entry.ward.as_ref(), &entry.id).await?;
            agent.init(identity).await?;
            Ok::<_, Error>(Some(agent))
        };
        let (agent, attached) = tokio::join!(talk, self.attach(entry));
        let mut agent = agent.map_err(|error| error.context("greeting the agent"))?;
        attached.map_err(|error| error.context("attaching the network"))?;
        if let Some(authority) = entry.reach.authority_for(&entry.reach.egress())? {
            let mut talking = match agent {
                Some(agent) => agent,
                None => agent::agent(entry.ward.as_ref(), &entry.id).await?,
            };
            talking.trust(&authority).await?;
            agent = Some(talking);
        }
        Ok((live, agent))
    }

    /// `creating -> running`, in the ledger and then in memory.
    pub async fn settle(
        &self,
        entry: &Arc<Entry>,
        live: &LiveBox,
        end_at: Option<Timestamp>,
    ) -> Result<()> {
        let started_at = entry.with(|sandbox| sandbox.started_at);
        let written = self
            .store
            .mark_running(&entry.id, &live.record, started_at, end_at, entry.pooled())
            .await;
        let error = match written {
            Ok(true) => {
                entry.amend(|sandbox| sandbox.end_at = end_at);
                entry.became(State::Running);
                return Ok(());
            }
            Ok(false) => Error::internal("the ledger lost the box while it was made"),
            Err(error) => error,
        };
        Err(self.give_up(entry, error).await)
    }

    /// Clears away a box that did not come up and gives the error back.
    pub async fn give_up(&self, entry: &Arc<Entry>, error: Error) -> Error {
        tracing::warn!(id = %entry.id, %error, "a box could not be made");
        let why = GoneReason::CreateFailed {
            message: error.message.clone(),
        };
        entry.ending(why, false);
        if let Err(failed) = self.clear_away(entry).await {
            tracing::warn!(id = %entry.id, error = %failed, "clearing it away, too");
        }
        error
    }

    /// Has the next disk of this template ready, a moment after a box was made: it is in nobody's
    /// way then.
    pub fn prepare_disks(&self, template: &TemplateName) {
        let (vault, closing) = (self.vault.clone(), self.closing.clone());
        let template = template.clone();
        self.tasks.spawn(async move {
            let pause = tokio::time::sleep(AFTER_A_START);
            if closing.run_until_cancelled(pause).await.is_none() {
                return;
            }
            if let Err(error) = vault.prepare_disks(&template).await {
                tracing::debug!(%template, %error, "no disk was made ahead");
            }
        });
    }

    /// The ledger refused the row: there is nothing but perhaps a disk.
    async fn never_was(&self, entry: &Arc<Entry>) {
        if let Err(error) = self.vault.remove_disk(&entry.id).await {
            tracing::warn!(id = %entry.id, %error, "a disk is left until the next upkeep");
        }
        entry.activity.close();
        entry.became(State::Gone);
        self.registry.remove(&entry.id);
    }

    /// Registers a box if the server may have one more, at the cost of a pooled one if need be.
    pub async fn make_room(&self, entry: &Arc<Entry>) -> Result<()> {
        let most = self.config.max_boxes;
        loop {
            if self.registry.add_within(entry, most) {
                return Ok(());
            }
            if let Some(ready) = self.pool.take_any() {
                self.discard(&ready.entry).await;
                continue;
            }
            // The one being made for the pool right now is next to go.
            if !self.pool.filled().await {
                return Err(Error::new(
                    Code::ResourceExhausted,
                    format!("this server has its {most} sandboxes already"),
                )
                .hint("kill some, or let the operator raise `max_boxes`"));
            }
        }
    }
}

/// What the template says holds where the request says nothing.
fn inherit(
    request: CreateSandbox,
    template: Option<&TemplateInfo>,
) -> Result<(CreateSandbox, BoxDefaults)> {
    let Some(built) = template.and_then(|template| template.built.as_ref()) else {
        return Ok((request, BoxDefaults::default()));
    };
    let mut env = built.env.clone();
    env.extend(request.env);
    check_env(&env)?;
    Ok((CreateSandbox { env, ..request }, built.defaults.clone()))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a text")
}

/// A box that begins now and belongs to nobody in particular.
pub fn blank(template: &TemplateName, ward: &dyn Ward, limits: Limits, now: Timestamp) -> Sandbox {
    Sandbox {
        id: SandboxId::random(),
        template: template.clone(),
        isolation: ward.level(),
        limits,
        state: State::Creating,
        created_at: now,
        started_at: now,
        end_at: None,
        on_timeout: OnTimeout::Kill,
        env: std::collections::BTreeMap::new(),
        metadata: std::collections::BTreeMap::new(),
        identity: Identity::default(),
        ports: PortAccess::default(),
        e2b: E2bSettings::default(),
        access_token: Secret::random(),
        gone: None,
        gone_at: None,
        oom_kills: 0,
        time: BoxTime::default(),
    }
}
