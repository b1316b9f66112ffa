//! Out of the sandbox, onto the host: the scenarios of SandboxEscapeBench (arXiv 2603.02277).

use std::{fs, path::Path, process::Stdio};

use reqwest::Method;
use serde_json::json;

use super::{by_what_was_felt, by_what_worked, server::processes_of_sandboxes};
use crate::{
    bait::OWN_PUBLIC,
    bench::Bench,
    check::{CONTAINER, Check, Class, EVERYWHERE, Level, MICROVM, OWN_KERNEL, Verdict, judged},
    enter::descriptors as descriptors_of,
    fault::{Doing as _, Fault, Result},
    sandbox::Wish,
    weakness::Weakness,
};

const NOT_MICROVM: &[Level] = &[Level::Container, Level::Gvisor];
const KERNEL: &str = "Report it with the output of `sandkeep verify --json`; until it is mended \
                      run untrusted code at the microvm or gvisor level.";
const REPORT: &str = "Stop running untrusted code at this level, and report it with the output of \
                      `sandkeep verify --json`.";

pub const CHECKS: &[Check] = &[
    Check {
        id: "escape-api",
        class: Class::Escape,
        attack: "ask the API for a privileged sandbox",
        source: "SandboxEscapeBench 1, SandboxEscapeBench 3",
        levels: CONTAINER,
        means: "Whoever may create sandboxes can have one with parts of the host in it.",
        todo: REPORT,
        weakened_by: &[Weakness::Planted],
        run: api,
    },
    Check {
        id: "escape-block-device",
        class: Class::Escape,
        attack: "read a disk of the host by a device node",
        source: "SandboxEscapeBench 1",
        levels: EVERYWHERE,
        means: "Root of a sandbox reads and writes the host's disks.",
        todo: REPORT,
        weakened_by: &[Weakness::HostRoot],
        run: block_device,
    },
    Check {
        id: "escape-engine-socket",
        class: Class::Escape,
        attack: "use a socket of an engine or of the host",
        source: "SandboxEscapeBench 2, SandboxEscapeBench 14",
        levels: EVERYWHERE,
        means: "A service of the host takes orders from the sandbox.",
        todo: REPORT,
        weakened_by: &[Weakness::HostMount],
        run: engine_socket,
    },
    Check {
        id: "escape-host-files",
        class: Class::Escape,
        attack: "find a file of the host in any mount",
        source: "SandboxEscapeBench 3",
        levels: EVERYWHERE,
        means: "Files of the host are in the sandbox's file tree.",
        todo: REPORT,
        weakened_by: &[Weakness::HostMount],
        run: host_files,
    },
    Check {
        id: "escape-host-processes",
        class: Class::Escape,
        attack: "find processes of the host",
        source: "SandboxEscapeBench 4",
        levels: EVERYWHERE,
        means: "The sandbox sees processes of the host and may read or end them.",
        todo: REPORT,
        weakened_by: &[Weakness::HostProc],
        run: host_processes,
    },
    Check {
        id: "escape-mounts",
        class: Class::Escape,
        attack: "mount something",
        source: "SandboxEscapeBench 5",
        levels: EVERYWHERE,
        means: "Root of the sandbox changes its mounts, and with them what protects it.",
        todo: KERNEL,
        weakened_by: &[Weakness::AllCapabilities],
        run: mounts,
    },
    Check {
        id: "escape-modules",
        class: Class::Escape,
        attack: "load code into the kernel",
        source: "SandboxEscapeBench 6",
        levels: NOT_MICROVM,
        means: "The sandbox can run code in the host's kernel.",
        todo: REPORT,
        weakened_by: &[Weakness::HostRoot],
        run: modules,
    },
    Check {
        id: "escape-handles",
        class: Class::Escape,
        attack: "open files of the host by handles",
        source: "SandboxEscapeBench 7",
        levels: NOT_MICROVM,
        means: "Files are reachable past every path, on the file system the pool lies on.",
        todo: REPORT,
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/handles.py")),
    },
    Check {
        id: "escape-release-agent",
        class: Class::Escape,
        attack: "have a cgroup start a program on the host",
        source: "SandboxEscapeBench 8",
        levels: CONTAINER,
        means: "The host's kernel would start a program of the sandbox as root.",
        todo: REPORT,
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/cgroups.py")),
    },
    Check {
        id: "escape-runtime",
        class: Class::Escape,
        attack: "overwrite the runtime through /proc",
        source: "SandboxEscapeBench 9",
        levels: NOT_MICROVM,
        means: "The program that starts sandboxes can be replaced from inside.",
        todo: REPORT,
        weakened_by: &[Weakness::Planted],
        run: runtime,
    },
    Check {
        id: "escape-dirty-cow",
        class: Class::Escape,
        attack: "write to a read-only file: Dirty COW",
        source: "SandboxEscapeBench 10",
        levels: CONTAINER,
        means: "The host's kernel has CVE-2016-5195: any user becomes root, also of the host.",
        todo: "Update the host's kernel.",
        weakened_by: &[Weakness::Planted],
        run: |bench, level| read_only_file(bench, level, include_str!("../probes/dirty_cow.py")),
    },
    Check {
        id: "escape-dirty-pipe",
        class: Class::Escape,
        attack: "write to a read-only file: Dirty Pipe",
        source: "SandboxEscapeBench 11",
        levels: CONTAINER,
        means: "The host's kernel has CVE-2022-0847: any user becomes root, also of the host.",
        todo: "Update the host's kernel.",
        weakened_by: &[Weakness::Planted],
        run: |bench, level| read_only_file(bench, level, include_str!("../probes/dirty_pipe.py")),
    },
    Check {
        id: "escape-bpf",
        class: Class::Escape,
        attack: "give the kernel programs: BPF, perf",
        source: "SandboxEscapeBench 12",
        levels: NOT_MICROVM,
        means: "A large part of the host's kernel that was often broken is in reach.",
        todo: KERNEL,
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/bpf.py")),
    },
    Check {
        id: "escape-packet-sockets",
        class: Class::Escape,
        attack: "open packet and other odd sockets",
        source: "SandboxEscapeBench 13",
        levels: NOT_MICROVM,
        means: "Rarely used parts of the host's kernel are in reach, or packets past the rules.",
        todo: KERNEL,
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/packet.py")),
    },
    Check {
        id: "escape-descriptors",
        class: Class::Escape,
        attack: "use a descriptor that leaked in",
        source: "SandboxEscapeBench 15",
        levels: EVERYWHERE,
        means: "A descriptor of the host is open in the sandbox and leads out of it.",
        todo: REPORT,
        weakened_by: &[Weakness::SeccompOff],
        run: descriptors,
    },
    Check {
        id: "escape-archive",
        class: Class::Escape,
        attack: "`sandkeep cp` from a sandbox whose tar lies",
        source: "SandboxEscapeBench 16",
        levels: CONTAINER,
        means: "Copying out of a sandbox writes files beside the target.",
        todo: "Do not copy directories out of sandboxes that run untrusted code; report it.",
        weakened_by: &[Weakness::Planted],
        run: archive,
    },
    Check {
        id: "escape-host-services",
        class: Class::Escape,
        attack: "reach services of the host, the API too",
        source: "SandboxEscapeBench 17",
        levels: EVERYWHERE,
        means: "The sandbox talks to services that are meant for the host itself.",
        todo: REPORT,
        weakened_by: &[Weakness::OpenMoat],
        run: host_services,
    },
    Check {
        id: "escape-sysctls",
        class: Class::Escape,
        attack: "set core_pattern and other sysctls",
        source: "SandboxEscapeBench 18",
        levels: CONTAINER,
        means: "The host's kernel would start a program of the sandbox as root.",
        todo: REPORT,
        weakened_by: &[Weakness::HostRoot],
        run: |bench, level| simple(bench, level, include_str!("../probes/sysctls.py")),
    },
    Check {
        id: "escape-own-kernel",
        class: Class::Escape,
        attack: "all of this as root of a kernel of its own",
        source: "SandboxEscapeBench 5, SandboxEscapeBench 6, SandboxEscapeBench 8, \
                 SandboxEscapeBench 12, SandboxEscapeBench 18",
        levels: OWN_KERNEL,
        means: "What root of a sandbox changes in its kernel is felt on the host.",
        todo: REPORT,
        weakened_by: &[Weakness::Planted],
        run: own_kernel,
    },
    Check {
        id: "escape-emulated",
        class: Class::Escape,
        attack: "a machine that is emulated, not virtual",
        source: "docs/microvm.md",
        levels: MICROVM,
        means: "The machine runs on QEMU's emulator, which its makers do not call a security \
                boundary; only the jail around it is one.",
        todo: "Run sandboxes on a host with KVM (nested virtualisation in a cloud).",
        weakened_by: &[],
        run: emulated,
    },
];

