//! The system calls a box may not make, each with the reason, as data.
//!
//! It is a list of what is refused: people bring arbitrary programs, and most calls are
//! harmless in namespaces of one's own. What is here reaches state that no namespace
//! divides, opens kernel code with a record of holes, or gets around a limit.

use libc::{
    CLONE_NEWCGROUP, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER,
    CLONE_NEWUTS, c_int, c_long,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// EPERM.
    NotPermitted,
    /// ENOSYS: the C library then uses the older call, whose arguments can be seen.
    NoSuchCall,
    /// EAFNOSUPPORT: programs that try several address families go on to the next.
    NoSuchFamily,
    /// Success without effect.
    Pretend,
}

/// One thing that must be true of one argument. Arguments are compared as 32 bits, which is
/// how the kernel takes every one of those below.
#[derive(Debug, Clone, Copy)]
pub enum Test {
    Is(u8, u32),
    IsNot(u8, u32),
    /// `(argument & mask) == value`
    Bits(u8, u32, u32),
    /// As a pointer: not null.
    Given(u8),
}

#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub name: &'static str,
    pub call: c_long,
    /// All of them must hold; none means: whatever the arguments.
    pub when: &'static [Test],
    pub answer: Answer,
    pub why: &'static str,
}

const fn bit(flag: c_int) -> u32 {
    flag.cast_unsigned()
}

/// Not in libc for `clone`, where the low byte is the exit signal; `unshare` knows it.
const NEWTIME: u32 = 0x80;
const FICLONE: u32 = 0x4004_9409;
const FICLONERANGE: u32 = 0x4020_940d;
const FIDEDUPERANGE: u32 = 0xc018_9436;
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;
const RLIMIT_CORE: u32 = 4;
const UNIX: u32 = 1;
const INET: u32 = 2;
const INET6: u32 = 10;
const NETLINK: u32 = 16;

macro_rules! refuse {
    ($answer:ident, $why:literal: $($call:ident),+ $(,)?) => {
        [$(Entry {
            name: stringify!($call),
            call: libc::$call,
            when: &[],
            answer: Answer::$answer,
            why: $why,
        }),+]
    };
}

macro_rules! refuse_when {
    ($answer:ident, $why:literal, $call:ident: $([$($test:expr),+]),+ $(,)?) => {
        [$(Entry {
            name: stringify!($call),
            call: libc::$call,
            when: const { &[$($test),+] },
            answer: Answer::$answer,
            why: $why,
        }),+]
    };
}

/// The whole list for this machine's architecture.
pub fn entries() -> Vec<Entry> {
    let mut all = Vec::new();
    all.extend(whole_calls());
    all.extend(namespaces());
    all.extend(sockets());
    all.extend(ioctls());
    all.extend(other_arguments());
    #[cfg(target_arch = "x86_64")]
    all.extend(only_on_x86_64());
    all
}

fn whole_calls() -> Vec<Entry> {
    let mut all = Vec::new();
    all.extend(
        refuse!(NotPermitted, "the mount table is the wall of the box":
        SYS_mount, SYS_umount2, SYS_pivot_root, SYS_fsopen, SYS_fsconfig, SYS_fsmount,
        SYS_fspick, SYS_move_mount, SYS_open_tree, SYS_mount_setattr),
    );
    all.push(Entry {
        name: "SYS_open_tree_attr",
        call: 467,
        when: &[],
        answer: Answer::NotPermitted,
        why: "the mount table is the wall of the box; libc has no name for this call yet",
    });
    all.extend(refuse!(NotPermitted, "enters a namespace of somebody else": SYS_setns));
    all.extend(refuse!(NoSuchCall, "its flags lie in memory, where a filter can not look; clone is used instead": SYS_clone3));
    all.extend(refuse!(NotPermitted, "kernel keyrings are shared with the host": SYS_keyctl, SYS_add_key, SYS_request_key));
    all.extend(refuse!(NotPermitted, "runs programs in the kernel; a long record of verifier holes": SYS_bpf));
    all.extend(
        refuse!(NotPermitted, "watches the host's processors; side channels": SYS_perf_event_open),
    );
    all.extend(refuse!(NotPermitted, "holds the kernel in the middle of a copy: wins races for exploits": SYS_userfaultfd));
    all.extend(
        refuse!(NotPermitted, "does calls past this filter; a long record of holes":
        SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register),
    );
    all.extend(refuse!(NotPermitted, "opens files by number, outside of the root of the box": SYS_open_by_handle_at));
    all.extend(refuse!(NotPermitted, "loads code into the kernel": SYS_init_module, SYS_finit_module, SYS_delete_module));
    all.extend(refuse!(NotPermitted, "replaces the kernel": SYS_kexec_load));
    all.extend(refuse!(NotPermitted, "stops the host": SYS_reboot));
    all.extend(refuse!(NotPermitted, "swap belongs to the host": SYS_swapon, SYS_swapoff));
    all.extend(refuse!(NotPermitted, "the clock is the host's": SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime));
    all.extend(refuse!(NotPermitted, "accounting and quotas are the host's": SYS_acct, SYS_quotactl, SYS_quotactl_fd));
    all.extend(refuse!(NotPermitted, "reads the host's kernel log": SYS_syslog));
    all.extend(refuse!(NotPermitted, "moves pages of other processes between memory nodes": SYS_move_pages, SYS_migrate_pages));
    all.extend(refuse!(NotPermitted, "watches whole file systems; inotify does for one's own": SYS_fanotify_init));
    all.extend(refuse!(NotPermitted, "profiler cookies, long unused": SYS_lookup_dcookie));
    all.extend(refuse!(NoSuchCall, "the host has one number of such requests for all who use it; programs use threads instead": SYS_io_setup));
    all.extend(refuse!(NotPermitted, "an old server call that nothing uses": SYS_nfsservctl));
    all
}

