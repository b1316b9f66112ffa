//! What is different between two trees.
//!
//! Both are copies of one tree at different times: a file whose times (and, in directories,
//! number) are the same was not touched, so a box of any size is compared by its directories
//! alone. Links are never followed.

mod image;
mod reader;
mod side;

use sandkeep_model::{Error, Result};
use serde::{Deserialize, Serialize};
use similar::TextDiff;
use std::{
    io::{self, Read as _},
    path::{Path, PathBuf},
};

pub use reader::{DiskReader, main as disk_reader_main, read as diff_images};
pub use side::entries;
use side::{Directory, Kind, Node, Side};

/// A list longer than this helps nobody.
const MOST_CHANGES: usize = 10_000;
/// Files with a text diff are at most this large, and all diffs together.
const LARGEST_TEXT: u64 = 256 * 1024;
const ALL_TEXT: usize = 4 << 20;
/// Files of directories up to here are read before they are called changed; larger ones by
/// their times.
const LARGEST_COMPARED: u64 = 64 << 20;
/// Deeper trees than this name are looked at up to here.
const LONGEST_PATH: usize = 3500;
const CHUNK: usize = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// From the root, with a slash; bytes that are no text are replaced.
    pub path: String,
    pub kind: ChangeKind,
    pub bytes_before: Option<u64>,
    pub bytes_after: Option<u64>,
    /// A unified diff, if it was asked for and both sides are text.
    pub text: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diff {
    /// By path.
    pub changes: Vec<Change>,
    /// There are more than are listed.
    pub cut: bool,
}

struct Work<'a> {
    before: &'a dyn Side,
    after: &'a dyn Side,
    with_text: bool,
    text_left: usize,
    diff: Diff,
}

pub fn diff(before: &Path, after: &Path, with_text: bool) -> Result<Diff> {
    compare(&Directory(before), &Directory(after), with_text)
}

fn compare(before: &dyn Side, after: &dyn Side, with_text: bool) -> Result<Diff> {
    let mut work = Work {
        before,
        after,
        with_text,
        text_left: ALL_TEXT,
        diff: Diff::default(),
    };
    let mut stack = vec![(PathBuf::new(), true, true)];
    while let Some((dir, in_before, in_after)) = stack.pop() {
        if work.diff.changes.len() == MOST_CHANGES && work.diff.cut {
            break;
        }
        if dir.as_os_str().len() > LONGEST_PATH {
            work.diff.cut = true;
            continue;
        }
        let listed = |side: &dyn Side, is_there: bool| match is_there {
            true => side.entries(&dir),
            false => Ok(side::Entries::new()),
        };
        let old = listed(before, in_before)?;
        let new = listed(after, in_after)?;
        for (name, node) in &old {
            let path = dir.join(name);
            match new.get(name) {
                None => {
                    work.note(&path, Some(node), None);
                    if node.is_dir() {
                        stack.push((path, true, false));
                    }
                }
                Some(now) => work.both(path, node, now, &mut stack)?,
            }
        }
        for (name, node) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
            let path = dir.join(name);
            work.note(&path, None, Some(node));
            if node.is_dir() {
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
        before: &Node,
        after: &Node,
        stack: &mut Vec<(PathBuf, bool, bool)>,
    ) -> Result<()> {
        let owner = |node: &Node| (node.kind, node.mode, node.uid, node.gid);
        if before.is_dir() && after.is_dir() {
            if owner(before) != owner(after) {
                self.note(&path, Some(before), Some(after));
            }
            stack.push((path, true, true));
            return Ok(());
        }
        let alike = owner(before) == owner(after)
            && before.size == after.size
            && before.modified == after.modified;
        if alike && before.stamp == after.stamp {
            return Ok(());
        }
        if alike && self.same_content(&path, before)? {
            return Ok(());
        }
        self.note(&path, Some(before), Some(after));
        for (node, before, after) in [(before, true, false), (after, false, true)] {
            if node.is_dir() {
                stack.push((path.clone(), before, after));
            }
        }
        Ok(())
    }

    /// Both are of one kind and size.
    fn same_content(&self, path: &Path, node: &Node) -> Result<bool> {
        match node.kind {
            Kind::Link => Ok(self.before.link(path)? == self.after.link(path)?),
            // Their times are believed of files that take long to read; in images those tell of
            // reading, too.
            Kind::File if !node.is_in_image() && node.size > LARGEST_COMPARED => Ok(false),
            Kind::File => same_bytes(&mut self.before.open(path)?, &mut self.after.open(path)?)
                .map_err(|error| {
                    Error::from(error).context(format_args!("reading /{}", path.display()))
                }),
            // Nothing but what was compared already is in those of an image.
            Kind::Dir | Kind::Other => Ok(node.is_in_image()),
        }
    }

    fn note(&mut self, path: &Path, before: Option<&Node>, after: Option<&Node>) {
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
        let size = |node: &Node| if node.is_dir() { 0 } else { node.size };
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
        before: Option<&Node>,
        after: Option<&Node>,
    ) -> Option<String> {
        let plain = |node: Option<&Node>| {
            node.is_none_or(|node| node.kind == Kind::File && node.size <= LARGEST_TEXT)
        };
        if !self.with_text || !plain(before) || !plain(after) {
            return None;
        }
        let read = |node: Option<&Node>, side: &dyn Side| match node {
            None => Some(String::new()),
            Some(_) => read_text(side, path),
        };
        let (old, new) = (read(before, self.before)?, read(after, self.after)?);
        let name = |node: Option<&Node>, side: &str| match node {
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

fn same_bytes(before: &mut dyn io::Read, after: &mut dyn io::Read) -> io::Result<bool> {
    let (mut old, mut new) = (vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let count = fill(before, &mut old)?;
        if fill(after, &mut new)? != count || old[..count] != new[..count] {
            return Ok(false);
        }
        if count < CHUNK {
            return Ok(true);
        }
    }
}

fn fill(from: &mut dyn io::Read, into: &mut [u8]) -> io::Result<usize> {
    let mut there = 0;
    while there < into.len() {
        match from.read(&mut into[there..]) {
            Ok(0) => break,
            Ok(count) => there += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(there)
}

fn read_text(side: &dyn Side, path: &Path) -> Option<String> {
    let mut text = String::new();
    side.open(path)
        .ok()?
        .take(LARGEST_TEXT)
        .read_to_string(&mut text)
        .ok()?;
    (!text.contains('\0')).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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
