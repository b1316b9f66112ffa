//! What this level needs of the host, each with what to do about it.

use crate::{
    cgroup::layout::{Kind, Layout},
    criu,
    launcher::TERMINALS,
    seccomp::Filters,
};
use sandkeep_model::Limits;
use sandkeep_ward::Check;
use std::{fs, path::Path};

/// Mapped mounts on btrfs came with 5.15; clone into a cgroup and close_range are older.
const OLDEST_KERNEL: (u32, u32) = (5, 15);
/// The kernel has no more.
const MOST_PIDS: u64 = 4_194_304;

/// What a host with `most_boxes` sandboxes needs.
pub fn all(state_dir: &Path, most_boxes: usize) -> Vec<Check> {
    let most_boxes = u64::try_from(most_boxes).unwrap_or(u64::MAX);
    vec![
        root(),
        kernel(&text("/proc/sys/kernel/osrelease")),
        user_namespaces(&text("/proc/sys/user/max_user_namespaces")),
        network_namespaces(&text("/proc/sys/user/max_net_namespaces")),
        cgroups(),
        seccomp(&text("/proc/sys/kernel/seccomp/actions_avail")),
        mapped_mounts(state_dir),
        core_pattern(&text("/proc/sys/kernel/core_pattern")),
        file_limit(),
        sockets(),
        process_ids(&text("/proc/sys/kernel/pid_max"), most_boxes),
        terminals(
            &text("/proc/sys/kernel/pty/max"),
            &text("/proc/sys/kernel/pty/reserve"),
            most_boxes,
        ),
    ]
}

/// Optional: without it paused boxes stay in memory.
pub async fn memory(given: Option<&Path>) -> Check {
    const NAME: &str = "memory to disk";
    const INSTALL: &str = "build CRIU: `script/server` of the sources does it on Debian and Ubuntu \
        (see docs/time.md); where the distribution has CRIU 4.2 or newer its package will do";
    const SHARED_LIMITS: &str = "sandboxes that come back from the disk share limits of the kernel \
        (inotify, message queues, pending signals) with root of this host";
    let Some(program) = criu::find(given) else {
        return Check::warning(
            NAME,
            "CRIU is not installed: paused boxes stay in memory, forks start cold",
            INSTALL,
        );
    };
    match criu::look(&program).await {
        Ok(criu) if criu.keeps_connections() && !criu.is_careful() => Check::warning(
            NAME,
            format!(
                "CRIU {} at {} was built for an earlier version: sandboxes that hold deleted files stay \
                 in memory when they are paused, and {SHARED_LIMITS}",
                criu.version,
                program.display()
            ),
            INSTALL,
        ),
        Ok(criu) if criu.is_careful() => Check::ok(
            NAME,
            format!("CRIU {} at {}", criu.version, program.display()),
        ),
        Ok(criu) if criu.keeps_connections() => Check::warning(
            NAME,
            format!(
                "CRIU {} at {} is of an earlier version of Sandkeep: sandboxes that hold deleted \
                 files open stay in memory when they are paused",
                criu.version,
                program.display()
            ),
            INSTALL,
        ),
        Ok(criu) => Check::warning(
            NAME,
            format!(
                "CRIU {} at {} is not built for boxes: those with open TCP connections or deleted \
                 files, and those that were on disk before, stay in memory when they are paused; \
                 {SHARED_LIMITS}",
                criu.version,
                program.display()
            ),
            INSTALL,
        ),
        Err(error) => Check::warning(NAME, error.message, INSTALL),
    }
}

