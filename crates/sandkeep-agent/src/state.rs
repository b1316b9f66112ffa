//! What every call shares.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use sandkeep_agent_api::{ConnectError, host::LimitsRequest};
use tokio::sync::Semaphore;

use crate::fence::Fence;
use crate::fs::FsState;
use crate::hold::Hold;
use crate::log::Log;
use crate::metrics::CpuMeter;
use crate::oom::ChildScore;
use crate::paths;
use crate::process::Table;
use crate::reap::Reaper;
use crate::tunnel::MAX_TUNNELS;
use crate::users::{self, User};

/// The agent's state; cheap to clone.
#[derive(Debug, Clone)]
pub struct State(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    settings: Mutex<Settings>,
    log: Log,
    fs: FsState,
    processes: Table,
    reaper: Reaper,
    hold: Hold,
    cpu: CpuMeter,
    child_score: ChildScore,
    fence: Mutex<Fence>,
    tunnels: Arc<Semaphore>,
}

/// What the host tells the box about itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    /// Environment of every process.
    pub envs: BTreeMap<String, String>,
    /// Tells programs where the roots are that they are to trust; whoever says otherwise wins.
    pub trust: BTreeMap<String, String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<PathBuf>,
}

impl Settings {
    /// What every process gets.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut all = self.trust.clone();
        all.extend(self.envs.clone());
        all
    }
}

/// Why a request's user cannot be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserError {
    /// The name asked for.
    pub name: String,
    pub reason: String,
}

impl From<UserError> for ConnectError {
    fn from(error: UserError) -> Self {
        Self::unauthenticated(format!("invalid username: '{}'", error.name))
    }
}

impl State {
    pub(crate) fn new(child_score: ChildScore, fence: Fence) -> Self {
        Self(Arc::new(Shared {
            settings: Mutex::default(),
            log: Log::default(),
            fs: FsState::default(),
            processes: Table::default(),
            reaper: Reaper::default(),
            hold: Hold::default(),
            cpu: CpuMeter::start(),
            child_score,
            fence: Mutex::new(fence),
            tunnels: Arc::new(Semaphore::new(MAX_TUNNELS)),
        }))
    }

    /// Places for tunnels to ports of the box.
    pub(crate) fn tunnels(&self) -> &Arc<Semaphore> {
        &self.0.tunnels
    }

    pub(crate) fn processes(&self) -> &Table {
        &self.0.processes
    }

    pub(crate) fn reaper(&self) -> &Reaper {
        &self.0.reaper
    }

    pub(crate) fn hold(&self) -> &Hold {
        &self.0.hold
    }

    pub(crate) fn cpu(&self) -> &CpuMeter {
        &self.0.cpu
    }

    pub(crate) fn child_score(&self) -> ChildScore {
        self.0.child_score
    }

    pub(crate) fn fence(&self) -> Fence {
        *self.0.fence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_limits(&self, limits: &LimitsRequest) -> std::io::Result<()> {
        self.0
            .fence
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .limit(limits)
    }

    /// The state of the `fs` module.
    pub fn fs(&self) -> &FsState {
        &self.0.fs
    }

    pub(crate) fn log(&self) -> &Log {
        &self.0.log
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.0
            .settings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The user a request acts as: the explicit name, else the name of its Basic credentials
    /// (there is no password: the host has checked who may call), else the default user.
    pub fn user(&self, headers: &HeaderMap, explicit: Option<&str>) -> Result<User, UserError> {
        let named = explicit
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .or_else(|| basic_username(headers));
        match named {
            Some(name) => find_user(&name),
            None => self.default_user(),
        }
    }

    /// The default user: what the host said, else `user` if the box has one, else root.
    pub(crate) fn default_user(&self) -> Result<User, UserError> {
        let configured = self.settings().default_user.clone();
        match configured {
            Some(name) => find_user(&name),
            None => find_user("user")
                .or_else(|_| find_user("root"))
                .or_else(|_| Ok(bare_root())),
        }
    }

    /// The box's own root, whatever became of its passwd file.
    pub(crate) fn root() -> User {
        find_user("root").unwrap_or_else(|_| bare_root())
    }

    /// Where the path of a request points, see [`paths::resolve`].
    pub fn resolve(&self, path: &str, user: &User) -> Result<PathBuf, ConnectError> {
        let workdir = self.settings().default_workdir.clone();
        paths::resolve(path, user, workdir.as_deref()).map_err(ConnectError::invalid_argument)
    }
}

/// A box without /etc/passwd still has root.
fn bare_root() -> User {
    User {
        name: "root".into(),
        uid: 0,
        gid: 0,
        home: PathBuf::from("/"),
    }
}

fn find_user(name: &str) -> Result<User, UserError> {
    let failed = |reason: String| UserError {
        name: name.to_owned(),
        reason,
    };
    users::lookup(name)
        .map_err(|error| failed(error.to_string()))?
        .ok_or_else(|| failed(format!("user: unknown user {name}")))
}

fn basic_username(headers: &HeaderMap) -> Option<String> {
    let (scheme, encoded) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let name = text.split_once(':').map_or(text.as_str(), |(name, _)| name);
    (!name.is_empty()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn basic_credentials_name_the_user() {
        assert_eq!(
            basic_username(&headers("Basic cm9vdDo=")).as_deref(),
            Some("root")
        );
        assert_eq!(basic_username(&headers("Basic ???")), None);
        assert_eq!(basic_username(&headers("Bearer cm9vdDo=")), None);
    }

    #[test]
    fn an_explicit_name_wins_and_an_unknown_one_is_refused() {
        let state = State::new(ChildScore::new(0), Fence::default());
        assert_eq!(
            state
                .user(&headers("Basic eHk6"), Some("root"))
                .unwrap()
                .uid,
            0
        );
        let error = state
            .user(&headers("Basic bm9ib2R5aGVyZTo="), None)
            .unwrap_err();
        let error = ConnectError::from(error);
        assert_eq!(error.message, "invalid username: 'nobodyhere'");
    }
}
