//! The programs of a machine stand still while it is written down, and in each copy of it until
//! the copy is one of its own.
//!
//! A machine goes on where it was stopped, in every copy, with all its processors at once. What
//! has to differ between copies (the kernel's random numbers, the generation, pages that mark a
//! copy) cannot be changed before any program runs, unless the programs do not run: so the host
//! has the agent freeze them before it stops the machine. In the machine itself the host then
//! lets them go; in a copy the agent does, when it has carried out its first order.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Dir, FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::State;
use crate::wipe::{self, Marked};
use sandkeep_agent_api::host::LogLevel;
use sandkeep_agent_api::machine::{GROUP, PROGRAMS};

/// Whoever is in the middle of a call of the kernel that cannot be interrupted stops when it
/// ends, before it runs on: those are not waited for longer.
const STILL: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(1);
/// A host that stopped neither the machine nor its wish has died. Counted in steps: a clock may
/// jump when a machine goes on, and in a copy that must not count for the whole time.
const STEPS: u32 = 300;
const STEP: Duration = Duration::from_millis(100);

static GROUPS: OnceLock<Groups> = OnceLock::new();

/// Opened before any program ran: whatever root mounts over them later.
#[derive(Debug)]
struct Groups {
    root: OwnedFd,
    /// Where programs are put when they are started.
    door: OwnedFd,
}

/// Programs that stand still.
#[derive(Debug)]
struct Held {
    number: u64,
    groups: Vec<OwnedFd>,
    marked: Vec<Marked>,
}

#[derive(Debug, Default)]
pub(crate) struct Hold(Mutex<(u64, Option<Held>)>);

/// Makes the group of programs. The agent stays beside it and is never frozen.
pub(crate) fn prepare(mount: &str) -> io::Result<()> {
    std::fs::create_dir(format!("{GROUP}/{PROGRAMS}"))?;
    let groups = Groups {
        root: File::open(mount)?.into(),
        door: File::options()
            .write(true)
            .open(format!("{GROUP}/{PROGRAMS}/cgroup.procs"))?
            .into(),
    };
    GROUPS
        .set(groups)
        .map_err(|_| io::Error::other("the groups were made twice"))
}

/// What a program writes into between fork and exec to be one of those that can be held.
pub(crate) fn door() -> Option<RawFd> {
    GROUPS.get().map(|groups| groups.door.as_raw_fd())
}

impl Hold {
    fn now(&self) -> MutexGuard<'_, (u64, Option<Held>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has every program stand still and finds what copies of them must find empty. Ends by
    /// itself if the host forgets it.
    pub(crate) fn take(&self, state: &State) -> io::Result<()> {
        let mut now = self.now();
        if now.1.is_some() {
            return Ok(());
        }
        state.reaper().pause(true);
        let held = match freeze(now.0 + 1) {
            Ok(held) => held,
            Err(error) => {
                state.reaper().pause(false);
                return Err(error);
            }
        };
        now.0 = held.number;
        let number = held.number;
        now.1 = Some(held);
        drop(now);
        let state = state.clone();
        std::thread::Builder::new()
            .name("hold".to_owned())
            .stack_size(64 << 10)
            .spawn(move || watch(&state, number))
            .map(drop)
    }

    /// Lets them go on as they are.
    pub(crate) fn release(&self, state: &State) {
        let held = self.now().1.take();
        if let Some(held) = held {
            thaw(&held.groups);
            state.reaper().pause(false);
        }
    }

    /// Makes this copy of a machine one of its own by `work`, and lets its programs go on. Those
    /// that the host did not have held before it wrote the machine down are held now.
    pub(crate) fn renew(
        &self,
        state: &State,
        work: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let held = self.now().1.take();
        let held = match held {
            Some(held) => held,
            None => {
                state.reaper().pause(true);
                freeze(0).inspect_err(|_| state.reaper().pause(false))?
            }
        };
        let done = work().and_then(|()| wipe::empty(&held.marked));
        // One that could not be made one of its own answers so, and is ended by the host.
        if done.is_ok() {
            thaw(&held.groups);
            state.reaper().pause(false);
        }
        done
    }

