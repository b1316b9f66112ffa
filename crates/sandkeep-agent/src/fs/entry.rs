//! What there is to know about one file, in the shape the SDKs expect.

use super::metadata;
use super::names::Names;
use sandkeep_agent_api::Timestamp;
use sandkeep_agent_api::filesystem::{EntryInfo, FileType};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const TYPE_MASK: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const FIFO: u32 = 0o010_000;
const SOCKET: u32 = 0o140_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const BLOCK_DEVICE: u32 = 0o060_000;

/// Describes the file at `path`; the reply calls it by the same path.
pub(crate) fn describe(path: &Path, names: &Names) -> io::Result<EntryInfo> {
    let meta = std::fs::symlink_metadata(path)?;
    let mut entry = EntryInfo {
        name: base_name(path),
        file_type: file_type(meta.mode()),
        path: path.to_string_lossy().into_owned(),
        size: i64::try_from(size(&meta)).unwrap_or(i64::MAX),
        mode: meta.mode() & 0o777,
        permissions: permissions(meta.mode()),
        owner: names.user(meta.uid()),
        group: names.group(meta.gid()),
        modified_time: Some(modified(&meta)),
        symlink_target: None,
        is_symlink: false,
        metadata: metadata::read(path),
    };
    if meta.is_symlink() {
        // A link is described by what it leads to; one that leads nowhere is just a link. Clients
        // leave out of a list what has no type.
        let target = std::fs::metadata(path).ok();
        entry.is_symlink = target.is_none();
        let mode = target.map_or(0, |target| target.mode());
        entry.file_type = if entry.is_symlink {
            FileType::Symlink
        } else {
            file_type(mode)
        };
        entry.mode = mode & 0o777;
        entry.symlink_target = Some(link_target(path));
    }
    Ok(entry)
}

/// What a directory takes is a matter of its file system, and 0 for an empty one on btrfs. Clients
/// know whole blocks.
fn size(meta: &Metadata) -> u64 {
    const BLOCK: u64 = 4096;
    if meta.is_dir() {
        meta.len().max(1).next_multiple_of(BLOCK)
    } else {
        meta.len()
    }
}

/// The last component, or the path itself for `/`.
pub(crate) fn base_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// A few words for what is not a regular file.
pub(crate) fn kind_in_words(mode: u32) -> &'static str {
    match mode & TYPE_MASK {
        DIRECTORY => "directory",
        REGULAR => "regular file",
        SYMLINK => "symbolic link",
        FIFO => "named pipe",
        SOCKET => "socket",
        CHARACTER_DEVICE => "character device",
        BLOCK_DEVICE => "block device",
        _ => "special file",
    }
}

fn file_type(mode: u32) -> FileType {
    match mode & TYPE_MASK {
        DIRECTORY => FileType::Directory,
        REGULAR => FileType::File,
        SYMLINK => FileType::Symlink,
        _ => FileType::Unspecified,
    }
}

fn modified(meta: &Metadata) -> Timestamp {
    Timestamp::new(meta.mtime(), u32::try_from(meta.mtime_nsec()).unwrap_or(0))
}

/// Where a link leads, fully resolved if it leads anywhere.
fn link_target(path: &Path) -> String {
    let target = std::fs::canonicalize(path).or_else(|_| {
        let parent = path.parent().unwrap_or(Path::new("/"));
        std::fs::read_link(path).map(|target| parent.join(target))
    });
    target.map_or_else(
        |_| path.to_string_lossy().into_owned(),
        |target| target.to_string_lossy().into_owned(),
    )
}

/// The permissions as the E2B clients know them: letters for everything that
/// is special about the file, `-` if nothing is, then the nine usual ones.
fn permissions(mode: u32) -> String {
    let mut text = String::with_capacity(10);
    text.push_str(match mode & TYPE_MASK {
        DIRECTORY => "d",
        SYMLINK => "L",
        BLOCK_DEVICE | CHARACTER_DEVICE => "D",
        FIFO => "p",
        SOCKET => "S",
        _ => "",
    });
    for (set, letter) in [
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (mode & TYPE_MASK == CHARACTER_DEVICE, 'c'),
        (mode & 0o1000 != 0, 't'),
    ] {
        if set {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (bit, letter) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode & (1 << bit) != 0 { letter } else { '-' });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_spelled_as_clients_know_them() {
        assert_eq!(permissions(REGULAR | 0o644), "-rw-r--r--");
        assert_eq!(permissions(DIRECTORY | 0o755), "drwxr-xr-x");
        assert_eq!(permissions(SYMLINK | 0o777), "Lrwxrwxrwx");
        assert_eq!(permissions(DIRECTORY | 0o1777), "dtrwxrwxrwx");
        assert_eq!(permissions(REGULAR | 0o4755), "urwxr-xr-x");
        assert_eq!(permissions(CHARACTER_DEVICE | 0o666), "Dcrw-rw-rw-");
    }

    #[test]
    fn links_are_described_by_what_they_lead_to() {
        let dir = tempfile::tempdir().expect("dir");
        let root = dir.path().canonicalize().expect("root");
        std::fs::write(root.join("file"), "12345").expect("write");
        std::os::unix::fs::symlink("file", root.join("link")).expect("link");
        std::os::unix::fs::symlink("second", root.join("dangling")).expect("link");
        std::os::unix::fs::symlink("loop", root.join("loop")).expect("link");
        let names = Names::load();

        let link = describe(&root.join("link"), &names).expect("link");
        assert_eq!(link.file_type, FileType::File);
        assert_eq!(link.mode, 0o644);
        assert_eq!(link.permissions, "Lrwxrwxrwx");
        assert_eq!(link.size, 4);
        let target = root.join("file").to_string_lossy().into_owned();
        assert_eq!(link.symlink_target, Some(target));

        for (name, leads_to) in [("dangling", "second"), ("loop", "loop")] {
            let entry = describe(&root.join(name), &names).expect("entry");
            assert_eq!(entry.file_type, FileType::Symlink);
            assert!(entry.is_symlink);
            let target = root.join(leads_to).to_string_lossy().into_owned();
            assert_eq!(entry.symlink_target, Some(target));
        }
        let file = describe(&root.join("file"), &names).expect("file");
        assert_eq!((file.name.as_str(), file.size), ("file", 5));
        assert_eq!(file.symlink_target, None);
        assert!(!file.is_symlink && !link.is_symlink);
    }
}
