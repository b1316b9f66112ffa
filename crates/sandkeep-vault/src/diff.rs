//! What is different between two trees.
//!
//! Both are read-only snapshots that share their inode numbers: a file whose number and
//! change time are the same was not touched, so a box of any size is compared by its
//! directories alone. Links are never followed.

use sandkeep_model::Result;
use similar::TextDiff;
use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, Metadata},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::doing::Doing as _;

/// A list longer than this helps nobody.
const MOST_CHANGES: usize = 10_000;
/// Files with a text diff are at most this large, and all diffs together.
const LARGEST_TEXT: u64 = 256 * 1024;
const ALL_TEXT: usize = 4 << 20;
/// Files up to here are read before they are called changed; larger ones by their times.
const LARGEST_COMPARED: u64 = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    Added,
    Removed,
    Changed,
}

impl ChangeKind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
        }
    }
}

/// One path that is different.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// From the root, with a slash; bytes that are no text are replaced.
    pub path: String,
    pub kind: ChangeKind,
    pub bytes_before: Option<u64>,
    pub bytes_after: Option<u64>,
    /// A unified diff, if it was asked for and both sides are text.
    pub text: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diff {
    /// By path.
    pub changes: Vec<Change>,
    /// There are more than are listed.
    pub cut: bool,
}

struct Work<'a> {
    before: &'a Path,
    after: &'a Path,
    with_text: bool,
    text_left: usize,
    diff: Diff,
}

pub fn diff(before: &Path, after: &Path, with_text: bool) -> Result<Diff> {
    let mut work = Work {
        before,
        after,
        with_text,
        text_left: ALL_TEXT,
        diff: Diff::default(),
    };
    let mut stack = vec![(PathBuf::new(), true, true)];
    while let Some((dir, in_before, in_after)) = stack.pop() {
        if work.diff.cut {
            break;
        }
        let old = entries(in_before.then(|| before.join(&dir)))?;
        let new = entries(in_after.then(|| after.join(&dir)))?;
        for (name, meta) in &old {
            let path = dir.join(name);
            match new.get(name) {
                None => {
                    work.note(&path, Some(meta), None);
                    if meta.is_dir() {
                        stack.push((path, true, false));
                    }
                }
                Some(now) => work.both(path, meta, now, &mut stack)?,
            }
        }
        for (name, meta) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
            let path = dir.join(name);
            work.note(&path, None, Some(meta));
            if meta.is_dir() {
                stack.push((path, false, true));
            }
        }
    }
    work.diff.changes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(work.diff)
}

impl Work<'_> {
    fn both(
        &mut self,
        path: PathBuf,
        before: &Metadata,
        after: &Metadata,
        stack: &mut Vec<(PathBuf, bool, bool)>,
    ) -> Result<()> {
        let owner = |meta: &Metadata| (meta.mode(), meta.uid(), meta.gid());
        if before.is_dir() && after.is_dir() {
            if owner(before) != owner(after) {
                self.note(&path, Some(before), Some(after));
            }
            stack.push((path, true, true));
            return Ok(());
        }
        let stamp = |meta: &Metadata| (meta.ino(), meta.ctime(), meta.ctime_nsec(), meta.size());
        if stamp(before) == stamp(after) && owner(before) == owner(after) {
            return Ok(());
        }
        let same = owner(before) == owner(after)
            && before.size() == after.size()
            && same_content(&self.before.join(&path), &self.after.join(&path), before)?;
        if !same {
            self.note(&path, Some(before), Some(after));
            for (meta, before, after) in [(before, true, false), (after, false, true)] {
                if meta.is_dir() {
                    stack.push((path.clone(), before, after));
                }
            }
        }
        Ok(())
    }

    fn note(&mut self, path: &Path, before: Option<&Metadata>, after: Option<&Metadata>) {
        if self.diff.changes.len() == MOST_CHANGES {
            self.diff.cut = true;
            return;
        }
        let kind = match (before, after) {
            (None, _) => ChangeKind::Added,
            (_, None) => ChangeKind::Removed,
            _ => ChangeKind::Changed,
        };
        let shown = format!("/{}", path.to_string_lossy());
        let text = self.text(path, &shown, before, after);
        let size = |meta: &Metadata| if meta.is_dir() { 0 } else { meta.size() };
        self.diff.changes.push(Change {
            path: shown,
            kind,
            bytes_before: before.map(size),
            bytes_after: after.map(size),
            text,
        });
    }

    fn text(
        &mut self,
        path: &Path,
        shown: &str,
        before: Option<&Metadata>,
        after: Option<&Metadata>,
    ) -> Option<String> {
        let plain =
            |meta: Option<&Metadata>| meta.is_none_or(|m| m.is_file() && m.size() <= LARGEST_TEXT);
        if !self.with_text || !plain(before) || !plain(after) {
            return None;
        }
        let read = |meta: Option<&Metadata>, root: &Path| match meta {
            None => Some(String::new()),
            Some(_) => read_text(&root.join(path)),
        };
        let (old, new) = (read(before, self.before)?, read(after, self.after)?);
        let name = |meta: Option<&Metadata>, side: &str| match meta {
            None => "/dev/null".to_owned(),
            Some(_) => format!("{side}{shown}"),
        };
        let text = TextDiff::from_lines(&old, &new)
            .unified_diff()
            .header(&name(before, "a"), &name(after, "b"))
            .to_string();
        if text.is_empty() || text.len() > self.text_left {
            return None;
        }
        self.text_left -= text.len();
        Some(text)
    }
}

