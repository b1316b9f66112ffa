//! The kernel's surface: calls, namespaces, /proc and /sys.

use crate::attack;
use libc::{
    CLONE_NEWCGROUP, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWUSER,
    CLONE_NEWUTS,
};

/// The names and numbers of calls with the same arguments.
macro_rules! calls {
    ($($call:ident($arguments:literal)),+ $(,)?) => {
        &[$((stringify!($call), libc::$call, $arguments)),+]
    };
}

attack!(mounts_are_refused, target, {
    target
        .all_answer(
            calls![
                SYS_mount("b'none', b'/tmp', b'tmpfs', 0, 0"),
                SYS_mount("b'/etc', b'/tmp', 0, 4096, 0"),
                SYS_umount2("b'/proc/sys', 2"),
                SYS_pivot_root("b'/tmp', b'/tmp'"),
                SYS_fsopen("b'tmpfs', 0"),
                SYS_fsconfig("3, 6, 0, 0, 0"),
                SYS_fsmount("3, 0, 0"),
                SYS_fspick("-100, b'/', 0"),
                SYS_open_tree("-100, b'/', 1"),
                SYS_move_mount("-100, b'/tmp', -100, b'/mnt', 0"),
                SYS_mount_setattr("-100, b'/proc/sys', 0, buffer, 32"),
            ],
            "EPERM",
        )
        .await;
    target
        .all_answer(&[("open_tree_attr", 467, "-100, b'/', 1, 0, 0")], "EPERM")
        .await;
    target.fails("mount -t cgroup -o memory cgroup /mnt").await;
    target.fails("mount -o remount,rw /proc/sys").await;
});

attack!(new_namespaces_are_refused_in_every_way, target, {
    for flag in [
        CLONE_NEWUSER,
        CLONE_NEWNS,
        CLONE_NEWPID,
        CLONE_NEWNET,
        CLONE_NEWIPC,
        CLONE_NEWUTS,
        CLONE_NEWCGROUP,
        CLONE_NEWUSER | CLONE_NEWNS,
    ] {
        let unshare = format!("{flag}");
        let clone = format!("{flag} | 17, 0, 0, 0, 0");
        target
            .all_answer(
                &[
                    ("unshare", libc::SYS_unshare, unshare.as_str()),
                    ("clone", libc::SYS_clone, clone.as_str()),
                ],
                "EPERM",
            )
            .await;
    }
    // CLONE_NEWTIME
    target
        .all_answer(calls![SYS_unshare("0x80")], "EPERM")
        .await;
    target
        .all_answer(calls![SYS_clone3("buffer, 64")], "ENOSYS")
        .await;
    target
        .all_answer(
            calls![SYS_setns("os.open('/proc/self/ns/net', 0), 0")],
            "EPERM",
        )
        .await;
    target.fails("unshare --user --map-root-user true").await;
    let output = target.stage.run_as("user", "unshare --user true").await;
    assert!(!output.success(), "{output:?}");
    // What is harmless goes on working: files and file system state of one's own.
    target
        .all_answer(calls![SYS_unshare("0x400"), SYS_unshare("0x200")], "ok")
        .await;
});

attack!(keyrings_are_refused, target, {
    target
        .all_answer(
            calls![
                SYS_keyctl("0, -3, 0"),
                SYS_add_key("b'user', b'name', b'x', 1, -3"),
                SYS_request_key("b'user', b'name', 0, -3"),
            ],
            "EPERM",
        )
        .await;
});

attack!(kernel_programs_and_watching_the_host_are_refused, target, {
    target
        .all_answer(
            calls![
                SYS_bpf("0, buffer, 64"),
                SYS_perf_event_open("buffer, 0, -1, -1, 0"),
                SYS_userfaultfd("1"),
                SYS_syslog("3, buffer, 100"),
                SYS_fanotify_init("0, 0"),
                SYS_lookup_dcookie("0, buffer, 10"),
                SYS_move_pages("1, 0, 0, 0, 0, 0"),
                SYS_migrate_pages("1, 0, 0, 0"),
            ],
            "EPERM",
        )
        .await;
});

