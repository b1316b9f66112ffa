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
    proc,
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
const KVM_BOOT: Duration = Duration::from_secs(40);
/// One whose timer was not found by its kernel hangs, and a host may be busy for a while; the next one
/// does not. Together with the deadlines less than the patience of the ward.
const ATTEMPTS: u32 = 3;
/// In the directory of a machine: the start of the host in which a copy of it has answered.
const ANSWERED: &str = "answered";
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
    /// The machine of this shape; booted now if it never was. One that does not come up is the
    /// failure of whoever asked: the next one may have more luck, and others have theirs.
    pub(crate) async fn machine_of(
        self: &Arc<Self>,
        shape: Shape,
        qemu: &Arc<Qemu>,
    ) -> Result<Arc<Machine>> {
        let mut machines = self.machines.lock().await;
        // A QEMU that was tried in vain may have left some.
        let key = (self.generation(qemu).await?, shape);
        if let Some(machine) = machines.get(&key) {
            return Ok(Arc::clone(machine));
        }
        let dir = self.machines_dir.join(&key.0).join(shape.name());
        let machine = match self.kept_machine(qemu, &dir).await {
            Ok(Some(machine)) => machine,
            found => {
                if let Err(error) = found {
                    tracing::warn!(%error, "a machine that was booted ahead can not be used");
                    let bad = dir.clone();
                    blocking(move || remove_dir(&bad)).await?;
                }
                self.make_machine(qemu, shape, &dir).await?
            }
        };
        let machine = Arc::new(machine);
        machines.insert(key, Arc::clone(&machine));
        drop(machines);
        // Images of its boxes name it: they do not have to be read for it.
        self.images.lock().await.know(&machine.base);
        Ok(machine)
    }

    /// One that is on disk counts when a copy of it has answered, once for each start of the host: what it
    /// was written down on may not be what is here.
    async fn kept_machine(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        dir: &Path,
    ) -> Result<Option<Machine>> {
        let Some(machine) = self.read_machine(dir).await? else {
            return Ok(None);
        };
        self.answers_here(qemu, &machine, None).await?;
        Ok(Some(machine))
    }

    /// Has a copy of a machine answer, unless one has since this host was started.
    pub(crate) async fn answers_here(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        machine: &Machine,
        own_disk: Option<&Path>,
    ) -> Result<()> {
        let (mark, boot) = (machine.dir.join(ANSWERED), proc::boot_id());
        if fs::read_to_string(&mark).is_ok_and(|noted| noted == boot) {
            return Ok(());
        }
        self.check_answers(qemu, machine, own_disk).await?;
        fs::write(&mark, boot).doing("noting that a machine answers")?;
        Ok(())
    }

    /// Everything a machine is made of but its shape, after what it runs on.
    async fn generation(&self, qemu: &Qemu) -> Result<String> {
        let (agent, build, accel) = (self.agent.clone(), qemu.build(), qemu.accel.name());
        blocking(move || {
            let mut all = Sha256::new();
            all.update(build);
            all.update(fs::read(&agent).doing("reading the agent")?);
            Ok(format!("{accel}-{}", &hex(&all.finalize())[..24]))
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
        for attempt in 1..=ATTEMPTS {
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
        let wait = self.boot.unwrap_or(match qemu.accel {
            Accel::Kvm => KVM_BOOT,
            Accel::Tcg => BOOT,
        });
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
    save_devices_to(qmp, &done.join(DEVICES))
}

pub fn save_devices_to(qmp: &mut Qmp, file: &Path) -> Result<()> {
    let devices = File::create(file).doing("writing the devices of the machine")?;
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

/// Gives the finished machine its name; machines of other programs or kernels go. Those that run on
/// something else stay: it may be back at the next start.
fn publish(done: &Path, dir: &Path) -> Result<()> {
    let generation = dir.parent().unwrap_or(dir);
    make_private_dir(generation)?;
    rename(done, dir)?;
    let all = generation.parent().unwrap_or(generation);
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let spared = name.starts_with(BUILDING) || runs_on_something_else(&name, generation);
        if path.is_dir() && path != generation && !spared {
            remove_dir(&path)?;
        }
    }
    Ok(())
}

/// By the names of generations.
fn runs_on_something_else(name: &str, generation: &Path) -> bool {
    let own = generation.file_name().unwrap_or_default().to_string_lossy();
    [Accel::Kvm, Accel::Tcg].iter().any(|accel| {
        let prefix = format!("{}-", accel.name());
        name.starts_with(&prefix) && !own.starts_with(&prefix)
    })
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
