//! What /proc tells about a process, and which boot this is.

use crate::failure::{Doing, Failure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal},
};
use std::{
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Marks every descriptor beyond the standard ones to be closed when this process starts a program:
/// nothing it has, or was given by whoever started it, is handed on but what is named later. One
/// system call, so it may stand between fork and exec.
pub fn close_all_on_exec() -> io::Result<()> {
    // SAFETY: numbers go in and a flag is set; no descriptor is closed in this process.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The start time of a process in clock ticks since boot: with the boot id it tells one
/// process from another that got the same number later.
pub fn start_ticks(pid: i32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse_start_ticks(&text)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/PID/stat has no start"))
}

fn parse_start_ticks(stat: &str) -> Option<u64> {
    // The command name may hold blanks and brackets; everything after the last one is numbers.
    let (_, rest) = stat.rsplit_once(')')?;
    // Field 22 of the line, and `rest` begins with field 3.
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Whether the kernel made this thread for itself; it has a number like a process. One that ended is none.
pub fn is_of_kernel(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| has_kernel_flag(&stat))
}

fn has_kernel_flag(stat: &str) -> bool {
    const PF_KTHREAD: u64 = 0x0020_0000;
    // Field 9, and what follows the name begins with field 3.
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_ascii_whitespace().nth(6)?.parse::<u64>().ok())
        .is_some_and(|flags| flags & PF_KTHREAD != 0)
}

/// Changes with every boot of the host.
pub fn boot_id() -> String {
    fs::read_to_string(Path::new("/proc/sys/kernel/random/boot_id"))
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

/// One that the kernel makes for whoever asks.
pub fn random_uuid() -> io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/random/uuid").map(|text| text.trim().to_owned())
}

/// Memory of the host in bytes, under the name that /proc/meminfo has for it.
pub fn memory(name: &str) -> Option<u64> {
    field_of_memory(&fs::read_to_string("/proc/meminfo").ok()?, name)
}

fn field_of_memory(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// What the processor can do, by the names that /proc/cpuinfo has for it.
pub fn processor() -> Vec<String> {
    features(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn features(text: &str) -> Vec<String> {
    let line = text.lines().find_map(|line| {
        let (name, list) = line.split_once(':')?;
        matches!(name.trim_end(), "flags" | "Features").then_some(list)
    });
    line.unwrap_or_default()
        .split_ascii_whitespace()
        .map(str::to_owned)
        .collect()
}

/// Kills one process; that it is gone already is fine.
pub fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid)
        && let Err(error) = kill_process(pid, Signal::KILL)
        && error != rustix::io::Errno::SRCH
    {
        tracing::warn!(pid = pid.as_raw_nonzero(), %error, "a process was not killed");
    }
}

/// Kills the process that `pidfd` is.
pub fn kill_by(pidfd: &OwnedFd) -> Result<(), Failure> {
    match pidfd_send_signal(pidfd, Signal::KILL) {
        Err(rustix::io::Errno::SRCH) => Ok(()),
        other => other.doing("killing the box"),
    }
}

/// Has a process stand still (SIGSTOP) and waits until every thread of it does. Blocks.
pub fn stop(pidfd: &OwnedFd, pid: i32, wait: Duration) -> Result<(), Failure> {
    const LOOK: Duration = Duration::from_millis(1);
    const WHAT: &str = "stopping the box";
    pidfd_send_signal(pidfd, Signal::STOP).doing(WHAT)?;
    let until = Instant::now() + wait;
    while !stands_still(pid).doing(WHAT)? {
        if !runs(pidfd) {
            return Err(io::Error::from(io::ErrorKind::NotFound)).doing(WHAT);
        }
        if Instant::now() >= until {
            // Half of it must not stay so.
            go_on(pidfd)?;
            return Err(io::Error::from(io::ErrorKind::TimedOut)).doing(WHAT);
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Ends a [`stop`]; one that runs is not disturbed.
pub fn go_on(pidfd: &OwnedFd) -> Result<(), Failure> {
    pidfd_send_signal(pidfd, Signal::CONT).doing("letting the box run")
}

/// Whether all threads of a process are stopped.
fn stands_still(pid: i32) -> io::Result<bool> {
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        match fs::read_to_string(thread?.path().join("stat")) {
            Ok(stat) if state(&stat) == Some('T') => {}
            Ok(_) => return Ok(false),
            // It ended between the two looks.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Field 3 of /proc/PID/stat, the first after the name.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

pub fn ended_within(pidfd: &OwnedFd, wait: Duration) -> bool {
    let timeout = Timespec::try_from(wait).ok();
    let mut fds = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
    matches!(poll(&mut fds, timeout.as_ref()), Ok(ready) if ready > 0)
}

pub fn runs(pidfd: &OwnedFd) -> bool {
    !ended_within(pidfd, Duration::ZERO)
}

/// Finds a process again; `None` when it is gone, or its number is somebody else's now.
pub fn find(boot: &str, pid: i32, started: u64) -> Option<OwnedFd> {
    if boot != boot_id() {
        return None;
    }
    let pidfd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    // Asked after the descriptor was made: it can not become another process any more.
    let same = start_ticks(pid).is_ok_and(|ticks| ticks == started);
    (same && runs(&pidfd)).then_some(pidfd)
}

/// Lets the runtime tell when a descriptor is ready.
pub fn watch_fd(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is the same open descriptor until it is dropped, and nothing of
    // ours closes it behind its back.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_kernel_are_told_from_processes() {
        let kvm = "1029 (kvm-nx-lpage-recovery-1018) S 2 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0";
        let ours = "7 (a) b) R 1 7 7 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 500 0 0";
        assert!(has_kernel_flag(kvm));
        assert!(!has_kernel_flag(ours));
        assert!(!has_kernel_flag(""));
        assert!(!is_of_kernel(std::process::id().cast_signed()));
        assert!(!is_of_kernel(i32::MAX));
    }

    #[test]
    fn a_hostile_command_name_does_not_shift_the_fields() {
        let stat = "17 (a) R 1 (x)) S 1 17 17 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1";
        assert_eq!(parse_start_ticks(stat), Some(987_654));
        assert_eq!(parse_start_ticks("17 (short) S 1"), None);
    }

    #[test]
    fn memory_is_found_by_its_name() {
        let text = "MemTotal:       16 kB\nMemAvailable: x kB\n";
        assert_eq!(field_of_memory(text, "MemTotal"), Some(16 << 10));
        assert_eq!(field_of_memory(text, "MemAvailable"), None);
        assert_eq!(field_of_memory(text, "Mem"), None);
        assert!(memory("MemTotal") > memory("MemAvailable"));
    }

    #[test]
    fn a_processor_is_what_its_first_core_can_do() {
        let intel = "processor\t: 0\nflags\t\t: fpu avx2\nvmx flags\t: vnmi\n\nflags : other\n";
        assert_eq!(features(intel), ["fpu", "avx2"]);
        assert_eq!(features("Features\t: fp asimd\n"), ["fp", "asimd"]);
        assert!(features("flags\n").is_empty());
        assert!(!processor().is_empty());
    }

    #[test]
    fn our_own_start_is_before_now() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(start_ticks(own).unwrap() > 0);
        assert_eq!(boot_id().len(), 36);
    }
}
