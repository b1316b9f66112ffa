//! Starting a QEMU in its jail.

use crate::{
    discard::{Pretence, Spot, high},
    jail::{self, Jail},
    machine::tell,
    qemu::{Accel, Begin, Files, Qemu, Shape},
    qmp::{self, Qmp},
};
use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    pipe::{PipeFlags, pipe_with},
};
use sandkeep_agent_api::machine::Order;
use sandkeep_host::{cgroup::Cgroups, failure::Doing as _};
use sandkeep_model::{Error, Result, Timestamp};
use std::{
    fs::{self, File},
    io::{Seek as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

const APPEARS: Duration = Duration::from_secs(10);
/// Starts until QEMU has the memory where it was thought to be.
const GUESSES: u32 = 3;
/// Far less than what a socket holds.
const FITS: usize = 32 << 10;
pub const LARGEST_DISK: u64 = 16 << 40;

/// Everything one QEMU gets from us.
#[derive(Debug)]
pub struct Launch<'a> {
    pub qemu: &'a Qemu,
    pub shape: Shape,
    pub cgroups: &'a Cgroups,
    pub netns: OwnedFd,
    pub card: OwnedFd,
    /// Who it runs as.
    pub id: u32,
    pub ram: BorrowedFd<'a>,
    /// Where it answers us.
    pub control: &'a Path,
    pub begin: Begin,
}

/// A QEMU that answers; its disk is an empty one until it is given another.
#[derive(Debug)]
pub struct Started {
    pub pid: i32,
    pub qmp: Qmp,
    /// Our end of the serial port of the machine.
    pub port: UnixStream,
}

impl Started {
    /// Gives QEMU its machine, which carries out the order first of all; the order gets the time of now.
    pub fn begin(&mut self, devices: &[u8], order: &mut Order) -> Result<()> {
        self.qmp.load_devices(in_memory(devices)?.as_fd())?;
        order.timestamp_ms = Timestamp::now().millis();
        let line = order
            .to_line()
            .map_err(|error| Error::internal(error.to_string()))?;
        // One that fits into the socket is there when the machine begins to run; of a longer one
        // nobody takes a byte before.
        if line.len() <= FITS {
            tell(&mut self.port, &line)?;
            self.qmp.go_on()
        } else {
            self.qmp.go_on()?;
            tell(&mut self.port, &line)
        }
    }
}

/// A file that is nowhere, for QEMU to read.
fn in_memory(bytes: &[u8]) -> Result<File> {
    let made = || {
        let fd = memfd_create("sandkeep-devices", MemfdFlags::CLOEXEC)?;
        let mut file = File::from(fd);
        file.write_all(bytes)?;
        file.rewind()?;
        Ok::<_, std::io::Error>(file)
    };
    made().doing("reading the machine").map_err(Error::from)
}

impl Launch<'_> {
    /// Blocks until QEMU answers.
    pub fn start(self) -> Result<Started> {
        let spot = &self.qemu.spot;
        if matches!(self.begin, Begin::Boot { .. }) {
            // The memory is its own yet: a hole in it is meant.
            let started = self.attempt(None)?;
            spot.set(Spot::of(started.pid, self.ram)?);
            return Ok(started);
        }
        for _ in 0..GUESSES {
            let guess = spot.get();
            let started = self.attempt(guess)?;
            let found = Spot::of(started.pid, self.ram)?;
            // Else what is pretended may be about its disk: it never gets one.
            if found == guess {
                return Ok(started);
            }
            spot.set(found);
            self.end(started)?;
        }
        tracing::warn!("QEMU has its memory elsewhere each time: boxes keep what they free");
        self.attempt(None)
    }

    /// With a pretence about the descriptor of this number.
    fn attempt(&self, pretend: Option<RawFd>) -> Result<Started> {
        let control = qmp::listen(self.control)?;
        let (port, theirs) = UnixStream::pair().doing("making the port of the machine")?;
        let (said, says) = pipe_with(PipeFlags::CLOEXEC).doing("making a pipe")?;
        let blank = blank_disk()?;
        let ours = [
            high(self.ram)?,
            high(&blank[0])?,
            high(&blank[1])?,
            high(&self.card)?,
            high(&control)?,
            high(&theirs)?,
            // QEMU holds our end open as well: the machine shall not see us leave.
            high(&port)?,
        ];
        let [ram, disk, disk_read, card, listener, serial, _] =
            ours.each_ref().map(|fd| fd.as_raw_fd());
        let files = Files {
            ram,
            disk: [disk, disk_read],
            card,
            control: listener,
            port: serial,
        };
        let netns = self.netns.try_clone().doing("entering the network")?;
        let mut jail = Jail::new(self.cgroups, netns, self.id)?;
        if self.qemu.accel == Accel::Kvm {
            jail = jail.with_kvm();
        }
        for fd in &ours {
            jail.keep(fd.as_raw_fd());
        }
        if let Begin::Boot {
            kernel,
            first_files,
        } = self.begin
        {
            jail.keep(kernel);
            jail.keep(first_files);
        }
        if let Some(number) = pretend {
            jail.pretend(Pretence::about(number)?);
        }
        let mut command = Command::new(&self.qemu.program);
        command
            .args(self.qemu.words(self.shape, &files, self.begin))
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(says));
        let mut said = File::from(said);
        jail.start(command)?;
        // QEMU has its own by now; ours would keep it from noticing our end.
        drop((ours, blank, theirs, control));
        let answered = find(self.cgroups).and_then(|pid| Ok((pid, Qmp::connect(self.control)?)));
        match answered {
            Ok((pid, qmp)) => Ok(Started { pid, qmp, port }),
            Err(error) => Err(last_words(&mut said).unwrap_or(error)),
        }
    }

    /// Ends one that is of no use, for another in its place.
    fn end(&self, started: Started) -> Result<()> {
        drop(started);
        let until = Instant::now() + APPEARS;
        while self.cgroups.kill_all() > 0 {
            if Instant::now() >= until {
                return Err(Error::internal("QEMU does not end"));
            }
            sleep(Duration::from_millis(1));
        }
        fs::remove_file(self.control).doing("removing a socket")?;
        Ok(())
    }
}

/// A machine that waits has seen no disk yet but one that is empty and larger than any: how
/// large a disk is it asks once, and what is on it the file system tells.
fn blank_disk() -> Result<[OwnedFd; 2]> {
    let made = || {
        let disk = memfd_create("sandkeep-no-disk", MemfdFlags::CLOEXEC)?;
        ftruncate(&disk, LARGEST_DISK)?;
        let path = format!("/proc/self/fd/{}", disk.as_raw_fd());
        Ok::<_, std::io::Error>([disk, File::open(path)?.into()])
    };
    made()
        .doing("making a disk for the machine")
        .map_err(Error::from)
}

/// The only process of the cgroup.
fn find(cgroups: &Cgroups) -> Result<i32> {
    let until = Instant::now() + APPEARS;
    loop {
        let there = cgroups.processes();
        if let [pid] = there[..] {
            return Ok(pid);
        }
        // The one that made it may still be on its way out.
        if there.is_empty() || Instant::now() >= until {
            return Err(Error::internal("QEMU ended as soon as it was started"));
        }
        sleep(Duration::from_millis(1));
    }
}

/// What a QEMU that ended said about it.
fn last_words(said: &mut File) -> Option<Error> {
    let said = jail::heard(said)?;
    Some(
        Error::internal(format!("QEMU did not start: {said}"))
            .hint("run `sandkeep doctor`: it looks at everything this level needs"),
    )
}
