//! Builds that run, and the last ones that did.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Mutex},
};

use sandkeep_model::{BuildId, Error, Isolation, Result, TemplateName, Timestamp, build_not_found};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use super::log::{BuildLine, LineLevel, MOST_LINES};
use crate::sync::lock;

/// Builds at once: they share the host with the boxes that people wait for.
const AT_ONCE: usize = 2;
/// Builds that are remembered after their end.
const REMEMBERED: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildStatus {
    Waiting,
    Building,
    Ready,
    Failed,
    Cancelled,
}

impl BuildStatus {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    pub const fn is_over(self) -> bool {
        matches!(self, Self::Ready | Self::Failed | Self::Cancelled)
    }
}

/// Why a build failed, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildFault {
    /// `base`, the number of the step from 1, or `finalize`.
    pub step: String,
    pub error: Error,
}

/// A build as it is now.
#[derive(Debug, Clone)]
pub struct BuildView {
    pub id: BuildId,
    pub template: TemplateName,
    pub status: BuildStatus,
    pub fault: Option<BuildFault>,
    pub begun_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    /// How many lines its log has.
    pub lines: usize,
}

pub struct Build {
    pub id: BuildId,
    pub template: TemplateName,
    pub cancel: CancellationToken,
    story: Mutex<Story>,
    /// Counts what happened, for those who follow.
    bell: watch::Sender<u64>,
}

struct Story {
    status: BuildStatus,
    fault: Option<BuildFault>,
    begun_at: Timestamp,
    ended_at: Option<Timestamp>,
    lines: Vec<BuildLine>,
}

impl Build {
    fn new(id: BuildId, template: &TemplateName) -> Self {
        Self {
            id,
            template: template.clone(),
            cancel: CancellationToken::new(),
            story: Mutex::new(Story {
                status: BuildStatus::Waiting,
                fault: None,
                begun_at: Timestamp::now(),
                ended_at: None,
                lines: Vec::new(),
            }),
            bell: watch::Sender::new(0),
        }
    }

    pub fn view(&self) -> BuildView {
        let story = lock(&self.story);
        BuildView {
            id: self.id.clone(),
            template: self.template.clone(),
            status: story.status,
            fault: story.fault.clone(),
            begun_at: story.begun_at,
            ended_at: story.ended_at,
            lines: story.lines.len(),
        }
    }

    pub fn status(&self) -> BuildStatus {
        lock(&self.story).status
    }

    fn change(&self, change: impl FnOnce(&mut Story)) {
        change(&mut lock(&self.story));
        self.bell.send_modify(|count| *count += 1);
    }

    pub fn say(&self, level: LineLevel, step: &str, message: &str) {
        let line = BuildLine::new(level, step, message);
        self.change(|story| {
            if story.lines.len() < MOST_LINES {
                story.lines.push(line);
            } else if story.lines.len() == MOST_LINES {
                let words = "the log is full; what follows is left out";
                story
                    .lines
                    .push(BuildLine::new(LineLevel::Warn, step, words));
            }
        });
    }

    pub fn begins(&self) {
        self.change(|story| story.status = BuildStatus::Building);
    }

    pub fn ends(&self, status: BuildStatus, fault: Option<BuildFault>) {
        self.change(|story| {
            story.status = status;
            story.fault = fault;
            story.ended_at = Some(Timestamp::now());
        });
    }

    pub fn lines(&self, after: usize, most: usize) -> Vec<BuildLine> {
        let story = lock(&self.story);
        story.lines.iter().skip(after).take(most).cloned().collect()
    }

    pub fn follow(&self) -> watch::Receiver<u64> {
        self.bell.subscribe()
    }
}

/// All of them, newest last.
pub struct Builds {
    all: Mutex<VecDeque<Arc<Build>>>,
    pub slots: Semaphore,
    /// Templates that are being warmed again, by build and level.
    pub warming: Mutex<HashSet<(BuildId, Isolation)>>,
    /// What could not be warmed by the engine that is here: not tried again.
    pub unwarmable: Mutex<HashSet<(BuildId, Isolation, String)>>,
}

impl Default for Builds {
    fn default() -> Self {
        Self {
            all: Mutex::default(),
            slots: Semaphore::new(AT_ONCE),
            warming: Mutex::default(),
            unwarmable: Mutex::default(),
        }
    }
}

impl Builds {
    /// Takes a build in; one for each name at a time.
    pub fn begin(&self, template: &TemplateName, id: BuildId) -> Result<Arc<Build>> {
        let mut all = lock(&self.all);
        let running = all
            .iter()
            .find(|build| build.template == *template && !build.status().is_over());
        if let Some(running) = running {
            return Err(Error::conflict(format!(
                "template \"{template}\" is being built already, by build {}",
                running.id
            ))
            .hint("wait for it, or cancel it with `sandkeep template cancel`"));
        }
        let build = Arc::new(Build::new(id, template));
        all.push_back(Arc::clone(&build));
        while all.len() > REMEMBERED {
            let Some(over) = all.iter().position(|build| build.status().is_over()) else {
                break;
            };
            all.remove(over);
        }
        Ok(build)
    }

    pub fn find(&self, id: &BuildId) -> Result<Arc<Build>> {
        let all = lock(&self.all);
        all.iter()
            .find(|build| build.id == *id)
            .cloned()
            .ok_or_else(|| build_not_found(id))
    }

    pub fn of(&self, template: &TemplateName) -> Vec<Arc<Build>> {
        let all = lock(&self.all);
        let of = all.iter().filter(|build| build.template == *template);
        of.cloned().collect()
    }

    /// Those that are not over.
    pub fn running(&self) -> Vec<BuildId> {
        let all = lock(&self.all);
        let running = all.iter().filter(|build| !build.status().is_over());
        running.map(|build| build.id.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_build_of_a_name_at_a_time_and_a_bounded_memory() {
        let builds = Builds::default();
        let name: TemplateName = "web".parse().unwrap();
        let begin = |name: &TemplateName| builds.begin(name, BuildId::random());
        let first = begin(&name).unwrap();
        assert!(begin(&name).is_err());
        assert!(begin(&"other".parse().unwrap()).is_ok());
        first.ends(BuildStatus::Failed, None);
        for _ in 0..2 * REMEMBERED {
            begin(&name).unwrap().ends(BuildStatus::Ready, None);
        }
        assert!(builds.find(&first.id).is_err());
        assert_eq!(builds.running().len(), 1);
        assert!(builds.of(&name).len() < REMEMBERED);
    }
}
