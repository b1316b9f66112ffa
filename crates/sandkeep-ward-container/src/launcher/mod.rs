//! The launcher: a single-threaded process beside the server that makes boxes.
//!
//! It holds a few workers ready and hands each job to one of them; the worker answers to the
//! server directly. It ends when the server does; boxes stay.

mod agents;
mod caps;
mod child;
pub mod client;
mod ghosts;
mod image;
mod limits;
mod mounts;
mod netns;
mod own;
mod processors;
pub mod protocol;
mod repair;
mod restore;
mod room;
mod run;
mod save;
mod seccomp_image;
mod sessions;
mod table;
mod userns;
mod userns_image;
mod verify;
mod whole;
mod wipe;
mod words;
mod worker;

pub use mounts::TERMINALS;
pub use repair::end as set_connections_going;
pub use worker::SOCKET;

use crate::{
    failure::{Doing, Failure},
    seccomp::Filters,
    sys,
};
use agents::Agents;
use processors::Processors;
use protocol::{Job, Packet, Setup};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags, open},
    process::{getpid, set_child_subreaper, setsid},
    stdio::{dup2_stdin, dup2_stdout},
};
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};
use worker::Tools;

/// Refilling waits until the box that took a worker has had the processors to itself.
const REFILL_DELAY: Duration = Duration::from_millis(40);
/// Workers in the making at the same time.
const MOST_IN_THE_MAKING: usize = 8;
/// Jobs that wait for a worker; more are refused.
const MOST_WAITING: usize = 512;
/// For what is left of a worker that was killed.
const CLEAN_DEADLINE: Duration = Duration::from_secs(10);
/// CRIU gives up by itself before.
const SAVE_DEADLINE: Duration = Duration::from_secs(330);

/// What the hidden subcommand of the server runs, first of all and with one thread.
///
/// Standard input is the control socket.
pub fn launcher_main() -> ! {
    let code = match Launcher::start() {
        Ok(mut launcher) => match launcher.serve() {
            Ok(()) => 0,
            Err(failure) => complain(&failure),
        },
        Err(failure) => complain(&failure),
    };
    std::process::exit(code)
}

#[expect(
    clippy::print_stderr,
    reason = "the launcher has no log of its own, standard error is the server's"
)]
fn complain(failure: &Failure) -> i32 {
    eprintln!("sandkeep launcher: {failure}");
    1
}

struct Worker {
    socket: OwnedFd,
    ready: bool,
    /// Of its cgroups.
    name: String,
}

/// A worker that has a job.
struct Busy {
    socket: OwnedFd,
    name: String,
    /// What it left behind is about a box that lives in other cgroups.
    saves: bool,
}

struct Launcher {
    control: OwnedFd,
    setup: Setup,
    filters: Filters,
    processors: Processors,
    agents: Agents,
    workers: Vec<Worker>,
    busy: Vec<Busy>,
    waiting: VecDeque<Packet>,
    next_name: u64,
    refill_at: Option<Instant>,
}