/// Probes whose every success is a breach, wherever they run.
pub fn simple(bench: &Bench, level: Level, script: &str) -> Result<Verdict> {
    let sandbox = bench.shared(level)?;
    let arguments = json!({"own_kernel": level.own_kernel()});
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    Ok(by_what_worked(&report))
}

fn modules(bench: &Bench, level: Level) -> Result<Verdict> {
    let any = ["/proc/modules", "/proc/sys/kernel/kexec_load_disabled"];
    if !level.own_kernel() && !any.iter().any(|file| Path::new(file).exists()) {
        return Err(Fault::cannot(
            "the host's kernel has neither modules nor kexec: there is nothing to attack",
        ));
    }
    simple(bench, level, include_str!("../probes/modules.py"))
}

fn api(bench: &Bench, level: Level) -> Result<Verdict> {
    // Creating works at all.
    drop(bench.sandbox(level, &Wish::default())?);
    let mut wrong = Vec::new();
    let taken = bench
        .weak(Weakness::Planted)
        .then(|| ("metadata", json!({"a-field": "that is taken"})));
    let fields = [
        ("privileged", json!(true)),
        ("mounts", json!(["/etc:/host-etc"])),
        ("volumes", json!({"/etc": "/host-etc"})),
        ("binds", json!(["/etc:/host-etc"])),
        ("devices", json!(["/dev/kvm"])),
        ("cap_add", json!(["SYS_ADMIN"])),
        ("security_opt", json!(["seccomp=unconfined"])),
        ("pid_mode", json!("host")),
        ("network_mode", json!("host")),
    ];
    for (field, value) in fields.into_iter().chain(taken) {
        let mut body = json!({"isolation": level.name(), "timeout_seconds": 60});
        body[field] = value;
        let patience = std::time::Duration::from_secs(60);
        match bench
            .api()
            .json(Method::POST, "/v1/sandboxes", Some(&body), patience)
        {
            Ok(_) => wrong.push(format!("\"{field}\" was taken")),
            Err(Fault::Refused { status: 400, .. }) => {}
            Err(fault) => return Err(fault),
        }
    }
    Ok(judged(&wrong, "9 fields were refused by name"))
}

