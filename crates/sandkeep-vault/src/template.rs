//! Templates: a directory with the read-only root and a small file that says what it is.

use sandkeep_model::{Error, Result, TemplateName, Timestamp};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use crate::{
    btrfs,
    disk::size_of_tree,
    doing::Doing as _,
    pool::PoolKind,
    staging::{Staged, make_private_dir},
    vault::Inner,
};

const ROOT: &str = "root";
const MANIFEST: &str = "template.json";
/// Ours are some hundred bytes; whatever is larger was not written by us.
const MAX_MANIFEST: u64 = 64 * 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateInfo {
    pub name: TemplateName,
    /// The read-only root directory.
    pub path: PathBuf,
    pub size_bytes: u64,
    /// Where it came from, in words.
    pub origin: String,
    pub created_at: Timestamp,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    origin: String,
    size_bytes: u64,
    created_at: Timestamp,
}

pub fn not_found(name: &TemplateName) -> Error {
    Error::not_found(format!("template \"{name}\" was not found"))
        .field("template")
        .hint("list them with `sandkeep template ls`, or make the base with `sandkeep template build`")
}

pub fn find(vault: &Inner, name: &TemplateName) -> Result<Option<TemplateInfo>> {
    read(&vault.layout.templates.join(name.as_str()), name)
}

fn read(dir: &Path, name: &TemplateName) -> Result<Option<TemplateInfo>> {
    use std::io::Read as _;
    let path = dir.join(MANIFEST);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.doing_to("opening", &path)?,
    };
    let mut text = String::new();
    file.take(MAX_MANIFEST)
        .read_to_string(&mut text)
        .doing_to("reading", &path)?;
    let manifest: Manifest = serde_json::from_str(&text).map_err(|error| {
        Error::internal(format!("{} is damaged: {error}", path.display()))
            .hint("remove the template and make it again")
    })?;
    Ok(Some(TemplateInfo {
        name: name.clone(),
        path: dir.join(ROOT),
        size_bytes: manifest.size_bytes,
        origin: manifest.origin,
        created_at: manifest.created_at,
    }))
}

pub fn list(vault: &Inner) -> Result<Vec<TemplateInfo>> {
    let dir = &vault.layout.templates;
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).doing_to("reading", dir)? {
        let entry = entry.doing_to("reading", dir)?;
        let Some(name) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        match read(&entry.path(), &name) {
            Ok(Some(info)) => out.push(info),
            Ok(None) => {}
            // One damaged template must not hide the others.
            Err(error) => tracing::warn!(%error, template = %name, "template left out"),
        }
    }
    out.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(out)
}

/// Boxes made from it keep their disks: a snapshot does not need its source.
pub fn remove(vault: &Inner, name: &TemplateName) -> Result<()> {
    let dir = vault.layout.templates.join(name.as_str());
    let staged = vault.layout.stage(&vault.quota);
    match fs::rename(&dir, &staged.path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_found(name)),
        Err(error) => return Err(error).doing_to("removing", &dir),
    }
    vault.layout.remove(&staged.path, &vault.quota)
}

/// A template being made: fill [`Draft::root`], then publish it.
#[derive(Debug)]
pub struct Draft<'a> {
    vault: &'a Inner,
    staged: Staged<'a>,
}

impl<'a> Draft<'a> {
    pub fn begin(vault: &'a Inner) -> Result<Self> {
        vault.check_room()?;
        let staged = vault.layout.stage(&vault.quota);
        make_private_dir(&staged.path)?;
        let root = staged.path.join(ROOT);
        if vault.pool.kind == PoolKind::PlainDirectory {
            make_private_dir(&root)?;
        } else {
            btrfs::create_subvolume(&root).doing_to("making a subvolume in", &staged.path)?;
        }
        open_to_all(&root)?;
        Ok(Self { vault, staged })
    }

    pub fn root(&self) -> PathBuf {
        self.staged.path.join(ROOT)
    }

    /// Makes it read-only, brings it to the disk, and gives it its name in one step.
    pub fn publish(self, name: &TemplateName, origin: &str, replace: bool) -> Result<TemplateInfo> {
        let root = self.root();
        let manifest = Manifest {
            origin: origin.to_owned(),
            size_bytes: size_of_tree(&root)?,
            created_at: Timestamp::now(),
        };
        let text = serde_json::to_vec(&manifest)
            .map_err(|error| Error::internal(format!("writing the manifest: {error}")))?;
        let path = self.staged.path.join(MANIFEST);
        File::create(&path)
            .and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()))
            .doing_to("writing", &path)?;
        if self.vault.pool.kind != PoolKind::PlainDirectory {
            btrfs::set_read_only(&root, true).doing_to("making read-only", &root)?;
        }
        self.vault.sync()?;
        let target = self.vault.layout.templates.join(name.as_str());
        if replace {
            self.staged.commit_over(&target)?;
        } else if !self.staged.commit(&target)? {
            return Err(taken(name));
        }
        self.vault.sync()?;
        read(&target, name)?.ok_or_else(|| not_found(name))
    }
}

pub fn taken(name: &TemplateName) -> Error {
    Error::conflict(format!("template \"{name}\" already exists"))
        .field("template")
        .hint("remove it first with `sandkeep template rm`, or choose another name")
}

/// The root of a box must be walkable for its users; its parents stay closed.
fn open_to_all(root: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(root, fs::Permissions::from_mode(0o755)).doing_to("opening", root)
}
