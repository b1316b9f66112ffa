//! Starting a box.

use crate::{
    launcher::protocol::{Job, Start},
    live::Live,
    memory::Image,
    record::{Note, Record},
    slots::Slot,
    ward::{Inner, set_limits},
};
use sandkeep_host::{
    failure::Doing as _,
    files::{make_private_dir, open_dir, remove_dir},
    proc,
    work::blocking,
};
use sandkeep_model::{Error, Result};
use sandkeep_ward::{BoxSpec, LiveBox};
use std::{fs, io, os::fd::OwnedFd, path::Path, sync::Arc};
use tokio_util::sync::CancellationToken;

/// The agent's file in the directory of a box: the very one it was started with, for as long
/// as it lives.
pub const AGENT: &str = "agent";

impl Inner {
    /// Afresh, or from an image of its memory.
    pub(crate) async fn start(
        &self,
        spec: BoxSpec,
        image: Option<&Path>,
        abandoned: CancellationToken,
    ) -> Result<LiveBox> {
        spec.check()?;
        let made = self.make(&spec, image, &abandoned).await;
        if made.is_err() {
            let directory = self.box_dir(&spec.id);
            if let Err(error) = blocking(move || remove_dir(&directory)).await {
                tracing::warn!(id = %spec.id, %error, "the directory of a failed box stays");
            }
        }
        made
    }

    async fn make(
        &self,
        spec: &BoxSpec,
        image: Option<&Path>,
        abandoned: &CancellationToken,
    ) -> Result<LiveBox> {
        let image = match image {
            Some(image) => Some(self.open_image(image).await?),
            None => None,
        };
        let path = self.box_dir(&spec.id);
        let Outfit {
            slot,
            directory,
            start,
        } = self.outfit(spec, image.as_ref()).await?;
        let (number, own_boot_id) = (slot.number(), start.boot_id.clone());
        let restored = image.is_some();
        let job = match image {
            Some(image) => Job::Restore(image.job(start)),
            None => Job::Start(start),
        };
        let (started, pidfd) = self.launcher.start(&job, &directory, abandoned).await?;
        let record = Record::new(number, own_boot_id, started);
        let value = record.to_value()?;
        let live = Arc::new(Live::new(
            spec.id.clone(),
            record.clone(),
            pidfd,
            directory,
            Some(slot),
        )?);
        self.hold(Arc::clone(&live), 0);
        let limits = restored.then_some(spec.limits);
        let noted = blocking(move || {
            // An image has the limits of the box it was.
            if let Some(limits) = limits {
                set_limits(&live, &limits)?;
            }
            Note {
                slot: number,
                record: Some(record),
            }
            .write(&path)
        })
        .await;
        if let Err(error) = noted {
            // Without the note a later server could not find it: better no box than that.
            self.destroy(&spec.id).await?;
            return Err(error);
        }
        Ok(LiveBox {
            id: spec.id.clone(),
            record: value,
        })
    }
}

/// What a box needs before it is begun.
pub struct Outfit {
    pub slot: Slot,
    pub directory: OwnedFd,
    pub start: Start,
}

impl Inner {
    /// Host ids, and a directory with the agent in it.
    pub(crate) async fn outfit(&self, spec: &BoxSpec, image: Option<&Image>) -> Result<Outfit> {
        let slot = self.slots.take()?;
        let number = slot.number();
        let directory = {
            let (path, agent) = (self.box_dir(&spec.id), self.agent.clone());
            let old_agent = image.map(Image::agent);
            // Written first: should the server die now, the next one knows the ids are used.
            blocking(move || {
                make_private_dir(&path)?;
                Note {
                    slot: number,
                    record: None,
                }
                .write(&path)?;
                put_agent(&agent, old_agent.as_deref(), &path.join(AGENT))?;
                open_dir(&path)
            })
            .await?
        };
        // The memory of a sandbox that was away comes back into the same start of it; another
        // sandbox that begins with that memory has started when it did.
        let boot_id = match image.and_then(|image| image.boot_id_of(&spec.id)) {
            Some(id) => id,
            None => proc::random_uuid().doing("naming this start of the sandbox")?,
        };
        let start = Start {
            root: spec.root.clone(),
            hostname: spec.hostname.clone(),
            limits: spec.limits,
            first_id: slot.first_id(),
            boot_id,
            agent_is_readable: self.criu().await.is_ok_and(|criu| !criu.is_careful()),
        };
        Ok(Outfit {
            slot,
            directory,
            start,
        })
    }
}

/// The ward's own agent, or the one that is in an image. A box in an image maps the file it was
/// started from, so it must be that one to the byte.
fn put_agent(own: &Path, old: Option<&Path>, target: &Path) -> Result<()> {
    let put = || -> io::Result<()> {
        match old {
            // Copies share the file, and with it the memory it takes.
            Some(old) if fs::read(old)? != fs::read(own)? => {
                fs::copy(old, target)?;
                fs::set_permissions(target, fs::metadata(own)?.permissions())
            }
            _ => fs::hard_link(own, target),
        }
    };
    put().doing("giving the box its agent").map_err(Error::from)
}
