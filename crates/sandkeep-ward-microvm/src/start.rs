//! Starting a box: from a machine that waits, or from an image of a box.

use crate::{
    clock, disk,
    image::Origin,
    laps::Laps,
    machine::answered,
    memory::Mapped,
    network, pages,
    qemu::{Qemu, Shape, host_limits},
    record::{Has, Live, Note, Noted, Record},
    waiting::{Place, Waiting},
    ward::Inner,
    warm::{Beginning, Seed},
};
use sandkeep_agent_api::{
    channel::TOKEN_LENGTH,
    host::{InitRequest, LimitsRequest, UsageResponse},
    machine::{ENTROPY_BYTES, Order},
};
use sandkeep_agent_client::Agent;
use sandkeep_host::{failure::Doing as _, files::write_token, slots::Slot, work::blocking};
use sandkeep_model::{Error, Limits, Result, Secret, Timestamp, random_token};
use sandkeep_own_kernel as own_kernel;
use sandkeep_ward::{BoxSpec, LiveBox};
use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};
use tokio::time::timeout;

impl Inner {
    /// `image` is a directory written by [`Inner::save`].
    pub(crate) async fn start(
        self: &Arc<Self>,
        spec: BoxSpec,
        image: Option<&Path>,
    ) -> Result<LiveBox> {
        spec.check()?;
        let made = self.make(&spec, image).await;
        if made.is_err() {
            self.roster.clear_half_made(&spec.id).await;
        }
        made
    }

    async fn make(self: &Arc<Self>, spec: &BoxSpec, image: Option<&Path>) -> Result<LiveBox> {
        let mut laps = Laps::begin();
        let qemu = self.qemu().await?;
        let (beginning, machine) = match image {
            Some(image) => (Beginning::with(self.open_image(image).await?), None),
            None => {
                let machine = self.machine_of(Shape::of(&spec.limits)?, &qemu).await?;
                let begin = self.beginning(&qemu, &machine, &spec.root, &spec.limits);
                (begin.await?, Some(machine))
            }
        };
        let Beginning { origin, disk, seed } = beginning;
        laps.lap("origin");
        let shape = origin.memory.base.shape;
        shape.check(&spec.limits)?;
        let ram = Arc::clone(&origin.memory.ram);
        // What many begin with; a memory put together for the copies of one box is not.
        let common = origin.memory.carried.is_empty();
        let place = Place::new(
            self.roster.box_dir(&spec.id),
            self.roster.tree.child(spec.id.as_str()),
        );
        let seat = match self.take_waiting(&ram) {
            Some(waiting) => Seat::Taken(waiting),
            None => Seat::New(network::make().await?, self.roster.slots.take()?),
        };
        laps.lap("network");
        let birth = Birth {
            qemu: Arc::clone(&qemu),
            answers: self.answers,
            spec: spec.clone(),
            origin,
            disk: match (disk, image) {
                (Some(disk), _) => Disk::Other(disk),
                (None, None) => Disk::Unseen,
                (None, Some(_)) => Disk::Known,
            },
            seed,
            token: Secret::new(random_token(TOKEN_LENGTH)),
            laps,
        };
        let Born {
            live,
            seed,
            clock_is_right,
        } = blocking(move || birth.bear(seat, place)).await?;
        if !clock_is_right && let Err(error) = clock::set(&live).await {
            tracing::warn!(id = %spec.id, %error, "the clock of a sandbox may be wrong");
        }
        let live = Arc::new(live);
        self.hold(Arc::clone(&live));
        if let (Some(seed), Some(machine)) = (seed, machine) {
            self.warm_later(qemu, machine, seed);
        } else if common {
            self.prepare_next(&ram, shape);
        }
        Ok(LiveBox {
            id: spec.id.clone(),
            record: live.record.to_value()?,
        })
    }
}

/// Where a box gets its QEMU.
enum Seat {
    /// One that waits.
    Taken(Waiting),
    /// One that is still to be started, with a network and ids of its own.
    New((OwnedFd, OwnedFd), Slot),
}

impl Seat {
    fn id(&self) -> u32 {
        match self {
            Self::Taken(waiting) => waiting.slot.first_id(),
            Self::New(_, slot) => slot.first_id(),
        }
    }
}

