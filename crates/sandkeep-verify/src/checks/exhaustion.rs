//! Using up what others need. Every attempt is bounded and gives back at once what it took, so that
//! a host on which it works does not suffer.

mod pool;

use std::{
    fs,
    time::{Duration, Instant},
};

use reqwest::Method;
use rustix::fs::inotify;
use serde_json::{Value, json};

use super::{neighbours::in_background, server::processes_of_sandboxes};
use crate::{
    bench::Bench,
    check::{CONTAINER, Check, Class, EVERYWHERE, GVISOR, Level, Verdict},
    enter::descriptors,
    fault::{Doing as _, Fault, Result},
    sandbox::{Report, Sandbox, Wish},
    weakness::Weakness,
    world::ip,
};

const LIMITS: &str = "One sandbox takes what the others and the host need.";
const ADVICE: &str = "Check `sandkeep doctor` for cgroup warnings; lower `max_boxes` and the largest \
                    limits until it is mended; report it.";
const NOT_MICROVM: &[Level] = &[Level::Container, Level::Gvisor];
/// Inotify instances of the host that no sandbox may take: so many leave room for those of other
/// programs, and are far fewer than what the attack asks for.
const FELT: usize = 16;

pub const CHECKS: &[Check] = &[
    Check {
        id: "exhaust-processes",
        class: Class::Exhaustion,
        attack: "more processes than allowed",
        source: "docs/threats.md: fork bomb",
        levels: EVERYWHERE,
        means: LIMITS,
        todo: ADVICE,
        weakened_by: &[Weakness::LimitsLifted, Weakness::NoCgroup],
        run: processes,
    },
    Check {
        id: "exhaust-memory",
        class: Class::Exhaustion,
        attack: "more memory than allowed",
        source: "docs/threats.md: memory hog",
        levels: EVERYWHERE,
        means: LIMITS,
        todo: ADVICE,
        weakened_by: &[Weakness::LimitsLifted, Weakness::NoCgroup],
        run: |bench, level| memory(bench, level, "pages"),
    },
    Check {
        id: "exhaust-memory-files",
        class: Class::Exhaustion,
        attack: "more memory than allowed, by files",
        source: "docs/threats.md: memory hog, also through tmpfs",
        levels: EVERYWHERE,
        means: LIMITS,
        todo: ADVICE,
        weakened_by: &[Weakness::LimitsLifted],
        run: |bench, level| memory(bench, level, "tmpfs"),
    },
    Check {
        id: "exhaust-memory-sockets",
        class: Class::Exhaustion,
        attack: "more memory than allowed, in sockets",
        source: "finding 6",
        levels: EVERYWHERE,
        means: "Memory in the queues of connections is not counted: a sandbox takes it from the \
                host, and then the host's own TCP suffers.",
        todo: "Use a host with cgroup2 for memory, or update Sandkeep.",
        weakened_by: &[Weakness::LimitsLifted],
        run: |bench, level| memory(bench, level, "sockets"),
    },
    Check {
        id: "exhaust-disk",
        class: Class::Exhaustion,
        attack: "more disk than allowed",
        source: "docs/threats.md: disk filler",
        levels: EVERYWHERE,
        means: LIMITS,
        todo: ADVICE,
        weakened_by: &[Weakness::LimitsLifted],
        run: disk,
    },
    Check {
        id: "exhaust-open-files",
        class: Class::Exhaustion,
        attack: "more open files than allowed",
        source: "docs/threats.md: descriptors",
        levels: EVERYWHERE,
        means: LIMITS,
        todo: ADVICE,
        weakened_by: &[Weakness::LimitsLifted],
        run: open_files,
    },
    Check {
        id: "exhaust-cpu",
        class: Class::Exhaustion,
        attack: "more processor time than allowed",
        source: "docs/threats.md: CPU hog",
        levels: NOT_MICROVM,
        means: LIMITS,
        todo: ADVICE,
        weakened_by: &[Weakness::LimitsLifted, Weakness::NoCgroup],
        run: cpu,
    },
    Check {
        id: "exhaust-kernel-inotify",
        class: Class::Exhaustion,
        attack: "inotify instances of all sandboxes",
        source: "finding 4",
        levels: CONTAINER,
        means: "The kernel counts them for all sandboxes and the host's root together: one \
                sandbox takes all.",
        todo: ADVICE,
        weakened_by: &[Weakness::SameSandbox],
        run: |bench, level| kernel_wide(bench, level, "inotify", "user"),
    },
    Check {
        id: "exhaust-host-inotify",
        class: Class::Exhaustion,
        attack: "inotify instances of the host",
        source: "finding 4",
        levels: GVISOR,
        means: "The sandbox's kernel takes one of the host for each of its own; the host's kernel \
                counts them for each user.",
        todo: ADVICE,
        weakened_by: &[Weakness::Planted],
        run: inotify_of_the_host,
    },
    Check {
        id: "exhaust-kernel-queues",
        class: Class::Exhaustion,
        attack: "message queues of all sandboxes",
        source: "finding 4",
        levels: CONTAINER,
        means: "The kernel counts them for all sandboxes and the host's root together: one \
                sandbox takes all.",
        todo: ADVICE,
        weakened_by: &[Weakness::SameSandbox],
        run: |bench, level| kernel_wide(bench, level, "queues", "root"),
    },
    Check {
        id: "exhaust-kernel-timers",
        class: Class::Exhaustion,
        attack: "timers and signals of all sandboxes",
        source: "finding 4",
        levels: CONTAINER,
        means: "The kernel counts them for all sandboxes and the host's root together: one \
                sandbox takes all.",
        todo: ADVICE,
        weakened_by: &[Weakness::SameSandbox],
        run: |bench, level| kernel_wide(bench, level, "timers", "root"),
    },
    Check {
        id: "exhaust-kernel-aio",
        class: Class::Exhaustion,
        attack: "AIO contexts of the whole host",
        source: "finding 4",
        levels: CONTAINER,
        means: "One sandbox takes all of them; databases on the host and in other sandboxes fail.",
        todo: ADVICE,
        weakened_by: &[Weakness::SeccompOff],
        run: |bench, level| kernel_wide(bench, level, "aio", "user"),
    },
    Check {
        id: "exhaust-terminals",
        class: Class::Exhaustion,
        attack: "terminals of the whole host",
        source: "finding 4",
        levels: CONTAINER,
        means: "A few sandboxes take all terminals; no one logs in any more.",
        todo: ADVICE,
        weakened_by: &[Weakness::FreeTerminals],
        run: terminals,
    },
    Check {
        id: "exhaust-neighbour-table",
        class: Class::Exhaustion,
        attack: "the host's table of neighbours",
        source: "finding 5",
        levels: EVERYWHERE,
        means: "A sandbox fills a table that all networks of the host share; then the host finds \
                no new neighbour, nor its gateway.",
        todo: "Raise net.ipv6.neigh.default.gc_thresh3 and its IPv4 twin; update Sandkeep.",
        weakened_by: &[Weakness::Planted],
        run: neighbour_table,
    },
    Check {
        id: "exhaust-server",
        class: Class::Exhaustion,
        attack: "descriptors of the server",
        source: "finding 8",
        levels: CONTAINER,
        means: "A few sandboxes without any rights make the API stop answering.",
        todo: "Raise the server's limit of open files (LimitNOFILE) and lower `max_boxes`.",
        weakened_by: &[Weakness::Planted],
        run: server_descriptors,
    },
    Check {
        id: "exhaust-pool",
        class: Class::Exhaustion,
        attack: "the disk below all sandboxes",
        source: "finding 3",
        levels: CONTAINER,
        means: "A sandbox within its own limit destroys the storage of all others, and the ledger.",
        todo: "Give the pool file all its space (`fallocate`), or keep the sum of disk limits \
               below what the disk has.",
        weakened_by: &[Weakness::Planted],
        run: pool::pool,
    },
];

