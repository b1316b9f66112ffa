//! Opening a parcel that nobody vouches for.

use rustix::fs::{FileType, Timespec};
use sandkeep_model::{Error, Point, Result, ServerKey, human_bytes};
use std::{
    cell::RefCell,
    ffi::{OsStr, OsString},
    fs::OpenOptions,
    io::{self, BufRead as _, BufReader, Read, Write as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, ffi::OsStringExt as _, fs::OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
};
use tar::{Archive, Entry, EntryType};

use super::{
    BLOCK, Behind, DISK, LABEL, Label, MAX_LABEL, MAX_PAX, MAX_SEAL, MEMORY, PAX_LINK, PAX_MAP,
    PAX_ODD_XATTR, PAX_PATH, PAX_SIZE, PAX_SOCKET, PAX_TIME, PAX_XATTR, SEAL, Totals, broken,
    in_a_parcel, no_parcel, pack::carried, records, seal::Seal,
};
use crate::{
    archive::ImportLimits,
    btrfs,
    doing::Doing as _,
    memory,
    point::{self, Keep, PointDraft, PointInfo},
    tree::{About, MAX_XATTR, Sparse, Tree, clean, refused, too_large},
    vault::Inner,
};

const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// A tar ends with two blocks of zeros, and may be padded a little.
const END: u64 = 2 * BLOCK as u64;
const PADDING: usize = 64 * 1024;
/// What the pool keeps free for what is under way.
const ROOM_BESIDE: u64 = 64 << 20;

/// What was in a parcel, and is now a point of this vault.
#[derive(Debug)]
pub struct Opened {
    pub point: Point,
    pub info: PointInfo,
    /// Files and memory.
    pub bytes: u64,
    /// Whether the memory was taken.
    pub memory: bool,
    /// Who signed it.
    pub signer: Option<ServerKey>,
}

/// Makes a point from a parcel. `accept` sees what it says of itself before anything is written
/// (that it is true, also who signed it, is known before the memory is taken in); where the
/// memory is wanted it says who takes that in when all of it is there. Until everything was
/// compared the point has no name, and whatever goes wrong leaves nothing.
pub fn open<T>(
    vault: &Arc<Inner>,
    reader: impl Read,
    most: &ImportLimits,
    accept: impl FnOnce(&Label) -> Result<Option<T>>,
) -> Result<Opened>
where
    T: FnOnce(&Path) -> Result<()>,
{
    struct Begun<T> {
        draft: PointDraft,
        memory: Option<(PathBuf, T)>,
        bytes: u64,
    }
    let begin = |label: &Label| {
        if point::exists(vault, &label.point.id) {
            return Err(
                Error::conflict(format!("point \"{}\" is here already", label.point.id))
                    .hint("delete it first with `sandkeep points rm`"),
            );
        }
        let wanted = accept(label)?.filter(|_| !label.memory.is_empty());
        let memory_bytes = wanted.as_ref().map_or(0, |_| label.memory_bytes());
        let bytes = label.disk.bytes.saturating_add(memory_bytes);
        point::check_memory_room(vault, bytes.saturating_add(ROOM_BESIDE))?;
        let draft = PointDraft::begin(vault, label.point.id.clone())?;
        let root = draft.new_disk()?;
        let disk = btrfs::open_dir(&root).doing_to("opening", &root)?;
        let memory = match wanted {
            Some(take_in) => Some((
                draft.memory(memory_bytes.saturating_add(ROOM_BESIDE))?,
                take_in,
            )),
            None => None,
        };
        let room = Room {
            disk: disk.into(),
            memory: memory.as_ref().map(|(place, _)| place.clone()),
        };
        let begun = Begun {
            draft,
            memory,
            bytes,
        };
        Ok((begun, room))
    };
    let (label, begun) = unpack(reader, most, begin)?;
    begun.draft.seal_disk()?;
    let memory = begun.memory.is_some();
    if let Some((place, take_in)) = begun.memory {
        take_in(&place)?;
    }
    // What was taken in is summed up here, as it is now.
    let info = begun
        .draft
        .publish(&label.point.sandbox_id, Keep::ForGood)?;
    Ok(Opened {
        point: label.point,
        info,
        bytes: begun.bytes,
        memory,
        signer: label.signer,
    })
}

/// Where the content of a parcel goes.
#[derive(Debug)]
pub struct Room {
    /// An empty directory.
    pub disk: OwnedFd,
    /// Another; without one the memory is read and dropped.
    pub memory: Option<PathBuf>,
}

/// Reads a parcel to its end. `begin` sees what it says of itself before anything is written,
/// and makes room. What is written is only good when this returns.
pub fn unpack<B>(
    reader: impl Read,
    most: &ImportLimits,
    begin: impl FnOnce(&Label) -> Result<(B, Room)>,
) -> Result<(Label, B)> {
    let mut reader = BufReader::with_capacity(256 * 1024, reader);
    if !reader.fill_buf().map_err(broken)?.starts_with(&ZSTD) {
        return Err(no_parcel("it is not packed with zstd"));
    }
    let decoder = zstd::Decoder::with_buffer(reader).map_err(broken)?;
    let behind = Rc::new(RefCell::new(Behind::default()));
    let mut archive = Archive::new(Compared {
        inner: decoder.single_frame(),
        behind: Rc::clone(&behind),
    });
    let mut entries = archive.entries().map_err(broken)?.raw(true);

    let mut first = Item::next(&mut entries)?.ok_or_else(|| no_parcel("it is empty"))?;
    let label = first.text(LABEL, MAX_LABEL)?;
    drop(first);
    let label = Label::read(&label)?;
    check(&label, most)?;
    // The room is left before what was begun is cleared away.
    let (begun, room) = begin(&label)?;
    let limits = ImportLimits {
        bytes: label.disk.bytes,
        entries: label.disk.entries,
    };
    let mut tree = Tree::new(room.disk.as_fd(), limits);
    let mut memory = label.memory.iter();
    let end = loop {
        let mut item =
            Item::next(&mut entries)?.ok_or_else(|| no_parcel("it ends without a seal"))?;
        if let Ok(path) = item.path.strip_prefix(DISK) {
            if memory.len() != label.memory.len() {
                return Err(no_parcel("its disk goes on after its memory"));
            }
            let path = clean(path).map_err(in_a_parcel)?;
            item.put(&mut tree, &path).map_err(in_a_parcel)?;
        } else if let Ok(name) = item.path.strip_prefix(MEMORY) {
            let file = memory
                .next()
                .filter(|file| Path::new(&file.name) == name && item.size == file.bytes)
                .ok_or_else(|| no_parcel("its memory is not what the label says"))?;
            item.memory(room.memory.as_deref(), file)?;
        } else {
            // What came before it, without its own header.
            let before = behind.borrow().sum.clone();
            let text = item.text(SEAL, MAX_SEAL)?;
            let seal: Seal =
                serde_json::from_slice(&text).map_err(|_| no_parcel("its seal can not be read"))?;
            seal.check(before, label.signer.as_ref())?;
            let padded = item.size.next_multiple_of(BLOCK as u64);
            break item.entry.raw_file_position() + padded + END;
        }
    };
    if memory.next().is_some() || Totals::from(tree.used()) != label.disk {
        return Err(no_parcel("it holds less than its label says"));
    }
    if Item::next(&mut entries)?.is_some() {
        return Err(no_parcel("something follows its seal"));
    }
    nothing_follows(archive.into_inner())?;
    if behind.borrow().count < end {
        return Err(no_parcel("it ends in the middle"));
    }
    tree.finish()?;
    Ok((label, begun))
}

/// What the label says must make sense before anything is believed.
fn check(label: &Label, most: &ImportLimits) -> Result<()> {
    if label.disk.entries > most.entries {
        return Err(too_large(format!(
            "the point holds {} files, at most {} are taken",
            label.disk.entries, most.entries
        )));
    }
    let bytes = label.disk.bytes.saturating_add(label.memory_bytes());
    if bytes > most.bytes {
        return Err(too_large(format!(
            "the point unpacks to {}, at most {} are taken",
            human_bytes(bytes),
            human_bytes(most.bytes)
        )));
    }
    if label.point.has_memory() == label.memory.is_empty()
        || label.memory.len() > memory::MOST_FILES
    {
        return Err(no_parcel("its label contradicts itself"));
    }
    for file in &label.memory {
        if !memory::is_plain(&file.name) {
            return Err(no_parcel("a file of its memory has a name that is no name"));
        }
    }
    Ok(())
}

fn nothing_follows<R: Read>(mut rest: Compared<Unpacked<R>>) -> Result<()> {
    let follows = || no_parcel("something follows its end");
    let mut bytes = vec![0; PADDING];
    let mut padding = 0;
    loop {
        let count = rest.read(&mut bytes).map_err(broken)?;
        if count == 0 {
            break;
        }
        padding += count;
        if padding > PADDING || bytes[..count].iter().any(|b| *b != 0) {
            return Err(follows());
        }
    }
    if rest.inner.finish().read(&mut bytes).map_err(broken)? > 0 {
        return Err(follows());
    }
    Ok(())
}

type Unpacked<R> = zstd::Decoder<'static, BufReader<R>>;

/// Keeps the sum where it can be read while the archive is being read.
struct Compared<R> {
    inner: R,
    behind: Rc<RefCell<Behind>>,
}

impl<R: Read> Read for Compared<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.behind.borrow_mut().take(&buffer[..count]);
        Ok(count)
    }
}

