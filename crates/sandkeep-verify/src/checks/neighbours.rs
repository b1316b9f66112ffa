//! From one sandbox to another.

use std::{fs, path::Path, time::Duration};

use serde_json::json;

use super::refusals;
use crate::{
    bench::Bench,
    check::{CONTAINER, Check, Class, EVERYWHERE, Level, Verdict, judged},
    fault::{Doing as _, Fault, Result},
    sandbox::{Probe, Report, Sandbox, Wish},
    server::random,
    weakness::Weakness,
};

const APART: &str = "Do not run sandboxes of people who must not know of each other on one host; \
                     report it.";

pub const CHECKS: &[Check] = &[
    Check {
        id: "neighbours-reach",
        class: Class::Neighbours,
        attack: "processes, files, sockets of a neighbour",
        source: "docs/threats.md: ptrace across, box to box",
        levels: EVERYWHERE,
        means: "One sandbox reads or reaches what belongs to another.",
        todo: APART,
        weakened_by: &[Weakness::SameSandbox],
        run: reach,
    },
    Check {
        id: "neighbours-inodes",
        class: Class::Neighbours,
        attack: "locks and watches on shared device nodes",
        source: "finding 10",
        levels: EVERYWHERE,
        means: "Sandboxes without any network talk to each other, and see when programs start on \
                the host.",
        todo: APART,
        weakened_by: &[Weakness::SharedNode],
        run: inodes,
    },
    Check {
        id: "neighbours-host-view",
        class: Class::Neighbours,
        attack: "see the host's activity and names",
        source: "finding 10, finding 15",
        levels: EVERYWHERE,
        means: "A sandbox can tell what happens on the host, and that another one is on it, too.",
        todo: APART,
        weakened_by: &[Weakness::HostProc, Weakness::HostMount],
        run: host_view,
    },
    Check {
        id: "neighbours-ids",
        class: Class::Neighbours,
        attack: "share ids with the host or a neighbour",
        source: "docs/threats.md: ids shared between boxes",
        levels: CONTAINER,
        means: "A process that gets out has the rights of another sandbox, or of the host.",
        todo: APART,
        weakened_by: &[Weakness::SameSandbox],
        run: ids,
    },
];

/// Starts a probe that goes on in the background, and waits for what it tells first.
pub fn in_background(
    bench: &Bench,
    sandbox: &Sandbox,
    script: &str,
    arguments: &serde_json::Value,
    user: &str,
) -> Result<Report> {
    const OUT: &str = "/tmp/verify-background";
    let probe = Probe::new(script, arguments)?;
    bench.start(sandbox, &probe, user, OUT)?;
    bench.stop.wait_for(
        // An emulated machine on a busy host takes its time.
        Duration::from_secs(150),
        "a program that was started in the background getting ready",
        || {
            let ran = sandbox.exec(&["cat", OUT], user)?;
            if ran.out.contains(&probe.nonce) {
                return probe.read(Some(0), &ran.out, "").map(Some);
            }
            if ran.out.contains("Error") {
                return Err(Fault::Cannot(format!(
                    "a program in the background failed: {}",
                    ran.out.lines().last().unwrap_or_default()
                )));
            }
            Ok(None)
        },
    )
}

const PORT: u16 = 7077;

fn reach(bench: &Bench, level: Level) -> Result<Verdict> {
    let victim = bench.sandbox(level, &Wish::default())?;
    let mark = format!("neighbour-{}", random(8)?);
    let key = 0x5eed;
    let holder = include_str!("../probes/nb_holder.py");
    let arguments = json!({"mark": mark, "port": PORT, "key": key, "seconds": 120});
    let told = in_background(bench, &victim, holder, &arguments, "user")?;
    let other;
    let attacker = if bench.weak(Weakness::SameSandbox) {
        &victim
    } else {
        other = bench.sandbox(level, &Wish::default())?;
        &other
    };
    let mut addresses = vec!["127.0.0.1".to_owned(), "10.0.0.2".to_owned()];
    addresses.extend(
        told.text("address")
            .ok()
            .filter(|address| !address.is_empty()),
    );
    let seeker = include_str!("../probes/nb_seeker.py");
    let arguments = json!({"mark": mark, "port": PORT, "key": key, "addresses": addresses});
    let report = bench.probe(attacker, seeker, &arguments, "user")?;
    Ok(super::by_what_worked(&report))
}

