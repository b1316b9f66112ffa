//! Trying a machine, before anybody counts on it.

use crate::{
    clock, disk,
    image::{self, Memory, Source},
    machine::{BUILDING, Machine, answered, save_devices_to},
    memory::Mapped,
    pages,
    qemu::Qemu,
    start::new_order,
    waiting::Waiting,
    ward::Inner,
};
use sandkeep_agent_api::{
    channel::TOKEN_LENGTH,
    process::{ProcessConfig, ProcessEvent, StartRequest},
};
use sandkeep_agent_client::Agent;
use sandkeep_host::{
    failure::Doing as _,
    files::{make_private_dir, remove_dir},
    work::blocking,
};
use sandkeep_model::{Error, Limits, Result, Secret, random_token};
use sandkeep_own_kernel as own_kernel;
use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::time::timeout;

const NAME: &str = "sandkeep";
/// A program that is in the disk of every trial: our own agent, which says how it is used and ends.
const PROGRAM: &str = "/program";
const STANDS_STILL: Duration = Duration::from_secs(10);

/// A directory for the disks and images of one trial.
#[derive(Debug)]
struct Bench(PathBuf);

impl Bench {
    fn make(machines: &Path) -> Result<Self> {
        let bench = Self(machines.join(format!("{BUILDING}{}", random_token(10))));
        make_private_dir(&bench.0)?;
        Ok(bench)
    }

    /// A disk with one program in it.
    fn disk(&self, agent: &Path) -> Result<PathBuf> {
        let (tree, disk) = (self.0.join("tree"), self.0.join("disk"));
        for dir in [&tree, &tree.join("etc"), &tree.join("root"), &disk] {
            make_private_dir(dir)?;
        }
        let program = tree.join(PROGRAM.trim_start_matches('/'));
        fs::copy(agent, &program)
            .and_then(|_| fs::set_permissions(&program, Permissions::from_mode(0o755)))
            .and_then(|()| fs::write(tree.join("etc/passwd"), "root:x:0:0::/root:/program\n"))
            .doing("making a disk to try machines with")?;
        disk::make(&tree, &disk)?;
        Ok(disk.join(disk::DISK_FILE))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Err(error) = remove_dir(&self.0) {
            tracing::warn!(%error, "what machines were tried with is left");
        }
    }
}

/// A machine that runs for a moment.
struct Copy {
    waiting: Waiting,
    token: Secret,
}

impl Copy {
    async fn agent(&self) -> Result<Agent> {
        let netns = File::open(format!("/proc/{}/ns/net", self.waiting.started.pid))
            .doing("entering the network of the machine")?;
        Agent::over(own_kernel::dial(&netns.into(), &self.token).await?).await
    }

    /// It starts a program and has the right time.
    async fn works(&self) -> Result<()> {
        let mut agent = self.agent().await?;
        clock::check_over(&mut agent).await?;
        let request = StartRequest {
            process: Some(ProcessConfig {
                cmd: PROGRAM.to_owned(),
                ..ProcessConfig::default()
            }),
            ..StartRequest::default()
        };
        let mut stream = agent.start(&request, Some("root"), None).await?;
        while let Some(event) = stream.next().await? {
            if matches!(event, ProcessEvent::End(_)) {
                return Ok(());
            }
        }
        Err(Error::internal("a program of the machine did not end"))
    }

    /// In a thread that may wait for QEMU.
    async fn with<T: Send + 'static>(
        self,
        work: impl FnOnce(&mut Waiting) -> Result<T> + Send + 'static,
    ) -> Result<(Self, T)> {
        blocking(move || {
            let mut copy = self;
            let done = work(&mut copy.waiting)?;
            Ok((copy, done))
        })
        .await
    }
}

impl Inner {
    /// Whether a machine that was written down by an earlier server, or before the host was started anew,
    /// runs here: with the disk that belongs to it, or one that is made for this.
    pub(crate) async fn check_answers(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        machine: &Machine,
        own_disk: Option<&Path>,
    ) -> Result<()> {
        let (machines, agent) = (self.machines_dir.clone(), self.agent.clone());
        let own_disk = own_disk.map(Path::to_owned);
        let (bench, disk) = blocking(move || {
            let bench = Bench::make(&machines)?;
            let disk = match own_disk {
                Some(own) => {
                    let disk = bench.0.join(disk::DISK_FILE);
                    disk::share(&own, &disk)?;
                    disk
                }
                None => bench.disk(&agent)?,
            };
            Ok((bench, disk))
        })
        .await?;
        let memory = Memory::of(&machine.base);
        let copy = self
            .copy_of(qemu, memory, machine.devices.clone(), None, disk)
            .await;
        let ended = blocking(move || {
            let copy = copy?;
            drop((copy, bench));
            Ok(())
        });
        ended.await
    }

