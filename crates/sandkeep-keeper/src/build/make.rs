//! A build from its beginning to its end.

use std::{sync::Arc, time::Duration};

use sandkeep_model::{
    Built, Code, ColdLevel, Error, Isolation, IsolationWish, LONGEST_READY, LimitsWish, PointKind,
    Result, Step, TemplateName,
};
use sandkeep_vault::{Ground, TemplateInfo};
use sandkeep_ward::Ward;

use super::{
    BuildWish,
    layers::{ground_hash, step_hashes},
    log::LineLevel,
    record::{Build, BuildFault, BuildStatus},
    steps::{At, Standing, changes_files},
    warm::{StartOrder, start_and_wait},
    workshop::{Bench, Floor, Workshop},
};
use crate::{core::Core, egress::Egress, isolation::Minimum, time::PointOrder};

/// No build takes this long unless something hangs.
const LONGEST: Duration = Duration::from_secs(4 * 3600);
const BASE: &str = "base";
const FINALIZE: &str = "finalize";

/// Everything decided before the first step.
struct Plan {
    base: TemplateInfo,
    /// Where the steps run.
    bench: Arc<dyn Ward>,
    wards: Vec<Arc<dyn Ward>>,
    limits: LimitsWish,
    egress: Egress,
    /// Of all its sandboxes.
    minimum: Option<Isolation>,
    standing: Standing,
}

impl Core {
    /// Runs a build in the background.
    pub fn build(self: &Arc<Self>, build: &Arc<Build>, wish: BuildWish) {
        let (core, build) = (Arc::clone(self), Arc::clone(build));
        self.tasks.spawn(async move {
            let shop = Workshop::of(&core);
            let made = tokio::select! {
                made = tokio::time::timeout(LONGEST, core.make_template(&build, &wish, &shop)) => {
                    made.unwrap_or_else(|_| Err(at(BASE)(Error::new(
                        Code::DeadlineExceeded,
                        "the build took too long",
                    ))))
                }
                () = build.cancel.cancelled() => Err(at(BASE)(Error::conflict("the build was cancelled"))),
                () = core.closing.cancelled() => Err(at(BASE)(
                    Error::host_not_ready("the server was stopped during the build"),
                )),
            };
            shop.close().await;
            match made {
                Ok(()) => {
                    build.say(LineLevel::Info, FINALIZE, "the template is ready");
                    build.ends(BuildStatus::Ready, None);
                    core.pool.nudge();
                    core.keep_warm().await;
                }
                Err(fault) => {
                    build.say(LineLevel::Error, &fault.step, &fault.error.message);
                    let status = if build.cancel.is_cancelled() {
                        BuildStatus::Cancelled
                    } else {
                        BuildStatus::Failed
                    };
                    build.ends(status, Some(fault));
                }
            }
            // After its end: what it made and nobody has is not needed any more.
            if let Err(error) = core.drop_unused_warmth().await {
                tracing::warn!(%error, "clearing away memory of older templates");
            }
            core.trim_layers().await;
        });
    }

    async fn make_template(
        &self,
        build: &Build,
        wish: &BuildWish,
        shop: &Workshop,
    ) -> Result<(), BuildFault> {
        let Ok(_slot) = self.builds.slots.acquire().await else {
            return Err(at(BASE)(Error::internal("the keeper is closed")));
        };
        build.begins();
        let mut plan = self.plan_build(wish).await.map_err(at(BASE))?;
        let words = format!("building {} from {}", build.template, plan.base.name);
        build.say(LineLevel::Info, BASE, &words);
        let (floor, layer) = self.lay(build, wish, shop, &mut plan).await?;
        plan.standing.defaults.after_restore = wish.recipe.after_restore.clone();
        let cold = match &wish.recipe.start {
            None => Vec::new(),
            Some(start) => {
                let warmed = self.warm_up(build, wish, shop, &plan, &floor, start).await;
                warmed.map_err(at(FINALIZE))?
            }
        };
        let recipe = &wish.recipe;
        let built = Built {
            build: build.id.clone(),
            layer,
            from: recipe.from.clone(),
            steps: recipe.steps.iter().map(Step::words).collect(),
            env: plan.standing.env,
            defaults: plan.standing.defaults,
            start: recipe.start.clone(),
            ready: recipe.ready.clone(),
            limits: plan.limits,
            levels: plan.wards.iter().map(|ward| ward.level()).collect(),
            cold,
            network: Some(plan.egress.to_json()),
            isolation_minimum: plan.minimum,
        };
        self.publish_as(build, &floor.ground(), &wish.names(&build.template), built)
            .await
            .map_err(at(FINALIZE))
    }

