//! What is mounted where, read from `/proc/self/mountinfo`.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub point: PathBuf,
    pub kind: String,
    pub source: PathBuf,
    /// `major:minor` of the file system.
    pub device: String,
    /// Of the file system, not of the mount.
    pub options: String,
}

/// The topmost mount at exactly this path, if there is one.
pub fn mounted_at(point: &Path) -> io::Result<Option<Mount>> {
    Ok(all()?.into_iter().rfind(|mount| mount.point == point))
}

/// The mount that a path is on.
pub fn mount_of(path: &Path) -> io::Result<Option<Mount>> {
    let mut nearest: Option<Mount> = None;
    for mount in all()? {
        let depth = |mount: &Mount| mount.point.as_os_str().len();
        if path.starts_with(&mount.point)
            && nearest
                .as_ref()
                .is_none_or(|found| depth(found) <= depth(&mount))
        {
            nearest = Some(mount);
        }
    }
    Ok(nearest)
}

impl Mount {
    /// Whether the file system keeps sums of what is written to its files, and compares what it
    /// reads with them.
    pub fn has_checksums(&self) -> bool {
        self.kind == "btrfs"
            && !self
                .options
                .split(',')
                .any(|option| matches!(option, "nodatasum" | "nodatacow"))
    }
}

fn all() -> io::Result<Vec<Mount>> {
    let text = fs::read("/proc/self/mountinfo")?;
    Ok(text
        .split(|byte| *byte == b'\n')
        .filter_map(parse_line)
        .collect())
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
    let point = unescape(fields.nth(1)?);
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    Some(Mount {
        point: PathBuf::from(point),
        device,
        kind: String::from_utf8_lossy(rest.next()?).into_owned(),
        source: PathBuf::from(unescape(rest.next()?)),
        options: String::from_utf8_lossy(rest.next().unwrap_or_default()).into_owned(),
    })
}

/// The kernel writes space, tab, newline and backslash as `\ooo`.
fn unescape(text: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let octal = (first == b'\\')
            .then(|| after.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = &after[3..];
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(out)
}

/// Whether two paths name the same file, without trusting how they are spelled.
pub fn same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => a.as_os_str().as_bytes() == b.as_os_str().as_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_optional_fields_and_escapes() {
        let line =
            br"61 29 7:0 / /var/my\040state/pool rw,noatime shared:1 master:2 - btrfs /dev/loop0 rw";
        let mount = parse_line(line).unwrap();
        assert_eq!(mount.point, Path::new("/var/my state/pool"));
        assert_eq!(mount.kind, "btrfs");
        assert_eq!(mount.source, Path::new("/dev/loop0"));
        assert!(mount.has_checksums());
    }

    #[test]
    fn not_every_btrfs_has_checksums() {
        for (kind, options, has) in [
            ("btrfs", "rw,ssd,space_cache=v2,subvolid=5,subvol=/", true),
            ("btrfs", "rw,nodatasum,space_cache=v2", false),
            ("btrfs", "rw,nodatasum,nodatacow", false),
            ("ext4", "rw", false),
        ] {
            let line = format!("61 29 7:0 / /pool rw - {kind} /dev/loop0 {options}");
            let mount = parse_line(line.as_bytes()).unwrap();
            assert_eq!(mount.has_checksums(), has, "{line}");
        }
    }

    #[test]
    fn broken_lines_are_no_mounts() {
        for line in [&b""[..], b"1 2 3", b"1 2 3:4 / /x rw -", b"1 2 3:4 / /x rw"] {
            assert_eq!(parse_line(line), None);
        }
        assert_eq!(unescape(br"a\9"), OsString::from(r"a\9"));
    }

    #[test]
    fn proc_is_mounted() {
        let mount = mounted_at(Path::new("/proc")).unwrap().unwrap();
        assert_eq!(mount.kind, "proc");
        assert_eq!(mounted_at(Path::new("/proc/self")).unwrap(), None);
        let mount = mount_of(Path::new("/proc/self/fd")).unwrap().unwrap();
        assert_eq!(mount.point, Path::new("/proc"));
    }
}
