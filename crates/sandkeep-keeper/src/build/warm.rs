//! What a template starts: once, when it is built, if the level can keep it; else in every box.

use std::{collections::HashSet, sync::Arc, time::Duration};

use sandkeep_agent_api::process::{EndEvent, Output, ProcessEvent};
use sandkeep_agent_client::ProcessStream;
use sandkeep_model::{
    BuildId, Built, Code, EngineBuild, Error, Isolation, Limits, Point, PointKind, Ready,
    ReadyCheck, Result, Sandbox, TemplateName,
};
use sandkeep_vault::{Disk, TemplateInfo};
use sandkeep_ward::Ward;
use tokio::time::Instant;

use super::{
    log::Lines,
    workshop::{Bench, Call, Floor, Workshop, run, start, went_well},
};
use crate::{
    after_restore, agent, core::Core, create::Up, egress::Egress, registry::Entry, sync::lock,
    time::PointOrder,
};

/// Between two looks whether it is ready.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// What is started without a ready check must at least live this long.
const FIRST_BREATH: Duration = Duration::from_secs(2);
/// Before a box is frozen.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// How often memory is written anew that can not be read again.
const TRIES: u32 = 3;
/// Memory that is renewed in every copy: written while its programs were held, by an agent that
/// knows generations. Older memory is made again.
const RENEWED: &str = "renewed-1";
/// A create waits no longer than this, whatever the recipe says: clients give up.
const LONGEST_AT_CREATE: Duration = Duration::from_secs(90);

/// Whether boxes of it have processes of their own from the beginning.
pub fn has_processes(template: &TemplateInfo) -> bool {
    template
        .built
        .as_ref()
        .is_some_and(|built| built.start.is_some())
}

/// Whether what was made within `these` limits may go on within `those`. Processes know how much
/// memory there is and how many files they may open; what is left of the limits holds from
/// outside, at once. A machine keeps the size it has.
pub fn may_go_on(ward: &dyn Ward, these: &Limits, those: &Limits) -> bool {
    if ward.disk_form().is_some() {
        return these == those;
    }
    these.memory_mib == those.memory_mib && these.open_files == those.open_files
}

/// How boxes of a template begin at one level.
#[derive(Debug, Clone)]
pub struct LevelView {
    pub level: Isolation,
    /// A new box is a restore with its processes already running.
    pub warm: bool,
    pub memory_bytes: u64,
    pub engine: Option<EngineBuild>,
    /// Why it is not warm.
    pub why: Option<String>,
}

/// What to start, and when it counts as started.
pub struct StartOrder<'a> {
    pub command: &'a str,
    pub ready: Option<&'a Ready>,
    pub longest: Duration,
}

