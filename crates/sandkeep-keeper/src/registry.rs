//! The boxes that live, in memory.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use sandkeep_model::{
    Error, GoneReason, HostMask, PortAccess, Result, Sandbox, SandboxId, Secret, State, Timestamp,
};
use sandkeep_ward::Ward;
use tokio::sync::Notify;

use crate::{
    egress::Egress,
    meters,
    network::Reach,
    samples::Trail,
    sync::{lock, read, write},
    time::{Activity, Auto, FailedWakes},
};

/// One box that is not gone.
pub struct Entry {
    pub id: SandboxId,
    pub ward: Arc<dyn Ward>,
    /// Operations on the box take turns. Whoever creates it has the first one.
    pub turn: tokio::sync::Mutex<()>,
    /// Who talks to it, and the way to cut them.
    pub activity: Arc<Activity>,
    /// Points that are made by themselves.
    pub auto: Auto,
    pub failed_wakes: FailedWakes,
    pub trail: Mutex<Trail>,
    pub reach: Reach,
    face: RwLock<Face>,
    /// Since when it stands still because the storage is nearly full.
    held: Mutex<Option<Timestamp>>,
    /// Rung at every step in its life.
    stepped: Notify,
    /// Somebody repeats its clean-up already.
    retried: AtomicBool,
}

struct Face {
    sandbox: Sandbox,
    pooled: bool,
    /// The state the ledger has; behind `sandbox.state` when a write failed.
    written: State,
    counted: bool,
}

impl Face {
    fn label(&self) -> Option<&'static str> {
        match self.sandbox.state {
            _ if !self.counted => None,
            State::Gone => None,
            _ if self.pooled => Some("pooled"),
            state => Some(state.name()),
        }
    }
}

impl Entry {
    pub fn new(sandbox: Sandbox, ward: Arc<dyn Ward>, pooled: bool, egress: Egress) -> Arc<Self> {
        Arc::new(Self {
            id: sandbox.id.clone(),
            ward,
            turn: tokio::sync::Mutex::default(),
            activity: Arc::default(),
            auto: Auto::default(),
            failed_wakes: FailedWakes::default(),
            trail: Mutex::default(),
            reach: Reach::new(egress),
            face: RwLock::new(Face {
                written: sandbox.state,
                sandbox,
                pooled,
                counted: false,
            }),
            held: Mutex::default(),
            stepped: Notify::new(),
            retried: AtomicBool::new(false),
        })
    }

    pub fn sandbox(&self) -> Sandbox {
        read(&self.face).sandbox.clone()
    }

    /// Looks at the box without copying it.
    pub fn with<T>(&self, look: impl FnOnce(&Sandbox) -> T) -> T {
        look(&read(&self.face).sandbox)
    }

    pub fn state(&self) -> State {
        read(&self.face).sandbox.state
    }

    /// The state the ledger has.
    pub fn written(&self) -> State {
        read(&self.face).written
    }

    pub fn pooled(&self) -> bool {
        read(&self.face).pooled
    }

    pub fn end_at(&self) -> Option<Timestamp> {
        read(&self.face).sandbox.end_at
    }

    fn change(&self, change: impl FnOnce(&mut Face)) {
        let mut face = write(&self.face);
        let (before, state) = (face.label(), face.sandbox.state);
        change(&mut face);
        meters::moved(before, face.label());
        let stepped = face.sandbox.state != state;
        drop(face);
        if stepped {
            self.stepped.notify_waiters();
        }
    }

    /// Returns when the box is in a state that `wanted` names.
    pub async fn until(&self, wanted: impl Fn(State) -> bool) -> State {
        loop {
            let stepped = self.stepped.notified();
            let state = self.state();
            if wanted(state) {
                return state;
            }
            stepped.await;
        }
    }

    /// Changes what is shown of the box without a step in its life.
    pub fn amend(&self, change: impl FnOnce(&mut Sandbox)) {
        self.change(|face| change(&mut face.sandbox));
    }

    /// A step that the ledger has.
    pub fn became(&self, state: State) {
        self.change(|face| {
            face.sandbox.state = state;
            face.written = state;
        });
    }

    /// It runs, but the ledger does not know it yet.
    pub fn runs_unwritten(&self) {
        self.change(|face| face.sandbox.state = State::Running);
    }

    /// It rests, but the ledger does not know it yet.
    pub fn rests_unwritten(&self) {
        self.change(|face| face.sandbox.state = State::Paused);
    }