impl Launcher {
    fn start() -> Result<Self, Failure> {
        let control = take_control().doing("taking the control socket")?;
        // A terminal's interrupt is for the server; it ends the launcher by closing the socket.
        let _leader_already = setsid();
        set_child_subreaper(Some(getpid())).doing("becoming the reaper of the boxes")?;
        sys::ignore_children();
        let setup: Setup = protocol::receive(&control)
            .and_then(|packet| packet.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()))
            .and_then(|packet| packet.parse())
            .doing("reading the setup")?;
        let filters = Filters::compile()
            .map_err(|error| io::Error::other(error.message))
            .doing("compiling the seccomp list")?;
        let agents = Agents::install(&setup.agent)?;
        Ok(Self {
            control,
            setup,
            filters,
            processors: Processors::of_this_host(),
            agents,
            workers: Vec::new(),
            busy: Vec::new(),
            waiting: VecDeque::new(),
            next_name: 0,
            refill_at: Some(Instant::now()),
        })
    }

    fn serve(&mut self) -> Result<(), Failure> {
        loop {
            self.hand_out();
            self.make_workers()?;
            let ready = self.wait().doing("waiting for work")?;
            let is_ready = |index: usize| ready.get(index).copied().unwrap_or(false);
            // From the end: the places in the lists are what `ready` counts.
            let idle = self.workers.len();
            for index in (0..self.busy.len()).rev() {
                if is_ready(1 + idle + index) {
                    self.hear_busy(index)?;
                }
            }
            for index in (0..idle).rev() {
                if is_ready(1 + index) {
                    self.hear_worker(index)?;
                }
            }
            if ready.first().copied().unwrap_or(false) {
                match protocol::receive(&self.control).doing("reading from the server")? {
                    Some(packet) => self.take_job(packet),
                    None => return Ok(()),
                }
            }
        }
    }

    /// Which sockets have something: the control socket, then every worker's, then those of
    /// the workers that have a job.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let mut fds = vec![PollFd::from_borrowed_fd(
            self.control.as_fd(),
            PollFlags::IN,
        )];
        let idle = self.workers.iter().map(|worker| &worker.socket);
        let busy = self.busy.iter().map(|worker| &worker.socket);
        fds.extend(
            idle.chain(busy)
                .map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)),
        );
        let timeout = self
            .refill_at
            .map(|at| at.saturating_duration_since(Instant::now()))
            .and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(rustix::io::Errno::INTR) => Ok(vec![false; fds.len()]),
            Err(error) => Err(error.into()),
        }
    }

    fn hear_worker(&mut self, index: usize) -> Result<(), Failure> {
        match protocol::receive(&self.workers[index].socket) {
            Ok(Some(_)) => {
                self.workers[index].ready = true;
                Ok(())
            }
            Ok(None) | Err(_) => {
                let dead = self.workers.swap_remove(index);
                self.clean_up(&dead.name, false)
            }
        }
    }

    /// It is done, or it was killed over its job.
    fn hear_busy(&mut self, index: usize) -> Result<(), Failure> {
        let told = protocol::receive(&self.busy[index].socket);
        let worker = self.busy.swap_remove(index);
        match told {
            Ok(Some(_)) => Ok(()),
            Ok(None) | Err(_) => self.clean_up(&worker.name, worker.saves),
        }
    }

    /// What a worker leaves that was killed: half a box, and whoever was making it. In a
    /// process of its own, as it may take a while. One that was writing a box is left alone:
    /// CRIU must take its hands off the processes of the box first.
    fn clean_up(&mut self, name: &str, saves: bool) -> Result<(), Failure> {
        let cgroups = self.setup.tree.child(name);
        if sys::fork().doing("cleaning up")? != 0 {
            return Ok(());
        }
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        if let Ok(null) = null {
            self.let_go(null);
        }
        let until = Instant::now() + if saves { SAVE_DEADLINE } else { CLEAN_DEADLINE };
        while !cgroups.processes().is_empty() && Instant::now() < until {
            if !saves {
                // A CRIU that ends before the processes it holds would let them go.
                cgroups.halt();
                cgroups.kill_all();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _swept_at_the_next_start = cgroups.remove(CLEAN_DEADLINE);
        std::process::exit(0)
    }

    /// In a child: nothing of the launcher's may stay open, or others would wait for the end
    /// of sockets we hold. Takes the place of the control socket.
    fn let_go(&mut self, instead: OwnedFd) {
        self.workers.clear();
        self.busy.clear();
        self.waiting.clear();
        drop(std::mem::replace(&mut self.control, instead));
    }

    fn take_job(&mut self, packet: Packet) {
        if self.waiting.len() < MOST_WAITING {
            self.waiting.push_back(packet);
            return;
        }
        if let Some(reply) = packet.fds.first() {
            let answer = protocol::Answer::Failed {
                message: format!("{MOST_WAITING} boxes wait to be started already"),
                errno: Some(libc::EAGAIN),
            };
            if let Ok(bytes) = protocol::encode(&answer) {
                // When the server has gone there is nobody to tell.
                let _told = protocol::send(reply, &bytes, &[]);
            }
        }
    }

    fn hand_out(&mut self) {
        while !self.waiting.is_empty()
            && let Some(index) = self.workers.iter().position(|worker| worker.ready)
            && let Some(job) = self.waiting.pop_front()
        {
            let worker = self.workers.swap_remove(index);
            let fds: Vec<_> = job.fds.iter().map(AsFd::as_fd).collect();
            let sent = protocol::send(&worker.socket, &job.bytes, &fds);
            self.busy.push(Busy {
                socket: worker.socket,
                name: worker.name,
                saves: matches!(job.parse(), Ok(Job::Save(_))),
            });
            if sent.is_err() {
                // It died while it waited: the next one gets the job.
                self.waiting.push_front(job);
            }
            self.refill_at = Some(Instant::now() + REFILL_DELAY);
        }
    }

    /// Workers for jobs that wait at once; spares a little later.
    fn make_workers(&mut self) -> Result<(), Failure> {
        let refill = self.refill_at.is_some_and(|at| at <= Instant::now());
        if refill {
            self.refill_at = None;
        }
        let spares = if refill { self.setup.spares } else { 0 };
        loop {
            let making = self.workers.iter().filter(|worker| !worker.ready).count();
            let short_of_jobs = making < self.waiting.len();
            if making >= MOST_IN_THE_MAKING || !(short_of_jobs || self.workers.len() < spares) {
                return Ok(());
            }
            self.make_worker()?;
        }
    }

    fn make_worker(&mut self) -> Result<(), Failure> {
        let (ours, theirs) = protocol::pair().doing("making a socket pair")?;
        let name = format!("{}-{}", self.setup.tag, self.next_name);
        self.next_name += 1;
        if sys::fork().doing("starting a worker")? != 0 {
            self.workers.push(Worker {
                socket: ours,
                ready: false,
                name,
            });
            return Ok(());
        }
        drop(ours);
        self.let_go(theirs);
        worker::run(
            &self.setup,
            &Tools {
                filters: &self.filters,
                processors: &self.processors,
                agents: &self.agents,
            },
            &name,
            &self.control,
        );
        std::process::exit(0)
    }
}

/// Standard input becomes the box's nothing; the socket moves where no program expects it.
fn take_control() -> io::Result<OwnedFd> {
    let control = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 10)?;
    let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    drop(null);
    // Whatever the server forgot to mark must not reach a worker's child.
    sys::close_on_exec_from(3)?;
    Ok(control)
}
