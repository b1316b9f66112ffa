//! The program QEMU: where it is, which build it is, and what it is told.

use crate::{
    discard::Spot,
    kernel::{Kernel, hex},
    kvm, program,
};
use sandkeep_agent_api::machine::OPTION;
use sandkeep_host::files::replace;
use sandkeep_model::{Error, Limits, Result};
use sandkeep_netlink::{BOX_MAC, HOST_V4};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::{
    fs,
    os::fd::RawFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const SMALLEST_MIB: u64 = 512;
/// For the kernel of the machine and its tables, beyond what the box may use.
const KERNEL_MIB: u64 = 128;
const MOST_VCPUS: u32 = 8;
/// What QEMU itself takes: its code, and where it translates code of the machine to.
const OVERHEAD_MIB: u64 = 256;
const OVERHEAD_TASKS: u32 = 64;
/// One part in so many of the memory of a machine is for tables that say where it is.
const TABLES: u64 = 128;

/// Beside the machines: how fast the counter of the processor was.
const SPEED: &str = "speed";
/// A difference of one part in so many is none.
const SAME_SPEED: u64 = 1000;

/// The disk of a machine, and the empty one that it has until it is given its own.
pub const DISK: &str = "disk";
pub const BLANK: &str = "blank";

/// What runs the instructions of machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The processor itself.
    Kvm,
    /// QEMU translates them: the same machine, ten to twenty-five times slower.
    Tcg,
}

impl Accel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    const fn cpu(self) -> &'static str {
        match self {
            // A machine in a machine is nobody's: the code for it in the kernel of the host would be another
            // wall that root of a sandbox stands before. So are the counters of the processor.
            Self::Kvm => "host,-svm,-vmx,pmu=off",
            // Five levels of page tables are one more to walk.
            Self::Tcg => "max,-la57",
        }
    }
}

/// How large a machine is. Machines are booted ahead for each shape, so there are few.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// What a box in it may use at most.
    pub class_mib: u64,
    pub vcpus: u32,
}

impl Shape {
    pub fn of(limits: &Limits) -> Result<Self> {
        let vcpus = limits.cpu_millis.div_ceil(1000).max(1);
        if vcpus > MOST_VCPUS {
            return Err(Error::new(
                sandkeep_model::Code::NotEnforceable,
                format!("a machine has at most {MOST_VCPUS} processors, not {vcpus}"),
            )
            .field("limits.cpu_millis")
            .hint("ask for fewer, or for another isolation level"));
        }
        Ok(Self {
            class_mib: limits.memory_mib.max(SMALLEST_MIB).next_power_of_two(),
            vcpus,
        })
    }

    pub const fn smallest() -> Self {
        Self {
            class_mib: SMALLEST_MIB,
            vcpus: 1,
        }
    }

    pub const fn ram_mib(self) -> u64 {
        self.class_mib + KERNEL_MIB
    }

    pub const fn ram_bytes(self) -> u64 {
        self.ram_mib() << 20
    }

    pub fn name(self) -> String {
        format!("{}m-{}c", self.class_mib, self.vcpus)
    }

    /// Refuses what no machine on this host can be: a shape that was read may be anything.
    pub fn check_possible(self, host_bytes: u64) -> Result<()> {
        // In this order: sizes of machines that are too large can not be computed.
        let possible = self.class_mib >= SMALLEST_MIB
            && self.class_mib.is_power_of_two()
            && self.class_mib <= host_bytes >> 20
            && self.ram_bytes() <= host_bytes
            && (1..=MOST_VCPUS).contains(&self.vcpus);
        if possible {
            return Ok(());
        }
        Err(Error::new(
            sandkeep_model::Code::NotEnforceable,
            format!(
                "a machine of {} MiB with {} processors can not be on this host",
                self.class_mib, self.vcpus
            ),
        )
        .field("image"))
    }

    /// Refuses limits that a machine of this shape can not give.
    pub fn check(self, limits: &Limits) -> Result<()> {
        if limits.memory_mib <= self.class_mib {
            return Ok(());
        }
        Err(Error::new(
            sandkeep_model::Code::NotEnforceable,
            format!(
                "the machine of this box was made for {} MiB of memory and can not have {}",
                self.class_mib, limits.memory_mib
            ),
        )
        .field("limits.memory_mib")
        .hint("make a new box with more memory; a machine does not grow"))
    }
}

