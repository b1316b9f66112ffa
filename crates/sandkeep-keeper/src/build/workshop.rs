//! Boxes that are nobody's, and commands in them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use sandkeep_agent_api::process::{EndEvent, Output, ProcessConfig, ProcessEvent, StartRequest};
use sandkeep_agent_client::ProcessStream;
use sandkeep_model::{
    BoxDefaults, Code, Error, Limits, Point, Result, State, TemplateName, Timestamp,
};
use sandkeep_vault::{Ground, TemplateInfo};
use sandkeep_ward::Ward;

use crate::{
    agent,
    core::Core,
    create::{Origin, blank},
    egress::Egress,
    registry::Entry,
    sync::lock,
};

/// The files something is built on.
#[derive(Debug, Clone)]
pub enum Floor {
    Template(TemplateInfo),
    Layer(Point),
}

impl Floor {
    pub const fn origin(&self) -> Origin<'_> {
        match self {
            Self::Template(template) => Origin::Template(template),
            Self::Layer(point) => Origin::Point(point),
        }
    }

    pub fn ground(&self) -> Ground {
        match self {
            Self::Template(template) => Ground::Template(template.name.clone()),
            Self::Layer(point) => Ground::Point(point.id.clone()),
        }
    }
}

/// What a box of the workshop is to be.
#[derive(Clone)]
pub struct Bench {
    pub template: TemplateName,
    pub ward: Arc<dyn Ward>,
    pub limits: Limits,
    pub egress: Egress,
    pub env: BTreeMap<String, String>,
    pub defaults: BoxDefaults,
}

/// The boxes of one build. They must be cleared away whatever happens.
pub struct Workshop {
    core: Arc<Core>,
    boxes: Mutex<Vec<Arc<Entry>>>,
}

impl Workshop {
    pub fn of(core: &Arc<Core>) -> Self {
        Self {
            core: Arc::clone(core),
            boxes: Mutex::default(),
        }
    }

    /// A box on these files. It does not exist for clients.
    pub async fn open(&self, bench: Bench, floor: Floor) -> Result<Arc<Entry>> {
        let mut sandbox = blank(
            &bench.template,
            bench.ward.as_ref(),
            bench.limits,
            Timestamp::now(),
        );
        sandbox.env = bench.env;
        sandbox.time.defaults = bench.defaults;
        let entry = Entry::new(sandbox, bench.ward, true, bench.egress);
        lock(&self.boxes).push(Arc::clone(&entry));
        let (core, made) = (Arc::clone(&self.core), Arc::clone(&entry));
        // In a task of its own: a build that is cancelled must not leave half a box.
        let up = self.core.tasks.spawn(async move {
            let _turn = made.turn.lock().await;
            if made.state() != State::Creating {
                return Err(Error::conflict("the build is over"));
            }
            core.make_room(&made).await?;
            core.bring_up(&made, None, None, floor.origin())
                .await
                .map(drop)
        });
        up.await
            .map_err(|_| Error::internal("making the box of the build was broken off"))??;
        Ok(entry)
    }

    pub async fn clear(&self, entry: &Arc<Entry>) {
        self.core.discard(entry).await;
        lock(&self.boxes).retain(|other| other.id != entry.id);
    }

    pub async fn close(&self) {
        let boxes = std::mem::take(&mut *lock(&self.boxes));
        for entry in boxes {
            self.core.discard(&entry).await;
        }
    }
}

/// A command in a box of ours.
#[derive(Debug, Clone, Default)]
pub struct Call<'a> {
    pub argv: Vec<&'a str>,
    pub user: Option<&'a str>,
    pub cwd: Option<&'a str>,
    pub env: BTreeMap<String, String>,
    pub timeout: Option<Duration>,
}

impl<'a> Call<'a> {
    /// As people type it.
    pub fn shell(command: &'a str) -> Self {
        Self {
            argv: vec!["/bin/bash", "-l", "-c", command],
            ..Self::default()
        }
    }

    fn request(&self) -> StartRequest {
        let mut words = self.argv.iter().map(|word| (*word).to_owned());
        StartRequest {
            process: Some(ProcessConfig {
                cmd: words.next().unwrap_or_default(),
                args: words.collect(),
                envs: self.env.clone(),
                cwd: self.cwd.map(str::to_owned),
            }),
            pty: None,
            tag: None,
            stdin: Some(false),
        }
    }
}

/// Starts a command; it goes on when the stream is dropped.
pub async fn start(entry: &Entry, call: &Call<'_>) -> Result<ProcessStream> {
    let agent = agent::visit(entry).await?;
    let mut stream = agent
        .start(&call.request(), call.user, call.timeout)
        .await?;
    match stream.next().await? {
        Some(ProcessEvent::Start(_)) => Ok(stream),
        _ => Err(Error::new(
            Code::BoxUnreachable,
            "the agent did not say that the command started",
        )),
    }
}

/// Runs a command to its end.
pub async fn run(
    entry: &Entry,
    call: &Call<'_>,
    mut said: impl FnMut(bool, &[u8]) + Send,
) -> Result<EndEvent> {
    let mut stream = start(entry, call).await?;
    loop {
        match stream.next().await? {
            Some(ProcessEvent::Data(Output::Stdout(blob) | Output::Pty(blob))) => {
                said(false, &blob.0);
            }
            Some(ProcessEvent::Data(Output::Stderr(blob))) => said(true, &blob.0),
            Some(ProcessEvent::End(end)) => return Ok(end),
            Some(ProcessEvent::Start(_) | ProcessEvent::Keepalive(_)) => {}
            None => {
                return Err(Error::new(
                    Code::BoxUnreachable,
                    "the box ended while the command ran",
                )
                .hint("give it more memory if that was the reason"));
            }
        }
    }
}

pub const fn went_well(end: &EndEvent) -> bool {
    end.exited && end.exit_code == 0
}