/// The disk of a box, as its machine begins.
#[derive(Debug, Clone)]
enum Disk {
    /// The machine has not seen it yet.
    Unseen,
    /// The machine has this one in it, which takes the place of a fresh one.
    Other(PathBuf),
    /// The machine has it in it.
    Known,
}

impl Disk {
    /// `id` is the one of the box.
    fn prepare(&self, spec: &BoxSpec, id: u32) -> Result<()> {
        match self {
            Self::Unseen => disk::size(&spec.root, &spec.limits, id),
            Self::Other(other) => disk::share(other, &spec.root.join(disk::DISK_FILE)),
            Self::Known => Ok(()),
        }
    }
}

/// A box that runs.
struct Born {
    live: Live,
    /// For want of memory, which it remembers.
    seed: Option<Seed>,
    clock_is_right: bool,
}

/// A box on its way.
struct Birth {
    qemu: Arc<Qemu>,
    spec: BoxSpec,
    origin: Origin,
    disk: Disk,
    /// To be filled with the disk before the box has touched it.
    seed: Option<Seed>,
    token: Secret,
    /// How long its agent may take.
    answers: Duration,
    laps: Laps,
}

impl Birth {
    fn bear(mut self, seat: Seat, place: Place) -> Result<Born> {
        // Beside the start of QEMU, which does not look at it before the machine runs.
        let sized = {
            let (disk, spec, id) = (self.disk.clone(), self.spec.clone(), seat.id());
            thread::spawn(move || disk.prepare(&spec, id))
        };
        let holes_bytes = self.origin.memory.ram.holes()?;
        let Waiting {
            place,
            slot,
            mut started,
            ..
        } = self.seated(seat, place, holes_bytes)?;
        self.laps.lap("qemu");
        write_token(&place.dir, &self.token)?;
        let pid = started.pid;
        started.qmp.give_disk(&disk::open(&self.spec.root)?)?;
        let shape = self.origin.memory.base.shape;
        if let Some(changed) = &self.origin.changed {
            // Before the devices: they look at the memory when they are read.
            let mapped = Mapped::find(pid, shape.ram_bytes())?;
            pages::read(changed, shape.ram_bytes(), |run, bytes| {
                mapped.write(run, bytes)
            })?;
        }
        self.laps.lap("memory");
        sized
            .join()
            .map_err(|_| Error::internal("the disk was not prepared"))??;
        let seed = self.seed.take().filter(|seed| {
            let copied = disk::share(&self.spec.root.join(disk::DISK_FILE), &seed.disk());
            if let Err(error) = &copied {
                tracing::debug!(%error, "no machine is warmed up");
            }
            copied.is_ok()
        });
        // It begins: whatever becomes of it, its disk is not fresh any more.
        disk::use_up(&self.spec.root)?;
        self.laps.lap("disk");
        let introduction = self.spec.introduction.take();
        let mut order = Order {
            introduction: introduction.map(without_time),
            ..new_order(&self.token, &self.spec.hostname, &self.spec.limits)?
        };
        started.begin(&self.origin.devices, &mut order)?;
        self.laps.lap("devices");
        let answer = answered(&started.port, &order, self.answers)?;
        let clock_is_right = clock::is_close(answer.now_us, clock::now_us());
        self.laps.lap("agent");
        let live = self.take_in(pid, place, slot, answer.oom_kills, holes_bytes)?;
        Ok(Born {
            live,
            seed,
            clock_is_right,
        })
    }

    /// A QEMU in the place of this box.
    fn seated(&self, seat: Seat, place: Place, holes_bytes: u64) -> Result<Waiting> {
        match seat {
            Seat::New(network, slot) => {
                place.make(&slot, &self.spec.limits, holes_bytes)?;
                let memory = &self.origin.memory;
                let (shape, ram) = (memory.base.shape, Arc::clone(&memory.ram));
                Waiting::start(&self.qemu, shape, ram, place, slot, network)
            }
            Seat::Taken(mut waiting) => {
                waiting.place.move_to(&place)?;
                place.keep();
                waiting.place.note(&waiting.slot)?;
                let limits = host_limits(&self.spec.limits, holes_bytes);
                waiting.place.cgroups.set_limits(&limits)?;
                Ok(waiting)
            }
        }
    }