fn inodes(bench: &Bench, level: Level) -> Result<Verdict> {
    let victim = bench.sandbox(level, &Wish::default())?;
    let holder = include_str!("../probes/nb_holder.py");
    let arguments = json!({
        "mark": format!("neighbour-{}", random(8)?), "port": PORT, "key": 0x5eee, "seconds": 120,
    });
    let told = in_background(bench, &victim, holder, &arguments, "user")?;
    if told.number("own")? < 1.0 {
        return Err(Fault::cannot(
            "openings of device nodes cannot be watched here",
        ));
    }
    let attacker = bench.sandbox(level, &Wish::default())?;
    let script = include_str!("../probes/nb_inodes.py");
    let report = bench.probe(&attacker, script, &json!({}), "user")?;
    bench.stop.sleep(Duration::from_millis(500))?;
    let ran = victim.exec(&["cat", "/tmp/seen"], "user")?;
    let seen: f64 = ran
        .out
        .trim()
        .parse()
        .map_err(|_| Fault::cannot("the watching program told nothing"))?;
    let mut wrong = report.worked.clone();
    // Some are its own: `cat` and others do not open it, so hardly any.
    if seen >= report.number("opened")? / 2.0 {
        wrong.push(format!("{seen} openings by a neighbour were seen"));
    }
    Ok(judged(&wrong, refusals(&report)))
}

fn host_view(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.shared(level)?;
    let script = include_str!("../probes/host_view.py");
    let read = |path: &str| {
        fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let before = read("/proc/loadavg");
    let report = bench.probe(&sandbox, script, &json!({}), "user")?;
    let after = read("/proc/loadavg");
    let mut wrong = Vec::new();
    if report.text("boot_id")? == read("/proc/sys/kernel/random/boot_id") {
        wrong.push("boot_id is the host's".to_owned());
    }
    let load = report.text("loadavg")?;
    // The last two numbers are of its own process namespace.
    let averages = |text: &str| text.split(' ').take(3).collect::<Vec<_>>().join(" ");
    let seen = averages(&load);
    if seen != "0.00 0.00 0.00" && (seen == averages(&before) || seen == averages(&after)) {
        wrong.push("loadavg is the host's".to_owned());
    }
    let state = bench.dir.to_string_lossy().into_owned();
    let name = bench
        .dir
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let mounts = report.text("mountinfo")?;
    if mounts.contains(&state) || name.is_some_and(|name| mounts.contains(&name)) {
        wrong.push("mountinfo shows the host's state directory".to_owned());
    }
    for of_host in [Path::new("/"), &bench.dir] {
        let size = size_of(of_host)?;
        for seen in report.texts("sizes")? {
            if let Some(point) = seen.strip_prefix(&size) {
                wrong.push(format!("statfs of {point} tells of the host's disk"));
            }
        }
    }
    if !level.own_kernel() {
        if report.number("locks")? > 0.0 {
            wrong.push("/proc/locks lists locks of the host".to_owned());
        }
        if report.number("disks")? > 0.0 {
            wrong.push("/proc/diskstats counts for the host".to_owned());
        }
        if !report.text("pressure")?.is_empty() {
            wrong.push("/proc/pressure is the host's".to_owned());
        }
    }
    Ok(judged(&wrong, "what it sees is its own, or nothing"))
}

/// As the probe writes it.
fn size_of(path: &Path) -> Result<String> {
    let found = rustix::fs::statvfs(path).doing("asking for the size of the host's disk")?;
    let bytes = found.f_blocks * found.f_frsize;
    Ok(format!("{bytes} bytes, {} inodes: ", found.f_files))
}

fn ids(bench: &Bench, level: Level) -> Result<Verdict> {
    let script = include_str!("../probes/id_map.py");
    let first = bench.sandbox(level, &Wish::default())?;
    let other;
    let second = if bench.weak(Weakness::SameSandbox) {
        &first
    } else {
        other = bench.sandbox(level, &Wish::default())?;
        &other
    };
    let map = |sandbox: &Sandbox| -> Result<u64> {
        let report = bench.probe(sandbox, script, &json!({}), "user")?;
        report
            .text("map")?
            .parse()
            .map_err(std::io::Error::other)
            .doing("reading the ids")
    };
    let (first, second) = (map(&first)?, map(second)?);
    let mut wrong = Vec::new();
    if first == second {
        wrong.push(format!("two sandboxes have the ids from {first}"));
    }
    if first < 65_536 {
        wrong.push(format!("its root is user {first} of the host"));
    }
    Ok(judged(
        &wrong,
        format!("ids from {first} and from {second}"),
    ))
}
