//! Points: a read-only snapshot of a disk, the memory that goes with it if there is any,
//! and a manifest that tells what must be there.
//!
//! `points/ID/{disk, memory/, manifest.json}` appears in one step and never changes. A disk
//! made from a point shares its blocks and does not need it to stay.

use rustix::fs::{Mode, OFlags};
use sandkeep_model::{
    Code, Error, PointId, Result, SandboxId, Timestamp, human_bytes, point_not_found,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    btrfs,
    disk::{self, Disk},
    doing::Doing as _,
    pool::PoolKind,
    staging::make_private_dir,
    vault::Inner,
};

pub const DISK: &str = "disk";
const MEMORY: &str = "memory";
const MANIFEST: &str = "manifest.json";
const FORMAT: u32 = 1;
/// An image is a handful of files; whatever has more was not written by an engine of ours.
pub const MOST_FILES: usize = 4096;
const MAX_MANIFEST: u64 = 4 << 20;
const CHUNK: usize = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    id: PointId,
    sandbox: SandboxId,
    created_at: Timestamp,
    /// Empty when only the disk is in it.
    memory: Vec<MemoryFile>,
}

/// A file of the memory, and what must be in it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryFile {
    pub name: String,
    pub bytes: u64,
    pub sha256: String,
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
            published: false,
        })
    }

    pub const fn id(&self) -> &PointId {
        &self.id
    }

    /// An empty directory for the memory.
    pub fn memory(&self) -> Result<PathBuf> {
        let path = self.path.join(MEMORY);
        make_private_dir(&path)?;
        Ok(path)
    }

    /// Forgets memory that was only half written: the point becomes one of the disk alone.
    pub fn drop_memory(&self) -> Result<()> {
        let path = self.path.join(MEMORY);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).doing_to("removing", &path)
            }
            _ => Ok(()),
        }
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

    /// Brings everything to the disk and gives it its name in one step.
    pub fn publish(mut self, sandbox: &SandboxId) -> Result<PointInfo> {
        let memory = self.path.join(MEMORY);
        let files = if memory.is_dir() {
            read_memory(&memory)?
        } else {
            Vec::new()
        };
        for file in &files {
            let path = memory.join(&file.name);
            File::open(&path)
                .and_then(|file| file.sync_all())
                .doing_to("writing out", &path)?;
        }
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
        File::create(&path)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .doing_to("writing", &path)?;
        sync_dir(&self.path)?;
        let target = place(&self.vault, &self.id);
        fs::rename(&self.path, &target).doing_to("moving into place", &target)?;
        self.published = true;
        sync_dir(&self.vault.layout.points)?;
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

fn sync_dir(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|dir| dir.sync_all())
        .doing_to("writing out", path)
}

/// All files of an image with their hashes. Images are flat.
fn read_memory(dir: &Path) -> Result<Vec<MemoryFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).doing_to("reading", dir)? {
        let entry = entry.doing_to("reading", dir)?;
        let name = entry.file_name().into_string().map_err(|name| {
            Error::internal(format!("an image holds a file named {}", name.display()))
        })?;
        let path = entry.path();
        let meta = entry.metadata().doing_to("looking at", &path)?;
        if !meta.is_file() || files.len() == MOST_FILES {
            return Err(Error::internal(format!(
                "{} does not belong into an image",
                path.display()
            )));
        }
        let (bytes, sha256) = hash(&path)?;
        files.push(MemoryFile {
            name,
            bytes,
            sha256,
        });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn hash(path: &Path) -> Result<(u64, String)> {
    let file = rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing_to("opening", path)?;
    let mut file = File::from(file);
    let mut sum = Sha256::new();
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0_u64;
    loop {
        let count = file.read(&mut chunk).doing_to("reading", path)?;
        if count == 0 {
            break;
        }
        sum.update(&chunk[..count]);
        bytes = bytes.saturating_add(count as u64);
    }
    Ok((bytes, hex(sum)))
}

pub fn hex(sum: Sha256) -> String {
    sum.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// A name of one file, and nothing that leads elsewhere.
pub fn is_plain(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= 255 && !name.contains(['/', '\0'])
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
/// checksums of the file system; the memory is compared here.
pub fn verify(vault: &Inner, id: &PointId) -> Result<PointInfo> {
    let manifest = read_manifest(vault, id)?;
    let dir = place(vault, id);
    if !btrfs::is_subvolume(&dir.join(DISK)).unwrap_or(false) {
        return Err(damaged(id, "its disk is not there"));
    }
    for file in &manifest.memory {
        let path = dir.join(MEMORY).join(&file.name);
        let found = if is_plain(&file.name) {
            hash(&path).ok()
        } else {
            None
        };
        if found.is_none_or(|(bytes, sha256)| bytes != file.bytes || sha256 != file.sha256) {
            return Err(damaged(
                id,
                &format!("\"{}\" of its memory is not what was written", file.name),
            ));
        }
    }
    find(vault, id)
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
    match fs::rename(&dir, &staged.path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Dropping the staged place removes what is in it.
        other => other.doing_to("removing", &dir),
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

/// Refuses memory that would not fit, before anything is written.
pub fn check_memory_room(vault: &Inner, bytes: u64) -> Result<()> {
    let (_, free) = vault.pool.space()?;
    if free > bytes {
        return Ok(());
    }
    Err(Error::new(
        Code::DiskFull,
        format!(
            "the memory of the sandbox is {}, the pool has {} left",
            human_bytes(bytes),
            human_bytes(free)
        ),
    )
    .hint("delete points or sandboxes, or enlarge the pool"))
}