    async fn plan_build(&self, wish: &BuildWish) -> Result<Plan> {
        let recipe = &wish.recipe;
        let Some(base) = self.vault.template(&recipe.from).await? else {
            return Err(self.no_template(&recipe.from).await.field("from"));
        };
        let egress = self.reach_of_build(wish.network.clone())?;
        let before = base.built.as_ref();
        // What is built on a template keeps its minimum.
        let minima = || {
            [
                Minimum::of_template(&base),
                Minimum::of_recipe(recipe),
                Minimum::of_policy(&egress.policy),
            ]
        };
        let minimum = recipe
            .isolation_minimum
            .max(before.and_then(|built| built.isolation_minimum));
        let mut wards: Vec<Arc<dyn Ward>> = Vec::new();
        for level in &recipe.isolation {
            let ward = self.levels.choose(*level, minima())?;
            if wards.iter().all(|other| other.level() != ward.level()) {
                wards.push(ward);
            }
        }
        if wards.is_empty() {
            wards.push(self.levels.choose(IsolationWish::Auto, minima())?);
        }
        let bench = self.bench_for(&wards, minima())?;
        let limits = over(
            &recipe.limits,
            &before.map(|built| built.limits).unwrap_or_default(),
        );
        limits.resolve(&self.config.limits.default, &self.config.limits.most)?;
        Ok(Plan {
            bench,
            wards,
            limits,
            egress,
            minimum,
            standing: before.map_or_else(Standing::default, |built| Standing {
                env: built.env.clone(),
                defaults: built.defaults.clone(),
            }),
            base,
        })
    }

    /// The first level whose disks are files, as templates are; else the one `auto` would take of
    /// those.
    fn bench_for(
        &self,
        wards: &[Arc<dyn Ward>],
        minima: [Option<Minimum>; 3],
    ) -> Result<Arc<dyn Ward>> {
        let of_files = |ward: &&Arc<dyn Ward>| ward.disk_form().is_none();
        if let Some(ward) = wards.iter().find(of_files) {
            return Ok(Arc::clone(ward));
        }
        let known = self.levels.wards().iter().filter(of_files);
        let (best, rest): (Vec<_>, Vec<_>) = known.partition(|ward| ward.suits_everything());
        let minimum = self.levels.minimum(minima);
        best.into_iter()
            .chain(rest)
            .find_map(|ward| {
                let wish = IsolationWish::Level(ward.level());
                self.levels.choose(wish, [minimum.clone()]).ok()
            })
            .ok_or_else(|| match minimum {
                // Steps need a disk of files, which machines do not have.
                Some(Minimum { level: Isolation::Microvm, set_by }) => Error::new(
                    Code::PermissionDenied,
                    format!("{set_by} demands microvm, and steps of a template run at container or gvisor"),
                )
                .field("isolation")
                .hint("build it on a server that allows these levels, and import the template here"),
                _ => Error::host_not_ready("no level of this server can run the steps of a template")
                    .hint("`sandkeep doctor` tells what each level needs"),
            })
    }