fn limited(bench: &Bench, level: Level, more: Value) -> Result<Sandbox> {
    let mut limits = json!({"memory_mib": 256, "cpu_millis": 1000, "disk_mib": 512, "pids": 256});
    if let (Some(all), Value::Object(more)) = (limits.as_object_mut(), more) {
        all.extend(more);
    }
    bench.sandbox(
        level,
        &Wish {
            limits: Some(limits),
            ..Wish::default()
        },
    )
}

/// More than a quarter above the limit is broken: what counts is counted in pages and blocks.
fn bounded(got: f64, limit: f64, what: &str) -> Verdict {
    let shown = format!("{got:.0} {what} of {limit:.0} allowed");
    if got > limit * 1.25 {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    }
}

fn processes(bench: &Bench, level: Level) -> Result<Verdict> {
    const ALLOWED: u32 = 64;
    // Enough memory for more: at gVisor each takes some, and the sandbox would end of that.
    let limits = json!({"pids": ALLOWED, "memory_mib": 1024});
    let sandbox = limited(bench, level, limits)?;
    let script = include_str!("../probes/exh_pids.py");
    let arguments = json!({"most": 2 * ALLOWED});
    match to_the_end(bench, &sandbox, script, &arguments, "user")? {
        Some(report) => Ok(bounded(report.number("got")?, ALLOWED.into(), "processes")),
        None => Err(Fault::cannot(
            "their memory was used up before there were too many",
        )),
    }
}

