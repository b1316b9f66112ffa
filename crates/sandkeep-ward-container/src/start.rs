//! Starting a box.

use crate::{
    launcher::protocol::Job,
    live::Live,
    record::{Note, Record},
    ward::Inner,
};
use sandkeep_host::{
    files::{make_private_dir, open_dir, remove_dir},
    work::{blocking, lock},
};
use sandkeep_model::{Error, Result, SandboxId};
use sandkeep_ward::{BoxSpec, LiveBox};
use std::sync::Arc;

/// Keeps a box from being swept or started twice while it is made.
struct Starting<'a> {
    inner: &'a Inner,
    id: SandboxId,
}

impl<'a> Starting<'a> {
    fn begin(inner: &'a Inner, id: &SandboxId) -> Result<Self> {
        let taken = inner.held(id).is_some() || !lock(&inner.starting).insert(id.clone());
        if taken {
            return Err(Error::conflict(format!("box {id} is there already"))
                .hint("end it first, or use another id"));
        }
        Ok(Self {
            inner,
            id: id.clone(),
        })
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        lock(&self.inner.starting).remove(&self.id);
    }
}

impl Inner {
    pub(crate) async fn start(&self, spec: BoxSpec) -> Result<LiveBox> {
        spec.check()?;
        let _starting = Starting::begin(self, &spec.id)?;
        let made = self.make(&spec).await;
        if made.is_err() {
            let directory = self.box_dir(&spec.id);
            if let Err(error) = blocking(move || remove_dir(&directory)).await {
                tracing::warn!(id = %spec.id, %error, "the directory of a failed box stays");
            }
        }
        made
    }

    async fn make(&self, spec: &BoxSpec) -> Result<LiveBox> {
        let slot = self.slots.take()?;
        let number = slot.number();
        let path = self.box_dir(&spec.id);
        let directory = {
            let path = path.clone();
            // Written first: should the server die now, the next one knows the ids are used.
            blocking(move || {
                make_private_dir(&path)?;
                Note {
                    slot: number,
                    record: None,
                }
                .write(&path)?;
                open_dir(&path)
            })
            .await?
        };
        let job = Job {
            root: spec.root.clone(),
            hostname: spec.hostname.clone(),
            limits: spec.limits,
            first_id: slot.first_id(),
        };
        let (started, pidfd) = self.launcher.start(&job, &directory).await?;
        let record = Record::new(number, started);
        let value = record.to_value()?;
        let live = Arc::new(Live::new(
            spec.id.clone(),
            record.clone(),
            pidfd,
            directory,
            Some(slot),
        )?);
        self.hold(Arc::clone(&live), 0);
        let noted = blocking(move || {
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
