//! Machines that have been through the first steps of a box.
//!
//! A machine that was booted ahead has seen no disk: its copy mounts one, starts the agent's
//! service and reads the first programs, all of it for the first time, which takes most of the
//! start of a box. So after the first box of a template one more machine goes through these
//! steps on a copy of the same fresh disk, runs a shell as a first command would, and is written
//! down together with that disk. It never was a box and nobody's data is in it. The next boxes
//! of that template and size are copies of both.

use crate::{
    disk,
    image::Origin,
    machine::{Machine, PAGES, answered, note, read, rename, save_devices},
    memory::{Mapped, Ram},
    qemu::{Qemu, Shape},
    start::new_order,
    ward::Inner,
};
use sandkeep_agent_api::{
    channel::TOKEN_LENGTH,
    host::InitRequest,
    process::{ProcessConfig, StartRequest},
};
use sandkeep_agent_client::Agent;
use sandkeep_host::{
    failure::Doing as _,
    files::{make_private_dir, remove_dir},
    work::{blocking, lock},
};
use sandkeep_model::{Error, Limits, Result, Secret, random_token};
use sandkeep_own_kernel as own_kernel;
use serde_json::json;
use std::{
    fs::{self, File},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant, SystemTime},
};

/// What directories of such machines begin with, beside those that were booted.
const WARM: &str = "warm-";
/// Before it has a name of its own.
const SEED: &str = "seed-";
/// Memories of them that are kept in memory, and on disk.
const HELD: usize = 3;
const KEPT: usize = 8;
/// The box that was first shall not feel it.
const LATER: Duration = Duration::from_millis(700);
/// Nobody needs that long to make use of a seed.
const SEEDS: Duration = Duration::from_secs(3600);
const FIRST_STEPS: Duration = Duration::from_secs(60);
/// How often the kernel of a machine tells which memory is free.
const TELLS: Duration = Duration::from_secs(2);
/// Between two looks whether the server ends.
const LOOK: Duration = Duration::from_millis(250);
const NAME: &str = "sandkeep";

/// A machine and the disk it has in it.
#[derive(Debug)]
pub struct Warm {
    pub machine: Machine,
    disk: PathBuf,
}

/// A copy of a disk that no box has touched yet.
#[derive(Debug)]
pub struct Seed {
    key: String,
    dir: PathBuf,
    pub limits: Limits,
}

impl Seed {
    pub fn disk(&self) -> PathBuf {
        self.dir.join(disk::DISK_FILE)
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if let Err(error) = remove_dir(&self.dir) {
            tracing::warn!(%error, "the copy of a disk is left");
        }
    }
}

/// What a box on a fresh disk begins with.
#[derive(Debug)]
pub struct Beginning {
    pub origin: Origin,
    /// The disk that belongs to that memory, where it has one.
    pub disk: Option<PathBuf>,
    /// To be filled: the next boxes are to find more.
    pub seed: Option<Seed>,
}

impl Beginning {
    /// One that has no disk of its own.
    pub const fn with(origin: Origin) -> Self {
        Self {
            origin,
            disk: None,
            seed: None,
        }
    }
}

impl Inner {
    /// For a box on a fresh disk.
    pub(crate) async fn beginning(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        machine: &Arc<Machine>,
        root: &Path,
        limits: &Limits,
    ) -> Result<Beginning> {
        let mut cold = Beginning::with(Origin::of(machine));
        if !self.warms {
            return Ok(cold);
        }
        let fresh = {
            let (root, limits) = (root.to_owned(), *limits);
            blocking(move || disk::fresh(&root, &limits)).await?
        };
        let Some(fresh) = fresh else {
            return Ok(cold);
        };
        let shape = machine.base.shape.name();
        let key = format!("{WARM}{shape}-{}-{}", fresh.template, fresh.bytes);
        if let Some(warm) = self.warm(qemu, machine, &key).await {
            return Ok(Beginning {
                origin: Origin::of(&warm.machine),
                disk: Some(warm.disk.clone()),
                seed: None,
            });
        }
        // Once in the life of a server, whatever comes of it.
        if !lock(&self.warming).insert(key.clone()) {
            return Ok(cold);
        }
        let seed = Seed {
            dir: beside(machine, &format!("{SEED}{}", random_token(10))),
            key,
            limits: *limits,
        };
        make_private_dir(&seed.dir)?;
        cold.seed = Some(seed);
        Ok(cold)
    }

