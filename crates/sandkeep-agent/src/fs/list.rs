//! Listing a directory to some depth.

use super::entry::describe;
use super::names::Names;
use sandkeep_agent_api::filesystem::EntryInfo;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// The most entries one reply holds.
pub(crate) const MAX_ENTRIES: usize = 100_000;

/// Why there is no listing.
#[derive(Debug)]
pub(crate) enum ListError {
    Io(io::Error),
    TooMany,
}

/// A directory being walked: where, and the names still to visit.
struct Level {
    dir: PathBuf,
    names: std::vec::IntoIter<OsString>,
}

/// Everything below `root` down to `depth` levels, parents before children,
/// names in byte order, links not followed.
pub(crate) fn list(
    root: &Path,
    depth: u32,
    names: &Names,
    max_entries: usize,
) -> Result<Vec<EntryInfo>, ListError> {
    let mut entries = Vec::new();
    // Counts what is waiting too, so a directory of millions stops early.
    let mut found = 0;
    let first = read_sorted(root, max_entries, &mut found)?;
    let mut stack = vec![Level {
        dir: root.to_path_buf(),
        names: first,
    }];
    while let Some(level) = stack.last_mut() {
        let Some(name) = level.names.next() else {
            stack.pop();
            continue;
        };
        let path = level.dir.join(name);
        // Gone since its directory was read, or too deep to be named.
        let Ok(entry) = describe(&path, names) else {
            continue;
        };
        let is_directory = entry.symlink_target.is_none()
            && entry.file_type == sandkeep_agent_api::filesystem::FileType::Directory;
        entries.push(entry);
        let deeper = u32::try_from(stack.len()).unwrap_or(u32::MAX) < depth.max(1);
        if !(is_directory && deeper) {
            continue;
        }
        match read_sorted(&path, max_entries, &mut found) {
            Ok(names) => stack.push(Level { dir: path, names }),
            Err(ListError::TooMany) => return Err(ListError::TooMany),
            Err(ListError::Io(_)) => {}
        }
    }
    Ok(entries)
}

fn read_sorted(
    dir: &Path,
    max_entries: usize,
    found: &mut usize,
) -> Result<std::vec::IntoIter<OsString>, ListError> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(ListError::Io)? {
        // A directory that breaks off is shown as far as it could be read.
        let Ok(entry) = entry else { break };
        *found += 1;
        if *found > max_entries {
            return Err(ListError::TooMany);
        }
        names.push(entry.file_name());
    }
    names.sort_unstable();
    Ok(names.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("dir");
        std::fs::create_dir_all(dir.path().join("b/deep/deeper")).expect("dirs");
        for file in ["a", "c", "b/z", "b/deep/x", "b.txt"] {
            std::fs::write(dir.path().join(file), "").expect("file");
        }
        std::os::unix::fs::symlink("b", dir.path().join("link")).expect("link");
        dir
    }

    fn names(dir: &Path, depth: u32) -> Vec<String> {
        let prefix = format!("{}/", dir.display());
        list(dir, depth, &Names::load(), MAX_ENTRIES)
            .expect("list")
            .into_iter()
            .map(|entry| entry.path.strip_prefix(&prefix).expect("prefix").to_owned())
            .collect()
    }

    #[test]
    fn parents_come_before_children_in_byte_order() {
        let dir = tree();
        let flat = ["a", "b", "b.txt", "c", "link"];
        assert_eq!(names(dir.path(), 0), flat);
        assert_eq!(names(dir.path(), 1), flat);
        let two = ["a", "b", "b/deep", "b/z", "b.txt", "c", "link"];
        assert_eq!(names(dir.path(), 2), two);
        let all = names(dir.path(), u32::MAX);
        assert_eq!(all.len(), 9);
        assert!(!all.iter().any(|name| name.starts_with("link/")));
    }

    #[test]
    fn names_that_are_not_text_are_shown_lossily() {
        let dir = tempfile::tempdir().expect("dir");
        let odd = OsString::from_vec(vec![b'x', 0xff]);
        std::fs::write(dir.path().join(odd), "").expect("file");
        assert_eq!(names(dir.path(), 1), ["x\u{fffd}"]);
    }

    #[test]
    fn too_many_entries_are_refused() {
        let dir = tree();
        let names = Names::load();
        assert!(list(dir.path(), 1, &names, 5).is_ok());
        let refused = list(dir.path(), 2, &names, 5);
        assert!(matches!(refused, Err(ListError::TooMany)));
        let missing = list(&dir.path().join("a"), 1, &names, 5);
        assert!(matches!(missing, Err(ListError::Io(_))));
    }
}