attack!(io_uring_is_refused, target, {
    target
        .all_answer(
            calls![
                SYS_io_uring_setup("8, buffer"),
                SYS_io_uring_enter("3, 0, 0, 0, 0, 0"),
                SYS_io_uring_register("3, 0, 0, 0"),
            ],
            "EPERM",
        )
        .await;
});

// "sys_module" and kin.
attack!(changing_the_kernel_or_the_host_is_refused, target, {
    target
        .all_answer(
            calls![
                SYS_init_module("buffer, 4096, b''"),
                SYS_finit_module("0, b'', 0"),
                SYS_delete_module("b'ext4', 0"),
                SYS_kexec_load("0, 0, 0, 0"),
                SYS_reboot("0xfee1dead, 672274793, 0x1234567, 0"),
                SYS_swapon("b'/tmp', 0"),
                SYS_swapoff("b'/tmp'"),
                SYS_settimeofday("buffer, 0"),
                SYS_clock_settime("0, buffer"),
                SYS_adjtimex("buffer"),
                SYS_clock_adjtime("0, buffer"),
                SYS_acct("b'/tmp/acct'"),
                SYS_quotactl("0, 0, 0, 0"),
                SYS_quotactl_fd("0, 0, 0, 0"),
                SYS_personality("0x0400000"),
                SYS_sethostname("b'host', 4"),
                SYS_setdomainname("b'host', 4"),
            ],
            "EPERM",
        )
        .await;
    #[cfg(target_arch = "x86_64")]
    target
        .all_answer(
            calls![
                SYS_iopl("3"),
                SYS_ioperm("0x80, 1, 1"),
                SYS_kexec_file_load("0, 0, 0, 0, 0"),
            ],
            "EPERM",
        )
        .await;
});

// "shocker": opening the host's files by number.
attack!(open_by_handle_is_refused, target, {
    target
        .all_answer(calls![SYS_open_by_handle_at("0, buffer, 0")], "EPERM")
        .await;
});

// The numbers of other calling conventions would pass a filter that knows only one.
#[cfg(target_arch = "x86_64")]
attack!(other_system_call_tables_are_refused, target, {
    // x32: the same numbers with a bit set.
    target
        .all_answer(&[("x32 getpid", 0x4000_0000 | 39, "")], "ENOSYS")
        .await;
    target
        .all_answer(
            &[("x32 mount", 0x4000_0000 | 165, "0, 0, 0, 0, 0")],
            "ENOSYS",
        )
        .await;
    // i386: `int $0x80`, here getpid, harmless if it worked. The process is killed.
    target
        .works(
            r#"cat > /tmp/i386.c <<'C'
int main(void) { long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20)); return r > 0 ? 42 : 43; }
C
gcc -o /tmp/i386 /tmp/i386.c"#,
        )
        .await;
    let output = target.run("/tmp/i386; echo $?").await;
    // 128 + SIGSYS, or + SIGSEGV where the kernel has no 32-bit calls at all.
    let code = output.stdout.lines().last().unwrap_or_default().to_owned();
    assert!(matches!(code.as_str(), "159" | "139"), "{output:?}");
});

attack!(proc_tells_and_commands_nothing_of_the_host, target, {
    for path in [
        "kcore",
        "keys",
        "key-users",
        "timer_list",
        "sched_debug",
        "kmsg",
        "kallsyms",
        "slabinfo",
        "kpagecount",
        "kpageflags",
        "latency_stats",
    ] {
        let output = target.run(&format!("head -c 100 /proc/{path}")).await;
        assert_eq!(output.stdout, "", "/proc/{path} tells: {output:?}");
    }
    for path in ["acpi", "scsi", "driver"] {
        let output = target.run(&format!("ls -A /proc/{path}")).await;
        assert_eq!(output.stdout, "", "/proc/{path} tells: {output:?}");
    }
    for (path, value) in [
        ("/proc/sysrq-trigger", "h"),
        ("/proc/sys/kernel/core_pattern", "|/tmp/evil"),
        ("/proc/sys/kernel/modprobe", "/tmp/evil"),
        ("/proc/sys/kernel/hostname", "evil"),
        ("/proc/sys/vm/drop_caches", "1"),
        ("/proc/sys/vm/overcommit_memory", "1"),
        ("/proc/sys/net/ipv4/ip_forward", "1"),
        ("/proc/sys/user/max_user_namespaces", "1"),
        ("/proc/irq/default_smp_affinity", "1"),
    ] {
        // A masked file takes anything and does nothing; all others refuse.
        let output = target
            .run(&format!(
                "[ -c {path} ] || ( echo '{value}' > {path} ) 2>/dev/null && ! [ -c {path} ]"
            ))
            .await;
        assert!(!output.success(), "{path} can be written: {output:?}");
    }
});

