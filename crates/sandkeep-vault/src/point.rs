//! Points: a read-only snapshot of a disk, the memory that goes with it if there is any,
//! and a manifest that tells what must be there.
//!
//! `points/ID/{disk, memory/, manifest.json}` appears in one step and never changes. A disk
//! made from a point shares its blocks and does not need it to stay.

use sandkeep_model::{
    Code, Error, PointId, Result, SandboxId, Timestamp, human_bytes, point_not_found,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::PathBuf,
    sync::Arc,
};

use crate::{
    btrfs,
    disk::{self, Disk},
    doing::Doing as _,
    image::{self, KeptImage},
    memory::{self, MemoryFile},
    pool::PoolKind,
    space::Space,
    staging::{make_private_dir, sync_dir},
    vault::Inner,
    verified::Stamps,
};

pub const DISK: &str = "disk";
pub const MEMORY: &str = "memory";
const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 1;
const MAX_MANIFEST: u64 = 4 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    id: PointId,
    sandbox: SandboxId,
    created_at: Timestamp,
    /// Empty when only the disk is in it.
    memory: Vec<MemoryFile>,
}

/// How long a point is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Until somebody deletes it: all of it is on the disk, with sums.
    ForGood,
    /// As long as this server runs, for what is made from it at once. It has no sums, and
    /// nothing waits for the disk. Whoever starts next must sweep it.
    ThisRun,
}

/// A point as the vault has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointInfo {
    pub id: PointId,
    /// The read-only root directory.
    pub disk: PathBuf,
    /// Where the memory is, if there is any.
    pub memory: Option<PathBuf>,
    pub memory_bytes: u64,
}

/// A point being made. Dropped without being published, it is taken away.
#[derive(Debug)]
pub struct PointDraft {
    vault: Arc<Inner>,
    id: PointId,
    path: PathBuf,
    /// Its memory, once that is written out.
    written: Option<(Vec<MemoryFile>, Stamps)>,
    published: bool,
}

impl PointDraft {
    pub fn begin(vault: &Arc<Inner>, id: PointId) -> Result<Self> {
        if vault.pool.kind == PoolKind::PlainDirectory {
            return Err(Error::new(
                Code::NotEnforceable,
                "points can not be made here: the pool is a plain directory, and copying a disk file by file while it changes gives no moment that ever was",
            )
            .hint("use a btrfs pool; `sandkeep doctor` tells more"));
        }
        vault.check_room()?;
        let path = vault.layout.staged_path();
        make_private_dir(&path)?;
        Ok(Self {
            vault: Arc::clone(vault),
            id,
            path,
            written: None,
            published: false,
        })
    }

    pub const fn id(&self) -> &PointId {
        &self.id
    }

    /// An empty directory for the memory, which takes `most` bytes (zero: no bound of its own).
    pub fn memory(&self, most: u64) -> Result<PathBuf> {
        let path = self.memory_path();
        image::make(&self.vault, &path, most)?;
        Ok(path)
    }

    pub fn memory_path(&self) -> PathBuf {
        self.path.join(MEMORY)
    }

    /// Where the disk is, once it was taken.
    pub fn disk_path(&self) -> PathBuf {
        self.path.join(DISK)
    }

    /// Brings its memory to the disk if it is to stay. Nothing changes in it any more.
    pub fn write_out(&mut self, keep: Keep) -> Result<()> {
        let memory = self.memory_path();
        self.written = Some(match (memory.is_dir(), keep) {
            (false, _) => Default::default(),
            (true, Keep::ForGood) => memory::write_out(&memory)?,
            (true, Keep::ThisRun) => memory::look(&memory)?,
        });
        Ok(())
    }

    /// The disk as it is now, in one moment, whether the box runs or not. The kernel brings
    /// it to the disk before this returns.
    pub fn take_disk(&self, sandbox: &SandboxId) -> Result<()> {
        let source = disk::existing(&self.vault, sandbox)?;
        btrfs::snapshot_read_only(&source, &self.path.join(DISK))
            .doing_to("taking a snapshot of", &source)
    }

    /// An empty tree to be filled, for a point that comes from elsewhere.
    pub fn new_disk(&self) -> Result<PathBuf> {
        let path = self.path.join(DISK);
        btrfs::create_subvolume(&path).doing_to("making a subvolume in", &self.path)?;
        Ok(path)
    }