fn block_device(bench: &Bench, level: Level) -> Result<Verdict> {
    let (major, minor) = bench.bait.disk()?;
    let sandbox = bench.shared(level)?;
    let arguments = json!({
        "major": major, "minor": minor, "mark": bench.bait.mark, "own_kernel": level.own_kernel(),
    });
    let script = include_str!("../probes/block_device.py");
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    Ok(by_what_worked(&report))
}

fn engine_socket(bench: &Bench, level: Level) -> Result<Verdict> {
    let before = bench.bait.touched();
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/sockets.py");
    let arguments = json!({"mark": bench.bait.mark});
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    let mut wrong = report.worked.clone();
    if bench.bait.touched() > before {
        wrong.push("a socket of the host was reached".to_owned());
    }
    Ok(judged(
        &wrong,
        format!(
            "none reached; sockets in the sandbox: {}",
            report.texts("sockets")?.len().saturating_sub(1)
        ),
    ))
}

fn host_files(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/host_files.py");
    let arguments = json!({"mark": bench.bait.mark});
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    Ok(by_what_worked(&report))
}

fn host_processes(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/host_processes.py");
    let arguments = json!({"mark": bench.bait.mark});
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    Ok(by_what_worked(&report))
}

fn mounts(bench: &Bench, level: Level) -> Result<Verdict> {
    // Of its own: what it mounts stays mounted.
    let sandbox = bench.sandbox(level, &Wish::default())?;
    let script = include_str!("../probes/mounts.py");
    let arguments = json!({"mark": bench.bait.mark, "own_kernel": level.own_kernel()});
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    let mut felt = Vec::new();
    if level.own_kernel() {
        let canary = report.text("canary")?;
        if !canary.is_empty() {
            felt.push(format!("a file of the host is at {canary}"));
        }
    }
    Ok(by_what_was_felt(level, &report, &felt))
}

fn runtime(bench: &Bench, level: Level) -> Result<Verdict> {
    let agents = bench.server.state.join("agent");
    let before = contents(&agents)?;
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/runtime.py");
    let report = bench.probe(&sandbox, script, &json!({}), "root")?;
    let planted = agents.join("verify-planted");
    if bench.weak(Weakness::Planted) {
        fs::write(&planted, "another agent").doing("planting an agent")?;
    }
    let after = contents(&agents);
    if bench.weak(Weakness::Planted) {
        fs::remove_file(&planted).doing("removing a planted agent")?;
    }
    let mut felt = Vec::new();
    if after? != before {
        felt.push("the agent's file on the host was changed".to_owned());
    }
    Ok(by_what_was_felt(level, &report, &felt))
}

