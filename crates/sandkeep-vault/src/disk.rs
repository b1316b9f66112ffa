//! Disks of boxes: writable snapshots of a template, with a limit on what they write.

use sandkeep_model::{Code, Error, Result, SandboxId, TemplateName, human_bytes};
use std::{
    fs, io,
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    btrfs, doing::Doing as _, pool::PoolKind, quota::QuotaKind, spare, staging::Staged, template,
    vault::Inner,
};

/// The root directory of one box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    pub path: PathBuf,
}

pub fn disk_path(vault: &Inner, id: &SandboxId) -> PathBuf {
    vault.layout.disks.join(id.as_str())
}

fn check_limit(vault: &Inner, limit: u64) -> Result<()> {
    if limit == 0 || vault.quota.kind != QuotaKind::None || vault.allow_unlimited {
        return Ok(());
    }
    Err(Error::new(
        Code::NotEnforceable,
        format!(
            "a disk limit of {} can not be enforced: the pool at {} has no quotas",
            human_bytes(limit),
            vault.pool.root.display()
        ),
    )
    .field("limits.disk_mib")
    .hint("use a btrfs pool with quotas (kernel 6.7 or newer), or allow unlimited disks"))
}

/// Makes the disk under a staging name, limits it, and only then gives it its name: a disk
/// without its limit is never seen.
pub fn create(vault: &Inner, id: &SandboxId, template: &TemplateName, limit: u64) -> Result<Disk> {
    let Some(template) = template::find(vault, template)? else {
        return Err(template::not_found(template));
    };
    let path = disk_path(vault, id);
    check_limit(vault, limit)?;
    vault.check_room()?;
    let staged = match spare::take(vault, &template) {
        Some(spare) => limited(vault, spare, limit)?,
        None => stage_from(vault, &template.path, limit)?,
    };
    if !staged.commit(&path)? {
        return Err(taken(id));
    }
    Ok(Disk { path })
}

pub fn taken(id: &SandboxId) -> Error {
    Error::conflict(format!("sandbox \"{id}\" already has a disk"))
}

/// A writable and limited copy of `source` that has no name yet.
pub fn stage_from<'a>(vault: &'a Inner, source: &Path, limit: u64) -> Result<Staged<'a>> {
    check_limit(vault, limit)?;
    vault.check_room()?;
    let staged = vault.layout.stage(&vault.quota);
    if vault.pool.kind == PoolKind::PlainDirectory {
        copy_tree(source, &staged.path)?;
        return Ok(staged);
    }
    btrfs::snapshot(source, &staged.path).doing_to("making the disk from", source)?;
    limited(vault, staged, limit)
}

fn limited<'a>(vault: &Inner, staged: Staged<'a>, limit: u64) -> Result<Staged<'a>> {
    let dir = btrfs::open_dir(&staged.path).doing_to("opening", &staged.path)?;
    let volume = btrfs::subvolume_id(dir.as_fd()).doing("asking for the id of the disk")?;
    vault
        .quota
        .adopt(dir.as_fd(), volume, limit)
        .doing("limiting the disk")?;
    Ok(staged)
}

/// `cp` keeps owners, links, attributes and holes, and shares blocks where it can.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let output = Command::new("cp")
        .args(["-a", "--reflink=auto", "--"])
        .args([from, to])
        .output()
        .doing("running cp")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let first = said.lines().next().unwrap_or("it gave no reason");
    let code = if first.contains("No space left") {
        Code::DiskFull
    } else {
        Code::Internal
    };
    Err(Error::new(code, format!("copying the template: {first}"))
        .hint("free space on the disk that holds the pool"))
}

pub fn existing(vault: &Inner, id: &SandboxId) -> Result<PathBuf> {
    let path = disk_path(vault, id);
    match fs::symlink_metadata(&path) {
        Ok(_) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::not_found(format!("sandbox \"{id}\" has no disk")))
        }
        Err(error) => Err(error).doing_to("looking at", &path),
    }
}

/// The kernel charges the change to the subvolume it comes by, and refuses it where that is at its limit:
/// by way of the disk a limit that was lowered could not be raised again.
pub fn set_limit(vault: &Inner, id: &SandboxId, limit: u64) -> Result<()> {
    check_limit(vault, limit)?;
    let path = existing(vault, id)?;
    if vault.quota.kind == QuotaKind::None {
        return Ok(());
    }
    let volume = volume_of(&path)?;
    let root = &vault.pool.root;
    let dir = btrfs::open_dir(root).doing_to("opening", root)?;
    vault
        .quota
        .limit(dir.as_fd(), volume, limit)
        .doing("limiting the disk")
}

/// What the disk holds beyond its template, and what was promised to whoever writes to it.
/// `None` where nobody counts.
pub fn held(vault: &Inner, id: &SandboxId) -> Result<Option<u64>> {
    if vault.quota.kind == QuotaKind::None {
        return Ok(None);
    }
    let volume = volume_of(&existing(vault, id)?)?;
    vault
        .quota
        .held_by(volume)
        .doing("reading the usage of the disk")
}

/// The number of the subvolume.
pub fn volume_of(path: &Path) -> Result<u64> {
    let dir = btrfs::open_dir(path).doing_to("opening", path)?;
    btrfs::subvolume_id(dir.as_fd()).doing("asking for the id of the disk")
}

pub fn usage(vault: &Inner, id: &SandboxId) -> Result<u64> {
    let path = existing(vault, id)?;
    if vault.quota.kind != QuotaKind::None {
        let dir = btrfs::open_dir(&path).doing_to("opening", &path)?;
        let volume = btrfs::subvolume_id(dir.as_fd()).doing("asking for the id of the disk")?;
        let counted = vault
            .quota
            .usage(volume)
            .doing("reading the usage of the disk")?;
        if let Some(bytes) = counted {
            return Ok(bytes);
        }
    }
    // Nobody counts; the disk is a whole copy, so all of it is the box's.
    size_of_tree(&path)
}

pub fn remove(vault: &Inner, id: &SandboxId) -> Result<()> {
    vault.delete(&disk_path(vault, id))
}

pub fn list(vault: &Inner) -> Result<Vec<SandboxId>> {
    let dir = &vault.layout.disks;
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).doing_to("reading", dir)? {
        let name = entry.doing_to("reading", dir)?.file_name();
        match name.to_str().and_then(|name| name.parse().ok()) {
            Some(id) => out.push(id),
            None => tracing::warn!(?name, "not a disk of ours"),
        }
    }
    out.sort();
    Ok(out)
}

/// Bytes on disk, hard links once, never out of the file system.
pub fn size_of_tree(root: &Path) -> Result<u64> {
    let mut seen = std::collections::HashSet::new();
    let mut total = 0_u64;
    let device = fs::symlink_metadata(root)
        .doing_to("looking at", root)?
        .dev();
    let mut stack = vec![root.to_owned()];
    while let Some(dir) = stack.pop() {
        for entry in fs::read_dir(&dir).doing_to("reading", &dir)? {
            let entry = entry.doing_to("reading", &dir)?;
            // A running box may remove it under our eyes.
            let Ok(meta) = entry.metadata() else { continue };
            if meta.nlink() > 1 && !meta.is_dir() && !seen.insert(meta.ino()) {
                continue;
            }
            total = total.saturating_add(meta.blocks().saturating_mul(512));
            if meta.is_dir() && meta.dev() == device {
                stack.push(entry.path());
            }
        }
    }
    Ok(total)
}
