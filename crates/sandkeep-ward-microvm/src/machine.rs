//! Machines that were booted ahead.
//!
//! Nobody waits for a kernel to boot: for each shape a machine is booted once, proves that it
//! works, and is written down while it waits for its first order. What every box is then made
//! from is kept on disk, so that the next server does not boot one either.

use crate::{
    discard::high,
    kernel::hex,
    launch::{Launch, Started},
    memory::Ram,
    network,
    qemu::{Accel, Begin, Qemu, Shape},
    qmp::Qmp,
    ward::Inner,
};
use sandkeep_agent_api::machine::{Answer, Order, READY};
use sandkeep_host::{
    failure::Doing as _,
    files::{make_private_dir, remove_dir, replace, sync_dir},
    work::{blocking, lock},
};
use sandkeep_model::{Code, Error, Result, random_token};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

const NOTE: &str = "machine.json";
pub const PAGES: &str = "ram";
const DEVICES: &str = "devices";
const LOCK: &str = "lock";
/// A machine that was emulated on a busy host took half of this.
const BOOT: Duration = Duration::from_secs(90);
/// On the processor itself it takes a second or two.
const KVM_BOOT: Duration = Duration::from_secs(20);
/// One whose timer was not found by its kernel hangs; the next one does not.
const ATTEMPTS: u32 = 4;
/// A machine that runs takes what it is told.
const TOLD: Duration = Duration::from_secs(30);
const CGROUP_DEADLINE: Duration = Duration::from_secs(15);
/// Before its answer; a machine says some lines at most.
const MOST_HEARD: usize = 64 << 10;
/// A machine that boots is no box, but is kept from the others like one.
pub const BUILDING: &str = "machine.";

/// Memory that boxes begin with, and the file it can be read from again.
#[derive(Debug)]
pub struct Base {
    /// Tells it from every other, on this host and elsewhere.
    pub id: String,
    pub shape: Shape,
    pub ram: Arc<Ram>,
    pub pages: File,
}

/// A machine that waits for its first order.
#[derive(Debug)]
pub struct Machine {
    /// Where it is kept.
    pub dir: PathBuf,
    pub base: Arc<Base>,
    /// The state of its devices: some KB, kept because its file may be replaced.
    pub devices: Vec<u8>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    id: String,
    shape: Shape,
    ticks: String,
}

impl Inner {
    /// The machine of this shape; booted now if it never was.
    pub(crate) async fn machine(self: &Arc<Self>, shape: Shape) -> Result<Arc<Machine>> {
        match self.machine_of(shape, self.qemu().await?).await {
            // A host may offer a KVM that can not run a machine; emulated it can be run anywhere.
            Err(error) if self.accel() == Accel::Kvm => {
                tracing::warn!(%error, "KVM does not run a machine here: machines are emulated");
                self.give_up_kvm().await;
                self.machine_of(shape, self.qemu().await?).await
            }
            made => made,
        }
    }

    /// Whether KVM really runs a machine is only known when it has: a boot with a deadline,
    /// written down like every other, so that it is done once.
    pub(crate) async fn try_kvm(self: &Arc<Self>) {
        if self.accel() == Accel::Kvm
            && let Err(error) = self.machine(Shape::smallest()).await
        {
            tracing::warn!(%error, "no machine comes up here");
        }
    }

    async fn machine_of(self: &Arc<Self>, shape: Shape, qemu: Arc<Qemu>) -> Result<Arc<Machine>> {
        let mut machines = self.machines.lock().await;
        if let Some(machine) = machines.get(&shape) {
            return Ok(Arc::clone(machine));
        }
        let generation = self.generation(&qemu).await?;
        let dir = self.machines_dir.join(&generation).join(shape.name());
        let machine = match self.read_machine(&dir).await {
            Ok(Some(machine)) => machine,
            found => {
                if let Err(error) = found {
                    tracing::warn!(%error, "a machine that was booted ahead can not be used");
                }
                self.make_machine(&qemu, shape, &dir).await?
            }
        };
        let machine = Arc::new(machine);
        machines.insert(shape, Arc::clone(&machine));
        drop(machines);
        // Images of its boxes name it: they do not have to be read for it.
        self.images.lock().await.know(&machine.base);
        Ok(machine)
    }

    /// Everything a machine is made of but its shape.
    async fn generation(&self, qemu: &Qemu) -> Result<String> {
        let (agent, build) = (self.agent.clone(), qemu.build());
        blocking(move || {
            let mut all = Sha256::new();
            all.update(build);
            all.update(fs::read(&agent).doing("reading the agent")?);
            Ok(hex(&all.finalize())[..24].to_owned())
        })
        .await
    }