/// Starts the command and waits until it is ready. What it writes is given to `said`.
pub async fn start_and_wait(
    entry: &Entry,
    order: &StartOrder<'_>,
    said: &(dyn Fn(&str) + Send + Sync),
) -> Result<()> {
    let call = Call::shell(order.command);
    let mut stream = start(entry, &call)
        .await
        .map_err(|error| error.context("the start command"))?;
    let mut listener = Listener {
        stream: &mut stream,
        said,
        lines: Lines::default(),
    };
    let Some(ready) = order.ready else {
        return tokio::select! {
            ended = listener.end() => ended.and_then(|end| ended_well(&end)),
            () = tokio::time::sleep(FIRST_BREATH) => Ok(()),
        };
    };
    let longest = ready.timeout().min(order.longest);
    let until = Instant::now() + longest;
    let mut last_look = String::new();
    let waiting = async {
        loop {
            match look(entry, &ready.check, until).await {
                Ok(None) => return Ok(()),
                Ok(Some(why)) => last_look = why,
                Err(error) => return Err(error.context("the ready check")),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    let waited = async {
        tokio::select! {
            done = waiting => done,
            // A command that puts itself into the background ends well; one that fails is not waited for.
            failed = listener.failure() => Err(failed),
        }
    };
    match tokio::time::timeout_at(until, waited).await {
        Ok(done) => done,
        Err(_) => Err(Error::new(
            Code::DeadlineExceeded,
            format!(
                "the start command was not ready in {} s ({})",
                longest.as_secs(),
                match (&ready.check, last_look.as_str()) {
                    (ReadyCheck::Port(port), _) => format!("nothing listens on port {port}"),
                    (ReadyCheck::Command(_), "") => "the ready command did not end".to_owned(),
                    (ReadyCheck::Command(_), why) => format!("the ready command: {why}"),
                }
            ),
        )
        .hint("`sandkeep template logs NAME` shows what it said; or give `ready` a longer timeout")
        .retryable(false)),
    }
}

/// `None`: it is ready. Else why not yet.
async fn look(entry: &Entry, check: &ReadyCheck, until: Instant) -> Result<Option<String>> {
    match check {
        ReadyCheck::Port(port) => {
            let mut agent = agent::visit(entry).await?;
            let ports = agent.ports().await?;
            let open = ports.iter().any(|listening| listening.port == *port);
            Ok((!open).then(String::new))
        }
        ReadyCheck::Command(command) => {
            let call = Call {
                timeout: Some(until.saturating_duration_since(Instant::now())),
                ..Call::shell(command)
            };
            let mut tail = Lines::default();
            let mut last = None;
            let end = run(entry, &call, |_, bytes| {
                last = tail.feed(bytes).pop().or(last.take());
            })
            .await?;
            if went_well(&end) {
                return Ok(None);
            }
            let last = tail.end().or(last);
            Ok(Some(match last {
                Some(line) => format!("{}, {line}", end.status),
                None => end.status,
            }))
        }
    }
}

struct Listener<'a> {
    stream: &'a mut ProcessStream,
    said: &'a (dyn Fn(&str) + Send + Sync),
    lines: Lines,
}

impl Listener<'_> {
    async fn end(&mut self) -> Result<EndEvent> {
        loop {
            match self.stream.next().await? {
                Some(ProcessEvent::Data(
                    Output::Stdout(blob) | Output::Stderr(blob) | Output::Pty(blob),
                )) => {
                    for line in self.lines.feed(&blob.0) {
                        (self.said)(&line);
                    }
                }
                Some(ProcessEvent::End(end)) => return Ok(end),
                Some(ProcessEvent::Start(_) | ProcessEvent::Keepalive(_)) => {}
                None => {
                    return Err(Error::new(
                        Code::BoxUnreachable,
                        "the box ended while the start command ran",
                    ));
                }
            }
        }
    }

    async fn failure(&mut self) -> Error {
        let ended = self.end().await;
        if let Some(line) = self.lines.end() {
            (self.said)(&line);
        }
        match ended.and_then(|end| ended_well(&end)) {
            Err(error) => error,
            Ok(()) => std::future::pending().await,
        }
    }
}

fn ended_well(end: &EndEvent) -> Result<()> {
    if went_well(end) {
        return Ok(());
    }
    Err(Error::conflict(format!(
        "the start command ended with {} before it was ready",
        end.status
    )))
}

impl Core {
    /// The memory a new box of this template begins with, if there is one that fits. One that
    /// should be there and is not is made in the background.
    pub async fn warm_for(
        &self,
        template: &TemplateInfo,
        ward: &dyn Ward,
        limits: &Limits,
    ) -> Result<Option<Point>> {
        let Some(built) = wants_warmth(template, ward.level()) else {
            return Ok(None);
        };
        let Ok(engine) = ward.engine().await else {
            return Ok(None);
        };
        let engine = EngineBuild {
            name: engine.name,
            build: engine.build,
        };
        let found = self
            .warm_points(&built.build, ward.level())
            .await?
            .into_iter()
            .rfind(|point| is_renewed(point) && point.engine.as_ref() == Some(&engine));
        let Some(point) = found else {
            self.warm_later(template, ward.level(), engine.to_string());
            return Ok(None);
        };
        Ok(may_go_on(ward, &point.limits, limits).then_some(point))
    }

    async fn warm_points(&self, build: &BuildId, level: Isolation) -> Result<Vec<Point>> {
        let mut points = self.store.points_for(PointKind::Template).await?;
        points.retain(|point| {
            point.isolation == level && point.tags.iter().any(|tag| tag == build.as_str())
        });
        Ok(points)
    }

    /// Builds whose memory somebody may still want.
    pub async fn builds_in_use(&self) -> Result<HashSet<String>> {
        let templates = self.vault.templates().await?;
        let made = templates
            .into_iter()
            .filter_map(|template| template.built.map(|built| built.build));
        let running = self.builds.running();
        Ok(made.chain(running).map(String::from).collect())
    }

    /// Memory of templates that were replaced or removed.
    pub async fn drop_unused_warmth(&self) -> Result<()> {
        let in_use = self.builds_in_use().await?;
        for point in self.store.points_for(PointKind::Template).await? {
            if !point.tags.iter().any(|tag| in_use.contains(tag)) {
                self.drop_point(&point).await;
            }
        }
        Ok(())
    }

    /// How boxes of a template begin, for each level it was built for.
    pub async fn levels_of(&self, template: &TemplateName) -> Result<Vec<LevelView>> {
        let Some(template) = self.vault.template(template).await? else {
            return Ok(Vec::new());
        };
        let Some(built) = &template.built else {
            return Ok(Vec::new());
        };
        let mut views = Vec::new();
        for &level in &built.levels {
            views.push(self.level_of(built, level).await?);
        }
        Ok(views)
    }

    async fn level_of(&self, built: &Built, level: Isolation) -> Result<LevelView> {
        let mut view = LevelView {
            level,
            warm: false,
            memory_bytes: 0,
            engine: None,
            why: None,
        };
        if built.start.is_none() {
            view.why = Some("it starts nothing".to_owned());
            return Ok(view);
        }
        let engine = match self.levels.ward(level) {
            None => Err(format!("this server does not run level {level}")),
            Some(ward) => ward.engine().await.map_err(|error| error.message),
        };
        let engine = match engine {
            Ok(engine) => EngineBuild {
                name: engine.name,
                build: engine.build,
            },
            Err(why) => {
                view.why = Some(format!("{why}; the start command runs at create"));
                return Ok(view);
            }
        };
        let points = self.warm_points(&built.build, level).await?;
        if let Some(point) = points
            .iter()
            .rfind(|point| is_renewed(point) && point.engine.as_ref() == Some(&engine))
        {
            view.warm = true;
            view.memory_bytes = point.bytes;
            view.engine = Some(engine);
            return Ok(view);
        }
        let refused = built.cold.iter().find(|cold| cold.level == level);
        view.why = Some(
            match (points.last().and_then(|p| p.engine.as_ref()), refused) {
                (Some(wrote), _) if *wrote == engine => {
                    "its memory was written by an older server; it is made again in the background"
                        .to_owned()
                }
                (Some(wrote), _) => format!(
                    "its memory was written by {wrote}, this server has {engine}; it is made again in the background"
                ),
                (None, Some(cold)) => format!("{}; the start command runs at create", cold.why),
                (None, None) => "its memory is being made".to_owned(),
            },
        );
        Ok(view)
    }

    /// Boxes that did not begin with their processes get them now. The caller has the turn.
    pub async fn start_what_it_is_for(
        &self,
        entry: &Arc<Entry>,
        up: &Up,
        template: Option<&TemplateInfo>,
    ) -> Result<()> {
        let built = template.and_then(|template| template.built.as_ref());
        let Some((built, command)) = built.and_then(|b| Some((b, b.start.as_deref()?))) else {
            return Ok(());
        };
        if up.restored {
            return Ok(());
        }
        let started = self.start_as_in_memory(entry, built, command).await;
        match started {
            Ok(()) => Ok(()),
            Err(error) => Err(self.give_up(entry, error).await),
        }
    }

    /// It sees what it would see in a box that begins with it: the environment of the template,
    /// not the one of this box.
    async fn start_as_in_memory(&self, entry: &Entry, built: &Built, command: &str) -> Result<()> {
        let own = agent::identity_of(&entry.sandbox()).same_machine();
        let mut of_template = own.clone();
        of_template.env_vars.clone_from(&built.env);
        let ward = entry.ward.as_ref();
        agent::agent(ward, &entry.id)
            .await?
            .init(&of_template)
            .await?;
        let order = StartOrder {
            command,
            ready: built.ready.as_ref(),
            longest: LONGEST_AT_CREATE,
        };
        start_and_wait(entry, &order, &|_| {}).await?;
        agent::agent(ward, &entry.id).await?.init(&own).await
    }

    /// A box from the memory of its template.
    pub async fn restore_warm(
        &self,
        entry: &Entry,
        sandbox: &Sandbox,
        disk: Result<Disk>,
        point: &Point,
    ) -> Result<Up> {
        let image = self.usable(point, entry.ward.as_ref()).await?.memory;
        entry.reach.comes_from(&point.id);
        let identity = agent::identity_of(sandbox).of_generation(agent::new_generation());
        let (live, agent) = self
            .start_on(entry, sandbox, disk?, image.as_deref(), &identity)
            .await?;
        Ok(Up {
            live,
            agent,
            restored: true,
        })
    }

    /// Memory that can not be used does not keep a box from being made.
    pub async fn cool_down(
        &self,
        entry: &Entry,
        sandbox: &Sandbox,
        template: &TemplateInfo,
        point: &Point,
        error: &Error,
    ) -> Result<Disk> {
        tracing::warn!(id = %entry.id, template = %template.name, %error, "a template's memory can not be used; its box starts cold");
        if error.code == Code::Conflict {
            // Damaged: the next one asking for it has it made again.
            self.drop_point(point).await;
        }
        entry.reach.close();
        entry.ward.destroy(&entry.id).await?;
        self.vault.remove_disk(&entry.id).await?;
        let ward = entry.ward.as_ref();
        self.template_disk(ward, &sandbox.id, &template.name, &sandbox.limits)
            .await
    }

    /// Freezes a box that is ready and keeps all of it.
    async fn keep_memory(&self, entry: &Entry, build: &BuildId) -> Result<Point> {
        entry.activity.cut().await;
        // The box hears of connections that ended before it stands still.
        tokio::time::sleep(LAST_WORDS).await;
        entry.ward.freeze(&entry.id).await?;
        entry.reach.close();
        let order = PointOrder {
            tags: vec![build.to_string(), RENEWED.to_owned()],
            ..PointOrder::of(PointKind::Template)
        };
        self.make_point(entry, order).await
    }

    /// Starts what a template is for in a fresh box and keeps it. What was kept is tried before
    /// it counts: an engine may write what it can not read. The outer error is the start
    /// command's, the inner one the engine's.
    pub async fn warm_in(
        &self,
        shop: &Workshop,
        (bench, floor): (&Bench, &Floor),
        order: &StartOrder<'_>,
        build: &BuildId,
        said: &(dyn Fn(&str) + Send + Sync),
    ) -> Result<Result<Point>> {
        let mut last = Error::internal("the memory was not tried");
        for _ in 0..TRIES {
            let entry = shop.open(bench.clone(), floor.clone()).await?;
            start_and_wait(&entry, order, said).await?;
            let point = match self.keep_memory(&entry, build).await {
                Ok(point) => point,
                Err(refused) => return Ok(Err(refused)),
            };
            shop.clear(&entry).await;
            // What it runs in copies is tried by itself: it is not the engine's to fail.
            let mut trial = bench.clone();
            trial.defaults.after_restore = None;
            match shop.open(trial, Floor::Layer(point.clone())).await {
                Ok(copy) => {
                    let told = after_restore::tell(
                        copy.ward.as_ref(),
                        &copy.id,
                        bench.defaults.after_restore.as_deref(),
                    );
                    let told = told.await;
                    shop.clear(&copy).await;
                    if let Err(error) = told {
                        self.drop_point(&point).await;
                        return Err(error);
                    }
                    return Ok(Ok(point));
                }
                Err(error) => {
                    tracing::warn!(point = %point.id, %error, "memory that was just written can not be read");
                    said(&format!("its memory can not be read, {}", error.message));
                    self.drop_point(&point).await;
                    last = error;
                }
            }
        }
        Ok(Err(last))
    }

    fn warm_later(&self, template: &TemplateInfo, level: Isolation, engine: String) {
        let (Some(core), Some(built)) = (self.me.upgrade(), &template.built) else {
            return;
        };
        let failed = (built.build.clone(), level, engine);
        let doing = (built.build.clone(), level);
        if lock(&self.builds.unwarmable).contains(&failed)
            || !lock(&self.builds.warming).insert(doing.clone())
        {
            return;
        }
        let template = template.clone();
        self.tasks.spawn(async move {
            let shop = Workshop::of(&core);
            let warmed = tokio::select! {
                warmed = core.warm_again(&shop, &template, level) => warmed,
                () = core.closing.cancelled() => Ok(()),
            };
            shop.close().await;
            if let Err(error) = warmed {
                tracing::warn!(template = %template.name, %level, %error, "a template stays cold");
                lock(&core.builds.unwarmable).insert(failed);
            }
            lock(&core.builds.warming).remove(&doing);
        });
    }

    async fn warm_again(
        &self,
        shop: &Workshop,
        template: &TemplateInfo,
        level: Isolation,
    ) -> Result<()> {
        let (Some(built), Some(ward)) = (&template.built, self.levels.ward(level)) else {
            return Ok(());
        };
        let Some(command) = built.start.as_deref() else {
            return Ok(());
        };
        let Ok(_slot) = self.builds.slots.acquire().await else {
            return Ok(());
        };
        let bench = Bench {
            template: template.name.clone(),
            ward: Arc::clone(ward),
            limits: self.limits_of(template)?,
            egress: match &built.network {
                Some(network) => Egress::from_json(network)?,
                None => Egress::default(),
            },
            env: built.env.clone(),
            defaults: built.defaults.clone(),
        };
        let floor = Floor::Template(template.clone());
        let order = StartOrder {
            command,
            ready: built.ready.as_ref(),
            longest: sandkeep_model::LONGEST_READY,
        };
        let older = self.warm_points(&built.build, level).await?;
        let made = self
            .warm_in(shop, (&bench, &floor), &order, &built.build, &|_| {})
            .await??;
        for point in older {
            self.drop_point(&point).await;
        }
        tracing::info!(template = %template.name, %level, point = %made.id, "a template is warm again");
        self.drop_unused_warmth().await
    }

    /// Has templates warmed whose memory is not there or was written by another engine.
    pub async fn keep_warm(&self) {
        let templates = match self.vault.templates().await {
            Ok(templates) => templates,
            Err(error) => {
                tracing::warn!(%error, "looking for templates to warm");
                return;
            }
        };
        for template in templates {
            let levels = template.built.as_ref().map(|built| built.levels.clone());
            for level in levels.unwrap_or_default() {
                let (Some(ward), Ok(limits)) = (self.levels.ward(level), self.limits_of(&template))
                else {
                    continue;
                };
                if let Err(error) = self.warm_for(&template, ward.as_ref(), &limits).await {
                    tracing::warn!(template = %template.name, %level, %error, "looking at its memory");
                }
            }
        }
    }
}

fn is_renewed(point: &Point) -> bool {
    point.tags.iter().any(|tag| tag == RENEWED)
}

fn wants_warmth(template: &TemplateInfo, level: Isolation) -> Option<&Built> {
    template
        .built
        .as_ref()
        .filter(|built| built.start.is_some() && built.levels.contains(&level))
}