/// Memory of the host for a box with this limit: the kernel of the machine holds the limit
/// itself, this one is for what QEMU takes beside it: its tables of pages too, on the processor itself
/// twice. `unfilled` is what the box may have to fill for others: see [`unfilled_mib`].
pub const fn host_memory_mib(limits: u64, unfilled: u64) -> u64 {
    limits + limits / TABLES + KERNEL_MIB + OVERHEAD_MIB + unfilled
}

/// Whoever first writes to a page of a memory that is a hole fills that page, which stays there for all
/// boxes, and gets one of its own: the kernel counts both for the box. No more than it may use, and no
/// more than there are holes.
pub fn unfilled_mib(holes_bytes: u64, limits: u64) -> u64 {
    holes_bytes
        .div_ceil(1 << 20)
        .min(limits.saturating_add(KERNEL_MIB))
}

/// Tasks of the host for a box with this limit. QEMU needs a few; one that was taken over gets
/// no more than its box may have.
pub const fn host_pids(pids: u32) -> u32 {
    pids.saturating_add(OVERHEAD_TASKS)
}

/// Limits as the host's cgroups hold them, for a box that began with a memory with so many bytes of holes.
pub fn host_limits(limits: &Limits, holes_bytes: u64) -> Limits {
    let unfilled = unfilled_mib(holes_bytes, limits.memory_mib);
    Limits {
        memory_mib: host_memory_mib(limits.memory_mib, unfilled),
        pids: host_pids(limits.pids),
        ..*limits
    }
}

/// One QEMU as it is told to be, the same for every machine of a server.
#[derive(Debug)]
pub struct Qemu {
    pub program: PathBuf,
    pub version: String,
    pub accel: Accel,
    pub kernel: Kernel,
    pub kernel_hash: String,
    /// How fast the processor counts, in thousands a second: an emulated machine can not find
    /// out by itself.
    tsc_khz: u64,
    /// What KVM gives a machine; nothing of it is in one that is emulated.
    processor: Option<String>,
    /// Where it has the memory of a machine.
    pub spot: Spot,
}

/// Descriptors QEMU gets.
#[derive(Debug, Default, Clone, Copy)]
pub struct Files {
    pub ram: RawFd,
    /// The empty disk, to read and write, and to read.
    pub disk: [RawFd; 2],
    pub card: RawFd,
    pub control: RawFd,
    pub port: RawFd,
}

/// What a QEMU begins with.
#[derive(Debug, Clone, Copy)]
pub enum Begin {
    /// Kernel and first files: the memory is written to.
    Boot { kernel: RawFd, first_files: RawFd },
    /// Waits for the state of a machine: the memory is mapped privately.
    Wait,
}

impl Qemu {
    /// This program, which does what it will be asked to. Blocks.
    pub fn of(program: PathBuf, kernel: Option<&Path>, accel: Accel) -> Result<Self> {
        let kernel = Kernel::find(kernel).ok_or_else(|| {
            Error::host_not_ready("the kernel of machines is not there")
                .hint("`sandkeep doctor` tells where to get it")
                .retryable(false)
        })?;
        Ok(Self {
            version: program::version(&program)?,
            program,
            accel,
            kernel_hash: kernel.fingerprint()?,
            kernel,
            tsc_khz: tsc_khz(),
            processor: match accel {
                Accel::Kvm => Some(kvm::offer()?),
                Accel::Tcg => None,
            },
            spot: Spot::default(),
        })
    }

    /// Every option that a machine begins with, to see whether a program knows them.
    pub fn options(accel: Accel) -> Vec<String> {
        let nobody = Self {
            program: PathBuf::new(),
            version: String::new(),
            accel,
            kernel: Kernel::default(),
            kernel_hash: String::new(),
            tsc_khz: 0,
            processor: None,
            spot: Spot::default(),
        };
        nobody.words(Shape::smallest(), &Files::default(), Begin::Wait)
    }

