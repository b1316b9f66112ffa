//! Templates: a directory with the read-only root and a small file that says what it is.

use sandkeep_model::{Built, Error, PointId, Result, TemplateName, Timestamp};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use crate::{
    btrfs,
    disk::{copy_tree, size_of_tree},
    doing::Doing as _,
    point,
    pool::PoolKind,
    staging::{Staged, make_private_dir},
    vault::Inner,
};

const ROOT: &str = "root";
const MANIFEST: &str = "template.json";
/// What a build said, line by line, beside the manifest.
const LOG: &str = "build.log";
/// An empty file: the mark of a public one. Beside the manifest, so that to mark a template
/// can not meet a build that replaces it halfway.
const PUBLIC: &str = "public";
/// Ours hold an environment at most; whatever is larger was not written by us.
const MAX_MANIFEST: u64 = 8 << 20;
/// What is read of a log.
const MAX_LOG: u64 = 32 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateInfo {
    pub name: TemplateName,
    /// The read-only root directory.
    pub path: PathBuf,
    pub size_bytes: u64,
    /// Where it came from, in words.
    pub origin: String,
    pub created_at: Timestamp,
    /// Set when it was built from a recipe.
    pub built: Option<Built>,
    /// A mark of clients of E2B.
    pub public: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    origin: String,
    size_bytes: u64,
    created_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    built: Option<Built>,
}

/// The files a template is made of.
#[derive(Debug, Clone)]
pub enum Ground {
    Template(TemplateName),
    Point(PointId),
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
        built: manifest.built,
        public: dir.join(PUBLIC).exists(),
    }))
}

pub fn mark(vault: &Inner, name: &TemplateName, public: bool) -> Result<()> {
    let dir = vault.layout.templates.join(name.as_str());
    let path = dir.join(PUBLIC);
    let done = if public {
        File::create(&path).map(drop)
    } else {
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && dir.exists() => Ok(()),
            other => other,
        }
    };
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(not_found(name)),
        other => other.doing_to("marking", &path)?,
    }
    File::open(&dir)
        .and_then(|dir| dir.sync_all())
        .doing_to("syncing", &dir)
}

/// What its build said; empty when there is nothing.
pub fn read_log(vault: &Inner, name: &TemplateName) -> Result<Vec<u8>> {
    use std::io::Read as _;
    let path = vault.layout.templates.join(name.as_str()).join(LOG);
    let file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.doing_to("opening", &path)?,
    };
    let mut text = Vec::new();
    file.take(MAX_LOG)
        .read_to_end(&mut text)
        .doing_to("reading", &path)?;
    Ok(text)
}

/// Gives files their name as a template, over one that has it already. The old one is there
/// until the new one is whole.
pub fn publish(
    vault: &Inner,
    ground: &Ground,
    name: &TemplateName,
    built: Built,
    log: &[u8],
) -> Result<TemplateInfo> {
    // The files of a template are counted already; counting takes seconds.
    let (source, size) = match ground {
        Ground::Template(name) => {
            let found = find(vault, name)?.ok_or_else(|| not_found(name))?;
            (found.path, Some(found.size_bytes))
        }
        Ground::Point(id) => (point::find(vault, id)?.disk, None),
    };
    vault.check_room()?;
    let staged = vault.layout.stage(&vault.quota);
    make_private_dir(&staged.path)?;
    let root = staged.path.join(ROOT);
    if vault.pool.kind == PoolKind::PlainDirectory {
        copy_tree(&source, &root)?;
    } else {
        btrfs::snapshot(&source, &root).doing_to("taking a snapshot of", &source)?;
    }
    write_durably(&staged.path.join(LOG), log)?;
    let origin = format!("built from {}", built.from);
    Draft { vault, staged }.publish_built(name, &origin, size, Some(built), true)
}

fn write_durably(path: &Path, text: &[u8]) -> Result<()> {
    File::create(path)
        .and_then(|mut file| file.write_all(text).and_then(|()| file.sync_all()))
        .doing_to("writing", path)
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
    vault.delete(&staged.path)
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

    pub fn publish(self, name: &TemplateName, origin: &str, replace: bool) -> Result<TemplateInfo> {
        self.publish_built(name, origin, None, None, replace)
    }

    /// Makes it read-only, brings it to the disk, and gives it its name in one step.
    fn publish_built(
        self,
        name: &TemplateName,
        origin: &str,
        size: Option<u64>,
        built: Option<Built>,
        replace: bool,
    ) -> Result<TemplateInfo> {
        let root = self.root();
        let manifest = Manifest {
            origin: origin.to_owned(),
            size_bytes: match size {
                Some(size) => size,
                None => size_of_tree(&root)?,
            },
            created_at: Timestamp::now(),
            built,
        };
        let text = serde_json::to_vec(&manifest)
            .map_err(|error| Error::internal(format!("writing the manifest: {error}")))?;
        write_durably(&self.staged.path.join(MANIFEST), &text)?;
        if self.vault.pool.kind != PoolKind::PlainDirectory {
            btrfs::set_read_only(&root, true).doing_to("making read-only", &root)?;
        }
        let target = self.vault.layout.templates.join(name.as_str());
        if replace && target.join(PUBLIC).exists() {
            write_durably(&self.staged.path.join(PUBLIC), b"")?;
        }
        self.vault.sync()?;
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
