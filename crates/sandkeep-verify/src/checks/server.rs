//! The server itself, and what it starts.

use std::{fs, path::Path, time::Duration};

use reqwest::Method;
use rustix::mount::{MountFlags, mount_remount};

use crate::{
    bench::Bench,
    check::{CONTAINER, Check, Class, EVERYWHERE, Level, Verdict, judged},
    enter::descriptors,
    fault::{Doing as _, Fault, Result},
    prepare::cgroup_trees,
    sandbox::Wish,
    weakness::Weakness,
};

pub const CHECKS: &[Check] = &[
    Check {
        id: "server-key",
        class: Class::Server,
        attack: "use the API without its key",
        source: "docs/threats.md: API without key",
        levels: CONTAINER,
        means: "Whoever reaches the port has the whole server.",
        todo: "Close the port, and report it.",
        weakened_by: &[Weakness::Planted],
        run: key,
    },
    Check {
        id: "server-descriptors",
        class: Class::Server,
        attack: "descriptors of the server in its helpers",
        source: "finding 14",
        levels: EVERYWHERE,
        means: "A program that breaks out of QEMU or runsc finds a descriptor of the server open.",
        todo: "Start the server from systemd, which opens nothing for it; update Sandkeep.",
        weakened_by: &[Weakness::Planted],
        run: stray,
    },
    Check {
        id: "server-pool-setuid",
        class: Class::Server,
        attack: "leave a setuid program on the host",
        source: "finding 15",
        levels: CONTAINER,
        means: "Programs of sandboxes lie in the pool with the setuid bit of the host's root; \
                only closed directories are before them.",
        todo: "Keep the state directory closed (0700); update Sandkeep.",
        weakened_by: &[Weakness::SuidPool],
        run: pool_setuid,
    },
    Check {
        id: "server-greeting",
        class: Class::Server,
        attack: "read the API key in the server's log",
        source: "finding 15",
        levels: CONTAINER,
        means: "`serve --greet` prints the key also where the output is a file or a journal.",
        todo: "Start services without --greet, and remove the key from logs.",
        weakened_by: &[Weakness::Planted],
        run: greeting,
    },
];

fn key(bench: &Bench, _level: Level) -> Result<Verdict> {
    let patience = Duration::from_secs(10);
    let right = bench.api().key.clone();
    let ask = |path: &str, key: &str| {
        let headers = [("x-api-key", key)];
        bench
            .api()
            .request(Method::GET, path, None, &headers, patience)
    };
    if ask("/v1/sandboxes", &right)?.status != 200 {
        return Err(Fault::cannot("not even the right key is taken"));
    }
    let other: String = right.chars().rev().collect();
    let none = if bench.weak(Weakness::Planted) {
        right.clone()
    } else {
        String::new()
    };
    let mut wrong = Vec::new();
    let paths = [
        "/v1/sandboxes".to_owned(),
        "/sandboxes".to_owned(),
        "/v1/secrets".to_owned(),
        "/v1/audit".to_owned(),
        "/metrics".to_owned(),
        "/v1/../v1/sandboxes".to_owned(),
        "//v1/sandboxes".to_owned(),
        format!("/v1/sandboxes?api_key={right}"),
    ];
    for path in &paths {
        for key in [none.as_str(), other.as_str(), "e2b_"] {
            let status = ask(path, key)?.status;
            if status < 400 {
                wrong.push(format!("{path}: {status}"));
            }
        }
    }
    Ok(judged(
        &wrong,
        format!("{} requests refused", 3 * paths.len()),
    ))
}

/// Processes of the private server's sandboxes, on the host, but not the server.
pub fn processes_of_sandboxes(bench: &Bench) -> Result<Vec<(i32, String)>> {
    let trees = cgroup_trees(&bench.server.state);
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").doing("reading /proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        // Helpers that are the server's own program are inside of the same walls as it is.
        let program = fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if program == bench.place.program {
            continue;
        }
        let groups = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if trees.iter().any(|tree| groups.contains(tree))
            && u32::try_from(pid) != Ok(bench.server.pid())
        {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            found.push((pid, name.trim().to_owned()));
        }
    }
    Ok(found)
}