    /// Has the speed of the counter be what it was for earlier servers: it is measured, never twice
    /// the same, and a machine that was written down at another speed is not read.
    pub fn keep_speed(&mut self, dir: &Path) -> Result<()> {
        let file = dir.join(SPEED);
        let before = fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok());
        match before {
            Some(before) if before.abs_diff(self.tsc_khz) <= self.tsc_khz / SAME_SPEED => {
                self.tsc_khz = before;
                Ok(())
            }
            _ => replace(&file, self.tsc_khz.to_string().as_bytes()),
        }
    }

    /// Everything that must be the same when a machine is read again.
    pub fn build(&self) -> String {
        let shape = Shape {
            class_mib: 0,
            vcpus: 0,
        };
        let line = self.words(shape, &Files::default(), Begin::Wait).join(" ");
        let processor = self
            .processor
            .as_ref()
            .map(|processor| format!(" processor {processor}"))
            .unwrap_or_default();
        format!(
            "{} {} {} kernel {} line {} tsc {} MHz{processor}",
            self.version,
            self.accel.name(),
            self.accel.cpu(),
            &self.kernel_hash[..12],
            &hex(&Sha256::digest(line))[..12],
            (self.tsc_khz + 500) / 1000,
        )
    }

    pub fn words(&self, shape: Shape, files: &Files, begin: Begin) -> Vec<String> {
        let ram = shape.ram_mib();
        let share = matches!(begin, Begin::Boot { .. });
        let [disk, disk_read] = files.disk;
        let mac = BOX_MAC.map(|byte| format!("{byte:02x}")).join(":");
        let accel = match self.accel {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg,thread=multi,tb-size=32",
        };
        let mut words: Vec<String> = [
            "-M",
            "microvm,acpi=on,rtc=on,pic=off,pit=off,isa-serial=off,memory-backend=ram,suppress-vmdesc=on",
            "-accel",
            accel,
            "-cpu",
            self.accel.cpu(),
            "-nodefaults",
            "-no-user-config",
            "-nographic",
            "-no-reboot",
            "-sandbox",
            "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
            "-global",
            "migration.send-configuration=off",
        ]
        .map(str::to_owned)
        .to_vec();
        let share = if share { "on" } else { "off" };
        let more = [
            ("-smp", format!("{}", shape.vcpus)),
            ("-m", format!("{ram}M")),
            (
                "-object",
                format!(
                    "memory-backend-file,id=ram,size={ram}M,mem-path=/proc/self/fd/{},share={share}",
                    files.ram
                ),
            ),
            (
                "-chardev",
                format!("socket,id=control,fd={},server=on,wait=off", files.control),
            ),
            ("-mon", "chardev=control,mode=control".to_owned()),
            ("-chardev", format!("socket,id=port,fd={}", files.port)),
            ("-device", "virtio-serial-device".to_owned()),
            (
                "-device",
                "virtserialport,chardev=port,name=sandkeep".to_owned(),
            ),
            ("-add-fd", format!("fd={disk},set=1")),
            ("-add-fd", format!("fd={disk_read},set=1")),
            (
                "-blockdev",
                format!(
                    "driver=file,node-name={BLANK},filename=/dev/fdset/1,locking=off,discard=unmap"
                ),
            ),
            (
                "-blockdev",
                format!("driver=raw,node-name={DISK},file={BLANK},discard=unmap"),
            ),
            // What the host has no room for is written when it has: a refusal would look like a
            // broken disk to the machine. The server holds and lets go such machines.
            (
                "-device",
                format!("virtio-blk-device,drive={DISK},werror=stop,rerror=report"),
            ),
            ("-netdev", format!("tap,id=net,fd={}", files.card)),
            ("-device", format!("virtio-net-device,netdev=net,mac={mac}")),
            (
                "-device",
                "virtio-balloon-device,free-page-reporting=on".to_owned(),
            ),
        ];
        for (option, value) in more {
            words.extend([option.to_owned(), value]);
        }
        match begin {
            Begin::Wait => words.extend(["-S", "-incoming", "defer"].map(str::to_owned)),
            Begin::Boot {
                kernel,
                first_files,
            } => {
                words.extend(["-kernel".to_owned(), format!("/proc/self/fd/{kernel}")]);
                words.extend(["-initrd".to_owned(), format!("/proc/self/fd/{first_files}")]);
                words.extend(["-append".to_owned(), self.kernel_line()]);
            }
        }
        words
    }

    fn kernel_line(&self) -> String {
        let by_accel = match self.accel {
            Accel::Kvm => String::new(),
            // The machine has no clock to measure the processor with; and guessing what a
            // processor might do wrong is in vain where there is none.
            Accel::Tcg => format!(
                "mitigations=off tsc_early_khz={} tsc=reliable",
                self.tsc_khz
            ),
        };
        format!(
            "quiet loglevel=0 panic=-1 reboot=t cryptomgr.notests lsm=landlock {by_accel} -- {OPTION} {HOST_V4}"
        )
    }
}

