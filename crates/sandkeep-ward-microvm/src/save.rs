//! Freezing boxes, and writing their memory to disk.

use crate::{
    image::{self, Source},
    qmp::Qmp,
    record::Live,
    start,
    ward::Inner,
};
use sandkeep_host::{failure::Doing as _, work::blocking};
use sandkeep_model::{Error, Result, SandboxId};
use sandkeep_ward::Engine;
use std::{
    fs::{self, File},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// In the directory of a box that is frozen, or was about to be.
const FROZEN: &str = "frozen";
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);

impl Inner {
    pub(crate) async fn engine(self: &Arc<Self>) -> Result<Engine> {
        Ok(engine(self.qemu().await?.build()))
    }

    /// The one that runs this box: not the server's where that was started anew.
    pub(crate) async fn engine_of(self: &Arc<Self>, id: &SandboxId) -> Result<Engine> {
        match self.roster.must_hold(id)?.record.more.build.clone() {
            Some(build) => Ok(engine(build)),
            None => self.engine().await,
        }
    }

    pub(crate) async fn freeze(&self, id: &SandboxId) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        let mut frozen = live.frozen.lock().await;
        if *frozen {
            return Ok(());
        }
        // Noted first: a later server must not think that a box runs which does not.
        let (mark, control) = (self.roster.box_dir(id).join(FROZEN), self.control(id));
        let cgroups = live.record.cgroups.clone();
        // What is written down of it begins, in each copy, with programs that stand still. A guest
        // that keeps its agent from doing so is written down as it is.
        if let Err(error) = start::hold(&live).await {
            tracing::warn!(%id, %error, "the programs of a sandbox are not held while it is written down");
        }
        let stood = blocking(move || {
            fs::write(&mark, "").doing("noting that the box is frozen")?;
            let stood = Qmp::connect(&control).and_then(|mut qmp| {
                qmp.stop()?;
                // The machine is stopped; QEMU itself would go on to look at its clocks.
                let held = cgroups.freeze(FREEZE_DEADLINE).map_err(Error::from);
                if held.is_err() {
                    qmp.go_on()?;
                }
                held
            });
            if stood.is_err() {
                let _gone = fs::remove_file(&mark);
            }
            stood
        })
        .await;
        if stood.is_err() {
            go_on(&live).await;
        }
        stood?;
        *frozen = true;
        Ok(())
    }

    /// Whether a box found again is frozen. Between the note and the deed a server may have
    /// died; then QEMU tells.
    pub(crate) async fn look_if_frozen(&self, live: &Live) -> Result<()> {
        let mark = self.roster.box_dir(&live.id).join(FROZEN);
        if !mark.exists() {
            return Ok(());
        }
        let mut frozen = live.frozen.lock().await;
        let (control, cgroups) = (self.control(&live.id), live.record.cgroups.clone());
        *frozen = blocking(move || {
            cgroups.thaw();
            let stopped = Qmp::connect(&control)?.status()? != "running";
            if stopped {
                cgroups.freeze(FREEZE_DEADLINE)?;
            } else {
                fs::remove_file(&mark).doing("noting that the box runs")?;
            }
            Ok(stopped)
        })
        .await?;
        if !*frozen {
            go_on(live).await;
        }
        Ok(())
    }

    pub(crate) async fn thaw(&self, id: &SandboxId) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        let mut frozen = live.frozen.lock().await;
        if !*frozen {
            return Ok(());
        }
        let (mark, control) = (self.roster.box_dir(id).join(FROZEN), self.control(id));
        let cgroups = live.record.cgroups.clone();
        blocking(move || {
            cgroups.thaw();
            Qmp::connect(&control)?.go_on()?;
            fs::remove_file(&mark).doing("noting that the box runs")?;
            Ok(())
        })
        .await?;
        *frozen = false;
        go_on(&live).await;
        Ok(())
    }

    pub(crate) async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let live = self.roster.must_hold(id)?;
        let frozen = live.frozen.lock().await;
        if !*frozen {
            return Err(Error::conflict(format!("box {id} is not frozen")).hint("freeze it first"));
        }
        let source = Source {
            pid: live.record.pid,
            shape: live.record.more.shape,
            memory: live.has.memory.clone(),
        };
        let (control, cgroups) = (self.control(id), live.record.cgroups.clone());
        let image: PathBuf = image.to_owned();
        blocking(move || {
            // The machine stays stopped; QEMU has work to do.
            cgroups.thaw();
            let written = write_devices(&control, &image::devices(&image));
            cgroups.freeze(FREEZE_DEADLINE)?;
            written?;
            image::write(&image, &source)
        })
        .await
    }
}

fn engine(build: String) -> Engine {
    Engine {
        name: "qemu".to_owned(),
        build,
    }
}

/// It was not written down, or was and goes on: as it is, nothing of it is emptied. The agent lets
/// its programs go by itself when it does not hear of it.
async fn go_on(live: &Live) {
    if let Err(error) = start::release(live).await {
        tracing::warn!(id = %live.id, %error, "the programs of a sandbox go on later");
    }
}

fn write_devices(control: &Path, to: &Path) -> Result<()> {
    let file = File::create(to).doing("writing the devices of the machine")?;
    Qmp::connect(control)?.save_devices(file.as_fd())
}