fn contents(dir: &Path) -> Result<Vec<Vec<u8>>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).doing("reading the agent's directory")? {
        let path = entry.doing("reading the agent's directory")?.path();
        files.push(fs::read(path).doing("reading the agent")?);
    }
    if files.is_empty() {
        return Err(Fault::cannot("the agent's file was not found on the host"));
    }
    Ok(files)
}

fn read_only_file(bench: &Bench, level: Level, script: &str) -> Result<Verdict> {
    const FILE: &str = "/tmp/read-only-by-verify";
    const TEXT: &str = "this file belongs to root";
    let sandbox = bench.shared(level)?;
    let make = format!("rm -f {FILE}; printf '{TEXT}' >{FILE} && chmod 444 {FILE}");
    sandbox.exec(&["sh", "-c", &make], "root")?;
    let arguments = json!({"file": FILE, "seconds": 2});
    let report = bench.probe(&sandbox, script, &arguments, "user")?;
    if bench.weak(Weakness::Planted) {
        sandbox.exec(&["sh", "-c", &format!("printf owned >{FILE}")], "root")?;
    }
    let after = sandbox.exec(&["cat", FILE], "root")?;
    if after.code != Some(0) {
        return Err(Fault::cannot("the file could not be read again"));
    }
    let wrong: Vec<String> = (after.out != TEXT)
        .then(|| "the file was changed by a user who may only read it".to_owned())
        .into_iter()
        .collect();
    Ok(judged(&wrong, report.refused.join(", ")))
}

fn descriptors(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/descriptors.py");
    let arguments = json!({"stray": bench.bait.stray, "state": bench.dir});
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    let mut wrong = report.worked.clone();
    for number in 3..12 {
        let body = json!({
            "cmd": ["sh", "-c", WHERE_IT_LEADS], "user": "root",
            "cwd": format!("/proc/self/fd/{number}"),
        });
        match sandbox.post("/exec", &body) {
            Err(Fault::Refused { .. }) => {}
            Ok(ran) => {
                let told = ran["stdout"].as_str().unwrap_or_default().trim();
                if !(level == Level::Microvm && told == OF_THE_MACHINE) {
                    wrong.push(format!(
                        "a program was started in /proc/self/fd/{number}: {told}"
                    ));
                }
            }
            Err(fault) => return Err(fault),
        }
    }
    Ok(judged(&wrong, report.refused.join(", ")))
}

/// Where a program is, whether that is what is there by this name, and whether the way up ends at
/// its own root.
const WHERE_IT_LEADS: &str = "at=$(readlink /proc/self/cwd); echo \"$at\"; \
     [ \"$(stat -c %d:%i .)\" = \"$(stat -c %d:%i \"$at\")\" ] && echo by name; \
     [ \"$(stat -c %d:%i ../../../../../../../..)\" = \"$(stat -c %d:%i /)\" ] && echo own root";

/// The agent of a machine is its init and keeps the machine's cgroups open (its descriptor 4).
/// They are of the machine's kernel, mounted by the agent, and root of the machine finds them by
/// their name as well: this one leads nowhere. The other levels have no such directory, for there
/// the agent is started by somebody outside.
const OF_THE_MACHINE: &str = "/sys/fs/cgroup\nby name\nown root";

fn archive(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.sandbox(level, &Wish::default())?;
    let base = bench.dir.join("copied");
    let (target, beside) = (base.join("target"), base.join("beside"));
    let _ = fs::remove_dir_all(&base);
    fs::create_dir_all(&target).doing("making a directory to copy to")?;
    let prepared = sandbox.exec(
        &["sh", "-c", "mkdir -p /tmp/dir && echo fine >/tmp/dir/f"],
        "root",
    )?;
    if prepared.code != Some(0) {
        return Err(Fault::cannot("the sandbox's directory could not be made"));
    }
    copy(bench, &sandbox.id, &target)?;
    if !target.join("dir/f").exists() && !target.join("f").exists() {
        return Err(Fault::cannot("an honest directory could not be copied out"));
    }
    let script = include_str!("../probes/evil_tar.py");
    let report = bench.probe(&sandbox, script, &json!({"beside": beside}), "root")?;
    let _refused_or_not = copy(bench, &sandbox.id, &target);
    if bench.weak(Weakness::Planted) {
        fs::write(&beside, "owned").doing("planting a file")?;
    }
    let escaped =
        beside.exists() || fs::symlink_metadata(target.join("link")).is_ok_and(|m| m.is_symlink());
    let wrong: Vec<String> = escaped
        .then(|| "a file or link was written beside the target".to_owned())
        .into_iter()
        .collect();
    Ok(judged(&wrong, report.refused.join(", ")))
}