/// One entry, with what its pax header says.
struct Item<'a, R: Read> {
    entry: Entry<'a, R>,
    path: PathBuf,
    size: u64,
    pax: Vec<u8>,
}

/// What the pax header of an entry of the disk says.
#[derive(Default)]
struct Said {
    xattrs: Vec<(OsString, Vec<u8>)>,
    modified: Option<Timespec>,
    link: Option<PathBuf>,
    size: Option<u64>,
    map: Option<Vec<(u64, u64)>>,
    socket: bool,
}

impl<'a, R: Read> Item<'a, R> {
    fn next(entries: &mut tar::Entries<'a, R>) -> Result<Option<Self>> {
        let mut pax = Vec::new();
        for entry in entries {
            let mut entry = entry.map_err(broken)?;
            let size = entry.header().entry_size().map_err(broken)?;
            if entry.header().entry_type() == EntryType::XHeader {
                if !pax.is_empty() || size > MAX_PAX {
                    return Err(no_parcel("a header in it is too large"));
                }
                entry.read_to_end(&mut pax).map_err(broken)?;
                continue;
            }
            let mut path = bytes_to_path(&entry.header().path_bytes());
            for (key, value) in records(&pax)? {
                if key == PAX_PATH {
                    path = bytes_to_path(value);
                }
            }
            return Ok(Some(Self {
                entry,
                path,
                size,
                pax,
            }));
        }
        if pax.is_empty() {
            return Ok(None);
        }
        Err(no_parcel("it ends in the middle"))
    }

