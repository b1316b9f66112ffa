//! Whether what CRIU wrote has what a restore asks for, looked at while the sandbox still lives.
//!
//! CRIU writes its files one by one, each with references to others, and has said before that it
//! was done when one of them was missing. Who finds that out at the restore has lost the sandbox.

use super::{
    image::{all, bad, messages},
    sessions::{self, Member},
};
use crate::failure::{Doing, Failure};
use prost::Message;
use std::{collections::HashSet, fs, io, path::Path};

const TREE: (&str, u32) = ("pstree.img", 0x5027_3030);
const FILES: (&str, u32) = ("files.img", 0x5630_3138);
const CORE: u32 = 0x5505_3847;
const MEMORY: u32 = 0x5749_2820;
const PLACES: u32 = 0x5140_3912;
const DESCRIPTORS: u32 = 0x5621_3732;

/// A process that has ended has nothing more.
const DEAD: u32 = 2;

const REGULAR: i32 = 1;
const MEMFD: i32 = 18;
/// Kinds of files that come back: all but packet sockets, network devices, those that only a plugin
/// knows, and BPF maps.
const KNOWN: [i32; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 17, MEMFD, 20];

/// A mapping is of a file, and not of one that is found in another way.
const OF_A_FILE: u32 = 1 << 6 | 1 << 7;
const FOUND_ELSEWHERE: u32 = 1 << 10 | 1 << 11 | 1 << 13 | 1 << 17;
const OF_A_MEMFD: u32 = 1 << 14;