fn copy(bench: &Bench, id: &str, target: &Path) -> Result<()> {
    let mut child = bench
        .place
        .command("cp")
        .arg(format!("{id}:/tmp/dir"))
        .arg(target)
        .env(
            "SANDKEEP_URL",
            format!("http://127.0.0.1:{}", bench.api().port),
        )
        .env("SANDKEEP_API_KEY", &bench.api().key)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .doing("running `sandkeep cp`")?;
    bench.stop.wait(&mut child).map(drop)
}

fn host_services(bench: &Bench, level: Level) -> Result<Verdict> {
    let before = bench.bait.touched();
    let sandbox = bench.shared(level)?;
    let arguments = json!({
        "hosts": ["127.0.0.1", "::1", "10.0.0.1", "10.0.2.2", "172.17.0.1", "198.18.0.1", OWN_PUBLIC],
        "ports": [bench.api().port, bench.bait.port],
    });
    let script = include_str!("../probes/host_loopback.py");
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    let mut wrong = report.worked.clone();
    if bench.bait.touched() > before {
        wrong.push("a service of the host was reached".to_owned());
    }
    Ok(judged(&wrong, super::refusals(&report)))
}

/// Files that tell what the host's kernel is set to.
const SETTINGS: [&str; 6] = [
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/sysrq",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/kernel/random/boot_id",
];

fn own_kernel(bench: &Bench, level: Level) -> Result<Verdict> {
    let read = || -> Vec<String> {
        SETTINGS
            .iter()
            .map(|file| fs::read_to_string(file).unwrap_or_default())
            .collect()
    };
    let before = read();
    let touched = bench.bait.touched();
    let neighbour = bench.shared(level)?;
    let ask = [
        "sh",
        "-c",
        "cat /proc/sys/kernel/hostname; sha256sum /bin/true",
    ];
    let its_own = neighbour.exec(&ask, "root")?.out;
    let sandbox = bench.sandbox(level, &Wish::default())?;
    let script = include_str!("../probes/own_kernel.py");
    let report = bench.probe(&sandbox, script, &json!({"device": "eth0"}), "root")?;
    if bench.weak(Weakness::Planted) {
        neighbour.exec(&["sh", "-c", "echo '# changed' >>/bin/true"], "root")?;
    }
    let mut felt = Vec::new();
    for ((file, before), after) in SETTINGS.iter().zip(&before).zip(read()) {
        if *before != after {
            felt.push(format!("{file} of the host changed"));
        }
    }
    if bench.bait.touched() > touched {
        felt.push("a service of the host was reached".to_owned());
    }
    if neighbour.exec(&ask, "root")?.out != its_own {
        felt.push("a neighbour's kernel or files changed".to_owned());
    }
    let written = report.texts("written").unwrap_or_default();
    Ok(judged(
        &felt,
        format!(
            "{} changes in its own kernel, {} refused; the host and a neighbour are as before",
            written.len(),
            report.refused.len()
        ),
    ))
}

/// A host may have KVM without its working there; what counts is what the machine uses.
fn emulated(bench: &Bench, level: Level) -> Result<Verdict> {
    let _machine = bench.shared(level)?;
    let mut machines = processes_of_sandboxes(bench)?;
    machines.retain(|(_, name)| name.starts_with("qemu"));
    if machines.is_empty() {
        return Err(Fault::cannot("no QEMU was found on the host"));
    }
    let virtual_ones = (machines.iter())
        .filter(|(pid, _)| {
            descriptors_of(*pid)
                .iter()
                .any(|link| link.contains("kvm-vcpu"))
        })
        .count();
    if virtual_ones == machines.len() {
        return Ok(Verdict::Held(format!("{virtual_ones} machines run on KVM")));
    }
    Err(Fault::cannot(
        "machines are emulated here, without KVM, and only the jail around QEMU is a wall",
    ))
}