    /// Nothing changes in such a tree any more, and all of it is on the disk.
    pub fn seal_disk(&self) -> Result<()> {
        let path = self.path.join(DISK);
        btrfs::set_read_only(&path, true).doing_to("making read-only", &path)?;
        self.vault.sync()
    }

    /// Whether the disk that was taken is what it was at a point it descends from. What can
    /// not be told counts as different.
    pub fn same_as(&self, point: &PointId) -> bool {
        let (then, now) = (place(&self.vault, point).join(DISK), self.path.join(DISK));
        match btrfs::changed_since(&then, &now) {
            Ok(changed) => !changed,
            Err(error) => {
                tracing::debug!(%point, %error, "comparing a disk with a point");
                false
            }
        }
    }

    /// Gives it its name in one step, and before that brings everything to the disk if it is
    /// to stay.
    pub fn publish(mut self, sandbox: &SandboxId, keep: Keep) -> Result<PointInfo> {
        if self.written.is_none() {
            self.write_out(keep)?;
        }
        let (files, stamps) = self.written.take().unwrap_or_default();
        let manifest = Manifest {
            format: FORMAT,
            id: self.id.clone(),
            sandbox: sandbox.clone(),
            created_at: Timestamp::now(),
            memory: files,
        };
        let text = serde_json::to_vec(&manifest)
            .map_err(|error| Error::internal(format!("writing the manifest: {error}")))?;
        let path = self.path.join(MANIFEST);
        let lasts = keep == Keep::ForGood;
        File::create(&path)
            .and_then(|mut file| {
                file.write_all(&text)?;
                if lasts { file.sync_all() } else { Ok(()) }
            })
            .doing_to("writing", &path)?;
        if lasts {
            sync_dir(&self.path)?;
        }
        let target = place(&self.vault, &self.id);
        fs::rename(&self.path, &target).doing_to("moving into place", &target)?;
        self.published = true;
        match keep {
            Keep::ForGood => {
                sync_dir(&self.vault.layout.points)?;
                self.vault.verified.remember(&self.id, stamps);
            }
            Keep::ThisRun => self.vault.verified.vouch_for(&self.id, stamps),
        }
        find(&self.vault, &self.id)
    }
}

impl Drop for PointDraft {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        if let Err(error) = self.vault.layout.remove(&self.path, &self.vault.quota) {
            tracing::warn!(%error, path = %self.path.display(), "left for the next sweep");
        }
    }
}

fn place(vault: &Inner, id: &PointId) -> PathBuf {
    vault.layout.points.join(id.as_str())
}

fn read_manifest(vault: &Inner, id: &PointId) -> Result<Manifest> {
    let path = place(vault, id).join(MANIFEST);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(point_not_found(id)),
        other => other.doing_to("opening", &path)?,
    };
    let mut text = String::new();
    file.take(MAX_MANIFEST)
        .read_to_string(&mut text)
        .doing_to("reading", &path)?;
    let manifest: Manifest = serde_json::from_str(&text)
        .map_err(|error| damaged(id, &format!("its manifest can not be read: {error}")))?;
    if manifest.format != FORMAT || manifest.id != *id {
        return Err(damaged(
            id,
            "its manifest is of another kind or another point",
        ));
    }
    Ok(manifest)
}

pub fn damaged(id: &PointId, why: &str) -> Error {
    Error::conflict(format!("point \"{id}\" is damaged: {why}"))
        .hint("use another point; delete this one with `sandkeep points rm`")
}

pub fn find(vault: &Inner, id: &PointId) -> Result<PointInfo> {
    let manifest = read_manifest(vault, id)?;
    let dir = place(vault, id);
    let memory = (!manifest.memory.is_empty()).then(|| dir.join(MEMORY));
    Ok(PointInfo {
        id: id.clone(),
        disk: dir.join(DISK),
        memory,
        memory_bytes: manifest.memory.iter().map(|file| file.bytes).sum(),
    })
}

pub fn exists(vault: &Inner, id: &PointId) -> bool {
    place(vault, id).exists()
}