/// Measured against the kernel's clock for a moment.
fn tsc_khz() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        const MOMENT: Duration = Duration::from_millis(50);
        // SAFETY: every processor of this architecture has the instruction.
        let count = || unsafe { core::arch::x86_64::_rdtsc() };
        // The pair that was read in one go: between two instructions somebody else may have had
        // a turn, and another speed is another build.
        let both = || {
            let pair = |_| {
                let (when, counted) = (Instant::now(), count());
                (when.elapsed(), when, counted)
            };
            (0..16).map(pair).min()
        };
        let first = both();
        std::thread::sleep(MOMENT);
        let last = both();
        let (Some((_, began, first)), Some((_, ended, last))) = (first, last) else {
            return 0;
        };
        let passed = ended.duration_since(began);
        let nanos = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX).max(1);
        last.wrapping_sub(first).saturating_mul(1_000_000) / nanos
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_few_and_large_enough() {
        let limits = |memory_mib, cpu_millis| Limits {
            memory_mib,
            cpu_millis,
            ..Limits::default()
        };
        let shape = |class_mib, vcpus| Shape { class_mib, vcpus };
        assert_eq!(Shape::of(&limits(16, 100)).unwrap(), shape(512, 1));
        assert_eq!(Shape::of(&limits(512, 1000)).unwrap(), shape(512, 1));
        assert_eq!(Shape::of(&limits(513, 1001)).unwrap(), shape(1024, 2));
        assert_eq!(Shape::of(&limits(4096, 8000)).unwrap(), shape(4096, 8));
        let refused = Shape::of(&limits(4096, 8001)).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("limits.cpu_millis"));
        shape(512, 1).check(&limits(512, 8000)).unwrap();
        let refused = shape(512, 1).check(&limits(513, 1000)).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("limits.memory_mib"));
    }

    #[test]
    fn the_host_has_room_for_what_a_box_fills_for_others() {
        let (mib, gib) = (1 << 20, 1 << 30);
        // The first of its memory: all of it is a hole.
        assert_eq!(unfilled_mib(gib, 256), 256 + KERNEL_MIB);
        assert_eq!(unfilled_mib(gib, 4096), 1024);
        // Others have filled it.
        assert_eq!(unfilled_mib(0, 1024), 0);
        assert_eq!(unfilled_mib(10 * mib + 1, 1024), 11);
        let first = host_memory_mib(1024, unfilled_mib(2 * gib, 1024));
        assert!(first >= 2 * (1024 + KERNEL_MIB) + OVERHEAD_MIB, "{first}");
    }

    #[test]
    fn shapes_that_no_machine_has_are_refused() {
        let host = 4 << 30;
        for (class_mib, vcpus) in [(512, 1), (1024, 8), (2048, 3)] {
            let shape = Shape { class_mib, vcpus };
            shape.check_possible(host).unwrap();
        }
        for (class_mib, vcpus) in [
            (0, 1),
            (256, 1),
            (513, 1),
            (512, 0),
            (512, 9),
            (512, u32::MAX),
            // No room beside it for the kernel of the machine.
            (4096, 1),
            (8192, 1),
            // As bytes these are small again.
            (1 << 44, 1),
            (1 << 63, 1),
            (u64::MAX, 1),
        ] {
            let shape = Shape { class_mib, vcpus };
            let refused = shape.check_possible(host).unwrap_err();
            assert!(refused.message.contains("can not be"), "{refused}");
        }
    }

    #[test]
    fn a_counter_is_as_fast_as_it_was_before() {
        let dir = tempfile::tempdir().unwrap();
        let kept = |khz| {
            let mut qemu = Qemu {
                program: PathBuf::new(),
                version: "7".to_owned(),
                accel: Accel::Tcg,
                kernel: Kernel::default(),
                kernel_hash: "0".repeat(12),
                tsc_khz: khz,
                processor: None,
                spot: Spot::default(),
            };
            qemu.keep_speed(dir.path()).unwrap();
            (qemu.tsc_khz, qemu.build())
        };
        let (first, build) = kept(2_445_490);
        assert_eq!(first, 2_445_490);
        assert_eq!(
            kept(2_445_510),
            (first, build.clone()),
            "on the other side of a whole number"
        );
        let (other, of_other) = kept(3_000_000);
        assert_eq!(other, 3_000_000);
        assert_ne!(of_other, build);
        assert_eq!(kept(3_000_100).0, other);
    }
}