    /// `kills` for want of memory are remembered by the machine: they are no news.
    fn take_in(
        self,
        pid: i32,
        place: Place,
        slot: Slot,
        kills: u64,
        holes_bytes: u64,
    ) -> Result<Live> {
        let memory = self.origin.memory;
        let noted = Noted {
            shape: memory.base.shape,
            accel: Some(self.qemu.accel),
            build: Some(self.qemu.build()),
            // One that was put together is not there again after a restart.
            base: memory.carried.is_empty().then(|| memory.base.id.clone()),
            holes_bytes,
        };
        let record = Record::of_started(pid, slot.number(), place.cgroups.clone(), noted)?;
        Note {
            slot: slot.number(),
            cgroups: place.cgroups.clone(),
            record: Some(record.clone()),
        }
        .write(&place.dir)?;
        let pidfd = record
            .find()
            .ok_or_else(|| Error::internal("the box ended as soon as it was started"))?;
        let id = self.spec.id;
        let has = Has {
            memory: Some(memory),
            kills: Mutex::new(Some(kills)),
        };
        let live = Live::new(id, record, self.token, has, pidfd, Some(slot))?;
        place.keep();
        tracing::debug!(id = %live.id, laps = %self.laps, "a machine was started");
        Ok(live)
    }
}

/// What was said before the disk and the machine were made is late by then; the order tells the time.
fn without_time(introduction: InitRequest) -> InitRequest {
    InitRequest {
        timestamp_ms: None,
        ..introduction
    }
}

/// What a machine is told first.
pub(crate) fn new_order(token: &Secret, hostname: &str, limits: &Limits) -> Result<Order> {
    let mut random = [0; ENTROPY_BYTES + 8];
    io::Read::read_exact(
        &mut File::open("/dev/urandom").doing("drawing random bytes")?,
        &mut random,
    )
    .doing("drawing random bytes")?;
    let (number, entropy) = random.split_at(8);
    Ok(Order {
        number: number
            .iter()
            .fold(0, |all, byte| all << 8 | u64::from(*byte)),
        token: token.expose().to_owned(),
        entropy: crate::kernel::hex(entropy),
        timestamp_ms: Timestamp::now().millis(),
        hostname: hostname.to_owned(),
        limits: inner_limits(limits),
        introduction: None,
    })
}

/// Limits that only the kernel of the machine can hold.
fn inner_limits(limits: &Limits) -> LimitsRequest {
    LimitsRequest {
        open_files: limits.open_files.into(),
        pids: limits.pids.into(),
        memory_bytes: Some(limits.memory_bytes()),
    }
}

/// What only the kernel of the machine counts.
pub(crate) async fn inner_usage(live: &Live, wait: Duration) -> Result<UsageResponse> {
    let asked = async {
        let mut agent = Agent::over(own_kernel::connect(live).await?).await?;
        agent.usage().await
    };
    timeout(wait, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// The agent answers when every program of the machine stands still: a moment, on a busy host more.
const HELD: Duration = Duration::from_secs(10);

/// Has every program of the machine stand still, before it is written down.
pub(crate) async fn hold(live: &Live) -> Result<()> {
    let asked = async {
        let mut agent = Agent::over(own_kernel::connect(live).await?).await?;
        agent.hold().await
    };
    timeout(HELD, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// Sets the clock, which stood still with the machine, and lets them go on.
pub(crate) async fn release(live: &Live) -> Result<()> {
    let asked = async {
        let mut agent = Agent::over(own_kernel::connect(live).await?).await?;
        // First, so that they see no other time. An agent that an older server started does not know how.
        if let Err(error) = clock::set_over(&mut agent).await {
            tracing::warn!(id = %live.id, %error, "the clock of a sandbox may be wrong");
        }
        agent.release().await
    };
    timeout(HELD, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// Has the kernel of the machine write what it keeps back. The agent's own deadline holds.
pub(crate) async fn settle(live: &Live) -> Result<()> {
    let mut agent = Agent::over(own_kernel::connect(live).await?).await?;
    agent.settle().await
}

/// Changes the limits that only the kernel of the machine can hold.
pub(crate) async fn set_inner_limits(live: &Live, limits: &Limits, wait: Duration) -> Result<()> {
    let asked = async {
        let mut agent = Agent::over(own_kernel::connect(live).await?).await?;
        agent.set_limits(&inner_limits(limits)).await
    };
    timeout(wait, asked)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}