fn text(path: &str) -> String {
    fs::read_to_string(path)
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

fn root() -> Check {
    const NAME: &str = "root";
    if !rustix::process::geteuid().is_root() {
        return Check::missing(
            NAME,
            "the server does not run as root",
            "run it as root or with sudo",
        );
    }
    let needed = rustix::thread::CapabilitySet::SYS_ADMIN
        | rustix::thread::CapabilitySet::SETUID
        | rustix::thread::CapabilitySet::SETGID
        | rustix::thread::CapabilitySet::NET_ADMIN
        | rustix::thread::CapabilitySet::KILL
        | rustix::thread::CapabilitySet::CHOWN;
    match rustix::thread::capabilities(None) {
        Ok(sets) if sets.effective.contains(needed) => {
            Check::ok(NAME, "root with its capabilities")
        }
        _ => Check::missing(
            NAME,
            "root without the capability to make namespaces",
            "start the server outside of a container, or in a privileged one",
        ),
    }
}

fn kernel(release: &str) -> Check {
    const NAME: &str = "kernel";
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    let version = (numbers.next(), numbers.next());
    match version {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= OLDEST_KERNEL => {
            Check::ok(NAME, release)
        }
        (Some(Ok(_)), Some(Ok(_))) => Check::missing(
            NAME,
            format!("{release} is too old"),
            format!(
                "use a kernel of {}.{} or newer",
                OLDEST_KERNEL.0, OLDEST_KERNEL.1
            ),
        ),
        _ => Check::warning(
            NAME,
            format!("the version {release:?} can not be read"),
            "make sure that /proc is mounted",
        ),
    }
}

fn user_namespaces(most: &str) -> Check {
    const NAME: &str = "user namespaces";
    match most.parse::<u64>() {
        Ok(0) => Check::missing(
            NAME,
            "switched off",
            "sysctl -w user.max_user_namespaces=15000, and make it last in /etc/sysctl.d",
        ),
        Ok(most) => Check::ok(NAME, format!("up to {most}")),
        Err(_) => Check::missing(
            NAME,
            "the kernel has none",
            "use a kernel with CONFIG_USER_NS=y",
        ),
    }
}

fn network_namespaces(most: &str) -> Check {
    const NAME: &str = "network namespaces";
    match most.parse::<u64>() {
        Ok(0) => Check::missing(
            NAME,
            "switched off",
            "sysctl -w user.max_net_namespaces=15000, and make it last in /etc/sysctl.d",
        ),
        Ok(most) => Check::ok(NAME, format!("up to {most}")),
        Err(_) => Check::missing(
            NAME,
            "the kernel has none",
            "use a kernel with CONFIG_NET_NS=y",
        ),
    }
}

fn cgroups() -> Check {
    const NAME: &str = "cgroups";
    let layout = match Layout::of_this_host() {
        Ok(layout) => layout,
        Err(error) => return Check::missing(NAME, error.message, "mount /proc"),
    };
    match layout.kind() {
        Ok(Kind::Unified) => Check::ok(NAME, "cgroup2 with cpu, memory and pids"),
        Ok(Kind::Hybrid) => Check::ok(NAME, "controllers on version 1, cgroup2 beside them"),
        Ok(Kind::V1Only) => Check::warning(
            NAME,
            "version 1 only: ending boxes takes a little longer",
            "mount cgroup2, or boot with systemd.unified_cgroup_hierarchy=1",
        ),
        Err(error) => Check::missing(NAME, error.message, error.hint.unwrap_or_default()),
    }
}

/// Whether what waits in sockets is memory of the sandbox.
fn sockets() -> Check {
    const NAME: &str = "memory of sockets";
    let version_1 = Layout::of_this_host()
        .and_then(|layout| layout.kind())
        .is_ok_and(|kind| kind != Kind::Unified);
    if version_1 {
        return Check::warning(
            NAME,
            "cgroup version 1 counts it apart: a sandbox can have a quarter of its memory limit in \
             sockets beside it, and each TCP connection 64 KiB more",
            "boot with systemd.unified_cgroup_hierarchy=1, so that it is counted as memory",
        );
    }
    Check::ok(NAME, "counted as memory of the sandbox")
}

/// Sandboxes share the numbers of processes with the host.
fn process_ids(most: &str, boxes: u64) -> Check {
    const NAME: &str = "process ids";
    let each = u64::from(Limits::default().pids);
    let wanted = boxes.saturating_mul(each);
    match most.parse::<u64>() {
        Ok(most) if most < wanted => Check::warning(
            NAME,
            format!(
                "kernel.pid_max is {most}: {} sandboxes with {each} processes each use up all of \
                 them, and {boxes} sandboxes are allowed",
                most / each
            ),
            format!(
                "sysctl -w kernel.pid_max={}, and make it last in /etc/sysctl.d; or lower `max_boxes`",
                wanted.next_power_of_two().min(MOST_PIDS)
            ),
        ),
        Ok(most) => Check::ok(NAME, format!("up to {most}, enough for {boxes} sandboxes")),
        Err(_) => Check::warning(
            NAME,
            "kernel.pid_max can not be read",
            "make sure that /proc is mounted",
        ),
    }
}

/// Sandboxes share the number of terminals with each other; some are kept for the host.
fn terminals(most: &str, kept: &str, boxes: u64) -> Check {
    const NAME: &str = "terminals";
    let each = u64::from(TERMINALS);
    let wanted = boxes.saturating_mul(each);
    match (most.parse::<u64>(), kept.parse::<u64>()) {
        (Ok(most), Ok(kept)) if most.saturating_sub(kept) < wanted => Check::warning(
            NAME,
            format!(
                "{} are for sandboxes: {} with {each} terminals each use up all of them, and \
                 {boxes} sandboxes are allowed",
                most.saturating_sub(kept),
                most.saturating_sub(kept) / each
            ),
            format!(
                "sysctl -w kernel.pty.max={}, and make it last in /etc/sysctl.d; or lower `max_boxes`",
                wanted.saturating_add(kept)
            ),
        ),
        (Ok(most), Ok(_)) => Check::ok(NAME, format!("{most}, enough for {boxes} sandboxes")),
        _ => Check::warning(
            NAME,
            "kernel.pty.max can not be read",
            "make sure that /proc is mounted",
        ),
    }
}

fn seccomp(actions: &str) -> Check {
    const NAME: &str = "seccomp";
    if !actions.split(' ').any(|action| action == "errno") {
        return Check::missing(
            NAME,
            "the kernel has no seccomp filters",
            "use a kernel with CONFIG_SECCOMP_FILTER=y",
        );
    }
    match Filters::compile() {
        Ok(_) => Check::ok(NAME, "filters can be installed"),
        Err(error) => Check::missing(NAME, error.message, "report this: it is a fault of ours"),
    }
}

/// File systems on which owners can be mapped, by the number statfs gives.
const MAPPABLE: [(u64, &str); 5] = [
    (0x9123_683e, "btrfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x0102_1994, "tmpfs"),
    (0xf2f5_2010, "f2fs"),
];

fn mapped_mounts(state_dir: &Path) -> Check {
    const NAME: &str = "idmapped mounts";
    let kind = match rustix::fs::statfs(state_dir) {
        Ok(stat) => stat.f_type.cast_unsigned(),
        Err(error) => {
            return Check::missing(
                NAME,
                format!("{}: {error}", state_dir.display()),
                "give a state directory that exists",
            );
        }
    };
    match MAPPABLE.iter().find(|(number, _)| *number == kind) {
        Some((_, name)) => Check::ok(NAME, format!("the state directory is on {name}")),
        None => Check::warning(
            NAME,
            format!("the state directory is on a file system ({kind:#x}) without them"),
            "put the state directory on btrfs, ext4 or xfs",
        ),
    }
}

/// Boxes never start it (see the core limit); host programs that touch a box's files might.
fn core_pattern(pattern: &str) -> Check {
    const NAME: &str = "core dumps";
    if pattern.starts_with('|') {
        Check::ok(
            NAME,
            format!("{pattern}; boxes are kept from starting it by their core limit"),
        )
    } else {
        Check::ok(NAME, "written to files; boxes write none")
    }
}

fn file_limit() -> Check {
    const NAME: &str = "open files";
    const ENOUGH: u64 = 65_536;
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    match most {
        Some(most) if most < ENOUGH => Check::warning(
            NAME,
            format!("the server may open {most} files; a box can not have more than that"),
            "raise it: LimitNOFILE=1048576 in the unit, or ulimit -n",
        ),
        Some(most) => Check::ok(NAME, format!("up to {most}")),
        None => Check::ok(NAME, "no limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_ward::Verdict;

    #[test]
    fn kernels() {
        assert_eq!(kernel("6.18.44-generic").verdict, Verdict::Ok);
        assert_eq!(kernel("5.15.0").verdict, Verdict::Ok);
        let old = kernel("5.10.0-32-amd64");
        assert_eq!(old.verdict, Verdict::Missing);
        assert!(old.fix.unwrap().contains("5.15"));
        assert_eq!(kernel("").verdict, Verdict::Warning);
    }

    #[test]
    fn what_sandboxes_share_is_compared_with_how_many_are_allowed() {
        assert_eq!(process_ids("4194304", 2000).verdict, Verdict::Ok);
        let few = process_ids("32768", 33);
        assert_eq!(few.verdict, Verdict::Warning);
        assert!(few.fix.unwrap().contains("kernel.pid_max=65536"));
        assert_eq!(terminals("4096", "1024", 48).verdict, Verdict::Ok);
        let few = terminals("4096", "1024", 49);
        assert_eq!(few.verdict, Verdict::Warning);
        assert!(few.fix.unwrap().contains("kernel.pty.max=4160"));
        assert_eq!(terminals("", "", 1).verdict, Verdict::Warning);
    }

    #[test]
    fn switched_off_namespaces_say_how_to_switch_them_on() {
        assert_eq!(user_namespaces("96343").verdict, Verdict::Ok);
        assert!(user_namespaces("0").fix.unwrap().contains("sysctl"));
        assert_eq!(user_namespaces("").verdict, Verdict::Missing);
        assert_eq!(network_namespaces("0").verdict, Verdict::Missing);
    }

    #[test]
    fn a_kernel_without_errno_filters_is_missing() {
        assert_eq!(seccomp("kill_process errno allow").verdict, Verdict::Ok);
        assert_eq!(seccomp("").verdict, Verdict::Missing);
    }
}
