//! Points as others see them. All work that may block happens off the async threads.

use std::{
    io::{Read, Write},
    path::Path,
    sync::Arc,
};

use sandkeep_model::{Code, Error, Point, PointId, Result, SandboxId, ServerKey};

use crate::{
    archive::ImportLimits,
    diff::{self, Diff},
    disk::Disk,
    parcel::{self, Label, Opened},
    point::{self, Keep, PointDraft, PointInfo},
    vault::{Inner, Vault, off_thread},
};

impl Vault {
    /// Begins a point. It is taken away again when the draft is dropped unpublished.
    pub async fn begin_point(&self, id: PointId) -> Result<PointDraft> {
        let inner = Arc::clone(&self.inner);
        off_thread(move || PointDraft::begin(&inner, id)).await
    }

    /// Puts the disk of a box, as it is in this moment, into a draft.
    pub async fn take_disk(&self, draft: PointDraft, sandbox: &SandboxId) -> Result<PointDraft> {
        let sandbox = sandbox.clone();
        off_thread(move || draft.take_disk(&sandbox).map(|()| draft)).await
    }

    /// Like [`Vault::take_disk`]; `None` where the disk is what it was at `unless`, a point it
    /// descends from.
    pub async fn take_changed_disk(
        &self,
        draft: PointDraft,
        sandbox: &SandboxId,
        unless: &PointId,
    ) -> Result<Option<PointDraft>> {
        let (sandbox, unless) = (sandbox.clone(), unless.clone());
        off_thread(move || {
            draft.take_disk(&sandbox)?;
            Ok((!draft.same_as(&unless)).then_some(draft))
        })
        .await
    }

    /// Brings the memory in a draft to the disk, as [`Vault::publish_point`] does of one that has it
    /// still in memory alone.
    pub async fn write_out_point(&self, mut draft: PointDraft, keep: Keep) -> Result<PointDraft> {
        off_thread(move || draft.write_out(keep).map(|()| draft)).await
    }

    /// Gives a draft its name, on the disk if it is to stay. From here on it is a point.
    pub async fn publish_point(
        &self,
        draft: PointDraft,
        sandbox: &SandboxId,
        keep: Keep,
    ) -> Result<PointInfo> {
        let sandbox = sandbox.clone();
        off_thread(move || draft.publish(&sandbox, keep)).await
    }

    /// A point, as its manifest tells; nothing is compared.
    pub async fn point(&self, id: &PointId) -> Result<PointInfo> {
        let id = id.clone();
        self.run(move |vault| point::find(vault, &id)).await
    }

    /// A point, compared with what was written: damaged ones are refused in words. What was
    /// compared since this vault was opened and has not changed is not read again.
    pub async fn verified_point(&self, id: &PointId) -> Result<PointInfo> {
        let id = id.clone();
        self.run(move |vault| point::verify(vault, &id)).await
    }

    /// A new disk for a box: what was at the point, with its own limit on what it writes.
    pub async fn disk_from_point(
        &self,
        id: &SandboxId,
        point: &PointId,
        limit_bytes: u64,
    ) -> Result<Disk> {
        let (id, point) = (id.clone(), point.clone());
        self.run(move |vault| point::to_new_disk(vault, &id, &point, limit_bytes))
            .await
    }

    /// The disk of a box that does not run becomes what was at the point, in one step.
    pub async fn replace_disk(
        &self,
        id: &SandboxId,
        point: &PointId,
        limit_bytes: u64,
    ) -> Result<Disk> {
        let (id, point) = (id.clone(), point.clone());
        self.run(move |vault| point::replace_disk(vault, &id, &point, limit_bytes))
            .await
    }

    /// The disk a box has already.
    pub async fn disk(&self, id: &SandboxId) -> Result<Disk> {
        let id = id.clone();
        self.run(move |vault| crate::disk::existing(vault, &id).map(|path| Disk { path }))
            .await
    }

    /// By which other servers know what was exported here.
    pub fn server_key(&self) -> ServerKey {
        self.inner.parcel_key.public()
    }

    /// What a parcel of this point would hold; damaged points are refused in words.
    pub async fn label(&self, point: &Point) -> Result<Label> {
        let point = point.clone();
        self.run(move |vault| parcel::label_of(vault, &point)).await
    }

    /// Packs a point into one file, signed by this server. What breaks off has no seal and is refused everywhere.
    pub async fn export_point(&self, label: Label, out: impl Write + Send + 'static) -> Result<()> {
        self.run(move |vault| parcel::pack(vault, &label, out))
            .await
    }

    /// Makes a point from such a file. `accept` sees what it is before anything is written; where
    /// its memory is wanted it says who takes that in, before it is a point. Nothing is left of
    /// one that is not whole.
    pub async fn import_point<T>(
        &self,
        reader: impl Read + Send + 'static,
        limits: ImportLimits,
        accept: impl FnOnce(&Label) -> Result<Option<T>> + Send + 'static,
    ) -> Result<Opened>
    where
        T: FnOnce(&Path) -> Result<()>,
    {
        let inner = Arc::clone(&self.inner);
        off_thread(move || parcel::open(&inner, reader, &limits, accept)).await
    }

    /// What is different at `after` from what was at `before`.
    pub async fn diff(&self, before: &PointId, after: &PointId, with_text: bool) -> Result<Diff> {
        let (before, after) = (before.clone(), after.clone());
        self.run(move |vault| {
            let (before, after) = (point::find(vault, &before)?, point::find(vault, &after)?);
            diff::diff(&before.disk, &after.disk, with_text)
        })
        .await
    }

    /// The same of points whose disks are images: `file` in them holds an ext4 file system.
    pub async fn diff_images(
        &self,
        before: &PointId,
        after: &PointId,
        file: &'static str,
        with_text: bool,
    ) -> Result<Diff> {
        let (before, after) = (before.clone(), after.clone());
        self.run(move |vault| {
            let reader = vault.disk_reader.as_ref().ok_or_else(|| {
                Error::new(Code::NotEnforceable, "this server does not read disks")
            })?;
            let (before, after) = (point::find(vault, &before)?, point::find(vault, &after)?);
            let (before, after) = (before.disk.join(file), after.disk.join(file));
            diff::diff_images(reader, &before, &after, with_text)
        })
        .await
    }

    /// Removes a point; disks made from it stay whole. One that is not there is fine.
    pub async fn remove_point(&self, id: &PointId) -> Result<()> {
        let id = id.clone();
        self.run(move |vault| point::remove(vault, &id)).await
    }

    /// All points there are, for finding those nobody knows.
    pub async fn points(&self) -> Result<Vec<PointId>> {
        self.run(point::list).await
    }

    /// Refuses what would not fit.
    pub async fn check_memory_room(&self, bytes: u64) -> Result<()> {
        self.run(move |vault| point::check_memory_room(vault, bytes))
            .await
    }

    /// Everything written so far survives a power cut.
    pub async fn settle(&self) -> Result<()> {
        self.run(Inner::sync).await
    }
}
