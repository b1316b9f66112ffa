//! Many boxes from one.

use std::sync::Arc;

use sandkeep_model::{
    Code, CreateSandbox, Error, EventKind, Expiry, Identity, IsolationWish, LimitsWish, Point,
    PointKind, Result, Sandbox, TimeWish,
};

use super::{ForkWish, Forked, snapshot::PointOrder};
use crate::{core::Core, create::Plan, registry::Entry};

/// More than this at once is a mistake.
pub const MOST_FORKS: u32 = 20;

impl Core {
    pub async fn fork(self: &Arc<Self>, entry: &Arc<Entry>, wish: ForkWish) -> Result<Forked> {
        if !(1..=MOST_FORKS).contains(&wish.count) {
            return Err(Error::invalid(
                "count",
                format!("count is {}, it must be from 1 to {MOST_FORKS}", wish.count),
            ));
        }
        let mut point = match &wish.at {
            Some(at) => self.point(at).await?,
            None => {
                let _turn = entry.turn.lock().await;
                self.point_now(entry, wish.memory, PointOrder::of(PointKind::Fork))
                    .await?
            }
        };
        let mut made = self.fork_from(entry, &point, &wish).await;
        if wish.at.is_none() {
            if let Ok(forks) = &made
                && forks.iter().all(Result::is_err)
                && let Some(why) = self.why_not_back(entry, &point).await
            {
                // They begin from the files, or are refused, as where there is no memory at all.
                point.engine = None;
                point.why_disk_only = Some(why);
                made = self.fork_from(entry, &point, &wish).await;
            }
            self.drop_point(&point).await;
        }
        let memory = point.has_memory();
        Ok(Forked {
            made: made?,
            memory,
            why: why_without(&point).filter(|_| wish.memory.is_none()),
        })
    }

    /// Why the memory that forks were to be made from is worth nothing, if that is why there are none.
    async fn why_not_back(&self, entry: &Entry, point: &Point) -> Option<String> {
        if !point.has_memory() {
            return None;
        }
        let found = self.vault.point(&point.id).await.ok()?;
        let tried = self.try_image(entry, &found.disk, &found.memory?).await;
        tried.err().map(|why| why.message)
    }

    async fn fork_from(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        point: &Point,
        wish: &ForkWish,
    ) -> Result<Vec<Result<Sandbox>>> {
        if wish.memory == Some(true)
            && let Some(why) = why_without(point)
        {
            return Err(Error::new(
                Code::NotEnforceable,
                format!("forks with memory can not be made: {why}"),
            )
            .field("memory")
            .hint("leave `memory` out to have them begin from the files"));
        }
        let source = entry.sandbox();
        let ward = self.ward_for(point)?;
        self.levels
            .allow(point.isolation, self.minima(entry, Some(point)).await?)?;
        self.usable(point, ward.as_ref()).await?;
        let expiry = match wish.expiry {
            Some(expiry) => expiry,
            None => source.time.lease_seconds.map_or(Expiry::Never, |seconds| {
                Expiry::After(std::time::Duration::from_secs(seconds))
            }),
        };
        self.first_end(sandkeep_model::Timestamp::now(), expiry)?;
        // A fork of now came from where its source came from; the point itself does not stay.
        let head = if wish.at.is_some() {
            Some(point.id.clone())
        } else {
            source.time.head.clone()
        };
        let mut forks = tokio::task::JoinSet::new();
        for place in 0..wish.count {
            let plan = Plan {
                request: CreateSandbox {
                    template: source.template.clone(),
                    isolation: IsolationWish::Level(point.isolation),
                    limits: LimitsWish::default(),
                    expiry,
                    on_timeout: source.on_timeout,
                    ports: source.ports,
                    e2b: source.e2b.clone(),
                    env: source.env.clone(),
                    metadata: source.metadata.clone(),
                    time: TimeWish {
                        from_point: Some(point.id.clone()),
                        auto_resume: source.time.auto_resume,
                        pause_files_only: source.time.pause_files_only,
                        idle_seconds: source.time.idle_seconds,
                        paused_limit_seconds: source.time.paused_limit_seconds,
                        points: Some(source.time.points.clone().unwrap_or_default()),
                    },
                    identity: Identity {
                        parent: Some(source.id.clone()),
                        ..source.identity.clone()
                    },
                    idempotency_key: None,
                    by: None,
                },
                template: None,
                from: Some(point.clone()),
                warm: None,
                defaults: source.time.defaults.clone(),
                ward: Arc::clone(&ward),
                limits: source.limits,
                network: entry.reach.egress().as_ref().clone(),
            };
            let (core, head, source) = (Arc::clone(self), head.clone(), source.id.clone());
            forks.spawn(async move {
                let made = core.make_cold(&plan, None, head).await;
                if let Ok(fork) = &made {
                    let told = EventKind::ForkedFrom { source };
                    if let Err(error) = core.store.note(&[(&fork.id, told)]).await {
                        tracing::warn!(id = %fork.id, %error, "telling where a fork came from");
                    }
                }
                (place, made)
            });
        }
        let mut made = forks.join_all().await;
        made.sort_by_key(|(place, _)| *place);
        Ok(made.into_iter().map(|(_, made)| made).collect())
    }
}

/// Why what is made from a point does not go on with its memory.
fn why_without(point: &Point) -> Option<String> {
    let unknown = || format!("there is no memory in point \"{}\"", point.id);
    (!point.has_memory()).then(|| point.why_disk_only.clone().unwrap_or_else(unknown))
}