    /// The one of this name, if there is one.
    async fn warm(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        machine: &Machine,
        key: &str,
    ) -> Option<Arc<Warm>> {
        let mut held = self.warm.lock().await;
        if let Some(place) = held.iter().position(|(other, _)| other == key) {
            let found = held.remove(place)?;
            let warm = Arc::clone(&found.1);
            held.push_back(found);
            return Some(warm);
        }
        let dir = beside(machine, key);
        let read = {
            let dir = dir.clone();
            blocking(move || {
                // The ones used last stay longest.
                let _touched = File::open(&dir).and_then(|dir| dir.set_modified(SystemTime::now()));
                read(&dir)
            })
            .await
        };
        let machine = match read {
            Ok(machine) => machine?,
            Err(error) => {
                tracing::warn!(%error, "a machine that was warmed up can not be used");
                return None;
            }
        };
        let disk = dir.join(disk::DISK_FILE);
        if let Err(error) = self.answers_here(qemu, &machine, Some(&disk)).await {
            tracing::warn!(%error, "a machine that was warmed up does not answer: it is thrown away");
            let removed = blocking(move || remove_dir(&dir)).await;
            if let Err(error) = removed {
                tracing::warn!(%error, "a machine that does not answer is left");
            }
            return None;
        }
        let warm = Arc::new(Warm { disk, machine });
        while held.len() >= HELD {
            held.pop_front();
        }
        held.push_back((key.to_owned(), Arc::clone(&warm)));
        drop(held);
        self.images.lock().await.know(&warm.machine.base);
        Some(warm)
    }

