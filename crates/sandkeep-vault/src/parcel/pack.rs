//! Packing a point.

use rustix::io::Errno;
use sandkeep_model::{Error, Point, Result};
use sha2::{Digest as _, Sha256};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, File, Metadata},
    io::{self, Read, Seek as _, SeekFrom, Write},
    os::unix::{
        ffi::OsStrExt as _,
        fs::{FileTypeExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
};
use tar::{Builder, EntryType, Header};

use super::{
    DISK, FORMAT, LABEL, Label, MEMORY, PAX_LINK, PAX_MAP, PAX_ODD_XATTR, PAX_PATH, PAX_SIZE,
    PAX_SOCKET, PAX_TIME, PAX_XATTR, SEAL, Summed, Totals, seal::Seal,
};
use crate::{
    diff, doing::Doing as _, memory::MemoryFile, point, sum::Adding, tree::MAX_XATTR, vault::Inner,
};

/// Fast enough not to hold up the disk, and half the size.
const LEVEL: i32 = 3;
/// More holes than this are written as zeros, which pack well.
const MOST_EXTENTS: usize = 8192;
/// A name that fits into the header of an entry.
const SHORT: usize = 100;

/// Looks at everything the parcel will hold. The point never changes, so what is said here is
/// true when it is packed.
pub fn label_of(vault: &Inner, point: &Point) -> Result<Label> {
    let found = point::find(vault, &point.id)?;
    let memory = point::memory_of(vault, &point.id)?;
    if point.has_memory() == memory.is_empty() {
        return Err(point::damaged(
            &point.id,
            "its memory is not what the ledger says",
        ));
    }
    let mut disk = Totals {
        entries: 0,
        bytes: 0,
    };
    let mut seen = Links::default();
    walk(&found.disk, |path, meta| {
        if left_out(meta) {
            return Ok(());
        }
        disk.entries += 1;
        if meta.is_file() && seen.first(path, meta).is_none() {
            let extents = extents(&found.disk.join(path), meta)?;
            disk.bytes += extents.map_or(meta.len(), |extents| sum(&extents));
        }
        Ok(())
    })?;
    Ok(Label {
        format: FORMAT,
        made_by: format!("sandkeep {}", env!("CARGO_PKG_VERSION")),
        signer: Some(vault.parcel_key.public()),
        point: point.clone(),
        disk,
        memory,
    })
}

/// Writes the parcel that `label` announces. What is damaged in the point is found on the way
/// and breaks it off: a parcel without its seal is none.
pub fn pack(vault: &Inner, label: &Label, out: impl Write) -> Result<()> {
    let found = point::find(vault, &label.point.id)?;
    let mut encoder = zstd::Encoder::new(out, LEVEL).doing("packing")?;
    encoder.include_checksum(true).doing("packing")?;
    let mut packer = Packer {
        tar: Builder::new(Summed {
            inner: encoder,
            sum: Sha256::new(),
        }),
        root: found.disk.clone(),
        seen: Links::default(),
    };
    packer.text(LABEL, &json(label)?)?;
    walk(&found.disk, |path, meta| packer.entry(path, meta))?;
    if let Some(dir) = &found.memory {
        for file in &label.memory {
            packer.memory(&dir.join(&file.name), file)?;
        }
    }
    let seal = Seal::new(packer.tar.get_ref().sum.clone(), &vault.parcel_key);
    packer.text(SEAL, &json(&seal)?)?;
    let summed = packer.tar.into_inner().doing("packing")?;
    let mut out = summed.inner.finish().doing("packing")?;
    out.flush().doing("packing")
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::internal(format!("packing a point: {error}")))
}

/// Devices are given to a box by its ward.
fn left_out(meta: &Metadata) -> bool {
    let kind = meta.file_type();
    kind.is_block_device() || kind.is_char_device()
}

/// Everything below a directory that nobody changes, parents first; links are not followed.
fn walk(root: &Path, mut visit: impl FnMut(&Path, &Metadata) -> Result<()>) -> Result<()> {
    let meta = fs::symlink_metadata(root).doing_to("looking at", root)?;
    visit(Path::new(""), &meta)?;
    let mut stack = vec![PathBuf::new()];
    while let Some(dir) = stack.pop() {
        for (name, meta) in diff::entries(Some(root.join(&dir)))? {
            let path = dir.join(name);
            visit(&path, &meta)?;
            if meta.is_dir() {
                stack.push(path);
            }
        }
    }
    Ok(())
}

