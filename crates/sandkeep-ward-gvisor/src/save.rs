//! Freezing boxes, and writing their memory to disk.

use crate::{
    control,
    runsc::{self, Runsc},
    start::no_runsc,
    ward::Inner,
};
use sandkeep_host::{failure::Doing as _, work::blocking};
use sandkeep_model::{Error, Result, SandboxId};
use sandkeep_ward::Engine;
use std::{ffi::OsStr, fs, path::Path};

impl Inner {
    pub(crate) async fn engine(&self) -> Result<Engine> {
        let program = runsc::find(self.runsc.as_deref()).ok_or_else(no_runsc)?;
        let stamp = Stamp::of(&program)?;
        let mut known = self.engine.lock().await;
        if let Some((seen, engine)) = known.as_ref()
            && *seen == stamp
        {
            return Ok(engine.clone());
        }
        let version = runsc::version(&program).await?;
        match runsc::date(&version) {
            Some(date) if date >= runsc::OLDEST => {}
            _ => {
                return Err(Error::host_not_ready(format!(
                    "runsc {version:?} is too old, {} or newer is needed",
                    runsc::OLDEST
                ))
                .hint("`sandkeep doctor` tells where to get it")
                .retryable(false));
            }
        }
        let engine = Engine {
            name: "runsc".to_owned(),
            // An image can only be read by the very build that wrote it, with the same file
            // systems; bump the number with the mounts in `spec.rs`.
            build: format!("{version} systrap mounts-1 {}", std::env::consts::ARCH),
        };
        *known = Some((stamp, engine.clone()));
        Ok(engine)
    }

    pub(crate) async fn freeze(&self, id: &SandboxId) -> Result<()> {
        let live = self.must_hold(id)?;
        let mut frozen = live.frozen.lock().await;
        // The kernel of the box counts pauses.
        if !*frozen {
            control::pause(&live.record.control).await?;
            *frozen = true;
        }
        Ok(())
    }

    pub(crate) async fn thaw(&self, id: &SandboxId) -> Result<()> {
        let live = self.must_hold(id)?;
        let mut frozen = live.frozen.lock().await;
        control::resume(&live.record.control).await?;
        *frozen = false;
        Ok(())
    }

    pub(crate) async fn save(&self, id: &SandboxId, image: &Path) -> Result<()> {
        let live = self.must_hold(id)?;
        if !*live.frozen.lock().await {
            return Err(Error::conflict(format!("box {id} is not frozen")).hint("freeze it first"));
        }
        let runsc = Runsc {
            program: self.program().await?,
            dir: self.box_dir(id),
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
        runsc.call(&words).await?;
        let image = image.to_owned();
        blocking(move || sync_dir(&image)).await
    }
}

/// Every file and the directory itself are on disk when this returns.
fn sync_dir(dir: &Path) -> Result<()> {
    let sync = |path: &Path| {
        fs::File::open(path)
            .and_then(|file| file.sync_all())
            .doing(format_args!("writing {} to disk", path.display()))
    };
    for entry in fs::read_dir(dir).doing("reading the image")? {
        sync(&entry.doing("reading the image")?.path())?;
    }
    sync(dir)?;
    Ok(())
}

/// Tells one build of the program from another that took its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp {
    path: std::path::PathBuf,
    changed: (i64, i64),
    inode: u64,
}

impl Stamp {
    fn of(program: &Path) -> Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let found =
            fs::metadata(program).doing(format_args!("looking at {}", program.display()))?;
        Ok(Self {
            path: program.to_owned(),
            changed: (found.ctime(), found.ctime_nsec()),
            inode: found.ino(),
        })
    }
}