/// What must be in the memory of a point.
pub fn memory_of(vault: &Inner, id: &PointId) -> Result<Vec<MemoryFile>> {
    read_manifest(vault, id).map(|manifest| manifest.memory)
}

/// Like [`find`], and everything in it is as it was written. The blocks of the disk have
/// checksums of the file system; the memory is compared here, unless it was before and has not
/// changed since.
pub fn verify(vault: &Inner, id: &PointId) -> Result<PointInfo> {
    let manifest = read_manifest(vault, id)?;
    let dir = place(vault, id);
    if !btrfs::is_subvolume(&dir.join(DISK)).unwrap_or(false) {
        return Err(damaged(id, "its disk is not there"));
    }
    let memory = dir.join(MEMORY);
    let now = memory::stamps(&memory, &manifest.memory).map_err(|name| damaged_memory(id, name))?;
    if !vault.verified.is(id, &now) {
        let found =
            memory::compare(&memory, &manifest.memory).map_err(|name| damaged_memory(id, name))?;
        vault.verified.remember(id, found);
    }
    find(vault, id)
}

fn damaged_memory(id: &PointId, name: &str) -> Error {
    damaged(
        id,
        &format!("\"{name}\" of its memory is not what was written"),
    )
}

/// The disk of a new box, as it was at the point, with a limit of its own.
pub fn to_new_disk(vault: &Inner, id: &SandboxId, point: &PointId, limit: u64) -> Result<Disk> {
    let staged = disk::stage_from(vault, &find(vault, point)?.disk, limit)?;
    let path = disk::disk_path(vault, id);
    if !staged.commit(&path)? {
        return Err(disk::taken(id));
    }
    Ok(Disk { path })
}

/// The disk of a box becomes what it was at the point, in one step; what it was is removed.
/// Nothing of the box may run.
pub fn replace_disk(vault: &Inner, id: &SandboxId, point: &PointId, limit: u64) -> Result<Disk> {
    let staged = disk::stage_from(vault, &find(vault, point)?.disk, limit)?;
    let path = disk::disk_path(vault, id);
    staged.commit_over(&path)?;
    sync_dir(&vault.layout.disks)?;
    Ok(Disk { path })
}

/// Out of sight in one step, then taken apart. One that is not there is fine.
pub fn remove(vault: &Inner, id: &PointId) -> Result<()> {
    let staged = vault.layout.stage(&vault.quota);
    let dir = place(vault, id);
    vault.verified.forget(id);
    match fs::rename(&dir, &staged.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // What cannot be removed now is removed when the staged place is dropped, or swept.
        other => other
            .doing_to("removing", &dir)
            .and_then(|()| vault.delete(&staged.path)),
    }
}

pub fn list(vault: &Inner) -> Result<Vec<PointId>> {
    let dir = &vault.layout.points;
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).doing_to("reading", dir)? {
        let name = entry.doing_to("reading", dir)?.file_name();
        match name.to_str().and_then(|name| name.parse().ok()) {
            Some(id) => out.push(id),
            None => tracing::warn!(?name, "not a point of ours"),
        }
    }
    out.sort();
    Ok(out)
}

/// The memory in a point, and whose it is.
pub fn image_of(vault: &Inner, id: &PointId) -> Result<Option<KeptImage>> {
    let manifest = read_manifest(vault, id)?;
    let bytes = manifest.memory.iter().map(|file| file.bytes).sum();
    Ok((bytes > 0).then_some(KeptImage {
        sandbox: manifest.sandbox,
        bytes,
        made: manifest.created_at,
    }))
}

/// Refuses memory that would not fit, before anything is written.
pub fn check_memory_room(vault: &Inner, bytes: u64) -> Result<()> {
    let checked = vault.pool.check_room_beyond(Space::left_by_images, bytes);
    let Err(full) = checked else { return Ok(()) };
    // There may be room for everything else.
    let error = match vault.pool.check_room() {
        Ok(()) => vault.pool.no_room_for_images()?,
        Err(_) => full,
    };
    Err(error.context(format!(
        "the memory of the sandbox is {}",
        human_bytes(bytes)
    )))
}

/// The storage has room, but not for images.
pub fn no_room_for_images(vault: &Inner) -> Result<Error> {
    vault.pool.no_room_for_images()
}
