//! Boxes in files: the memory of a machine, what the box has changed of it, its devices.

use crate::{
    machine::{Base, Machine},
    memory::{Mapped, Ram},
    pages::{self, Run, union},
    qemu::Shape,
    ward::Inner,
};
use sandkeep_host::{failure::Doing as _, proc, work::blocking};
use sandkeep_model::{Code, Error, Result, human_bytes, random_token};
use serde::{Deserialize, Serialize};
use std::{
    collections::VecDeque,
    fmt::Display,
    fs::{self, File},
    io::{self, Read as _, Seek as _},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

const NOTE: &str = "image.json";
const BASE: &str = "base";
const CHANGED: &str = "changed";
const DEVICES: &str = "devices";
/// Memories that were put together for many copies, kept while they may be wanted again.
const KEPT: usize = 2;
/// A note is a line, devices are some KB; what is larger was not written by us.
const MOST_NOTE: u64 = 4 << 10;
const MOST_DEVICES: u64 = 16 << 20;
/// What the host must have left beside a memory that is read.
const ROOM_BESIDE: u64 = 128 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    /// Of this image alone.
    id: String,
    /// Of the memory in `base`.
    base: String,
    shape: Shape,
}

impl Note {
    fn write(&self, image: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|error| Error::internal(error.to_string()))?;
        fs::write(image.join(NOTE), text).doing("writing the note of the image")?;
        Ok(())
    }
}

/// The memory a box begins with, or runs on.
#[derive(Debug, Clone)]
pub struct Memory {
    pub base: Arc<Base>,
    /// What QEMU maps: the base itself, or the base with changes put into it.
    pub ram: Arc<Ram>,
    /// Those changes.
    pub carried: Vec<Run>,
}

impl Memory {
    pub fn of(base: &Arc<Base>) -> Self {
        Self {
            ram: Arc::clone(&base.ram),
            base: Arc::clone(base),
            carried: Vec::new(),
        }
    }
}

/// What a QEMU that waits is to become.
#[derive(Debug)]
pub struct Origin {
    pub memory: Memory,
    pub devices: Vec<u8>,
    /// Pages to be put into the memory of this one box.
    pub changed: Option<PathBuf>,
}

impl Origin {
    /// A machine as it was written down.
    pub fn of(machine: &Machine) -> Self {
        Self {
            memory: Memory::of(&machine.base),
            devices: machine.devices.clone(),
            changed: None,
        }
    }
}

/// What this ward remembers of the images it has read.
#[derive(Debug, Default)]
pub struct Images {
    bases: Vec<Weak<Base>>,
    /// Images that one box was made from; the next one is worth putting the memory together.
    seen: VecDeque<String>,
    joined: VecDeque<(String, Memory)>,
}

impl Images {
    fn base(&mut self, id: &str) -> Option<Arc<Base>> {
        self.bases.retain(|base| base.strong_count() > 0);
        self.bases
            .iter()
            .filter_map(Weak::upgrade)
            .find(|base| base.id == id)
    }

    pub fn know(&mut self, base: &Arc<Base>) {
        if self.base(&base.id).is_none() {
            self.bases.push(Arc::downgrade(base));
        }
    }
}

/// What [`write`] needs to know of a box.
#[derive(Debug)]
pub struct Source {
    pub pid: i32,
    pub shape: Shape,
    /// `None` after a restart of the server, for boxes that run on memory it does not have:
    /// then all of it is written.
    pub memory: Option<Memory>,
}

/// Writes the memory of a machine that stands still. The devices were written before.
pub fn write(image: &Path, source: &Source) -> Result<()> {
    let mapped = Mapped::find(source.pid, source.shape.ram_bytes())?;
    let create = |name: &str| {
        File::create(image.join(name)).doing(format_args!("making the {name} of the image"))
    };
    let base = match &source.memory {
        Some(memory) => {
            let runs = union(&mapped.changed()?, &memory.carried);
            pages::write(create(CHANGED)?, &runs, |run, bytes| {
                mapped.read(run, bytes)
            })?;
            // On one file system this copies nothing: both share the blocks.
            let mut pages = &memory.base.pages;
            pages
                .rewind()
                .and_then(|()| io::copy(&mut pages, &mut create(BASE).map_err(io::Error::other)?))
                .doing("writing the memory of the machine")?;
            memory.base.id.clone()
        }
        None => {
            pages::write(create(CHANGED)?, &[], |_, _| Ok(()))?;
            let all = mapped.filled()?;
            pages::write(create(BASE)?, &all, |run, bytes| mapped.read(run, bytes))?;
            random_token(32)
        }
    };
    Note {
        id: random_token(32),
        base,
        shape: source.shape,
    }
    .write(image)
}