    /// Makes one from a seed, a little later.
    pub(crate) fn warm_later(self: &Arc<Self>, qemu: Arc<Qemu>, machine: Arc<Machine>, seed: Seed) {
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(LATER).await;
            // One at a time: machines are many processors' work.
            let _turn = inner.warming_turn.lock().await;
            if inner.closed.load(Ordering::Acquire) {
                return;
            }
            let (key, shape) = (seed.key.clone(), machine.base.shape);
            let began = Instant::now();
            match inner.warm_up(&qemu, &machine, seed).await {
                Ok(()) => {
                    let ms = began.elapsed().as_millis();
                    tracing::info!(machine = key, ms, "a machine was warmed up");
                    if let Some(warm) = inner.warm(&qemu, &machine, &key).await {
                        inner.prepare_next(&warm.machine.base.ram, shape);
                    }
                }
                Err(error) => tracing::warn!(machine = key, %error, "no machine was warmed up"),
            }
        });
    }

    /// Lets a machine be; in vain if the server ends meanwhile.
    async fn rest(&self, long: Duration) -> Result<()> {
        let end = Instant::now() + long;
        while Instant::now() < end {
            if self.closed.load(Ordering::Acquire) {
                return Err(Error::internal("the server ends"));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    async fn warm_up(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        machine: &Arc<Machine>,
        seed: Seed,
    ) -> Result<()> {
        let base = &machine.base;
        let waiting = self
            .start_ahead(qemu, Arc::clone(&base.ram), base.shape)
            .await?;
        let token = Secret::new(random_token(TOKEN_LENGTH));
        let mut order = new_order(&token, NAME, &seed.limits)?;
        let (mut waiting, seed) = {
            let (devices, mut waiting) = (machine.devices.clone(), waiting);
            blocking(move || {
                let started = &mut waiting.started;
                started.qmp.give_disk(&disk::open_file(&seed.disk())?)?;
                started.begin(&devices, &mut order)?;
                answered(&started.port, &order, FIRST_STEPS)?;
                Ok((waiting, seed))
            })
            .await?
        };
        let netns = File::open(format!("/proc/{}/ns/net", waiting.started.pid))
            .doing("entering the network of the machine")?;
        tokio::time::timeout(FIRST_STEPS, first_steps(&netns.into(), &token))
            .await
            .unwrap_or_else(|_| Err(Error::internal("its first steps take too long")))?;
        self.rest(settles(base.shape)).await?;
        let (shape, dir) = (base.shape, beside(machine, &seed.key));
        blocking(move || {
            let qmp = &mut waiting.started.qmp;
            qmp.stop()?;
            let done = &seed.dir;
            save_devices(qmp, done)?;
            let mapped = Mapped::find(waiting.started.pid, shape.ram_bytes())?;
            let ram = Ram::copy_of(&mapped)?;
            // The end of QEMU is the end of this connection; that is what was asked for.
            let _ended = qmp.call("quit", &json!({}));
            drop(waiting);
            ram.seal()?;
            ram.store(&done.join(PAGES))?;
            note(done, shape, String::new())?;
            rename(done, &dir)?;
            forget_old(&dir);
            Ok(())
        })
        .await
    }
}

/// Until connections have ended, writers are done and the kernel has told of all free memory: what
/// it has told now no copy has to tell again. Each time it tells of 32 pieces, most of them of
/// 4 MiB, or of a sixteenth if that is more.
fn settles(shape: Shape) -> Duration {
    let times = (shape.ram_mib() / 4).div_ceil(32).min(16);
    TELLS * (times as u32 + 2)
}

fn beside(machine: &Machine, name: &str) -> PathBuf {
    machine.dir.with_file_name(name)
}

/// What the first call of a user does: afterwards its programs and the agent's own code are in
/// memory. Templates without these programs are served all the same.
async fn first_steps(netns: &OwnedFd, token: &Secret) -> Result<()> {
    let mut agent = Agent::over(own_kernel::dial(netns, token).await?).await?;
    let identity = InitRequest {
        hostname: Some(NAME.to_owned()),
        ..InitRequest::default()
    };
    agent.init(&identity).await?;
    if let Err(error) = agent.warm().await {
        tracing::debug!(%error, "a template without a shell");
    }
    drop(agent);
    // The last one: what is not on the disk of the machine yet would be written by every copy.
    for program in ["/bin/echo", "/bin/sync"] {
        let request = StartRequest {
            process: Some(ProcessConfig {
                cmd: program.to_owned(),
                ..ProcessConfig::default()
            }),
            ..StartRequest::default()
        };
        let agent = Agent::over(own_kernel::dial(netns, token).await?).await?;
        let Ok(mut stream) = agent.start(&request, None, None).await else {
            continue;
        };
        while let Ok(Some(_)) = stream.next().await {}
    }
    Ok(())
}

/// Others than the ones used last are made again when somebody asks; seeds of servers that died
/// are of no use.
fn forget_old(dir: &Path) {
    let named = |prefix: &'static str| {
        fs::read_dir(dir.parent().unwrap_or(dir))
            .into_iter()
            .flatten()
            .flatten()
            .filter(move |entry| entry.file_name().to_string_lossy().starts_with(prefix))
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
    };
    let mut all: Vec<_> = named(WARM).collect();
    all.sort_unstable();
    all.truncate(all.len().saturating_sub(KEPT));
    let long_ago = SystemTime::now() - SEEDS;
    all.extend(named(SEED).filter(|(made, _)| *made < long_ago));
    for (_, path) in all {
        if let Err(error) = remove_dir(&path) {
            tracing::warn!(%error, "an old machine is left");
        }
    }
}