fn memory(bench: &Bench, level: Level, kind: &str) -> Result<Verdict> {
    const ALLOWED: u32 = 192;
    let sandbox = limited(bench, level, json!({"memory_mib": ALLOWED}))?;
    let script = include_str!("../probes/exh_memory.py");
    let arguments = json!({"kind": kind, "most": 2 * ALLOWED, "file": "/dev/shm/verify-fill"});
    match to_the_end(bench, &sandbox, script, &arguments, "root")? {
        Some(report) => Ok(bounded(report.number("got")?, ALLOWED.into(), "MiB")),
        None => Ok(Verdict::Held(format!(
            "the host ended it for want of memory, {ALLOWED} MiB allowed"
        ))),
    }
}

fn disk(bench: &Bench, level: Level) -> Result<Verdict> {
    const ALLOWED: u32 = 64;
    /// A machine's disk is an image made for the template and the limit together: what the image
    /// was made larger for the file system's own needs can be written, too.
    const ROUNDING: f64 = 256.0;
    let sandbox = limited(bench, level, json!({"disk_mib": ALLOWED}))?;
    let script = include_str!("../probes/exh_disk.py");
    let report = bench.probe(&sandbox, script, &json!({"most": 3 * ALLOWED}), "root")?;
    let got = report.number("got")?;
    if level == Level::Microvm && got > f64::from(ALLOWED) {
        let free = report.number("free")?;
        let shown =
            format!("{got:.0} MiB of {ALLOWED} allowed; its image ends after {free:.0} MiB");
        return Ok(if free > f64::from(ALLOWED) * 1.25 + ROUNDING {
            Verdict::Broken(shown)
        } else {
            Verdict::Held(shown)
        });
    }
    Ok(bounded(got, ALLOWED.into(), "MiB"))
}

fn open_files(bench: &Bench, level: Level) -> Result<Verdict> {
    const ALLOWED: u32 = 256;
    let sandbox = limited(bench, level, json!({"open_files": ALLOWED}))?;
    let script = include_str!("../probes/exh_files.py");
    let report = bench.probe(&sandbox, script, &json!({"most": 4 * ALLOWED}), "user")?;
    Ok(bounded(report.number("got")?, ALLOWED.into(), "open files"))
}