/// Takes an image in that somebody else wrote, before anything reads it. What shares a memory
/// is told by names, so it gets names that nobody knows: it would else begin with the memory of
/// another box, or other boxes with its memory.
pub fn take_in(image: &Path) -> Result<()> {
    let mut names = Vec::new();
    for entry in fs::read_dir(image).doing("reading the image")? {
        names.push(entry.doing("reading the image")?.file_name());
    }
    names.sort_unstable();
    if names != [BASE, CHANGED, DEVICES, NOTE] {
        return Err(no_image("it is made of other files"));
    }
    let note = read_note(image)?;
    for name in [BASE, CHANGED] {
        pages::look(&image.join(name), note.shape.ram_bytes())
            .map_err(|failure| no_image(failure.source))?;
    }
    read_devices(image)?;
    Note {
        id: random_token(32),
        base: random_token(32),
        shape: note.shape,
    }
    .write(image)
}

/// Where the devices of a box are written to.
pub fn devices(image: &Path) -> PathBuf {
    image.join(DEVICES)
}

/// Where the pages are that a box has changed.
pub fn changed(image: &Path) -> PathBuf {
    image.join(CHANGED)
}

impl Inner {
    /// Reads an image for one more box. The first box gets the changed pages for itself, which
    /// is fast; from the second on they are put together with the base, to be shared.
    pub(crate) async fn open_image(&self, image: &Path) -> Result<Origin> {
        let note = {
            let image = image.to_owned();
            blocking(move || read_note(&image)).await?
        };
        // One at a time: many copies of one image wait for the first two.
        let mut images = self.images.lock().await;
        if let Some((_, memory)) = images.joined.iter().find(|(id, _)| *id == note.id) {
            return origin(memory.clone(), image, false);
        }
        let known = images.base(&note.base);
        let base = match known {
            Some(base) => base,
            None => {
                let (path, note) = (image.join(BASE), note.clone());
                let base = Arc::new(blocking(move || read_base(&path, &note)).await?);
                images.know(&base);
                base
            }
        };
        if !images.seen.contains(&note.id) {
            images.seen.push_back(note.id);
            if images.seen.len() > 64 {
                images.seen.pop_front();
            }
            return origin(Memory::of(&base), image, true);
        }
        let memory = {
            let (base, image) = (Arc::clone(&base), image.to_owned());
            blocking(move || join(&base, &image)).await?
        };
        if images.joined.len() >= KEPT {
            images.joined.pop_front();
        }
        images.joined.push_back((note.id, memory.clone()));
        origin(memory, image, false)
    }

    /// The memory of a box found again, if this server has what it began with.
    pub(crate) async fn memory_again(&self, base: Option<&str>) -> Option<Memory> {
        let base = base?;
        let base = self.images.lock().await.base(base)?;
        Some(Memory::of(&base))
    }
}

fn origin(memory: Memory, image: &Path, inject: bool) -> Result<Origin> {
    Ok(Origin {
        memory,
        devices: read_devices(image)?,
        changed: inject.then(|| image.join(CHANGED)),
    })
}

fn no_image(why: impl Display) -> Error {
    Error::invalid("image", format!("this is no image of a machine: {why}"))
        .hint("it may have been written by another level or an older server")
}

/// A file of an image, if it is not larger than it can be.
fn read_small(image: &Path, name: &str, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pages::open(&image.join(name))
        .and_then(|file| file.take(most + 1).read_to_end(&mut bytes))
        .map_err(no_image)?;
    if bytes.len() as u64 > most {
        return Err(no_image(format_args!("its {name} is too large")));
    }
    Ok(bytes)
}

fn read_note(image: &Path) -> Result<Note> {
    let text = read_small(image, NOTE, MOST_NOTE)?;
    let note: Note = serde_json::from_slice(&text).map_err(no_image)?;
    note.shape
        .check_possible(proc::memory("MemTotal").unwrap_or(0))?;
    Ok(note)
}

fn read_devices(image: &Path) -> Result<Vec<u8>> {
    read_small(image, DEVICES, MOST_DEVICES)
}

/// Reads the files of pages of an image over one another. They are held by the server and count
/// for no box.
fn load(shape: Shape, files: &[&Path]) -> Result<(Ram, Vec<Run>)> {
    let needed = files
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|found| found.len().min(shape.ram_bytes()))
        .sum::<u64>()
        .min(shape.ram_bytes());
    match proc::memory("MemAvailable") {
        Some(left) if left < needed + ROOM_BESIDE => Err(Error::new(
            Code::ResourceExhausted,
            format!(
                "the memory in the image is {}, the host has {} left",
                human_bytes(needed),
                human_bytes(left)
            ),
        )
        .hint("end or pause boxes, then try again")),
        _ => Ok(Ram::load(shape.ram_bytes(), files)?),
    }
}