/// Files with more than one name, by the first of them.
#[derive(Default)]
struct Links(HashMap<u64, PathBuf>);

impl Links {
    /// The name under which this file came before.
    fn first(&mut self, path: &Path, meta: &Metadata) -> Option<PathBuf> {
        if meta.nlink() < 2 {
            return None;
        }
        let before = self.0.get(&meta.ino()).cloned();
        if before.is_none() {
            self.0.insert(meta.ino(), path.to_owned());
        }
        before
    }
}

struct Packer<W: Write> {
    tar: Builder<Summed<W>>,
    root: PathBuf,
    seen: Links,
}

type Records = Vec<(String, Vec<u8>)>;

impl<W: Write> Packer<W> {
    fn text(&mut self, name: &str, text: &[u8]) -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(text.len() as u64);
        self.append(
            header,
            Path::new(name),
            EntryType::Regular,
            Vec::new(),
            text,
        )
    }

    fn append(
        &mut self,
        mut header: Header,
        name: &Path,
        kind: EntryType,
        mut records: Records,
        data: impl Read,
    ) -> Result<()> {
        header.set_entry_type(kind);
        let bytes = name.as_os_str().as_bytes();
        let short = &bytes[..bytes.len().min(SHORT)];
        header.as_mut_bytes()[..short.len()].copy_from_slice(short);
        if bytes.len() > SHORT {
            records.push((PAX_PATH.to_owned(), bytes.to_vec()));
        }
        if !records.is_empty() {
            let records = records
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_slice()));
            self.tar.append_pax_extensions(records).doing("packing")?;
        }
        header.set_cksum();
        self.tar.append(&header, data).doing_to("packing", name)
    }

    fn entry(&mut self, path: &Path, meta: &Metadata) -> Result<()> {
        if left_out(meta) {
            return Ok(());
        }
        let name = Path::new(DISK).join(path);
        let here = self.root.join(path);
        let mut header = Header::new_gnu();
        header.set_mode(meta.mode() & 0o7777);
        header.set_uid(meta.uid().into());
        header.set_gid(meta.gid().into());
        header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
        header.set_size(0);
        let kind = meta.file_type();
        if !kind.is_dir()
            && let Some(first) = self.seen.first(path, meta)
        {
            let target = Path::new(DISK).join(first);
            let records = link_to(&mut header, &target);
            return self.append(header, &name, EntryType::Link, records, io::empty());
        }
        let mut records = time_of(meta);
        if kind.is_symlink() {
            let target = fs::read_link(&here).doing_to("reading", &here)?;
            records.extend(link_to(&mut header, &target));
            return self.append(header, &name, EntryType::Symlink, records, io::empty());
        }
        if kind.is_fifo() || kind.is_socket() {
            if kind.is_socket() {
                records.push((PAX_SOCKET.to_owned(), b"1".to_vec()));
            }
            return self.append(header, &name, EntryType::Fifo, records, io::empty());
        }
        records.extend(xattrs_of(&here)?);
        if kind.is_dir() {
            return self.append(header, &name, EntryType::Directory, records, io::empty());
        }
        let mut file = open(&here)?;
        let Some(extents) = extents(&here, meta)? else {
            header.set_size(meta.len());
            let data = Exactly::new(&mut file, meta.len());
            return self.append(header, &name, EntryType::Regular, records, data);
        };
        header.set_size(sum(&extents));
        records.push((PAX_SIZE.to_owned(), meta.len().to_string().into_bytes()));
        let map: Vec<_> = extents
            .iter()
            .map(|(at, length)| format!("{at},{length}"))
            .collect();
        records.push((PAX_MAP.to_owned(), map.join(",").into_bytes()));
        let data = Pieces {
            file: &mut file,
            extents: &extents,
            left: 0,
        };
        self.append(header, &name, EntryType::Regular, records, data)
    }

    fn memory(&mut self, path: &Path, file: &MemoryFile) -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_mode(0o600);
        header.set_size(file.bytes);
        let Some(sum) = &file.sum else {
            return Err(Error::conflict("the point is for a fork that is under way"));
        };
        let mut data = open(path)?;
        let mut summed = SummedRead {
            inner: Exactly::new(&mut data, file.bytes),
            sum: sum.again(),
        };
        let name = Path::new(MEMORY).join(&file.name);
        self.append(header, &name, EntryType::Regular, Vec::new(), &mut summed)?;
        if summed.sum.finish() != *sum {
            return Err(Error::conflict(format!(
                "the point is damaged: \"{}\" of its memory is not what was written",
                file.name
            ))
            .hint("use another point"));
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NOATIME | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
        .map(File::from)
        .doing_to("opening", path)
}