    /// A small file of this name.
    fn text(&mut self, name: &str, most: u64) -> Result<Vec<u8>> {
        let shown = self.path.to_string_lossy().into_owned();
        if self.path != Path::new(name)
            || self.entry.header().entry_type() != EntryType::Regular
            || self.size > most
        {
            return Err(no_parcel(&format!(
                "\"{}\" is where \"{name}\" should be",
                shown
                    .escape_debug()
                    .to_string()
                    .chars()
                    .take(80)
                    .collect::<String>()
            )));
        }
        let mut text = Vec::new();
        self.entry.read_to_end(&mut text).map_err(broken)?;
        Ok(text)
    }

    /// `path` is where it goes in the tree.
    fn put(&mut self, tree: &mut Tree<'_>, path: &Path) -> Result<()> {
        tree.take_entry()?;
        let said = Said::of(path, &self.pax)?;
        let header = self.entry.header();
        let mut about = About::new(
            path,
            header.uid().map_err(broken)?,
            header.gid().map_err(broken)?,
            header.mode().map_err(broken)?,
        )?;
        about.xattrs = said.xattrs;
        about.modified = said.modified;
        let link = said
            .link
            .or_else(|| header.link_name_bytes().map(|name| bytes_to_path(&name)));
        let nowhere = || refused(path, "it links nowhere");
        match header.entry_type() {
            EntryType::Directory => tree.directory(path, &about),
            EntryType::Regular => {
                let sparse = match (said.size, said.map) {
                    (None, None) => None,
                    (Some(size), Some(extents)) => Some(Sparse { size, extents }),
                    _ => return Err(refused(path, "its holes do not fit together")),
                };
                tree.file(path, &about, &mut self.entry, self.size, sparse.as_ref())
            }
            EntryType::Symlink => tree.symlink(path, &about, &link.ok_or_else(nowhere)?),
            EntryType::Link => {
                let link = link.ok_or_else(nowhere)?;
                let target = link.strip_prefix(DISK).map_err(|_| nowhere())?;
                tree.hard_link(path, target)
            }
            EntryType::Fifo if said.socket => tree.special(path, &about, FileType::Socket),
            EntryType::Fifo => tree.special(path, &about, FileType::Fifo),
            _ => Err(refused(path, "it is of a kind that no point holds")),
        }
    }

