//! Where the memory of a point is written: a subvolume of its own, so that the kernel counts what
//! is written to it and refuses what passes its bound, while it is written.
//!
//! How large an image becomes is not known before: processes that share memory are written one by
//! one, and so are deleted files that share blocks. A program could have one written of a
//! thousand times what it is allowed to have.

use sandkeep_model::{Code, Error, Result, SandboxId, Timestamp, human_bytes};
use std::{
    fs,
    os::{
        fd::AsFd as _,
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::Path,
};

use crate::{
    btrfs,
    doing::Doing as _,
    point::{self, PointDraft},
    vault::{Inner, Vault},
};

/// A write is refused as a whole: so near to its bound an image has reached it.
const NEARLY: u64 = 16 << 20;
/// The names of deleted files in an image begin so.
const DELETED_FILE: &[u8] = b"ghost-file-";
/// What else is written where files come back: names, directories, tables of the file system.
const BESIDE: u64 = 4 << 20;
/// The same for each of them.
const FOR_A_NAME: u64 = 8 << 10;

/// The directory of a memory, which takes `most` bytes. Zero means no bound of its own.
pub fn make(vault: &Inner, path: &Path, most: u64) -> Result<()> {
    let_images_have(vault)?;
    btrfs::create_subvolume(path).doing("making a place for memory")?;
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .doing_to("closing", path)?;
    let dir = btrfs::open_dir(path).doing_to("opening", path)?;
    let volume = btrfs::subvolume_id(dir.as_fd()).doing("asking for the id of a memory")?;
    vault
        .quota
        .adopt_image(dir.as_fd(), volume, most)
        .doing("limiting what is written of a memory")
}

/// Has what is written to this subvolume end where images do: it must not make the storage low.
pub fn count_as_image(vault: &Inner, path: &Path) -> Result<()> {
    let_images_have(vault)?;
    let dir = btrfs::open_dir(path).doing_to("opening", path)?;
    let volume = btrfs::subvolume_id(dir.as_fd()).doing("asking for the id of a disk")?;
    vault
        .quota
        .count_as_image(dir.as_fd(), volume)
        .doing("limiting what a trial writes")
}

/// Has all images together take no more than what leaves the storage well, as of now.
fn let_images_have(vault: &Inner) -> Result<()> {
    let space = vault.pool.space()?;
    let more = space.free.saturating_sub(space.left_by_images());
    let root = &vault.pool.root;
    let dir = btrfs::open_dir(root).doing_to("opening", root)?;
    vault
        .quota
        .limit_images(dir.as_fd(), more, 0)
        .doing("limiting all images together")
}

/// Why an image could not be written, if it is that there was no room for it.
fn no_room(vault: &Inner, path: &Path, most: u64) -> Result<Option<Error>> {
    let dir = btrfs::open_dir(path).doing_to("opening", path)?;
    let volume = btrfs::subvolume_id(dir.as_fd()).doing("asking for the id of a memory")?;
    let room = vault.quota.image_room(volume).doing("looking for room")?;
    let Some(room) = room else { return Ok(None) };
    if most > 0 && room.own < NEARLY && room.own <= room.together {
        let text = format!(
            "its image would be larger than {}, which is what its memory and its disk may have together: \
             processes that share memory, and deleted files that share blocks, are written one by one",
            human_bytes(most)
        );
        return Ok(Some(Error::new(Code::NotEnforceable, text).hint(
            "end processes of it, close deleted files, or give it larger limits",
        )));
    }
    if room.together < NEARLY {
        return Ok(Some(point::no_room_for_images(vault)?));
    }
    Ok(None)
}

/// What it may take to bring back the deleted files in an image, and no more: programs run for a
/// moment before the limit is what it was, and write what it leaves.
pub fn to_bring_back(image: &Path) -> Result<u64> {
    let mut bytes = BESIDE;
    for entry in fs::read_dir(image).doing("looking at the image")? {
        let entry = entry.doing("looking at the image")?;
        if entry.file_name().as_bytes().starts_with(DELETED_FILE) {
            let blocks = entry.metadata().doing("looking at the image")?.blocks();
            bytes = bytes
                .saturating_add(blocks.saturating_mul(512))
                .saturating_add(FOR_A_NAME);
        }
    }
    Ok(bytes)
}

/// An image that is kept, and of whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptImage {
    pub sandbox: SandboxId,
    pub bytes: u64,
    pub made: Timestamp,
}

impl Vault {
    /// An empty directory for the memory in a draft, which takes `most` bytes (zero: as many as
    /// there is room for) and is refused more by the kernel.
    pub async fn memory_of_at_most(
        &self,
        draft: PointDraft,
        most: u64,
    ) -> Result<(PointDraft, std::path::PathBuf)> {
        self.run(move |_| {
            let path = draft.memory(most)?;
            Ok((draft, path))
        })
        .await
    }

    /// Why the memory in a draft could not be written, where the cause is that it has no room.
    pub async fn why_no_memory(&self, draft: PointDraft, most: u64) -> Option<Error> {
        let why = self
            .run(move |vault| no_room(vault, &draft.memory_path(), most))
            .await;
        why.unwrap_or_else(|error| {
            tracing::debug!(%error, "looking why a memory was not written");
            None
        })
    }

    /// Lets the disk of a sandbox take what it takes to bring its processes back from `image`, above
    /// `limit` and above what it holds: deleted files that were open become files again, each on
    /// its own. To be limited again before anybody relies on it.
    pub async fn limit_for_wake(&self, id: &SandboxId, limit: u64, image: &Path) -> Result<()> {
        let (id, image) = (id.clone(), image.to_owned());
        self.run(move |vault| {
            if limit == 0 {
                return Ok(());
            }
            let held = crate::disk::held(vault, &id)?.unwrap_or(0);
            let most = limit.max(held).saturating_add(to_bring_back(&image)?);
            crate::disk::set_limit(vault, &id, most)
        })
        .await
    }

    /// All memory that is kept in points.
    pub async fn images(&self) -> Result<Vec<KeptImage>> {
        self.run(|vault| {
            let mut found = Vec::new();
            for id in point::list(vault)? {
                // One may be deleted under our eyes.
                found.extend(point::image_of(vault, &id).ok().flatten());
            }
            Ok(found)
        })
        .await
    }
}