    async fn read_machine(&self, dir: &Path) -> Result<Option<Machine>> {
        let dir = dir.to_owned();
        blocking(move || read(&dir)).await
    }

    /// Other servers and tests on this host may want the same one.
    async fn make_machine(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        shape: Shape,
        dir: &Path,
    ) -> Result<Machine> {
        let lock_file = self.machines_dir.join(LOCK);
        let held = blocking(move || {
            let file = File::create(&lock_file).doing("opening the lock of machines")?;
            file.lock().doing("waiting for another server's machine")?;
            Ok(file)
        })
        .await?;
        if let Ok(Some(machine)) = self.read_machine(dir).await {
            return Ok(machine);
        }
        let began = Instant::now();
        let mut last = None;
        let attempts = match qemu.accel {
            Accel::Kvm => 1,
            Accel::Tcg => ATTEMPTS,
        };
        for attempt in 1..=attempts {
            match self.boot(qemu, shape, dir).await {
                Ok(()) => {
                    let ms = began.elapsed().as_millis();
                    tracing::info!(
                        shape = shape.name(),
                        attempt,
                        ms,
                        "a machine was booted ahead"
                    );
                    drop(held);
                    return self.read_machine(dir).await?.ok_or_else(|| {
                        Error::internal("the machine that was booted ahead is gone")
                    });
                }
                Err(error) => {
                    tracing::warn!(shape = shape.name(), attempt, %error, "a machine did not boot");
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| Error::internal("no machine was booted")))
    }

    async fn boot(self: &Arc<Self>, qemu: &Arc<Qemu>, shape: Shape, dir: &Path) -> Result<()> {
        let name = format!("{BUILDING}{}", random_token(10));
        lock(&self.building).insert(name.clone());
        let booted = self.boot_as(&name, qemu, shape, dir).await;
        let (cgroups, fresh) = (self.roster.tree.child(&name), self.machines_dir.join(&name));
        let cleared = blocking(move || {
            cgroups.kill_all();
            cgroups.remove(CGROUP_DEADLINE)?;
            remove_dir(&fresh)
        })
        .await;
        lock(&self.building).remove(&name);
        booted.and(cleared)
    }

    async fn boot_as(
        self: &Arc<Self>,
        name: &str,
        qemu: &Arc<Qemu>,
        shape: Shape,
        dir: &Path,
    ) -> Result<()> {
        let (netns, card) = network::make().await?;
        let slot = self.roster.slots.take()?;
        let (cgroups, fresh) = (self.roster.tree.child(name), self.machines_dir.join(name));
        let (qemu, agent, dir) = (Arc::clone(qemu), self.agent.clone(), dir.to_owned());
        blocking(move || {
            make_private_dir(&fresh)?;
            cgroups.create()?;
            let kernel = readable(&fresh.join("kernel"), &qemu.kernel.image)?;
            let first = fresh.join("first");
            fs::write(&first, qemu.kernel.first_files(&agent)?)
                .doing("writing the first files of the machine")?;
            let first_files = readable(&fresh.join("first-files"), &first)?;
            let ram = Ram::blank(shape.ram_bytes())?;
            let started = Launch {
                qemu: &qemu,
                shape,
                cgroups: &cgroups,
                netns,
                card,
                id: slot.first_id(),
                ram: ram.fd(),
                control: &fresh.join("control"),
                begin: Begin::Boot {
                    kernel: kernel.as_raw_fd(),
                    first_files: first_files.as_raw_fd(),
                },
            }
            .start()?;
            drop((kernel, first_files));
            let done = fresh.join("done");
            make_private_dir(&done)?;
            let wait = match qemu.accel {
                Accel::Kvm => KVM_BOOT,
                Accel::Tcg => BOOT,
            };
            let ticks = proven(&started.port, wait)?;
            write_down(started, &cgroups, &ram, &done)?;
            note(&done, shape, ticks)?;
            publish(&done, &dir)
        })
        .await
    }
}

/// QEMU's user can read this copy, by its descriptor alone.
fn readable(copy: &Path, source: &Path) -> Result<OwnedFd> {
    let copied = fs::copy(source, copy)
        .and_then(|_| fs::set_permissions(copy, fs::Permissions::from_mode(0o444)))
        .and_then(|()| File::open(copy))
        .doing(format_args!("copying {}", source.display()))?;
    high(copied)
}

/// Writes a machine down that has proved itself, as it waits.
fn write_down(
    started: Started,
    cgroups: &sandkeep_host::cgroup::Cgroups,
    ram: &Ram,
    done: &Path,
) -> Result<()> {
    let Started { mut qmp, .. } = started;
    qmp.stop()?;
    save_devices(&mut qmp, done)?;
    // The end of QEMU is the end of this connection; that is what was asked for.
    let _ended = qmp.call("quit", &json!({}));
    cgroups.kill_all();
    cgroups.remove(CGROUP_DEADLINE)?;
    ram.seal()?;
    ram.store(&done.join(PAGES))?;
    Ok(())
}

/// Of a machine that stands still.
pub fn save_devices(qmp: &mut Qmp, done: &Path) -> Result<()> {
    let devices = File::create(done.join(DEVICES)).doing("writing the devices of the machine")?;
    qmp.save_devices(devices.as_fd())
}

pub fn note(done: &Path, shape: Shape, ticks: String) -> Result<()> {
    let note = Note {
        id: random_token(32),
        shape,
        ticks,
    };
    let text = serde_json::to_vec(&note).map_err(|error| Error::internal(error.to_string()))?;
    replace(&done.join(NOTE), &text)?;
    sync_dir(done)
}

/// The first line a machine says, when its timers tick and its agent waits.
fn proven(port: &UnixStream, wait: Duration) -> Result<String> {
    let no = |why: String| {
        Error::new(
            Code::DeadlineExceeded,
            format!("the machine did not come up: {why}"),
        )
        .hint("the host may be overloaded; try again")
    };
    port.set_read_timeout(Some(wait))
        .doing("waiting for the machine")?;
    let mut line = String::new();
    BufReader::new(port)
        .read_line(&mut line)
        .map_err(|error| no(error.to_string()))?;
    match line.trim().split_once(' ') {
        Some((READY, ticks)) if ticks != "0" => Ok(ticks.to_owned()),
        _ => Err(no(format!("it said {:?}", line.trim()))),
    }
}

/// Gives the finished machine its name.
pub fn rename(done: &Path, dir: &Path) -> Result<()> {
    remove_dir(dir)?;
    fs::rename(done, dir).doing("naming the machine")?;
    Ok(())
}

/// Gives the finished machine its name; machines of other programs or kernels go.
fn publish(done: &Path, dir: &Path) -> Result<()> {
    let generation = dir.parent().unwrap_or(dir);
    make_private_dir(generation)?;
    rename(done, dir)?;
    let all = generation.parent().unwrap_or(generation);
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let path = entry.path();
        let building = entry.file_name().to_string_lossy().starts_with(BUILDING);
        if path.is_dir() && path != generation && !building {
            remove_dir(&path)?;
        }
    }
    Ok(())
}

