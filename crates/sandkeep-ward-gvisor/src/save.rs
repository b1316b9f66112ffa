//! Freezing boxes, and writing their memory to disk.

use crate::{
    control, network,
    record::Live,
    release::{self, Release},
    runsc::Runsc,
    ward::Inner,
};
use sandkeep_host::{failure::Doing as _, files::Stamp, work::blocking};
use sandkeep_model::{Code, Error, Result, SandboxId};
use sandkeep_own_kernel as own_kernel;
use sandkeep_ward::Engine;
use std::{ffi::OsStr, fs, path::Path, sync::Arc, time::Duration};

/// In the directory of a box that is frozen, or was about to be.
const FROZEN: &str = "frozen";
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);
/// A box that runs answers in this time.
const PROBE: Duration = Duration::from_secs(5);

impl Inner {
    /// The release in use, known to be new enough. It is asked about itself once per file.
    pub(crate) async fn release(&self) -> Result<Arc<Release>> {
        let program = release::find(self.runsc.as_deref()).ok_or_else(|| self.no_runsc())?;
        let stamp = Stamp::of(&program)?;
        let mut known = self.release.lock().await;
        if let Some((seen, release)) = known.as_ref()
            && *seen == stamp
            && release.program == program
        {
            return Ok(Arc::clone(release));
        }
        let release = Arc::new(Release::ask(program).await?);
        release.check_age()?;
        *known = Some((stamp, Arc::clone(&release)));
        Ok(release)
    }

    pub(crate) async fn engine(&self) -> Result<Engine> {
        let release = self.release().await?;
        Ok(Engine {
            name: "runsc".to_owned(),
            // An image can only be read by the very build that wrote it, with the same file
            // systems; bump the number with the mounts in `spec.rs`.
            build: format!(
                "{} systrap mounts-1 {}",
                release.version,
                std::env::consts::ARCH
            ),
        })
    }

    pub(crate) async fn freeze(&self, id: &SandboxId) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        let mut frozen = live.frozen.lock().await;
        // The kernel of the box counts pauses.
        if *frozen {
            return Ok(());
        }
        // What is written down of a conversation in the middle may not be whole.
        own_kernel::settle(&live).await;
        // Noted first: a later server must not think that a box runs which does not.
        let mark = self.roster.box_dir(id).join(FROZEN);
        fs::write(&mark, "").doing("noting that the box is frozen")?;
        let paused = match control::pause(&live.record.more.control).await {
            Ok(()) => stand_still(&live).await,
            refused => refused,
        };
        match paused {
            Ok(()) => *frozen = true,
            Err(_) => {
                let _gone = fs::remove_file(&mark);
            }
        }
        paused
    }

    /// Whether a box found again is frozen. Between the note and the deed a server may have
    /// died; then the agent tells.
    pub(crate) async fn look_if_frozen(&self, live: &Live) -> Result<()> {
        let mark = self.roster.box_dir(&live.id).join(FROZEN);
        if !mark.exists() {
            return Ok(());
        }
        let mut frozen = live.frozen.lock().await;
        // It may have been about to be written down.
        network::open(live.netns()).await?;
        live.first.go_on()?;
        // An earlier version of this server froze the cgroup.
        live.record.cgroups.thaw();
        if own_kernel::answers(live, PROBE).await {
            fs::remove_file(&mark).doing("noting that the box runs")?;
            return Ok(());
        }
        *frozen = true;
        hold_still(live).await
    }

    pub(crate) async fn thaw(&self, id: &SandboxId) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        let mut frozen = live.frozen.lock().await;
        // A kernel that is not paused does not survive being resumed.
        if !*frozen {
            return Ok(());
        }
        live.first.go_on()?;
        control::resume(&live.record.more.control).await?;
        *frozen = false;
        fs::remove_file(self.roster.box_dir(id).join(FROZEN)).doing("noting that the box runs")?;
        Ok(())
    }

    pub(crate) async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        let frozen = live.frozen.lock().await;
        if !*frozen {
            return Err(Error::conflict(format!("box {id} is not frozen")).hint("freeze it first"));
        }
        let release = self.release().await?;
        check_release(live.record.more.version.as_deref(), &release.version)?;
        let runsc = Runsc {
            release,
            dir: self.roster.box_dir(id),
            name: id.to_string(),
        };
        let words = [
            OsStr::new("checkpoint"),
            OsStr::new("-leave-running"),
            OsStr::new("-compression"),
            OsStr::new("none"),
            OsStr::new("-image-path"),
            image.as_os_str(),
        ];
        // Its network would go on to take what arrives, and what it changes while it is written
        // down is written down by half (google/gvisor#14147).
        network::cut(live.netns()).await?;
        // Its tasks stay paused; the sandbox itself has work to do.
        live.first.go_on()?;
        let written = runsc.call(&words).await;
        let held = hold_still(&live).await;
        network::open(live.netns()).await?;
        held?;
        written
    }
}

/// An image is read by the release that wrote it and no other, and it is written by the process that
/// runs the box. So one that was started before `runsc` was replaced keeps its memory.
fn check_release(started: Option<&str>, now: &str) -> Result<()> {
    match started {
        Some(started) if started != now => Err(Error::new(
            Code::NotEnforceable,
            format!(
                "it runs on runsc {started}, this server has {now} now: its memory cannot be written to disk"
            ),
        )
        .hint("start a new sandbox, or name the old release by the setting `runsc`")),
        _ => Ok(()),
    }
}

/// Pausing stops the tasks of the box; its kernel would go on to look at its clocks.
async fn stand_still(live: &Arc<Live>) -> Result<()> {
    let held = hold_still(live).await;
    if held.is_err() {
        control::resume(&live.record.more.control).await?;
    }
    held
}

/// Its kernel stands still, which is one process, and with it everything that it would do for the
/// tasks. Not the whole cgroup, with the processes in which the tasks run: newer releases wait for
/// those by seccomp's notifications, each freeze breaks such a wait off and so do the freezes after
/// it, and a kernel that finds more than one broken off takes the process for dead and the box with
/// it. The tasks are paused, so those processes only wait.
async fn hold_still(live: &Live) -> Result<()> {
    let (first, pid) = (Arc::clone(&live.first), live.record.pid);
    blocking(move || first.stop(pid, FREEZE_DEADLINE).map_err(Error::from)).await
}
