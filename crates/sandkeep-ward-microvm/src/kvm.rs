//! KVM as a machine in the jail will find it: whether it can be opened there, and what it gives.

use crate::{
    config::DEFAULT_ID_BASE,
    jail::{Bounds, Jail, prepare_host},
    kernel::hex,
};
use sandkeep_host::{failure::Doing as _, proc};
use sandkeep_model::Result;
use sha2::{Digest as _, Sha256};
use std::{fs::File, io, os::fd::AsRawFd as _, path::Path, process::Command, time::Duration};

const DEVICE: &str = "/dev/kvm";
/// _IOWR(0xAE, 0x05, struct kvm_cpuid2)
const GET_SUPPORTED_CPUID: libc::Ioctl = 0xc008_ae05_u32 as libc::Ioctl;
const MOST_ENTRIES: usize = 256;
/// What a processor can do is in these. Others say which of the processors was asked, how its caches lie
/// and what it is called: the same machine runs on either.
const FEATURES: [u32; 14] = [
    0x0,
    0x1,
    0x7,
    0xd,
    0x14,
    0x19,
    0x1d,
    0x1e,
    0x24,
    0x4000_0001,
    0x8000_0001,
    0x8000_0007,
    0x8000_0008,
    0x8000_0021,
];

/// Whether QEMU in its jail can open KVM; the words say why not. A processor without it is asked for
/// nothing: some hosts offer a device that runs no machine. Whether it really does is seen when the
/// first one is tried. Blocks.
pub fn offered() -> std::result::Result<(), String> {
    let flags = proc::processor();
    if !flags.iter().any(|flag| flag == "vmx" || flag == "svm") {
        return Err("the processor has neither vmx nor svm".to_owned());
    }
    if !rustix::process::geteuid().is_root() {
        // Nobody else can look from within a jail.
        return match Path::new(DEVICE).exists() {
            true => Ok(()),
            false => Err(format!("there is no {DEVICE}")),
        };
    }
    prepare_host().map_err(|error| error.message)?;
    let bounds = Bounds {
        memory: 1 << 30,
        file: 0,
        cpu_seconds: 10,
        wait: Duration::from_secs(10),
    };
    let jail = Jail::for_one_task(DEFAULT_ID_BASE, bounds).with_kvm();
    let mut command = Command::new("/usr/bin/sh");
    command.args(["-c", "exec 3<>/dev/kvm"]).env_clear();
    let ended = jail.run(command).map_err(|failure| failure.to_string())?;
    if ended.status.success() && !ended.late {
        return Ok(());
    }
    Err(format!("KVM can not be opened: {}", ended.said))
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    function: u32,
    index: u32,
    flags: u32,
    /// eax, ebx, ecx, edx
    registers: [u32; 4],
    padding: [u32; 3],
}

#[repr(C)]
struct Asked {
    count: u32,
    padding: u32,
    entries: [Entry; MOST_ENTRIES],
}

/// What KVM gives a machine here: what was written down under another one is not read. Of the host's
/// kernel the first two numbers count: what a newer build of it takes away shows in the rest.
pub fn offer() -> Result<String> {
    let mut asked = Box::new(Asked {
        count: u32::try_from(MOST_ENTRIES).unwrap_or(0),
        padding: 0,
        entries: [Entry::default(); MOST_ENTRIES],
    });
    let mut get = || -> io::Result<()> {
        let device = File::options().read(true).write(true).open(DEVICE)?;
        // SAFETY: the kernel reads the count and writes at most as many entries behind it, which is
        // what `asked` has room for; it lives until the call returns.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), GET_SUPPORTED_CPUID, &raw mut *asked) };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    get().doing("asking KVM what it gives a machine")?;
    let count = (asked.count as usize).min(MOST_ENTRIES);
    let kernel = rustix::system::uname();
    let kernel = kernel.release().to_string_lossy();
    let kernel: Vec<&str> = kernel.splitn(3, '.').take(2).collect();
    Ok(format!(
        "{} linux {}",
        &hex(&Sha256::digest(told(&asked.entries[..count])))[..12],
        kernel.join("."),
    ))
}

/// The part that is the same on every processor of this host.
fn told(entries: &[Entry]) -> Vec<u8> {
    let mut entries: Vec<Entry> = entries
        .iter()
        .filter(|entry| FEATURES.contains(&entry.function))
        .copied()
        .map(without_whom)
        .collect();
    entries.sort_unstable_by_key(|entry| (entry.function, entry.index));
    let words = |entry: &Entry| {
        let [a, b, c, d] = entry.registers;
        [entry.function, entry.index, a, b, c, d]
    };
    entries
        .iter()
        .flat_map(words)
        .flat_map(u32::to_le_bytes)
        .collect()
}

/// Which processor was asked, and what its kernel has switched on just now, are in some of them.
fn without_whom(mut entry: Entry) -> Entry {
    const OSXSAVE: u32 = 1 << 27;
    const OSPKE: u32 = 1 << 4;
    let [_, b, c, _] = &mut entry.registers;
    match entry.function {
        0x1 => {
            *b = 0;
            *c &= !OSXSAVE;
        }
        0x7 => *c &= !OSPKE,
        // The size of what is switched on.
        0xd if entry.index < 2 => *b = 0,
        _ => {}
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, registers: [u32; 4]) -> Entry {
        Entry {
            function,
            registers,
            ..Entry::default()
        }
    }

    #[test]
    fn what_a_processor_can_do_counts_and_which_one_was_asked_does_not() {
        let one = [entry(0x1, [1, 2, 3, 4]), entry(0xb, [1, 1, 1, 1])];
        let other = [
            entry(0xb, [1, 1, 1, 9]),
            entry(0x1, [1, 77, 3 | 1 << 27, 4]),
        ];
        assert_eq!(told(&one), told(&other));
        let less = [entry(0x1, [1, 2, 1, 4])];
        assert_ne!(told(&one), told(&less));
        let newer = [entry(0x1, [9, 2, 3, 4])];
        assert_ne!(told(&one), told(&newer));
        assert_ne!(told(&one), told(&[]));
    }

    #[test]
    fn the_kernel_reads_what_is_asked_as_it_is_laid_out() {
        assert_eq!(size_of::<Entry>(), 40);
        assert_eq!(size_of::<Asked>(), 8 + 40 * MOST_ENTRIES);
    }
}
