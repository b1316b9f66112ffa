//! The launcher: a single-threaded process beside the server that makes boxes.
//!
//! It holds a few workers ready and hands each job to one of them; the worker answers to the
//! server directly. It ends when the server does; boxes stay.

mod caps;
mod child;
pub mod client;
mod mounts;
mod netns;
pub mod protocol;
mod repair;
mod restore;
mod room;
mod save;
mod table;
mod userns;
mod userns_image;
mod verify;
mod words;
mod worker;

pub use worker::SOCKET;

use crate::{
    failure::{Doing, Failure},
    seccomp::Filters,
    sys,
};
use protocol::{Packet, Setup};
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

/// Refilling waits until the box that took a worker has had the processors to itself.
const REFILL_DELAY: Duration = Duration::from_millis(40);
/// Workers in the making at the same time.
const MOST_IN_THE_MAKING: usize = 8;
/// Jobs that wait for a worker; more are refused.
const MOST_WAITING: usize = 512;

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
}

struct Launcher {
    control: OwnedFd,
    setup: Setup,
    filters: Filters,
    workers: Vec<Worker>,
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
        let setup = protocol::receive(&control)
            .and_then(|packet| packet.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()))
            .and_then(|packet| packet.parse())
            .doing("reading the setup")?;
        let filters = Filters::compile()
            .map_err(|error| io::Error::other(error.message))
            .doing("compiling the seccomp list")?;
        Ok(Self {
            control,
            setup,
            filters,
            workers: Vec::new(),
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
            // Workers first: their places in the list are what `ready` counts.
            for index in (0..self.workers.len()).rev() {
                if ready.get(index + 1).copied().unwrap_or(false) {
                    self.hear_worker(index);
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

    /// Which sockets have something: the control socket, then every worker's.
    fn wait(&self) -> io::Result<Vec<bool>> {
        let mut fds = vec![PollFd::from_borrowed_fd(
            self.control.as_fd(),
            PollFlags::IN,
        )];
        fds.extend(
            self.workers
                .iter()
                .map(|worker| PollFd::from_borrowed_fd(worker.socket.as_fd(), PollFlags::IN)),
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

    fn hear_worker(&mut self, index: usize) {
        match protocol::receive(&self.workers[index].socket) {
            Ok(Some(_)) => self.workers[index].ready = true,
            Ok(None) | Err(_) => drop(self.workers.swap_remove(index)),
        }
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
            if protocol::send(&worker.socket, &job.bytes, &fds).is_err() {
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
            });
            return Ok(());
        }
        // In the worker: nothing of the launcher's may stay open, or others would wait for
        // the end of sockets we hold.
        drop(ours);
        self.workers.clear();
        self.waiting.clear();
        let control = std::mem::replace(&mut self.control, theirs);
        drop(control);
        worker::run(&self.setup, &self.filters, &name, &self.control);
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
