//! Where checks are run: a private server, an outside, bait on the host.

use std::{cell::RefCell, collections::BTreeMap, fs, path::PathBuf, rc::Rc, sync::Arc};

use rustix::mount::{MountFlags, mount};
use serde_json::{Value, json};

use crate::{
    api::Api,
    bait::Bait,
    check::Level,
    enter::{Anchor, mount_into},
    fault::{Doing as _, Fault, Result},
    sandbox::{Probe, Ran, Report, Sandbox, Wish},
    server::{Place, Server},
    stop::Stop,
    tables::Tables,
    weakness::Weakness,
    world::World,
};

#[derive(Debug)]
pub struct Bench {
    pub server: Server,
    pub place: Place,
    pub world: World,
    pub bait: Bait,
    pub stop: Stop,
    pub tables: Tables,
    pub runtime: Arc<tokio::runtime::Runtime>,
    /// A directory of verify's own on the disk of the host.
    pub dir: PathBuf,
    /// What is taken away from sandboxes, in the self-test.
    pub weakness: RefCell<Option<Weakness>>,
    /// Sandboxes for probes that change nothing: one of each level without a network, and one
    /// with [`one_name`].
    shared: RefCell<BTreeMap<(Level, bool), Rc<Sandbox>>>,
}

impl Bench {
    #[expect(
        clippy::too_many_arguments,
        reason = "each is a part of the bench, made in order"
    )]
    pub fn new(
        server: Server,
        place: Place,
        world: World,
        bait: Bait,
        stop: Stop,
        tables: Tables,
        runtime: Arc<tokio::runtime::Runtime>,
        dir: PathBuf,
    ) -> Self {
        Self {
            server,
            place,
            world,
            bait,
            stop,
            tables,
            runtime,
            dir,
            weakness: RefCell::default(),
            shared: RefCell::default(),
        }
    }

    pub fn api(&self) -> &Arc<Api> {
        &self.server.api
    }

    pub fn weak(&self, weakness: Weakness) -> bool {
        *self.weakness.borrow() == Some(weakness)
    }

    /// A fresh sandbox; weakened, in the self-test.
    pub fn sandbox(&self, level: Level, wish: &Wish) -> Result<Sandbox> {
        let mut wish = wish.clone();
        if self.weak(Weakness::LimitsLifted) {
            wish.limits = Some(json!({
                "memory_mib": 1024, "cpu_millis": 2000, "disk_mib": 2048, "pids": 2048, "open_files": 65536,
            }));
        }
        if self.weak(Weakness::OpenPolicy) && wish.network.is_some() {
            wish.network = Some(open_policy());
        }
        let sandbox = Sandbox::create(self.api(), level, &wish)?;
        let weakness = *self.weakness.borrow();
        let mount_in = |from: &str, to| {
            let anchor = Anchor::find(&sandbox, &self.stop)?;
            mount_into(&anchor, from.as_ref(), to, false)
        };
        match weakness {
            Some(Weakness::HostMount) => {
                let from = self.bait.dir.to_string_lossy().into_owned();
                mount_in(&from, c"/mnt")?;
            }
            Some(Weakness::HostProc) => mount_in("/proc", c"/proc")?,
            Some(Weakness::SharedNode) => mount_in("/dev/zero", c"/dev/zero")?,
            Some(Weakness::FreeTerminals) => {
                let from = self.free_terminals()?;
                mount_in(&from.to_string_lossy(), c"/dev/pts")?;
            }
            _ => {}
        }
        Ok(sandbox)
    }

    /// A terminal file system as sandboxes have it, but for its limit; it ends with the room.
    fn free_terminals(&self) -> Result<PathBuf> {
        let at = self.dir.join("terminals");
        fs::create_dir_all(&at).doing("making a directory for terminals")?;
        let options = Some(c"gid=5,mode=620,ptmxmode=666");
        mount("devpts", &at, "devpts", MountFlags::NOSUID, options)
            .doing("mounting terminals without a limit")?;
        Ok(at)
    }

    /// The one for probes that change nothing.
    pub fn shared(&self, level: Level) -> Result<Rc<Sandbox>> {
        self.one_of(level, false)
    }

    /// The same, with one name it may reach.
    pub fn shared_with_a_name(&self, level: Level) -> Result<Rc<Sandbox>> {
        self.one_of(level, true)
    }

    fn one_of(&self, level: Level, network: bool) -> Result<Rc<Sandbox>> {
        let wish = Wish {
            network: network.then(one_name),
            ..Wish::default()
        };
        if self.weakness.borrow().is_some() {
            return Ok(Rc::new(self.sandbox(level, &wish)?));
        }
        if let Some(found) = self.shared.borrow().get(&(level, network)) {
            return Ok(Rc::clone(found));
        }
        let made = Rc::new(self.sandbox(level, &wish)?);
        self.shared
            .borrow_mut()
            .insert((level, network), Rc::clone(&made));
        Ok(made)
    }

    /// After a check that could not be tested the shared sandboxes may be in any state.
    pub fn forget_shared(&self, level: Level) {
        self.shared.borrow_mut().retain(|(own, _), _| *own != level);
    }

    /// Runs a probe; in the self-test perhaps without what usually surrounds it.
    pub fn probe(
        &self,
        sandbox: &Sandbox,
        script: &str,
        arguments: &Value,
        user: &str,
    ) -> Result<Report> {
        let probe = Probe::new(script, arguments)?;
        let ran = self.ran(sandbox, &probe.words, user)?;
        probe.read(ran.code, &ran.out, &ran.err)
    }

    /// Starts a probe that goes on in the background, surrounded by as much as any other.
    pub fn start(&self, sandbox: &Sandbox, probe: &Probe, user: &str, out: &str) -> Result<()> {
        let ran = self.ran(sandbox, &probe.behind(out), user)?;
        if ran.code == Some(0) {
            return Ok(());
        }
        Err(Fault::Cannot(format!(
            "a program could not be started in the sandbox: {}",
            ran.err.trim()
        )))
    }

    fn ran(&self, sandbox: &Sandbox, words: &[String], user: &str) -> Result<Ran> {
        let weakness = *self.weakness.borrow();
        match weakness.filter(|weakness| weakness.enters()) {
            Some(weakness) => Anchor::find(sandbox, &self.stop)?.run(weakness, words, user),
            None => sandbox.exec_with(words, user),
        }
    }
}

/// All that is outside, but for what is private.
pub fn open_policy() -> Value {
    json!({"allow": ["198.18.0.0/16", "good.test", "open.test", "narrow.test", "echo.test", "other.test", "evil.test", "*.evil.test",
        "rebound.test", "impostor.test"]})
}

/// What most checks of the network allow: one name, so that the way out is known to work.
pub fn one_name() -> Value {
    json!({"allow": [{"to": "good.test", "ports": [80, 443]}]})
}
