//! The server's side of the launcher: starts it, hands it jobs, starts it again when it died.

use super::protocol::{self, Answer, Job, Restore, Save, Setup, Started};
use crate::{failure::Doing, proc::watch_fd};
use rustix::{
    io::Errno,
    net::{Shutdown, shutdown},
};
use sandkeep_model::{Code, Error, Result};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    process::{Child, Command},
    sync::Mutex,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

/// From handing out a job to the agent running; far above what a loaded host needs.
const START_DEADLINE: Duration = Duration::from_secs(20);
/// With memory; the worker gives up before.
const MEMORY_DEADLINE: Duration = Duration::from_secs(330);

#[derive(Debug)]
pub struct Launcher {
    program: PathBuf,
    arguments: Vec<String>,
    setup: Setup,
    running: Mutex<Option<Arc<Running>>>,
    /// How many there have been: a second one must not use the first one's names.
    spawned: AtomicU64,
}

#[derive(Debug)]
struct Running {
    control: AsyncFd<OwnedFd>,
    child: std::sync::Mutex<Child>,
}

/// What came of one attempt.
enum Outcome {
    Answered(Answer, Option<OwnedFd>),
    /// The launcher died before it answered.
    Silence,
}

impl Launcher {
    pub const fn new(program: PathBuf, arguments: Vec<String>, setup: Setup) -> Self {
        Self {
            program,
            arguments,
            setup,
            running: Mutex::const_new(None),
            spawned: AtomicU64::new(0),
        }
    }

    /// Cgroups whose names begin with this belong to a launcher of this ward, or its boxes.
    pub fn tag(&self) -> &str {
        &self.setup.tag
    }

    /// Starts it now, so that its spare workers are ready before the first box.
    pub async fn warm(&self) -> Result<()> {
        self.running().await.map(drop)
    }

    async fn running(&self) -> Result<Arc<Running>> {
        let mut slot = self.running.lock().await;
        if let Some(running) = slot.as_ref()
            && running.alive()
        {
            return Ok(Arc::clone(running));
        }
        if slot.is_some() {
            tracing::warn!("the launcher has died; starting another");
        }
        let running = Arc::new(self.spawn()?);
        *slot = Some(Arc::clone(&running));
        drop(slot);
        Ok(running)
    }

    fn spawn(&self) -> Result<Running> {
        let (ours, theirs) = protocol::pair().doing("making a socket pair")?;
        rustix::io::ioctl_fionbio(&ours, true)
            .map_err(io::Error::from)
            .doing("making a socket pair")?;
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .current_dir("/")
            .spawn()
            .doing(format_args!(
                "starting the launcher {}",
                self.program.display()
            ))?;
        let mut setup = self.setup.clone();
        let number = self.spawned.fetch_add(1, Ordering::Relaxed);
        setup.tag = format!("{}-{number}", setup.tag);
        let setup = protocol::encode(&setup).doing("encoding the setup")?;
        protocol::send(&ours, &setup, &[]).doing("sending the setup")?;
        Ok(Running {
            control: watch_fd(ours, Interest::READABLE | Interest::WRITABLE)
                .doing("watching the launcher")?,
            child: std::sync::Mutex::new(child),
        })
    }

    /// Starts a box; the descriptor is its pidfd. When it is `abandoned`, one that comes from the
    /// disk is given up.
    pub async fn start(
        &self,
        job: &Job,
        directory: &OwnedFd,
        abandoned: &CancellationToken,
    ) -> Result<(Started, OwnedFd)> {
        let bytes = protocol::encode(job).doing("encoding the job")?;
        let deadline = match job {
            Job::Start(_) => START_DEADLINE,
            Job::Restore(_) | Job::Try(_) | Job::Save(_) => MEMORY_DEADLINE,
        };
        match self.twice(&bytes, directory, deadline, abandoned).await? {
            Outcome::Answered(Answer::Started(started), Some(pidfd)) => Ok((started, pidfd)),
            Outcome::Answered(Answer::Started(_), None) => {
                Err(Error::internal("the launcher sent no pidfd"))
            }
            other => Err(nothing("starting the box", other)),
        }
    }

    /// Brings an image back up to the moment before any of it runs, and ends it there.
    pub async fn try_image(
        &self,
        job: Restore,
        directory: &OwnedFd,
        abandoned: &CancellationToken,
    ) -> Result<()> {
        let bytes = protocol::encode(&Job::Try(job)).doing("encoding the job")?;
        match self
            .twice(&bytes, directory, MEMORY_DEADLINE, abandoned)
            .await?
        {
            Outcome::Answered(Answer::ComesBack, _) => Ok(()),
            Outcome::Answered(Answer::Failed { message, .. }, _) => Err(Error::new(
                Code::NotEnforceable,
                format!("the memory of the sandbox would not come back from the disk: {message}"),
            )
            .hint("end the process that holds what is named, and try again")),
            other => Err(nothing("trying the memory of the sandbox", other)),
        }
    }