pub fn read(dir: &Path) -> Result<Option<Machine>> {
    let Ok(text) = fs::read(dir.join(NOTE)) else {
        return Ok(None);
    };
    let note: Note = serde_json::from_slice(&text)
        .map_err(|error| Error::internal(format!("the note of a machine: {error}")))?;
    let path = dir.join(PAGES);
    let pages = File::open(&path).doing(format_args!("opening {}", path.display()))?;
    let (ram, _) = Ram::load(note.shape.ram_bytes(), &[&path])?;
    Ok(Some(Machine {
        dir: dir.to_owned(),
        base: Arc::new(Base {
            id: note.id,
            shape: note.shape,
            ram: Arc::new(ram),
            pages,
        }),
        devices: fs::read(dir.join(DEVICES)).doing("reading the devices of the machine")?,
    }))
}

/// Writes an order to the port of a machine.
pub fn tell(port: &mut UnixStream, line: &str) -> Result<()> {
    port.set_write_timeout(Some(TOLD))
        .and_then(|()| port.write_all(line.as_bytes()))
        .doing("telling the machine who it is")
        .map_err(Error::from)
}

/// Waits until an order has been carried out. What the machine says is the box's word.
pub fn answered(mut port: &UnixStream, order: &Order, wait: Duration) -> Result<Answer> {
    let silent = |why: String| {
        Error::new(
            Code::BoxUnreachable,
            format!("the agent of the box does not answer: {why}"),
        )
        .hint("its disk may be damaged, or the host out of memory")
    };
    let until = Instant::now() + wait;
    let mut heard = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(silent("its time is over".to_owned()));
        }
        port.set_read_timeout(Some(left))
            .doing("waiting for the machine")?;
        let mut part = [0; 512];
        match port.read(&mut part) {
            Ok(0) => return Err(silent("its machine ended".to_owned())),
            Ok(count) => heard.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(silent(error.to_string())),
        }
        if let Some(answer) = Answer::to_order(order.number, &heard) {
            return match &answer.error {
                None => Ok(answer),
                Some(error) => {
                    let error: String = error.chars().take(500).collect();
                    Err(silent(error))
                }
            };
        }
        if heard.len() > MOST_HEARD {
            return Err(silent("it talks too much".to_owned()));
        }
    }
}