    fn bench(&self, build: &Build, plan: &Plan, ward: &Arc<dyn Ward>) -> Result<Bench> {
        let limits = &self.config.limits;
        Ok(Bench {
            template: build.template.clone(),
            ward: Arc::clone(ward),
            limits: plan.limits.resolve(&limits.default, &limits.most)?,
            egress: plan.egress.clone(),
            env: plan.standing.env.clone(),
            defaults: plan.standing.defaults.clone(),
        })
    }

    /// Runs the steps that no earlier build ran; gives the files and their hash.
    async fn lay(
        &self,
        build: &Build,
        wish: &BuildWish,
        shop: &Workshop,
        plan: &mut Plan,
    ) -> Result<(Floor, String), BuildFault> {
        let steps = &wish.recipe.steps;
        let ward = Arc::clone(&plan.bench);
        let ground = ground_hash(&plan.base, ward.level());
        let hashes = step_hashes(&ground, steps).map_err(at(BASE))?;
        let cached = self.cached_layers(&hashes).await.map_err(at(BASE))?;
        // The last step whose files are there already, and all before it.
        let usable = wish.cached_until.min(steps.len());
        let skip = (0..usable)
            .rev()
            .find(|&at| cached[at].is_some())
            .map_or(0, |at| at + 1);
        let mut floor = match skip.checked_sub(1).and_then(|last| cached[last].clone()) {
            Some(layer) => Floor::Layer(layer),
            None => Floor::Template(plan.base.clone()),
        };
        let mut bench_box = None;
        for (place, step) in steps.iter().enumerate() {
            let number = (place + 1).to_string();
            let known = place < skip;
            let mark = if known { "CACHED " } else { "" };
            let words = format!("[{number}/{}] {mark}{}", steps.len(), step.words());
            build.say(LineLevel::Info, &number, &words);
            if !known && changes_files(step) {
                let is_first = bench_box.is_none() && matches!(floor, Floor::Template(_));
                let entry = match &bench_box {
                    Some(entry) => Arc::clone(entry),
                    None => {
                        let bench = self.bench(build, plan, &ward).map_err(at(&number))?;
                        let opened = shop.open(bench, floor.clone()).await;
                        bench_box.insert(opened.map_err(at(&number))?).clone()
                    }
                };
                let here = At {
                    core: self,
                    build,
                    number: &number,
                    entry: &entry,
                    standing: &plan.standing,
                };
                if is_first {
                    here.make_account().await;
                }
                here.perform(step).await.map_err(at(&number))?;
                here.settle().await;
                let order = PointOrder {
                    tags: vec![hashes[place].clone()],
                    ..PointOrder::of(PointKind::Layer)
                };
                let layer = self
                    .point_of_disk(&entry, order)
                    .await
                    .map_err(at(&number))?;
                floor = Floor::Layer(layer);
            }
            plan.standing.after(step);
        }
        if let Some(entry) = bench_box {
            shop.clear(&entry).await;
        }
        let layer = hashes.last().cloned().unwrap_or(ground);
        Ok((floor, layer))
    }

