//! The seccomp programs in an image: CRIU installs what is written there.
//!
//! The kernel shows the programs of a thread to its tracer alone, and while a sandbox comes
//! back that is CRIU. So the image is checked before CRIU reads it: the programs of every thread
//! must begin with those that every sandbox has, byte for byte and in their order. Threads
//! without any in the image get them from the first of their process; that each thread has at
//! least as many is checked afterwards, out of what the kernel says (`verify`).

use super::image::only;
use crate::{
    failure::{Doing, Failure},
    seccomp::Filters,
};
use prost::Message;
use std::{fs, io, path::Path};

const PROGRAMS: &str = "seccomp.img";
/// One of these for every thread: `core-1.img`.
const THREAD: &str = "core-";
const OF_PROGRAMS: u32 = 0x6441_3049;
const OF_THREAD: u32 = 0x5505_3847;
/// `SECCOMP_MODE_FILTER`
const FILTER: i32 = 2;
/// The only flag that does not change what a program decides: it is installed in all threads of
/// a process at once.
const TSYNC: u32 = 1;

#[derive(Clone, PartialEq, Message)]
struct Program {
    #[prost(bytes = "vec", required, tag = "1")]
    filter: Vec<u8>,
    /// The place of the one that is installed after it: CRIU walks from the oldest on.
    #[prost(uint32, optional, tag = "2")]
    next: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    flags: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct Programs {
    #[prost(message, repeated, tag = "1")]
    all: Vec<Program>,
}

/// What has the same tags in both parts of [`Thread`].
#[derive(Clone, PartialEq, Message)]
struct Seccomp {
    #[prost(int32, optional, tag = "11")]
    mode: Option<i32>,
    /// The place of the program that is installed first.
    #[prost(uint32, optional, tag = "12")]
    first: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct Thread {
    /// Images of CRIU before 3.0 have it here, and CRIU prefers it.
    #[prost(message, optional, tag = "3")]
    task: Option<Seccomp>,
    #[prost(message, optional, tag = "5")]
    thread: Option<Seccomp>,
}

/// Refuses an image that would give a thread other programs than every sandbox has.
pub fn check(image: &Path, filters: &Filters) -> Result<(), Failure> {
    let doing = "reading the seccomp programs in the image";
    let programs: Programs = only(&image.join(PROGRAMS), OF_PROGRAMS).doing(doing)?;
    let ours = filters.bytes();
    for entry in fs::read_dir(image).doing(doing)? {
        let entry = entry.doing(doing)?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with(THREAD)) else {
            continue;
        };
        let thread: Thread = only(&entry.path(), OF_THREAD).doing(doing)?;
        confines(&thread, &programs.all, &ours).map_err(|why| Failure {
            doing: format!("the image does not confine its sandbox ({name}): {why}"),
            source: io::ErrorKind::PermissionDenied.into(),
        })?;
    }
    Ok(())
}

fn confines(thread: &Thread, programs: &[Program], ours: &[Vec<u8>]) -> Result<(), String> {
    if thread
        .task
        .as_ref()
        .is_some_and(|old| old.mode.is_some() || old.first.is_some())
    {
        return Err("its seccomp programs are written as no server writes them".to_owned());
    }
    let Some(Seccomp {
        mode: Some(FILTER),
        first,
    }) = thread.thread
    else {
        // It has ended, or is given those of its process; what it has in the end is looked at.
        return Ok(());
    };
    let mut next = first;
    for (place, ours) in ours.iter().enumerate() {
        let program = next
            .and_then(|at| programs.get(usize::try_from(at).ok()?))
            .ok_or_else(|| format!("it has {place} seccomp programs"))?;
        if program.filter != *ours || program.flags.unwrap_or(0) & !TSYNC != 0 {
            return Err(format!("its seccomp program {place} is another one"));
        }
        next = program.next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(filter: &[u8], next: Option<u32>) -> Program {
        Program {
            filter: filter.to_vec(),
            next,
            flags: Some(0),
        }
    }

    fn ours() -> Vec<Vec<u8>> {
        vec![b"first".to_vec(), b"second".to_vec()]
    }

    fn thread(first: u32) -> Thread {
        Thread {
            task: Some(Seccomp::default()),
            thread: Some(Seccomp {
                mode: Some(FILTER),
                first: Some(first),
            }),
        }
    }

    /// Two chains: one thread has nothing more, another has programs of its own.
    fn whole() -> Vec<Program> {
        vec![
            program(b"second", None),
            program(b"first", Some(0)),
            program(b"own", None),
            program(b"own", Some(2)),
            program(b"second", Some(3)),
            program(b"first", Some(4)),
        ]
    }

    #[test]
    fn programs_of_the_sandbox_come_after_ours() {
        confines(&thread(1), &whole(), &ours()).unwrap();
        confines(&thread(5), &whole(), &ours()).unwrap();
        let mut synced = whole();
        for program in &mut synced {
            program.flags = Some(TSYNC);
        }
        confines(&thread(1), &synced, &ours()).unwrap();
        // One that has ended, and one that gets those of its process.
        confines(&Thread::default(), &synced, &ours()).unwrap();
    }

    #[test]
    fn an_image_with_other_seccomp_programs_was_restored() {
        type Forge = fn(&mut Vec<Program>, &mut Thread);
        let forged: [Forge; 9] = [
            |all, _| all.clear(),
            |all, _| all[5].filter = b"allow".to_vec(),
            |all, _| all[4].filter.push(0),
            |all, _| all[5].next = None,
            |all, _| all[5].next = Some(5),
            |all, _| all[5].flags = Some(4),
            // Only what the sandbox had of its own.
            |_, thread| thread.thread.as_mut().unwrap().first = Some(3),
            |_, thread| thread.thread.as_mut().unwrap().first = None,
            |_, thread| thread.task.as_mut().unwrap().first = Some(3),
        ];
        for (number, forge) in forged.into_iter().enumerate() {
            let (mut programs, mut thread) = (whole(), thread(5));
            forge(&mut programs, &mut thread);
            let found = confines(&thread, &programs, &ours());
            assert!(found.is_err(), "forged {number}");
        }
    }
}