#[derive(Clone, PartialEq, Message)]
struct Process {
    #[prost(uint32, required, tag = "1")]
    pid: u32,
    #[prost(uint32, required, tag = "2")]
    parent: u32,
    #[prost(uint32, required, tag = "3")]
    group: u32,
    #[prost(uint32, required, tag = "4")]
    session: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Task {
    #[prost(uint32, required, tag = "1")]
    state: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Core {
    #[prost(message, optional, tag = "3")]
    task: Option<Task>,
}

#[derive(Clone, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, required, tag = "4")]
    file: u64,
    #[prost(uint32, required, tag = "7")]
    status: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Memory {
    #[prost(uint32, required, tag = "12")]
    program: u32,
    #[prost(message, repeated, tag = "14")]
    mappings: Vec<Mapping>,
}

#[derive(Clone, PartialEq, Message)]
struct Places {
    #[prost(uint32, required, tag = "1")]
    working: u32,
    #[prost(uint32, required, tag = "2")]
    root: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Descriptor {
    #[prost(uint32, required, tag = "1")]
    file: u32,
    #[prost(int32, required, tag = "3")]
    kind: i32,
    #[prost(uint32, required, tag = "4")]
    number: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(int32, required, tag = "1")]
    kind: i32,
    #[prost(uint32, required, tag = "2")]
    id: u32,
}

/// What is missing in an image, if anything is. `memfds`: whether programs in memfds come back.
pub fn missing(image: &Path, memfds: bool) -> Result<Option<String>, Failure> {
    look(image, memfds).doing("looking at the image of the box")
}

fn look(image: &Path, memfds: bool) -> io::Result<Option<String>> {
    let entries: Vec<Entry> = all(&image.join(FILES.0), FILES.1)?;
    if let Some(strange) = entries.iter().find(|entry| !KNOWN.contains(&entry.kind)) {
        return Ok(Some(format!(
            "a process holds a file of a kind that does not come back (number {} of CRIU)",
            strange.kind
        )));
    }
    let files: HashSet<(i32, u32)> = entries.iter().map(|one| (one.kind, one.id)).collect();
    let processes: Vec<Process> = all(&image.join(TREE.0), TREE.1)?;
    if processes.is_empty() {
        return Err(bad());
    }
    let members: Vec<Member> = processes
        .iter()
        .map(|one| Member {
            pid: one.pid,
            parent: one.parent,
            session: one.session,
        })
        .collect();
    if let Some(Member { pid, session, .. }) = sessions::misplaced(&members) {
        return Ok(Some(format!(
            "process {pid} is in the session {session}, into which it cannot be put again: the \
             leader is none of its ancestors"
        )));
    }
    if let Some(Process { pid, group, .. }) = led_from_outside(&processes) {
        return Ok(Some(format!(
            "process {pid} is in the group {group}, into which it cannot be put again: the process \
             of that number is in another group"
        )));
    }
    for process in processes {
        if let Some(what) = of_process(image, process.pid, &files, memfds)? {
            let pid = process.pid;
            return Ok(Some(format!("of process {pid} CRIU wrote {what}")));
        }
    }
    descriptors(image, &files)
}

/// A process whose group was founded by one that has gone into another group since: CRIU waits for
/// it to found the group, and for ever.
fn led_from_outside(processes: &[Process]) -> Option<&Process> {
    processes.iter().find(|one| {
        processes
            .iter()
            .any(|founder| founder.pid == one.group && founder.group != one.group)
    })
}

fn of_process(
    image: &Path,
    pid: u32,
    files: &HashSet<(i32, u32)>,
    memfds: bool,
) -> io::Result<Option<String>> {
    let core: Vec<Core> = all(&image.join(format!("core-{pid}.img")), CORE)?;
    let Some(task) = core.first().and_then(|core| core.task.as_ref()) else {
        return Ok(Some("no registers".to_owned()));
    };
    if task.state == DEAD {
        return Ok(None);
    }
    let memory: Vec<Memory> = all(&image.join(format!("mm-{pid}.img")), MEMORY)?;
    let [memory] = &memory[..] else {
        return Ok(Some("no memory".to_owned()));
    };
    let program = |kind| files.contains(&(kind, memory.program));
    if !(program(REGULAR) || memfds && program(MEMFD)) {
        return Ok(Some(match program(MEMFD) {
            true => "a program in a memfd, which this build cannot bring back".to_owned(),
            false => "no program".to_owned(),
        }));
    }
    for mapping in &memory.mappings {
        let status = mapping.status;
        if status & OF_A_FILE == 0 || status & FOUND_ELSEWHERE != 0 {
            continue;
        }
        let kind = match status & OF_A_MEMFD {
            0 => REGULAR,
            _ => MEMFD,
        };
        if !u32::try_from(mapping.file).is_ok_and(|file| files.contains(&(kind, file))) {
            return Ok(Some("a mapping without its file".to_owned()));
        }
    }
    let places: Vec<Places> = all(&image.join(format!("fs-{pid}.img")), PLACES)?;
    let whole = matches!(&places[..], [one] if [one.working, one.root]
        .iter()
        .all(|id| files.contains(&(REGULAR, *id))));
    Ok((!whole).then(|| "no working directory or root".to_owned()))
}

fn descriptors(image: &Path, files: &HashSet<(i32, u32)>) -> io::Result<Option<String>> {
    for entry in fs::read_dir(image)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with("fdinfo-") {
            continue;
        }
        for message in messages(&fs::read(entry.path())?, DESCRIPTORS)? {
            let descriptor = Descriptor::decode(message).map_err(io::Error::other)?;
            if !files.contains(&(descriptor.kind, descriptor.file)) {
                return Ok(Some(format!(
                    "CRIU wrote descriptor {} of a process without its file",
                    descriptor.number
                )));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::{super::image::tests::file, *};

    fn write(dir: &Path, name: &str, kind: u32, messages: &[Vec<u8>]) {
        fs::write(dir.join(name), file(kind, messages)).unwrap();
    }

    /// Process 1, whose program is the file 5 of a kind, with a mapping and a descriptor; and
    /// process 2, which has ended.
    fn image(program: i32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let entries = [(program, 5), (REGULAR, 6), (MEMFD, 7)]
            .map(|(kind, id)| Entry { kind, id }.encode_to_vec());
        write(at, FILES.0, FILES.1, &entries);
        let processes = [(1, 0), (2, 1)].map(|(pid, parent)| {
            Process {
                pid,
                parent,
                group: 1,
                session: 1,
            }
            .encode_to_vec()
        });
        write(at, TREE.0, TREE.1, &processes);
        for (pid, state) in [(1, 1), (2, DEAD)] {
            let task = Some(Task { state });
            write(
                at,
                &format!("core-{pid}.img"),
                CORE,
                &[Core { task }.encode_to_vec()],
            );
        }
        let mapping = |file, status| Mapping { file, status };
        let memory = Memory {
            program: 5,
            mappings: vec![
                mapping(6, 1 << 6),
                mapping(7, 1 << 7 | OF_A_MEMFD),
                mapping(9, 1 << 8),
                mapping(9, 1 << 7 | 1 << 10),
            ],
        };
        write(at, "mm-1.img", MEMORY, &[memory.encode_to_vec()]);
        let places = Places {
            working: 6,
            root: 6,
        };
        write(at, "fs-1.img", PLACES, &[places.encode_to_vec()]);
        let descriptor = Descriptor {
            file: 7,
            kind: MEMFD,
            number: 3,
        };
        write(
            at,
            "fdinfo-2.img",
            DESCRIPTORS,
            &[descriptor.encode_to_vec()],
        );
        dir
    }

    #[test]
    fn a_whole_image_is_whole() {
        assert_eq!(missing(image(REGULAR).path(), false).unwrap(), None);
        assert_eq!(missing(image(MEMFD).path(), true).unwrap(), None);
        let why = missing(image(MEMFD).path(), false).unwrap().unwrap();
        assert!(why.contains("memfd"), "{why}");
    }

    #[test]
    fn a_group_whose_founder_has_left_it_is_found() {
        let tree = |groups: [(u32, u32); 3]| {
            groups.map(|(pid, group)| Process {
                pid,
                parent: 1,
                group,
                session: 1,
            })
        };
        assert!(led_from_outside(&tree([(1, 1), (13, 1), (14, 13)])).is_some());
        // Founders that lead, and one that has ended.
        assert!(led_from_outside(&tree([(1, 1), (13, 13), (14, 13)])).is_none());
        assert!(led_from_outside(&tree([(1, 1), (13, 1), (14, 12)])).is_none());
    }

    #[test]
    fn an_image_without_a_part_is_found() {
        for (name, says) in [
            ("mm-1.img", "of process 1 CRIU wrote no memory"),
            ("fs-1.img", "no working directory"),
            ("core-1.img", "no registers"),
        ] {
            let image = image(REGULAR);
            fs::remove_file(image.path().join(name)).unwrap();
            let why = missing(image.path(), true).unwrap().unwrap();
            assert!(why.contains(says), "{why}");
        }
        let image = image(REGULAR);
        write(image.path(), TREE.0, TREE.1, &[]);
        assert!(missing(image.path(), true).is_err());
    }

    #[test]
    fn what_nobody_can_open_again_is_found() {
        for (entries, says) in [
            (vec![(REGULAR, 5), (REGULAR, 6)], "mapping"),
            (vec![(4, 5), (REGULAR, 6), (MEMFD, 7)], "no program"),
            (vec![(REGULAR, 5), (REGULAR, 6), (19, 7)], "number 19"),
        ] {
            let image = image(REGULAR);
            let entries: Vec<_> = entries
                .into_iter()
                .map(|(kind, id)| Entry { kind, id }.encode_to_vec())
                .collect();
            write(image.path(), FILES.0, FILES.1, &entries);
            let why = missing(image.path(), true).unwrap().unwrap();
            assert!(why.contains(says), "{why}");
        }
        let image = image(REGULAR);
        let lost = Descriptor {
            file: 8,
            kind: REGULAR,
            number: 3,
        };
        let descriptors = [lost.encode_to_vec()];
        write(image.path(), "fdinfo-2.img", DESCRIPTORS, &descriptors);
        let why = missing(image.path(), true).unwrap().unwrap();
        assert!(why.contains("descriptor 3"), "{why}");
    }
}
