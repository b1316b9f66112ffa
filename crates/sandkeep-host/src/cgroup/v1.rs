//! Limits and counters in the files of version 1.

use super::files::{keyed, read, read_number, write, write_if_there};
use crate::failure::Failure;
use std::{io, path::Path, time::Instant};

const SOCKETS_LIMIT: &str = "memory.kmem.tcp.limit_in_bytes";
const SOCKETS_USED: &str = "memory.kmem.tcp.usage_in_bytes";

pub const CPU_PERIOD_USEC: u64 = 100_000;

/// Swap would make the limit soft; where it can not be counted it is at least avoided.
pub fn keep_out_of_swap(dir: &Path) -> Result<(), Failure> {
    write_if_there(dir, "memory.swappiness", 0)
}

/// What was there stays within the limit for memory and swap together.
pub fn push_out(dir: &Path) -> Result<(), Failure> {
    write_if_there(dir, "memory.swappiness", 100)?;
    write_if_there(dir, "memory.force_empty", 0)
}

pub fn swapped_bytes(dir: &Path) -> Result<u64, Failure> {
    Ok(keyed(&read(dir, "memory.stat")?, "total_swap"))
}

/// Of what a sandbox may have in memory, how much may wait in sockets. Version 1 counts it apart
/// from the rest, and only where it is limited.
const SOCKET_SHARE: u64 = 4;
/// With less than this few connections get anywhere.
const LEAST_SOCKETS: u64 = 8 << 20;

fn socket_bytes(memory: u64) -> u64 {
    (memory / SOCKET_SHARE).max(LEAST_SOCKETS)
}

pub fn set_memory(dir: &Path, bytes: u64) -> Result<(), Failure> {
    keep_out_of_swap(dir)?;
    // First: sockets that are made before are never counted.
    write_if_there(dir, SOCKETS_LIMIT, socket_bytes(bytes))?;
    match write(dir, "memory.limit_in_bytes", bytes) {
        // The limit may not exceed the one for memory and swap together: raise that first.
        Err(failure) if failure.source.raw_os_error() == Some(libc::EINVAL) => {
            write_if_there(dir, "memory.memsw.limit_in_bytes", bytes)?;
            write(dir, "memory.limit_in_bytes", bytes)?;
        }
        other => other?,
    }
    match write_if_there(dir, "memory.memsw.limit_in_bytes", bytes) {
        // Accounting of swap is switched off at boot: the file is there but refuses.
        Err(failure) if failure.source.kind() == io::ErrorKind::Unsupported => Ok(()),
        other => other,
    }
}

pub fn set_cpu(dir: &Path, millis: u32) -> Result<(), Failure> {
    write(dir, "cpu.cfs_period_us", CPU_PERIOD_USEC)?;
    write(
        dir,
        "cpu.cfs_quota_us",
        u64::from(millis) * CPU_PERIOD_USEC / 1000,
    )
}

pub fn set_pids(dir: &Path, most: u32) -> Result<(), Failure> {
    write(dir, "pids.max", most)
}

pub fn cpu_usec(cpuacct: &Path) -> Result<u64, Failure> {
    Ok(read_number(cpuacct, "cpuacct.usage")? / 1000)
}

/// With what waits in sockets, as version 2 counts it.
pub fn memory_bytes(dir: &Path) -> Result<u64, Failure> {
    let sockets = match read_number(dir, SOCKETS_USED) {
        // A kernel without this counter.
        Err(failure) if failure.source.kind() == io::ErrorKind::NotFound => 0,
        other => other?,
    };
    Ok(read_number(dir, "memory.usage_in_bytes")? + sockets)
}

pub fn cache_bytes(dir: &Path) -> Result<u64, Failure> {
    let stat = read(dir, "memory.stat")?;
    Ok(keyed(&stat, "total_active_file") + keyed(&stat, "total_inactive_file"))
}

pub fn oom_kills(dir: &Path) -> Result<u64, Failure> {
    Ok(keyed(&read(dir, "memory.oom_control")?, "oom_kill"))
}

/// Asked again each time: the kernel gives up on tasks that were busy just then.
pub fn freeze(dir: &Path, until: Instant) -> Result<(), Failure> {
    super::wait_frozen(until, || {
        write(dir, "freezer.state", "FROZEN")?;
        is_frozen(dir)
    })
}

pub fn is_frozen(dir: &Path) -> Result<bool, Failure> {
    Ok(read(dir, "freezer.state")?.trim() == "FROZEN")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn limits_go_into_the_files_of_version_1() {
        let dir = tempfile::tempdir().unwrap();
        for file in [
            "memory.limit_in_bytes",
            "memory.kmem.tcp.limit_in_bytes",
            "cpu.cfs_period_us",
            "cpu.cfs_quota_us",
            "pids.max",
        ] {
            fs::write(dir.path().join(file), "").unwrap();
        }
        set_memory(dir.path(), 1 << 30).unwrap();
        set_cpu(dir.path(), 1500).unwrap();
        set_pids(dir.path(), 99).unwrap();
        let read = |file| fs::read_to_string(dir.path().join(file)).unwrap();
        assert_eq!(read("memory.limit_in_bytes"), "1073741824");
        assert_eq!(read("memory.kmem.tcp.limit_in_bytes"), "268435456");
        assert_eq!(read("cpu.cfs_quota_us"), "150000");
        assert_eq!(read("pids.max"), "99");
        assert!(!dir.path().join("memory.memsw.limit_in_bytes").exists());
    }
}
