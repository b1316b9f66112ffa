//! The process with which a box ends.

use crate::{
    cgroup::Cgroups,
    failure::{Doing as _, Failure},
    proc,
    work::blocking,
};
use sandkeep_model::{Code, Error, Limits, Result, SandboxId};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};

/// One that was killed is gone by then, or hangs in the kernel.
pub const END_DEADLINE: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub struct First {
    /// Readable when it has ended.
    pidfd: AsyncFd<OwnedFd>,
    ending: AtomicBool,
}

impl First {
    pub fn watch(pidfd: OwnedFd) -> Result<Self, Failure> {
        Ok(Self {
            pidfd: proc::watch_fd(pidfd, Interest::READABLE).doing("watching the box")?,
            ending: AtomicBool::new(false),
        })
    }

    pub fn runs(&self) -> bool {
        proc::runs(self.pidfd.get_ref())
    }

    /// Waits for its end, and with it of everything in the box.
    pub async fn ended(&self) -> io::Result<()> {
        let mut guard = self.pidfd.readable().await?;
        // It stays readable for ever; others may wait for it, too.
        guard.retain_ready();
        Ok(())
    }

    /// Whether its end is no news.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Kills it and everything else in the box. Its end alone would do, but a box that is frozen
    /// ends only when it goes on, and then all of it must be dead. Blocks.
    pub fn kill(&self, cgroups: &Cgroups) -> Result<(), Failure> {
        proc::kill_by(self.pidfd.get_ref())?;
        cgroups.kill_all();
        Ok(())
    }

    /// Has this one process stand still, and nothing else of the box. Blocks.
    pub fn stop(&self, pid: i32, wait: Duration) -> Result<(), Failure> {
        proc::stop(self.pidfd.get_ref(), pid, wait)
    }

    /// Ends a [`stop`](Self::stop).
    pub fn go_on(&self) -> Result<(), Failure> {
        proc::go_on(self.pidfd.get_ref())
    }

    /// Ends the box; from now on that is no news.
    pub async fn end(self: &Arc<Self>, id: &SandboxId, cgroups: &Cgroups) -> Result<()> {
        self.ending.store(true, Ordering::Release);
        {
            let (first, cgroups) = (Arc::clone(self), cgroups.clone());
            blocking(move || first.kill(&cgroups).map_err(Error::from)).await?;
        }
        timeout(END_DEADLINE, self.ended())
            .await
            .map_err(|_| {
                Error::new(Code::DeadlineExceeded, format!("box {id} does not die"))
                    .hint("a process of it hangs in the kernel; look at /proc/PID/stack")
            })?
            .doing("waiting for the box to end")?;
        Ok(())
    }
}

/// Has the host hold a box to other limits. Blocks.
pub fn limit(cgroups: &Cgroups, limits: &Limits) -> Result<()> {
    cgroups.set_limits(limits).map_err(|failure| {
        let busy = failure.source.kind() == io::ErrorKind::ResourceBusy;
        let error = Error::from(failure);
        if busy {
            Error::conflict(error.message).hint("the box uses more memory than that now")
        } else {
            error
        }
    })
}