    /// Everything that sandboxes will want of a machine: that it runs programs, is written down while it
    /// stands still, goes on, and comes back twice, each time with the right clock.
    pub(crate) async fn try_out(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        machine: &Machine,
    ) -> Result<()> {
        let (machines, agent) = (self.machines_dir.clone(), self.agent.clone());
        let (bench, disk) = blocking(move || {
            let bench = Bench::make(&machines)?;
            let disk = bench.disk(&agent)?;
            Ok((bench, disk))
        })
        .await?;
        let bench = Arc::new(bench);
        let memory = Memory::of(&machine.base);
        let first = self
            .copy_of(
                qemu,
                memory.clone(),
                machine.devices.clone(),
                None,
                disk.clone(),
            )
            .await
            .map_err(|error| error.context("a copy of a machine"))?;
        first
            .works()
            .await
            .map_err(|error| error.context("a machine"))?;
        let mut agent = first.agent().await?;
        agent.hold().await?;
        drop(agent);
        let (image, second_disk) = (bench.0.join("image"), bench.0.join("copied"));
        let (first, devices) = {
            let (memory, image, copied) = (memory.clone(), image.clone(), second_disk.clone());
            first
                .with(move |waiting| write_down(waiting, memory, &image, &disk, &copied))
                .await
                .map_err(|error| error.context("writing a machine down"))?
        };
        let mut agent = first.agent().await?;
        agent.release().await?;
        first
            .works()
            .await
            .map_err(|error| error.context("a machine that was written down"))?;
        for number in 0..2 {
            let disk = bench.0.join(format!("copied-{number}"));
            fs::copy(&second_disk, &disk).doing("copying a disk")?;
            let changed = Some(image::changed(&image));
            let copy = self
                .copy_of(qemu, memory.clone(), devices.clone(), changed, disk)
                .await
                .map_err(|error| error.context("a machine that comes back"))?;
            copy.works()
                .await
                .map_err(|error| error.context("a machine that came back"))?;
            blocking(move || {
                drop(copy);
                Ok(())
            })
            .await?;
        }
        blocking(move || {
            drop((first, bench));
            Ok(())
        })
        .await
    }

    /// One that carried out its first order.
    async fn copy_of(
        self: &Arc<Self>,
        qemu: &Arc<Qemu>,
        memory: Memory,
        devices: Vec<u8>,
        changed: Option<PathBuf>,
        disk: PathBuf,
    ) -> Result<Copy> {
        let shape = memory.base.shape;
        let waiting = self.start_ahead(qemu, memory.ram, shape).await?;
        let token = Secret::new(random_token(TOKEN_LENGTH));
        let limits = Limits {
            memory_mib: shape.class_mib,
            ..Limits::default()
        };
        let mut order = new_order(&token, NAME, &limits)?;
        let answers = self.answers;
        let copy = Copy { waiting, token };
        let begun = copy.with(move |waiting| {
            let started = &mut waiting.started;
            started.qmp.give_disk(&disk::open_file(&disk)?)?;
            if let Some(changed) = changed {
                let mapped = Mapped::find(started.pid, shape.ram_bytes())?;
                pages::read(&changed, shape.ram_bytes(), |run, bytes| {
                    mapped.write(run, bytes)
                })?;
            }
            started.begin(&devices, &mut order)?;
            answered(&started.port, &order, answers)?;
            Ok(())
        });
        // The port has deadlines of its own; this one is for a QEMU that hangs.
        let (copy, ()) = timeout(answers * 2, begun)
            .await
            .map_err(|_| Error::internal("a copy of the machine does not begin"))??;
        Ok(copy)
    }
}

/// As a sandbox is, with its disk; gives its devices. It goes on.
fn write_down(
    waiting: &mut Waiting,
    memory: Memory,
    image: &Path,
    disk: &Path,
    copied: &Path,
) -> Result<Vec<u8>> {
    make_private_dir(image)?;
    waiting.started.qmp.stop()?;
    waiting.place.cgroups.freeze(STANDS_STILL)?;
    waiting.place.cgroups.thaw();
    save_devices_to(&mut waiting.started.qmp, &image::devices(image))?;
    fs::copy(disk, copied).doing("copying a disk")?;
    let source = Source {
        pid: waiting.started.pid,
        shape: memory.base.shape,
        memory: Some(memory),
    };
    image::write(image, &source)?;
    waiting.started.qmp.go_on()?;
    Ok(fs::read(image::devices(image)).doing("reading the devices of the machine")?)
}