    /// A job that was lost with the launcher is given to a new one.
    async fn twice(
        &self,
        job: &[u8],
        directory: &OwnedFd,
        deadline: Duration,
        abandoned: &CancellationToken,
    ) -> Result<Outcome> {
        let beside = [directory.as_fd()];
        match self.attempt(job, &beside, deadline, abandoned).await? {
            Outcome::Silence => self.attempt(job, &beside, deadline, abandoned).await,
            outcome => Ok(outcome),
        }
    }

    /// Writes a frozen box. `writing` is given away: whoever writes has it as long as it does, which
    /// may be longer than this takes when it fails.
    pub async fn save(&self, job: Save, directory: &OwnedFd, writing: OwnedFd) -> Result<()> {
        let bytes = protocol::encode(&Job::Save(job)).doing("encoding the job")?;
        let beside = [directory.as_fd(), writing.as_fd()];
        // Once begun it must come to its end.
        let never = CancellationToken::new();
        let attempt = self.attempt(&bytes, &beside, MEMORY_DEADLINE, &never);
        match attempt.await? {
            Outcome::Answered(Answer::Saved, _) => Ok(()),
            other => Err(nothing("writing the box to disk", other)),
        }
    }

    async fn attempt(
        &self,
        job: &[u8],
        beside: &[BorrowedFd<'_>],
        deadline: Duration,
        abandoned: &CancellationToken,
    ) -> Result<Outcome> {
        let running = self.running().await?;
        let (ours, theirs) = protocol::pair().doing("making a socket pair")?;
        rustix::io::ioctl_fionbio(&ours, true)
            .map_err(io::Error::from)
            .doing("making a socket pair")?;
        let reply = watch_fd(ours, Interest::READABLE).doing("watching a job")?;
        let talk = async {
            let mut fds = vec![theirs.as_fd()];
            fds.extend(beside);
            if !running.send(job, &fds).await? {
                return Ok(Outcome::Silence);
            }
            drop(theirs);
            tokio::select! {
                outcome = receive(&reply) => return outcome,
                () = abandoned.cancelled() => {}
            }
            // The worker sees it, clears away what there is, and says so.
            shutdown(reply.get_ref(), Shutdown::Write).doing("giving up a job")?;
            receive(&reply).await
        };
        match timeout(deadline, talk).await {
            Ok(outcome) => outcome,
            Err(_) => {
                // It may have answered in this very moment; then the box must not be lost.
                if let Ok(Some(packet)) = protocol::receive(reply.get_ref())
                    && let Some(pidfd) = packet.fds.first()
                {
                    let _gone =
                        rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
                }
                Err(Error::new(
                    Code::DeadlineExceeded,
                    format!("the box was not up after {} seconds", deadline.as_secs()),
                )
                .hint("the host is overloaded; try again, or run fewer boxes"))
            }
        }
    }
}

/// Why nothing came of a job.
fn nothing(doing: &str, outcome: Outcome) -> Error {
    match outcome {
        Outcome::Answered(Answer::Failed { message, errno }, _) => refusal(doing, &message, errno),
        Outcome::Answered(Answer::Refused { why }, _) => Error::new(
            Code::NotEnforceable,
            format!("the memory of the box can not be written to disk: {why}"),
        ),
        Outcome::Answered(..) => Error::internal("the launcher answered something else"),
        Outcome::Silence => Error::internal("the launcher died while it worked on the box")
            .retryable(true)
            .hint("look for its last words in the server's log"),
    }
}

async fn receive(reply: &AsyncFd<OwnedFd>) -> Result<Outcome> {
    let packet = reply
        .async_io(Interest::READABLE, |fd| protocol::receive(fd))
        .await
        .doing("waiting for the launcher")?;
    let Some(mut packet) = packet else {
        return Ok(Outcome::Silence);
    };
    let answer = packet.parse().doing("reading the launcher's answer")?;
    Ok(Outcome::Answered(answer, packet.fds.pop()))
}

impl Running {
    fn alive(&self) -> bool {
        self.child
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .try_wait()
            .is_ok_and(|status| status.is_none())
    }

    /// False when nobody is at the other end any more.
    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool> {
        let sent = self
            .control
            .async_io(Interest::WRITABLE, |fd| protocol::send(fd, bytes, fds))
            .await;
        match sent {
            Ok(()) => Ok(true),
            Err(error)
                if [Errno::PIPE, Errno::CONNRESET, Errno::NOTCONN]
                    .iter()
                    .any(|gone| error.raw_os_error() == Some(gone.raw_os_error())) =>
            {
                Ok(false)
            }
            Err(error) => Err(error)
                .doing("sending to the launcher")
                .map_err(Error::from),
        }
    }
}

/// The worker's words as an error of the server.
fn refusal(doing: &str, message: &str, errno: Option<i32>) -> Error {
    let error = errno.map_or_else(
        || Error::internal(""),
        |errno| Error::from(io::Error::from_raw_os_error(errno)),
    );
    let code = match errno {
        Some(libc::EAGAIN) => Code::ResourceExhausted,
        _ => error.code,
    };
    let mut made = Error::new(code, format!("{doing}: {message}"));
    made.hint = error.hint.or_else(|| {
        Some("run `sandkeep doctor`: it looks at everything this level needs".to_owned())
    });
    made
}