    /// It ends; `written` tells whether the ledger knows that yet.
    pub fn ending(&self, why: GoneReason, written: bool) {
        self.change(|face| {
            face.sandbox.state = State::Stopping;
            face.sandbox.gone = Some(why);
            if written {
                face.written = State::Stopping;
            }
        });
    }

    /// A pooled box has an owner now.
    pub fn claimed(&self, sandbox: Sandbox) {
        self.change(|face| {
            face.sandbox = sandbox;
            face.pooled = false;
        });
    }

    /// Since when it is held for want of storage, though it runs for the ledger.
    pub fn held(&self) -> Option<Timestamp> {
        *lock(&self.held)
    }

    pub fn set_held(&self, since: Option<Timestamp>) {
        *lock(&self.held) = since;
    }

    /// Whether the ledger has another state than the one it is in.
    pub fn is_unwritten(&self) -> bool {
        let face = read(&self.face);
        face.written != face.sandbox.state
    }

    /// Whether the caller is the one to repeat the clean-up.
    pub fn begin_retries(&self) -> bool {
        !self.retried.swap(true, Ordering::AcqRel)
    }
}

/// Whether a request gets through to it, perhaps after it was woken.
fn reachable(sandbox: &Sandbox) -> bool {
    match sandbox.state {
        State::Running => true,
        // In a moment it runs again.
        State::Pausing | State::Resuming => true,
        State::Paused => sandbox.time.auto_resume,
        State::Creating | State::Stopping | State::Gone => false,
    }
}

/// All of them.
#[derive(Default)]
pub struct Registry {
    boxes: RwLock<HashMap<SandboxId, Arc<Entry>>>,
}

impl Registry {
    /// Adds a box if there are fewer than `most`.
    pub fn add_within(&self, entry: &Arc<Entry>, most: usize) -> bool {
        let mut boxes = write(&self.boxes);
        if boxes.len() >= most {
            return false;
        }
        boxes.insert(entry.id.clone(), Arc::clone(entry));
        drop(boxes);
        entry.change(|face| face.counted = true);
        true
    }

    pub fn remove(&self, id: &SandboxId) {
        write(&self.boxes).remove(id);
    }

    pub fn len(&self) -> usize {
        read(&self.boxes).len()
    }

    /// A box, pooled or not.
    pub fn find(&self, id: &SandboxId) -> Option<Arc<Entry>> {
        read(&self.boxes).get(id).cloned()
    }

    /// A box that exists for clients.
    pub fn owned(&self, id: &SandboxId) -> Result<Arc<Entry>> {
        self.find(id)
            .filter(|entry| !entry.pooled() && entry.state() != State::Gone)
            .ok_or_else(|| Error::sandbox_not_found(id))
    }

    pub fn all(&self) -> Vec<Arc<Entry>> {
        read(&self.boxes).values().cloned().collect()
    }

    /// Boxes that run for somebody.
    pub fn running(&self) -> Vec<Arc<Entry>> {
        let mut all = self.all();
        all.retain(|entry| !entry.pooled() && entry.state() == State::Running);
        all
    }

    /// How many exist for clients.
    pub fn owned_count(&self) -> usize {
        let boxes = read(&self.boxes);
        boxes.values().filter(|entry| !entry.pooled()).count()
    }

    pub fn token(&self, id: &SandboxId) -> Option<Secret> {
        let entry = self.find(id)?;
        let face = read(&entry.face);
        (!face.pooled && reachable(&face.sandbox)).then(|| face.sandbox.access_token.clone())
    }

    /// Who reaches the ports of a sandbox that can be reached.
    pub fn port_access(&self, id: &SandboxId) -> Option<PortAccess> {
        let entry = self.find(id)?;
        let face = read(&entry.face);
        (!face.pooled && reachable(&face.sandbox)).then_some(face.sandbox.ports)
    }

    /// The host that programs of a sandbox are asked by, where it is not the one of the request.
    pub fn host_mask(&self, id: &SandboxId) -> Option<HostMask> {
        let entry = self.find(id)?;
        let face = read(&entry.face);
        face.sandbox.e2b.mask_request_host.clone()
    }

    pub fn tokens(&self) -> Vec<(SandboxId, Secret)> {
        self.running()
            .into_iter()
            .map(|entry| (entry.id.clone(), entry.with(|b| b.access_token.clone())))
            .collect()
    }

    /// Forgets what was sampled of a box when it changes hands.
    pub fn clear_trail(entry: &Entry) {
        *lock(&entry.trail) = Trail::default();
    }
}