attack!(sys_is_nearly_empty_and_read_only, target, {
    let everything = target.works("find /sys -maxdepth 4 | sort").await;
    for line in everything.lines() {
        let expected = ["/sys", "/sys/devices", "/sys/devices/system"].contains(&line)
            || line.starts_with("/sys/devices/system/cpu");
        assert!(expected, "{line} is in the box");
    }
    target.fails("touch /sys/x").await;
    target
        .fails("echo 0 > /sys/devices/system/cpu/cpu1/online")
        .await;
});

// CVE-2022-0492.
attack!(no_cgroup_file_system_to_abuse, target, {
    assert_eq!(
        target
            .works("grep -cE ' cgroup2? ' /proc/mounts || true")
            .await,
        "0\n"
    );
    let found = target
        .works("find / -xdev -name release_agent -o -name cgroup.procs | head")
        .await;
    assert_eq!(found, "");
    // And the box does not see where on the host it is.
    let own = target.works("cat /proc/self/cgroup").await;
    for line in own.lines() {
        let path = line.rsplit(':').next().unwrap_or_default();
        let controllers = line.split(':').nth(1).unwrap_or_default();
        if ["memory", "pids", "cpu", "freezer", ""].contains(&controllers) {
            assert_eq!(path, "/", "{own}");
        }
    }
});

attack!(capabilities_are_few_and_never_more, target, {
    let status = target.works("grep ^Cap /proc/self/status").await;
    let value = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        let hex = line.and_then(|line| line.split_ascii_whitespace().nth(1));
        u64::from_str_radix(hex.expect("a line"), 16).expect("hex")
    };
    let bounding = value("CapBnd");
    assert_eq!(value("CapEff"), bounding);
    assert_eq!((value("CapInh"), value("CapAmb")), (0, 0));
    // SYS_ADMIN 21, SYS_MODULE 16, SYS_RAWIO 17, SYS_PTRACE 19, NET_ADMIN 12, BPF 39,
    // DAC_READ_SEARCH 2, SYS_RESOURCE 24, SYS_TIME 25, MKNOD 27.
    for number in [21, 16, 17, 19, 12, 39, 2, 24, 25, 27] {
        assert_eq!(
            bounding & (1 << number),
            0,
            "capability {number} in {bounding:x}"
        );
    }
    // sudo gives root, and root is no more than this.
    let output = target
        .stage
        .run_as(
            "user",
            "sudo -n id -u; sudo -n grep CapEff /proc/self/status",
        )
        .await;
    let mut lines = output.stdout.lines();
    assert_eq!(lines.next(), Some("0"), "{output:?}");
    let after = lines
        .next()
        .and_then(|line| line.split_ascii_whitespace().nth(1));
    assert_eq!(after, Some(format!("{bounding:016x}").as_str()));
    let output = target
        .stage
        .run_as("user", "sudo -n mount -t tmpfs x /mnt")
        .await;
    assert!(!output.success(), "{output:?}");
    // A plain user has nothing.
    let output = target
        .stage
        .run_as("user", "grep CapEff /proc/self/status")
        .await;
    assert!(output.stdout.ends_with("0000000000000000\n"), "{output:?}");
});

attack!(nothing_is_typed_into_other_terminals, target, {
    let answers = target
        .python(
            "master, slave = os.openpty()
print(call(16, slave, 0x5412, ctypes.c_char_p(b'x')))
print(call(16, slave, 0x541c, ctypes.c_char_p(b'x')))",
        )
        .await;
    assert_eq!(answers, "EPERM\nEPERM\n");
});