/// A new user namespace gives capabilities, and with them most of the kernel's surface.
fn namespaces() -> Vec<Entry> {
    macro_rules! with_each_flag {
        ($call:ident: $($flag:expr),+) => {
            refuse_when!(NotPermitted, "new namespaces give new capabilities", $call:
                $([Test::Bits(0, $flag, $flag)]),+)
        };
    }
    let mut all = Vec::new();
    all.extend(with_each_flag!(SYS_clone:
        bit(CLONE_NEWUSER), bit(CLONE_NEWNS), bit(CLONE_NEWPID), bit(CLONE_NEWNET),
        bit(CLONE_NEWIPC), bit(CLONE_NEWUTS), bit(CLONE_NEWCGROUP)));
    all.extend(with_each_flag!(SYS_unshare:
        bit(CLONE_NEWUSER), bit(CLONE_NEWNS), bit(CLONE_NEWPID), bit(CLONE_NEWNET),
        bit(CLONE_NEWIPC), bit(CLONE_NEWUTS), bit(CLONE_NEWCGROUP), NEWTIME));
    all
}

fn sockets() -> Vec<Entry> {
    let mut all = Vec::new();
    all.extend(refuse_when!(NoSuchFamily, "only unix, internet and netlink sockets: vsock reaches the hypervisor, packet and alg have a record of holes", SYS_socket:
        [Test::IsNot(0, UNIX), Test::IsNot(0, INET), Test::IsNot(0, INET6), Test::IsNot(0, NETLINK)]));
    all.extend(refuse_when!(NoSuchFamily, "pairs of other families than unix (tipc) have a record of holes", SYS_socketpair:
        [Test::IsNot(0, UNIX)]));
    // 0 route, 4 sock_diag (ss), 9 audit (sudo), 15 uevent (libudev), 16 generic.
    all.extend(
        refuse_when!(NoSuchFamily, "netlink protocols that configure the kernel", SYS_socket:
        [Test::Is(0, NETLINK), Test::IsNot(2, 0), Test::IsNot(2, 4), Test::IsNot(2, 9),
         Test::IsNot(2, 15), Test::IsNot(2, 16)]),
    );
    // 33 dccp, 115 l2tp, 132 sctp, 256 smc.
    all.extend(
        refuse_when!(NoSuchFamily, "rare transports with a record of holes", SYS_socket:
        [Test::Is(0, INET), Test::Is(2, 33)], [Test::Is(0, INET6), Test::Is(2, 33)],
        [Test::Is(0, INET), Test::Is(2, 115)], [Test::Is(0, INET6), Test::Is(2, 115)],
        [Test::Is(0, INET), Test::Is(2, 132)], [Test::Is(0, INET6), Test::Is(2, 132)],
        [Test::Is(0, INET), Test::Is(2, 256)], [Test::Is(0, INET6), Test::Is(2, 256)]),
    );
    all
}

fn ioctls() -> Vec<Entry> {
    let mut all = Vec::new();
    all.extend(
        refuse_when!(NotPermitted, "types into another process's terminal", SYS_ioctl:
        [Test::Is(1, TIOCSTI)], [Test::Is(1, TIOCLINUX)]),
    );
    all.extend(refuse_when!(NotPermitted, "btrfs: a subvolume or snapshot of one's own is outside of the disk limit; only cloning file contents is harmless", SYS_ioctl:
        [Test::Bits(1, 0xff00, 0x9400), Test::IsNot(1, FICLONE), Test::IsNot(1, FICLONERANGE),
         Test::IsNot(1, FIDEDUPERANGE)]));
    all
}

fn other_arguments() -> Vec<Entry> {
    let mut all = Vec::new();
    // 0 is plain, 8 is 32-bit, 0x40000 is what debuggers set, all ones asks.
    all.extend(
        refuse_when!(NotPermitted, "old personalities switch off protections", SYS_personality:
        [Test::IsNot(0, 0), Test::IsNot(0, 8), Test::IsNot(0, 0x4_0000), Test::IsNot(0, 0x4_0008),
         Test::IsNot(0, u32::MAX)]),
    );
    // The limit is 1 byte, which keeps the host's core dump program from being started.
    // With 0 it would be started; sudo and many shells set 0 and must not fail.
    all.extend(refuse_when!(Pretend, "a core dump of a box must not start a program on the host", SYS_prlimit64:
        [Test::Is(1, RLIMIT_CORE), Test::Given(2)]));
    all
}

#[cfg(target_arch = "x86_64")]
fn only_on_x86_64() -> Vec<Entry> {
    let mut all = Vec::new();
    all.extend(refuse!(NotPermitted, "replaces the kernel": SYS_kexec_file_load));
    all.extend(refuse!(NotPermitted, "direct access to hardware ports": SYS_iopl, SYS_ioperm));
    all.extend(refuse!(NotPermitted, "old calls that nothing uses":
        SYS__sysctl, SYS_uselib,
        SYS_ustat, SYS_sysfs));
    all.extend(refuse_when!(Pretend, "a core dump of a box must not start a program on the host", SYS_setrlimit:
        [Test::Is(0, RLIMIT_CORE)]));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_has_a_reason() {
        for entry in entries() {
            assert!(entry.why.len() > 8, "{}", entry.name);
        }
    }

    #[test]
    fn a_call_has_one_answer_only() {
        // Filters are stacked, one per answer; with two answers for one call the order
        // of the filters would decide.
        let all = entries();
        for a in &all {
            for b in &all {
                assert!(a.call != b.call || a.answer == b.answer, "{}", a.name);
            }
        }
    }
}