fn time_of(meta: &Metadata) -> Records {
    let text = format!("{}.{:09}", meta.mtime(), meta.mtime_nsec());
    vec![(PAX_TIME.to_owned(), text.into_bytes())]
}

fn link_to(header: &mut Header, target: &Path) -> Records {
    let bytes = target.as_os_str().as_bytes();
    let fits = header.set_link_name_literal(bytes).is_ok();
    if fits {
        return Vec::new();
    }
    vec![(PAX_LINK.to_owned(), bytes.to_vec())]
}

/// Capabilities, access lists and what users noted; the rest means something only to a host.
pub fn carried(name: &[u8]) -> bool {
    name == b"security.capability"
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
        || name.starts_with(b"user.")
}

fn xattrs_of(path: &Path) -> Result<Records> {
    let mut names = vec![0; MAX_XATTR];
    let count = match rustix::fs::llistxattr(path, &mut names[..]) {
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        other => other.doing_to("listing the attributes of", path)?,
    };
    let mut out = Vec::new();
    for name in names[..count]
        .split(|b| *b == 0)
        .filter(|name| carried(name))
    {
        let mut value = vec![0; MAX_XATTR];
        let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..])
            .doing_to("reading an attribute of", path)?;
        value.truncate(length);
        let key = match std::str::from_utf8(name) {
            Ok(name) if !name.contains(['=', '\n']) => format!("{PAX_XATTR}{name}"),
            _ => {
                let hex: String = name.iter().map(|b| format!("{b:02x}")).collect();
                format!("{PAX_ODD_XATTR}{hex}")
            }
        };
        out.push((key, value));
    }
    Ok(out)
}

fn sum(extents: &[(u64, u64)]) -> u64 {
    extents.iter().map(|(_, length)| length).sum()
}

/// Where the bytes of a file are, if there are holes between them.
fn extents(path: &Path, meta: &Metadata) -> Result<Option<Vec<(u64, u64)>>> {
    let size = meta.len();
    if meta.blocks().saturating_mul(512) >= size {
        return Ok(None);
    }
    let file = open(path)?;
    let mut out = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            // Only a hole is left.
            Err(Errno::NXIO) => break,
            other => other.doing_to("looking for holes in", path)?,
        };
        let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(start))
            .doing_to("looking for holes in", path)?;
        let end = if out.len() + 1 == MOST_EXTENTS {
            size
        } else {
            end.min(size)
        };
        if end > start {
            out.push((start, end - start));
        }
        at = end.max(start + 1);
    }
    Ok(if out == [(0, size)] { None } else { Some(out) })
}

/// As many bytes as were announced, or an error: a file never seems whole that is not.
struct Exactly<'a> {
    file: &'a mut File,
    left: u64,
}

impl<'a> Exactly<'a> {
    const fn new(file: &'a mut File, left: u64) -> Self {
        Self { file, left }
    }
}

impl Read for Exactly<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if most == 0 {
            return Ok(0);
        }
        let count = self.file.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= count as u64;
        Ok(count)
    }
}

/// The bytes of a file without its holes.
struct Pieces<'a> {
    file: &'a mut File,
    extents: &'a [(u64, u64)],
    /// Of the piece that is being read.
    left: u64,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left == 0 {
            let Some((&(at, length), rest)) = self.extents.split_first() else {
                return Ok(0);
            };
            self.extents = rest;
            self.file.seek(SeekFrom::Start(at))?;
            self.left = length;
        }
        let mut piece = Exactly::new(self.file, self.left);
        let count = piece.read(buffer)?;
        self.left = piece.left;
        Ok(count)
    }
}

struct SummedRead<R> {
    inner: R,
    sum: Adding,
}

impl<R: Read> Read for SummedRead<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.sum.add(&buffer[..count]);
        Ok(count)
    }
}