    /// A file of the memory, compared with its hash. Without a place for it it is only read.
    fn memory(&mut self, place: Option<&Path>, file: &memory::MemoryFile) -> Result<()> {
        if self.entry.header().entry_type() != EntryType::Regular {
            return Err(no_parcel("its memory is not what the label says"));
        }
        let mut out = match place {
            Some(dir) => {
                let path = dir.join(&file.name);
                let made = OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&path);
                Some(made.doing_to("making", &path)?)
            }
            None => None,
        };
        let Some(expected) = &file.sum else {
            return Err(no_parcel("its memory has no sums"));
        };
        let mut sum = expected.again();
        let mut chunk = vec![0; 1 << 18];
        let mut read = 0_u64;
        loop {
            let count = self.entry.read(&mut chunk).map_err(broken)?;
            if count == 0 {
                break;
            }
            read += count as u64;
            sum.add(&chunk[..count]);
            if let Some(out) = &mut out {
                out.write_all(&chunk[..count]).doing("unpacking")?;
            }
        }
        if read != file.bytes || sum.finish() != *expected {
            return Err(no_parcel("its memory is not what was written"));
        }
        Ok(())
    }
}

impl Said {
    fn of(path: &Path, pax: &[u8]) -> Result<Self> {
        let mut said = Self::default();
        for (key, value) in records(pax)? {
            let text = || std::str::from_utf8(value).unwrap_or_default();
            let odd = || refused(path, "what its header says makes no sense");
            if let Some(name) = key.strip_prefix(PAX_XATTR) {
                said.xattr(path, name.as_bytes().to_vec(), value)?;
            } else if let Some(name) = key.strip_prefix(PAX_ODD_XATTR) {
                said.xattr(path, unhex(name).ok_or_else(odd)?, value)?;
            } else if key == PAX_TIME {
                said.modified = Some(time(text()).ok_or_else(odd)?);
            } else if key == PAX_LINK {
                said.link = Some(bytes_to_path(value));
            } else if key == PAX_SIZE {
                said.size = Some(text().parse().map_err(|_| odd())?);
            } else if key == PAX_MAP {
                said.map = Some(map(text()).ok_or_else(odd)?);
            } else if key == PAX_SOCKET {
                said.socket = true;
            }
        }
        Ok(said)
    }

    fn xattr(&mut self, path: &Path, name: Vec<u8>, value: &[u8]) -> Result<()> {
        if !carried(&name) || name.contains(&0) {
            return Err(refused(path, "it has an attribute that no point holds"));
        }
        if value.len() > MAX_XATTR || name.len() > 255 {
            return Err(refused(path, "an attribute is too large"));
        }
        self.xattrs.push((OsString::from_vec(name), value.to_vec()));
        Ok(())
    }
}

fn bytes_to_path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    digits
        .chunks(2)
        .map(|pair| {
            let pair = std::str::from_utf8(pair)
                .ok()
                .filter(|pair| pair.len() == 2)?;
            u8::from_str_radix(pair, 16).ok()
        })
        .collect()
}

fn time(text: &str) -> Option<Timespec> {
    let (seconds, nanos) = text.split_once('.').unwrap_or((text, "0"));
    let nanos: i64 = nanos.parse().ok()?;
    Some(Timespec {
        tv_sec: seconds.parse().ok()?,
        tv_nsec: (0..1_000_000_000).contains(&nanos).then_some(nanos)?,
    })
}

fn map(text: &str) -> Option<Vec<(u64, u64)>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    let numbers: Vec<u64> = text
        .split(',')
        .map(|number| number.parse().ok())
        .collect::<Option<_>>()?;
    if numbers.len() % 2 == 1 {
        return None;
    }
    Some(numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect())
}