    fn is(&self, number: u64) -> bool {
        self.now()
            .1
            .as_ref()
            .is_some_and(|held| held.number == number)
    }
}

fn watch(state: &State, number: u64) {
    for _ in 0..STEPS {
        std::thread::sleep(STEP);
        if !state.hold().is(number) {
            return;
        }
    }
    state.hold().release(state);
    let message = "the host had the programs of this sandbox held and did nothing; they go on";
    state.log().add(LogLevel::Warn, message.to_owned());
}

fn freeze(number: u64) -> io::Result<Held> {
    let Some(groups) = GROUPS.get() else {
        return Ok(Held {
            number,
            groups: Vec::new(),
            marked: Vec::new(),
        });
    };
    let mut frozen = Vec::new();
    let mut processes = Vec::new();
    let own = GROUP.rsplit('/').next().unwrap_or_default();
    for (name, group) in children(groups.root.as_fd())? {
        if name == own {
            for (_, inner) in children(group.as_fd())? {
                stop(inner, &mut frozen)?;
            }
        } else {
            stop(group, &mut frozen)?;
        }
    }
    let until = Instant::now() + STILL;
    for group in &frozen {
        while tells(group.as_fd(), "populated 1") && !tells(group.as_fd(), "frozen 1") {
            if Instant::now() >= until {
                break;
            }
            std::thread::sleep(LOOK);
        }
    }
    // Also of groups that stood still before: they are copied, too.
    for (_, group) in children(groups.root.as_fd())? {
        list(group.as_fd(), &mut processes);
    }
    // What root of the machine moved out of every group cannot be held, but it is emptied.
    if number > 0 {
        processes.extend(read_numbers(groups.root.as_fd()));
    }
    let itself = i32::try_from(std::process::id()).unwrap_or(1);
    processes.retain(|&pid| pid != itself);
    Ok(Held {
        number,
        groups: frozen,
        marked: wipe::find(&processes),
    })
}

/// A group that stands still already goes on doing so.
fn stop(group: OwnedFd, frozen: &mut Vec<OwnedFd>) -> io::Result<()> {
    if read(group.as_fd(), "cgroup.freeze")?.trim() == "0" {
        write(group.as_fd(), "cgroup.freeze", b"1")?;
        frozen.push(group);
    }
    Ok(())
}

fn thaw(groups: &[OwnedFd]) {
    for group in groups {
        // One that is gone holds nobody.
        let _gone = write(group.as_fd(), "cgroup.freeze", b"0");
    }
}

fn tells(group: BorrowedFd<'_>, what: &str) -> bool {
    read(group, "cgroup.events").is_ok_and(|events| events.lines().any(|line| line == what))
}

fn list(group: BorrowedFd<'_>, processes: &mut Vec<i32>) {
    if !tells(group, "populated 1") {
        return;
    }
    processes.extend(read_numbers(group));
    for (_, inner) in children(group).unwrap_or_default() {
        list(inner.as_fd(), processes);
    }
}

fn read_numbers(group: BorrowedFd<'_>) -> Vec<i32> {
    let text = read(group, "cgroup.procs").unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn children(group: BorrowedFd<'_>) -> io::Result<Vec<(String, OwnedFd)>> {
    let mut found = Vec::new();
    for entry in Dir::read_from(group)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type() != FileType::Directory || name == "." || name == ".." {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(group, entry.file_name(), flags, Mode::empty()) {
            Ok(inner) => found.push((name, inner)),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(found)
}

fn read(group: BorrowedFd<'_>, name: &str) -> io::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut text = String::new();
    File::from(openat(group, name, flags, Mode::empty())?).read_to_string(&mut text)?;
    Ok(text)
}

fn write(group: BorrowedFd<'_>, name: &str, text: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    File::from(openat(group, name, flags, Mode::empty())?).write_all(text)
}