/// What is in a directory, by name.
pub fn entries(dir: Option<PathBuf>) -> Result<BTreeMap<OsString, Metadata>> {
    let mut out = BTreeMap::new();
    let Some(dir) = dir else {
        return Ok(out);
    };
    for entry in fs::read_dir(&dir).doing_to("reading", &dir)? {
        let entry = entry.doing_to("reading", &dir)?;
        let meta = entry.metadata().doing_to("looking at", &entry.path())?;
        out.insert(entry.file_name(), meta);
    }
    Ok(out)
}

fn same_content(before: &Path, after: &Path, meta: &Metadata) -> Result<bool> {
    if meta.is_symlink() {
        return Ok(fs::read_link(before).ok() == fs::read_link(after).ok());
    }
    let is_file = fs::symlink_metadata(after)
        .doing_to("looking at", after)?
        .is_file();
    if !meta.is_file() || !is_file || meta.size() > LARGEST_COMPARED {
        return Ok(false);
    }
    let read = |path: &Path| fs::read(path).doing_to("reading", path);
    Ok(read(before)? == read(after)?)
}

fn read_text(path: &Path) -> Option<String> {
    let read = || -> io::Result<String> {
        let mut text = String::new();
        fs::File::open(path)?
            .take(LARGEST_TEXT)
            .read_to_string(&mut text)?;
        Ok(text)
    };
    read().ok().filter(|text| !text.contains('\0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_is_listed_and_shown() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        for root in [&a, &b] {
            fs::create_dir_all(root.join("etc")).unwrap();
            fs::write(root.join("etc/same"), "same\n").unwrap();
            fs::write(root.join("etc/conf"), "one\ntwo\n").unwrap();
            std::os::unix::fs::symlink("/etc/shadow", root.join("link")).unwrap();
        }
        fs::write(b.join("etc/conf"), "one\nthree\n").unwrap();
        fs::create_dir(b.join("new")).unwrap();
        fs::write(b.join("new/file"), [0, 1, 2]).unwrap();
        fs::write(a.join("old"), "bye\n").unwrap();

        let found = diff(&a, &b, true).unwrap();
        assert!(!found.cut);
        let told: Vec<_> = found
            .changes
            .iter()
            .map(|c| (c.path.as_str(), c.kind, c.bytes_before, c.bytes_after))
            .collect();
        use ChangeKind::{Added, Changed, Removed};
        assert_eq!(
            told,
            [
                ("/etc/conf", Changed, Some(8), Some(10)),
                ("/new", Added, None, Some(0)),
                ("/new/file", Added, None, Some(3)),
                ("/old", Removed, Some(4), None),
            ]
        );
        let text = found.changes[0].text.as_deref().unwrap();
        assert!(
            text.starts_with("--- a/etc/conf\n+++ b/etc/conf\n"),
            "{text}"
        );
        assert!(text.contains("-two\n+three\n"), "{text}");
        assert_eq!(found.changes[2].text, None, "bytes are not shown");
        assert!(
            found.changes[3]
                .text
                .as_deref()
                .unwrap()
                .contains("+++ /dev/null")
        );
        assert_eq!(diff(&a, &a, true).unwrap(), Diff::default());
    }
}