fn stray(bench: &Bench, level: Level) -> Result<Verdict> {
    let before = processes_of_sandboxes(bench)?;
    let sandbox = bench.sandbox(level, &Wish::default())?;
    sandbox.exec(&["true"], "user")?;
    let mut all = processes_of_sandboxes(bench)?;
    // A machine may have waited for its sandbox.
    let waited = |name: &str| level == Level::Microvm && name.starts_with("qemu");
    all.retain(|(pid, name)| waited(name) || !before.iter().any(|(known, _)| known == pid));
    if bench.weak(Weakness::Planted) {
        // This process made the pipe.
        all.push((
            rustix::process::getpid().as_raw_nonzero().get(),
            "verify".to_owned(),
        ));
    }
    if all.is_empty() {
        return Err(Fault::cannot(
            "no process of the sandbox was found on the host",
        ));
    }
    let mut wrong: Vec<String> = all
        .iter()
        .filter(|(pid, _)| descriptors(*pid).contains(&bench.bait.stray))
        .map(|(_, name)| format!("{name} has a descriptor that the server was started with"))
        .collect();
    wrong.dedup();
    Ok(judged(
        &wrong,
        format!("{} processes on the host, none has it", all.len()),
    ))
}

fn pool_setuid(bench: &Bench, level: Level) -> Result<Verdict> {
    let sandbox = bench.sandbox(level, &Wish::default())?;
    let ran = sandbox.exec(
        &["sh", "-c", "cp /usr/bin/id /root/setuid-id && chmod 4755 /root/setuid-id && stat -c %a /root/setuid-id"],
        "root",
    )?;
    if !ran.out.contains("4755") {
        return Err(Fault::cannot("the sandbox could not make such a program"));
    }
    let pool = bench.server.state.join("pool");
    let before = mount_options(bench, &pool)?;
    if bench.weak(Weakness::SuidPool) {
        remount(&pool, &before, MountFlags::empty())?;
    }
    let options = mount_options(bench, &pool);
    if bench.weak(Weakness::SuidPool) {
        remount(&pool, &before, MountFlags::NOSUID)?;
    }
    let options = options?;
    let wrong: Vec<String> = (!options.split(',').any(|word| word == "nosuid"))
        .then(|| format!("the pool is mounted {options}, without nosuid"))
        .into_iter()
        .collect();
    Ok(judged(&wrong, "the pool is mounted nosuid"))
}

/// How something is mounted for the private server.
fn mount_options(bench: &Bench, at: &Path) -> Result<String> {
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", bench.server.pid()))
        .doing("reading the server's mounts")?;
    mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|fields| fields.get(4).is_some_and(|point| Path::new(point) == at))
        .and_then(|fields| fields.get(5).map(|&options| options.to_owned()))
        .ok_or_else(|| Fault::cannot("the pool's mount was not found"))
}

/// As it was, with or without `nosuid`.
fn remount(at: &Path, options: &str, nosuid: MountFlags) -> Result<()> {
    let others = [
        ("nodev", MountFlags::NODEV),
        ("noexec", MountFlags::NOEXEC),
        ("noatime", MountFlags::NOATIME),
    ];
    let mut flags = MountFlags::BIND | nosuid;
    for (word, flag) in others {
        if options.split(',').any(|option| option == word) {
            flags |= flag;
        }
    }
    mount_remount(at, flags, c"").doing("mounting the pool in another way")
}

fn greeting(bench: &Bench, _level: Level) -> Result<Verdict> {
    if bench.weak(Weakness::Planted) {
        let file = fs::OpenOptions::new().append(true).open(&bench.server.log);
        let mut file = file.doing("opening the private server's log")?;
        std::io::Write::write_all(&mut file, bench.api().key.as_bytes())
            .doing("writing to the private server's log")?;
    }
    let log = fs::read_to_string(&bench.server.log).doing("reading the private server's log")?;
    if log.trim().is_empty() {
        return Err(Fault::cannot("the private server logged nothing"));
    }
    let wrong: Vec<String> = log
        .contains(&bench.api().key)
        .then(|| "the key stands in a log that is a file".to_owned())
        .into_iter()
        .collect();
    Ok(judged(&wrong, "the log has no key in it"))
}