fn read_base(path: &Path, note: &Note) -> Result<Base> {
    let pages = pages::open(path).doing("opening the memory of the image")?;
    let (ram, _) = load(note.shape, &[path])?;
    Ok(Base {
        id: note.base.clone(),
        shape: note.shape,
        ram: Arc::new(ram),
        pages,
    })
}

fn join(base: &Arc<Base>, image: &Path) -> Result<Memory> {
    let files = [image.join(BASE), image.join(CHANGED)];
    let (ram, carried) = load(base.shape, &[&files[0], &files[1]])?;
    Ok(Memory {
        base: Arc::clone(base),
        ram: Arc::new(ram),
        carried,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PAGE;

    /// An image as a box of a small machine would leave it.
    fn image(dir: &Path, note: &str) {
        fs::write(dir.join(NOTE), note).unwrap();
        fs::write(dir.join(DEVICES), "devices").unwrap();
        for (name, page) in [(BASE, 3), (CHANGED, 4)] {
            let run = Run {
                first: page,
                count: 1,
            };
            let file = File::create(dir.join(name)).unwrap();
            pages::write(file, &[run], |_, bytes| {
                bytes.fill(7);
                Ok(())
            })
            .unwrap();
        }
    }

    fn note(class_mib: u64, vcpus: u32) -> String {
        format!(
            r#"{{"id":"mine","base":"theirs","shape":{{"class_mib":{class_mib},"vcpus":{vcpus}}}}}"#
        )
    }

    /// Boxes share a memory by its name: nobody chooses the name of what comes from elsewhere.
    #[test]
    fn an_image_from_elsewhere_with_the_base_id_of_somebody_else_gets_its_own() {
        let dir = tempfile::tempdir().unwrap();
        image(dir.path(), &note(512, 1));
        let pages = fs::read(dir.path().join(BASE)).unwrap();
        let mut seen = vec!["mine".to_owned(), "theirs".to_owned()];
        // Taken in as often as somebody likes, it is another one each time.
        for _ in 0..3 {
            take_in(dir.path()).unwrap();
            let note = read_note(dir.path()).unwrap();
            for name in [note.id, note.base] {
                assert!(!seen.contains(&name), "{name}");
                seen.push(name);
            }
            assert_eq!(note.shape, Shape::smallest());
        }
        assert_eq!(fs::read(dir.path().join(BASE)).unwrap(), pages);
    }

    #[test]
    fn hostile_images_are_refused_before_anything_is_read_into_memory() {
        let damaged = |damage: &dyn Fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            image(dir.path(), &note(512, 1));
            damage(dir.path());
            take_in(dir.path()).unwrap_err().message
        };
        for name in [NOTE, BASE, CHANGED, DEVICES] {
            let words = damaged(&|dir| fs::remove_file(dir.join(name)).unwrap());
            assert!(words.contains("other files"), "{words}");
        }
        let words = damaged(&|dir| fs::write(dir.join("more"), "").unwrap());
        assert!(words.contains("other files"), "{words}");
        for (class_mib, vcpus) in [(0, 1), (511, 1), (768, 1), (1 << 44, 1), (512, 0), (512, 9)] {
            let words = damaged(&|dir| fs::write(dir.join(NOTE), note(class_mib, vcpus)).unwrap());
            assert!(words.contains("can not be on this host"), "{words}");
        }
        for text in [
            "",
            "[]",
            "{}",
            r#"{"id":"x","base":"y","shape":{"class_mib":-1}}"#,
        ] {
            let words = damaged(&|dir| fs::write(dir.join(NOTE), text).unwrap());
            assert!(words.contains("no image"), "{words}");
        }
        for (name, most) in [(NOTE, MOST_NOTE), (DEVICES, MOST_DEVICES)] {
            let words = damaged(&|dir| {
                let file = File::create(dir.join(name)).unwrap();
                file.set_len(most + 1).unwrap();
            });
            assert!(words.contains("too large"), "{words}");
        }
        for name in [BASE, CHANGED] {
            let words = damaged(&|dir| {
                let file = File::options().write(true).open(dir.join(name)).unwrap();
                file.set_len(PAGE).unwrap();
            });
            assert!(words.contains("damaged"), "{words}");
            let words = damaged(&|dir| {
                let path = dir.join(name);
                fs::remove_file(&path).unwrap();
                std::os::unix::fs::symlink("/proc/kcore", path).unwrap();
            });
            assert!(words.contains("no image"), "{words}");
        }
    }
}