fn cpu(bench: &Bench, level: Level) -> Result<Verdict> {
    // So little that also a busy host could give more.
    const ALLOWED: f64 = 0.1;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: usize = load
        .split('.')
        .next()
        .and_then(|whole| whole.parse().ok())
        .unwrap_or_default();
    if load > 3 * cores {
        return Err(Fault::Cannot(format!(
            "the host is too busy (load {load} on {cores} cores): without a limit a sandbox would get as little"
        )));
    }
    let sandbox = limited(bench, level, json!({"cpu_millis": 100}))?;
    let used = || -> Result<f64> {
        let info = sandbox.info()?;
        let micros = info["usage"]["cpu_usec"].as_f64();
        micros
            .map(|micros| micros / 1e6)
            .ok_or_else(|| Fault::cannot("the server tells no processor time"))
    };
    let (before, begun) = (used()?, Instant::now());
    let script = include_str!("../probes/exh_cpu.py");
    let report = bench.probe(&sandbox, script, &json!({"seconds": 3}), "user")?;
    // A kernel of its own counts as it likes; the host counts what it gave.
    let share = if level.own_kernel() {
        (used()? - before) / begun.elapsed().as_secs_f64()
    } else {
        report.number("used")? / report.number("wall")?.max(0.1)
    };
    let shown = format!("{share:.2} of a core, {ALLOWED} allowed");
    // What it may get beyond the limit is one period at each end.
    Ok(if share > ALLOWED * 1.7 {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}

/// Runs a probe that may cost the sandbox its life: nothing is told when the host ended the whole
/// of it because its limit of memory was used up, as it does with a kernel of its own.
fn to_the_end(
    bench: &Bench,
    sandbox: &Sandbox,
    script: &str,
    arguments: &Value,
    user: &str,
) -> Result<Option<Report>> {
    match bench.probe(sandbox, script, arguments, user) {
        Err(Fault::Refused { message, .. }) => {
            bench.stop.sleep(Duration::from_secs(1))?;
            let info = sandbox.info()?;
            if info["state"] == "running" {
                return Err(Fault::Cannot(message));
            }
            if info["gone"]["reason"] == "out_of_memory" {
                return Ok(None);
            }
            Err(Fault::Cannot(format!(
                "the sandbox itself ended of it ({}), which harms no other: what it got by then is not known",
                info["gone"]
            )))
        }
        other => other.map(Some),
    }
}

/// One sandbox holds a half; whether another one still gets a bit more than the other half.
fn kernel_wide(bench: &Bench, level: Level, kind: &str, user: &str) -> Result<Verdict> {
    let script = include_str!("../probes/exh_kernel.py");
    let first = limited(bench, level, json!({}))?;
    let other;
    let second = if bench.weak(Weakness::SameSandbox) {
        &first
    } else {
        other = limited(bench, level, json!({}))?;
        &other
    };
    let count = |kinds: &[&str]| -> Result<f64> {
        let arguments = json!({"kinds": kinds, "share": 0.7, "hold": 0});
        bench.probe(second, script, &arguments, user)?.number(kind)
    };
    let alone = count(&[kind])?;
    let arguments = json!({"kinds": [kind], "share": 0.5, "hold": 30});
    let holding = in_background(bench, &first, script, &arguments, user)?.number(kind)?;
    let beside = count(&[kind])?;
    first.exec(&["touch", "/tmp/release"], user)?;
    let shown = format!("{alone} alone, {beside} while another sandbox holds {holding}");
    if alone == 0.0 && holding == 0.0 {
        return Ok(Verdict::Held("not available in a sandbox".to_owned()));
    }
    Ok(if beside < alone * 0.95 {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}

/// A kernel of its own has no limit that could be shared, so there is none to be felt by another
/// sandbox; what counts is whether what it gives is taken from the host.
fn inotify_of_the_host(bench: &Bench, level: Level) -> Result<Verdict> {
    let before = processes_of_sandboxes(bench)?;
    let sandbox = limited(bench, level, json!({}))?;
    let held_by = |pid: i32| {
        let all = descriptors(pid);
        let instances = all.iter().filter(|link| link.contains("inotify")).count();
        (all.len(), instances)
    };
    let mut own = processes_of_sandboxes(bench)?;
    own.retain(|one| !before.contains(one));
    // This process leaves the trace, if any.
    own.push((
        rustix::process::getpid().as_raw_nonzero().get(),
        "verify".to_owned(),
    ));
    let count = || -> Result<usize> {
        let held: Vec<(usize, usize)> = own.iter().map(|(pid, _)| held_by(*pid)).collect();
        // Of each something is open, and root may see it.
        if held.len() < 2 || held.iter().any(|(all, _)| *all == 0) {
            return Err(Fault::cannot(
                "what the sandbox's processes have open on the host cannot be seen",
            ));
        }
        Ok(held.iter().map(|(_, instances)| instances).sum())
    };
    let alone = count()?;
    let script = include_str!("../probes/exh_kernel.py");
    let arguments = json!({"kinds": ["inotify"], "share": 0.5, "hold": 60});
    let holding = in_background(bench, &sandbox, script, &arguments, "user")?.number("inotify")?;
    let mut planted = Vec::new();
    while bench.weak(Weakness::Planted) && planted.len() < FELT {
        let instance = inotify::init(inotify::CreateFlags::CLOEXEC);
        planted.push(instance.doing("taking an inotify instance")?);
    }
    let more = count()?.saturating_sub(alone);
    drop(planted);
    sandbox.exec(&["touch", "/tmp/release"], "user")?;
    if holding < 1.0 {
        return Err(Fault::cannot("the sandbox has no inotify"));
    }
    let shown = format!("{holding} instances of the sandbox are {more} on the host");
    Ok(if more >= FELT {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}

fn terminals(bench: &Bench, level: Level) -> Result<Verdict> {
    let number = |file: &str| -> Result<f64> {
        fs::read_to_string(file)
            .doing("reading how many terminals there are")?
            .trim()
            .parse()
            .map_err(|_| Fault::cannot("the kernel tells no number of terminals"))
    };
    let all = number("/proc/sys/kernel/pty/max")?;
    let sandbox = limited(bench, level, json!({}))?;
    let script = include_str!("../probes/exh_terminals.py");
    let report = bench.probe(&sandbox, script, &json!({"most": 1100}), "user")?;
    let got = report.number("got")?;
    let shown = format!("{got} terminals of the host's {all}");
    // Ten sandboxes that take as many leave none.
    Ok(if got * 10.0 > all {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}

fn neighbour_table(bench: &Bench, level: Level) -> Result<Verdict> {
    const COUNT: u64 = 96;
    let sandbox = limited(bench, level, json!({}))?;
    let before = bench.tables.entries()?;
    let script = include_str!("../probes/exh_neighbours.py");
    let arguments = json!({
        "device": "eth0", "count": COUNT, "host6": "fd00:a::1", "net6": "fd00:a::",
        "mac": [2, 0, 10, 0, 0, 1],
    });
    let report = bench.probe(&sandbox, script, &arguments, "root")?;
    bench.stop.sleep(Duration::from_millis(300))?;
    if bench.weak(Weakness::Planted) {
        false_neighbours(COUNT)?;
    }
    let after = bench.tables.entries();
    if bench.weak(Weakness::Planted) {
        ip(&["link", "del", PLANTED_CABLE])?;
    }
    let after = after?;
    let six = after.0.saturating_sub(before.0);
    let four = after.1.saturating_sub(before.1);
    let shown = format!(
        "{:.0} packets of {COUNT} false neighbours; entries on the host: {six} more (IPv6), {four} more (IPv4)",
        report.number("sent")?
    );
    // Others on this host make some entries, too.
    Ok(if six.max(four) > COUNT / 2 {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}

const PLANTED_CABLE: &str = "planted";

/// As many entries as the attack would leave; they go with their cable.
fn false_neighbours(count: u64) -> Result<()> {
    ip(&[
        "link",
        "add",
        PLANTED_CABLE,
        "type",
        "veth",
        "peer",
        "name",
        "planted-end",
    ])?;
    ip(&["link", "set", PLANTED_CABLE, "up"])?;
    for number in 1..=count {
        ip(&[
            "-6",
            "neigh",
            "add",
            &format!("fd00:a::{number:x}"),
            "lladdr",
            "02:00:0a:00:00:02",
            "nud",
            "stale",
            "dev",
            PLANTED_CABLE,
        ])?;
    }
    Ok(())
}

fn server_descriptors(bench: &Bench, level: Level) -> Result<Verdict> {
    const MOST: usize = 1500;
    /// What one sandbox may cost the server.
    const ALLOWED: usize = 600;
    let descriptors = || -> Result<usize> {
        let listed = fs::read_dir(format!("/proc/{}/fd", bench.server.pid()));
        Ok(listed.doing("counting the server's descriptors")?.count())
    };
    let sandbox = limited(bench, level, json!({"open_files": 65_536}))?;
    let before = descriptors()?;
    let script = include_str!("../probes/exh_server.py");
    let report = in_background(bench, &sandbox, script, &json!({"most": MOST}), "user")?;
    let mut more = descriptors()?.saturating_sub(before);
    if bench.weak(Weakness::Planted) {
        more += ALLOWED;
    }
    let health = bench.api().request(
        Method::GET,
        "/v1/health",
        None,
        &[],
        Duration::from_secs(10),
    )?;
    let shown = format!(
        "{:.0} silent connections of one sandbox cost the server {more} descriptors",
        report.number("got")?
    );
    if health.status != 200 {
        return Ok(Verdict::Broken(format!("{shown}, and it does not answer")));
    }
    Ok(if more > ALLOWED {
        Verdict::Broken(shown)
    } else {
        Verdict::Held(shown)
    })
}