    /// Starts what the template is for, in a fresh box of each level, and keeps it where that
    /// can be done. Gives the levels that stay cold, and why.
    async fn warm_up(
        &self,
        build: &Build,
        wish: &BuildWish,
        shop: &Workshop,
        plan: &Plan,
        floor: &Floor,
        start: &str,
    ) -> Result<Vec<ColdLevel>> {
        let mut cold = Vec::new();
        // Disks of other forms are made of the template, when it is there.
        let (now, later): (Vec<_>, Vec<_>) = plan
            .wards
            .iter()
            .partition(|ward| ward.disk_form().is_none());
        for ward in later {
            let words = format!("{}: warmed when the template is there", ward.level());
            build.say(LineLevel::Info, FINALIZE, &words);
        }
        let trial = now.is_empty().then_some(&plan.bench);
        for (place, ward) in now.into_iter().chain(trial).enumerate() {
            let level = ward.level();
            let engine = match trial {
                Some(_) => Err(Error::conflict("this level was not asked for")),
                None => ward.engine().await,
            };
            if let (Err(error), None) = (&engine, trial) {
                let words = format!(
                    "{level}: {}; the start command runs at create",
                    error.message
                );
                build.say(LineLevel::Warn, FINALIZE, &words);
                cold.push(ColdLevel {
                    level,
                    why: error.message.clone(),
                });
                if place > 0 {
                    continue;
                }
            }
            let bench = self.bench(build, plan, ward)?;
            build.say(
                LineLevel::Info,
                FINALIZE,
                &format!("{level}: starting {start}"),
            );
            let order = StartOrder {
                command: start,
                ready: wish.recipe.ready.as_ref(),
                longest: LONGEST_READY,
            };
            let said = |line: &str| build.say(LineLevel::Info, FINALIZE, line);
            if engine.is_err() {
                let entry = shop.open(bench, floor.clone()).await?;
                start_and_wait(&entry, &order, &said).await?;
                shop.clear(&entry).await;
                said(&format!("{level}: ready"));
                continue;
            }
            let kept = self.warm_in(shop, (&bench, floor), &order, &build.id, &said);
            match kept.await? {
                Ok(point) => {
                    let size = sandkeep_model::human_bytes(point.bytes);
                    said(&format!(
                        "{level}: ready, and kept with its memory ({size})"
                    ));
                }
                Err(error) if error.code == Code::DiskFull => return Err(error),
                Err(error) => {
                    let words = format!(
                        "{level}: {}; the start command runs at create",
                        error.message
                    );
                    build.say(LineLevel::Warn, FINALIZE, &words);
                    cold.push(ColdLevel {
                        level,
                        why: error.message,
                    });
                }
            }
        }
        Ok(cold)
    }

    pub async fn copy_template(&self, from: &TemplateName, to: &TemplateName) -> Result<()> {
        let Some(template) = self.vault.template(from).await? else {
            return Err(self.no_template(from).await);
        };
        if from == to {
            return Ok(());
        }
        let Some(built) = template.built else {
            return Err(Error::conflict(format!(
                "template \"{from}\" was not built from a recipe"
            ))
            .hint("build one from it first; it may have no steps"));
        };
        let log = self.vault.template_log(from).await?;
        self.vault
            .publish_template(Ground::Template(from.clone()), to, built, log)
            .await?;
        // What had the name before may be in use no longer.
        self.drop_unused_warmth().await
    }

    /// The template appears under all its names, each in one step.
    async fn publish_as(
        &self,
        build: &Build,
        ground: &Ground,
        names: &[TemplateName],
        built: Built,
    ) -> Result<()> {
        let mut log = Vec::new();
        for line in build.lines(0, usize::MAX) {
            serde_json::to_writer(&mut log, &line)
                .map_err(|error| Error::internal(format!("writing the log: {error}")))?;
            log.push(b'\n');
        }
        let mut ground = ground.clone();
        for name in names {
            self.vault
                .publish_template(ground, name, built.clone(), log.clone())
                .await?;
            ground = Ground::Template(name.clone());
        }
        Ok(())
    }
}

fn at(step: &str) -> impl Fn(Error) -> BuildFault {
    let step = step.to_owned();
    move |error| BuildFault {
        step: step.clone(),
        error,
    }
}

/// What the recipe leaves open holds as it did for what it is built on.
fn over(wish: &LimitsWish, before: &LimitsWish) -> LimitsWish {
    LimitsWish {
        cpu_millis: wish.cpu_millis.or(before.cpu_millis),
        memory_mib: wish.memory_mib.or(before.memory_mib),
        pids: wish.pids.or(before.pids),
        disk_mib: wish.disk_mib.or(before.disk_mib),
        open_files: wish.open_files.or(before.open_files),
    }
}
