//! `doctor`: what this host can do, what is missing, what to install. Needs no server and no
//! root, though root sees more.

use std::{
    collections::HashSet,
    env, fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use sandkeep_keeper::{Candidate, IsolationRule};
use sandkeep_model::{Isolation, IsolationWish, human_bytes};
use sandkeep_ward::{Check, Verdict};
use serde::Serialize;

use crate::{
    args::DoctorArgs,
    cli::output::{Output, clean},
    config::Config,
    network,
    running::{self, Running},
};

#[derive(Debug, Serialize)]
struct Report {
    /// Whether a server would work here.
    ready: bool,
    /// What every level needs.
    host: Vec<Check>,
    levels: Vec<Level>,
}

#[derive(Debug, Serialize)]
struct Level {
    level: Isolation,
    usable: bool,
    checks: Vec<Check>,
}

/// Exit code 1 when a server would not work.
pub async fn doctor(output: Output, args: &DoctorArgs) -> anyhow::Result<u8> {
    let mut settings = args.place.settings();
    let served = running::servers();
    // Who names no place means the server that runs.
    if let (
        None,
        [
            Running {
                state: Some(state), ..
            },
        ],
    ) = (&settings.state, served.as_slice())
    {
        settings.state = Some(state.clone());
    }
    let config = Config::load(settings, None)?;
    // Looking at files and tools blocks for moments only, and nothing else runs here.
    let kernel = named(&config.microvm_kernel, "SANDKEEP_MICROVM_KERNEL");
    let qemu = named(&config.microvm_qemu, "SANDKEEP_MICROVM_QEMU");
    let runsc = named(&config.runsc, "SANDKEEP_RUNSC");
    let (memory, gvisor, microvm) = tokio::join!(
        sandkeep_ward_container::check_memory(None),
        sandkeep_ward_gvisor::check_host(runsc.as_deref()),
        sandkeep_ward_microvm::check_host(qemu.as_deref(), kernel.as_deref())
    );
    let kvm = sandkeep_ward_microvm::kvm_offered().is_ok();
    let mut report = examine(&config, memory, gvisor, microvm, kvm);
    report.host.insert(0, server(&served));
    report.host.push(network::check().await);
    report.host.push(network::registries(&config.network).await);
    if output.json {
        output.json(&report)?;
    } else {
        show(output, &report)?;
    }
    Ok(u8::from(!report.ready))
}

/// What a setting names. The flags of this command are few; the variable of the server counts, too.
fn named(setting: &Option<PathBuf>, variable: &str) -> Option<PathBuf> {
    setting
        .clone()
        .or_else(|| env::var_os(variable).map(PathBuf::from))
}

fn examine(
    config: &Config,
    memory: Check,
    gvisor: Vec<Check>,
    microvm: Vec<Check>,
    kvm: bool,
) -> Report {
    let mut seen = HashSet::new();
    let host = once(&mut seen, host_checks(config));
    let mut container = once(
        &mut seen,
        sandkeep_ward_container::check_host(existing(&config.state), config.keeper.max_boxes),
    );
    container.push(memory);
    let usable = fine(&container);
    let gvisor = Level {
        level: Isolation::Gvisor,
        usable: fine(&gvisor),
        checks: once(&mut seen, gvisor),
    };
    let microvm = Level {
        level: Isolation::Microvm,
        usable: fine(&microvm),
        checks: once(&mut seen, microvm),
    };
    let levels = vec![
        Level {
            level: Isolation::Container,
            usable,
            checks: container,
        },
        gvisor,
        microvm,
    ];
    let mut host = host;
    host.push(plain_level(config.keeper.isolation, &levels, kvm));
    Report {
        ready: levels.iter().any(|level| level.usable) && fine(&host),
        host,
        levels,
    }
}

/// What a create gets that names no level.
fn plain_level(rule: IsolationRule, levels: &[Level], kvm: bool) -> Check {
    const NAME: &str = "plain create";
    let candidates: Vec<_> = levels
        .iter()
        .map(|level| Candidate {
            level: level.level,
            usable: level.usable,
            suits_everything: match level.level {
                Isolation::Microvm => kvm,
                Isolation::Gvisor => false,
                Isolation::Process | Isolation::Container => true,
            },
        })
        .collect();
    let least = rule.minimum.map_or_else(String::new, |least| {
        format!(", isolation_minimum is {least}")
    });
    let works = |level| {
        candidates
            .iter()
            .any(|one| one.level == level && one.usable)
    };
    match rule.plain(rule.minimum, &candidates) {
        IsolationWish::Level(level) if works(level) => {
            Check::ok(NAME, format!("isolated at level {level}{least}"))
        }
        wish => Check::missing(
            NAME,
            format!("level {wish} does not work here{least}"),
            "install what that level needs, or change isolation_default or isolation_minimum",
        ),
    }
}

/// The state directory, or before it is made the directory it will be in.
fn existing(state: &Path) -> &Path {
    state
        .ancestors()
        .find(|dir| dir.exists())
        .unwrap_or(Path::new("/"))
}

/// A thing that several levels need is told once.
fn once(seen: &mut HashSet<String>, checks: Vec<Check>) -> Vec<Check> {
    checks
        .into_iter()
        .filter(|check| seen.insert(check.name.clone()))
        .collect()
}

fn fine(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.verdict != Verdict::Missing)
}

fn host_checks(config: &Config) -> Vec<Check> {
    vec![
        btrfs_kernel(&fs::read_to_string("/proc/filesystems").unwrap_or_default()),
        tool("mkfs.btrfs", "btrfs-progs", "makes the storage"),
        tool("mmdebstrap", "mmdebstrap", "makes the base template"),
        state(&config.state),
        disk(&config.state),
    ]
    .into_iter()
    .chain(storage(config))
    .collect()
}

fn server(served: &[Running]) -> Check {
    const NAME: &str = "server";
    let shown: Vec<String> = served
        .iter()
        .map(|one| match &one.state {
            Some(state) => format!("pid {} serves {}", one.pid, state.display()),
            None => format!(
                "pid {} (run the doctor as root to see what it serves)",
                one.pid
            ),
        })
        .collect();
    match served {
        [] => Check::ok(NAME, "none runs"),
        _ => Check::ok(NAME, shown.join(", ")),
    }
}

fn btrfs_kernel(file_systems: &str) -> Check {
    const NAME: &str = "btrfs";
    let listed = file_systems
        .lines()
        .any(|line| line.split_whitespace().next_back() == Some("btrfs"));
    if listed {
        return Check::ok(NAME, "the kernel has it");
    }
    Check::warning(
        NAME,
        "the kernel has not loaded it",
        "modprobe btrfs, or let `sandkeep init` try",
    )
}

fn tool(name: &str, package: &str, what_for: &str) -> Check {
    // Tools for root are often outside the PATH of others.
    let mut places: Vec<_> = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect())
        .unwrap_or_default();
    places.extend(["/usr/sbin".into(), "/sbin".into()]);
    match places
        .iter()
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
    {
        Some(path) => Check::ok(name, path.display().to_string()),
        None => Check::missing(
            name,
            format!("not installed; it {what_for}"),
            format!("apt-get install {package}"),
        ),
    }
}

fn state(path: &Path) -> Check {
    const NAME: &str = "state directory";
    let shown = path.display();
    let init = format!("sudo sandkeep init --state {shown}");
    match fs::read_dir(path) {
        Ok(_) if path.join("pool.img").exists() => Check::ok(NAME, shown.to_string()),
        Ok(_) => Check::warning(NAME, format!("{shown} holds no storage yet"), init),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Check::warning(NAME, format!("{shown} is not there yet"), init)
        }
        Err(error) => Check::warning(
            NAME,
            format!("{shown} can not be looked at: {error}"),
            "run the doctor as root to see more",
        ),
    }
}

fn disk(state: &Path) -> Check {
    const NAME: &str = "disk";
    const ENOUGH: u64 = 5 << 30;
    let Ok(stat) = rustix::fs::statvfs(existing(state)) else {
        return Check::warning(NAME, "its free space is not known", "look with `df -h`");
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let shown = format!("{} free", human_bytes(free));
    if free >= ENOUGH {
        Check::ok(NAME, shown)
    } else {
        Check::warning(
            NAME,
            shown,
            format!(
                "free some: {} is the least for real work",
                human_bytes(ENOUGH)
            ),
        )
    }
}

/// The storage that is there, and whether the disk below has what it may still take.
fn storage(config: &Config) -> Option<Check> {
    const NAME: &str = "storage";
    if config.storage_dir.is_some() {
        return None;
    }
    let state = &config.state;
    let image = fs::metadata(state.join("pool.img")).ok()?;
    let kept = sandkeep_vault::kept_size(state)?;
    let most = config.storage_size.map_or(kept, |size| size.0);
    let read_only = rustix::fs::statvfs(state.join("pool"))
        .is_ok_and(|stat| stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY));
    if read_only {
        return Some(Check::missing(
            NAME,
            "it is read-only: nothing can be made",
            "stop the server, sudo sandkeep storage repair, and start it again",
        ));
    }
    let below = sandkeep_vault::Below::of(state).ok()?;
    let allocated = image.blocks().saturating_mul(512);
    if allocated < image.len() {
        return Some(Check::missing(
            NAME,
            format!(
                "the disk has not got all that the storage was promised: {} of {}",
                human_bytes(allocated),
                human_bytes(image.len())
            ),
            "free space on that disk and start the server: it sets the rest aside",
        ));
    }
    let more = most.saturating_sub(image.len());
    if more > below.free {
        return Some(Check::missing(
            NAME,
            format!(
                "it may grow to {}, for which the disk lacks {}",
                human_bytes(most),
                human_bytes(more - below.free)
            ),
            format!(
                "free space on that disk, or give the server --storage-size {}MiB",
                (image.len() + below.spare()) >> 20
            ),
        ));
    }
    Some(Check::ok(
        NAME,
        format!(
            "{} set aside, may grow to {}",
            human_bytes(allocated),
            human_bytes(most)
        ),
    ))
}

fn show(output: Output, report: &Report) -> std::io::Result<()> {
    output.line("host")?;
    show_checks(output, &report.host)?;
    for level in &report.levels {
        let word = if level.usable {
            output.good("usable")
        } else {
            output.bad("not usable")
        };
        output.line(&format!("{}: {word}", level.level))?;
        show_checks(output, &level.checks)?;
    }
    output.line(if report.ready {
        "A server works here."
    } else {
        "A server does not work here until what is missing is mended."
    })
}

fn show_checks(output: Output, checks: &[Check]) -> std::io::Result<()> {
    for check in checks {
        let mark = match check.verdict {
            Verdict::Ok => output.good("ok     "),
            Verdict::Warning => output.warning("warning"),
            Verdict::Missing => output.bad("missing"),
        };
        output.line(&format!(
            "  {mark}  {:<18} {}",
            clean(&check.name),
            clean(&check.found)
        ))?;
        if let Some(fix) = &check.fix {
            output.line(&format!("           {:<18} -> {}", "", clean(fix)))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn every_check_has_a_name_of_its_own_and_every_fault_a_fix() {
        let settings = Settings {
            state: Some("/nonexistent/sandkeep".into()),
            ..Settings::default()
        };
        let gvisor = vec![
            Check::missing("runsc", "not installed", "install it"),
            Check::ok("root", "the server runs as root"),
        ];
        let microvm = vec![
            Check::missing("qemu", "not installed", "install it"),
            Check::ok("root", "the server runs as root"),
        ];
        let memory = Check::warning("memory to disk", "CRIU is not installed", "build it");
        let report = examine(
            &Config::load(settings, None).unwrap(),
            memory,
            gvisor,
            microvm,
            false,
        );
        assert!(!report.levels[2].usable, "{report:?}");
        assert!(!report.levels[1].usable, "{report:?}");
        let all: Vec<&Check> = report
            .host
            .iter()
            .chain(report.levels.iter().flat_map(|level| &level.checks))
            .collect();
        let names: HashSet<&str> = all.iter().map(|check| check.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for check in all {
            assert_eq!(
                check.verdict == Verdict::Ok,
                check.fix.is_none(),
                "{check:?}"
            );
        }
    }

    #[test]
    fn a_missing_tool_names_its_package() {
        let check = tool("no-such-tool-anywhere", "the-package", "does nothing");
        assert_eq!(check.verdict, Verdict::Missing);
        assert_eq!(check.fix.as_deref(), Some("apt-get install the-package"));
    }

    #[test]
    fn a_kernel_without_btrfs_is_told() {
        assert_eq!(btrfs_kernel("nodev\tproc\n\tbtrfs\n").verdict, Verdict::Ok);
        assert_eq!(
            btrfs_kernel("nodev\tproc\n\text4\n").verdict,
            Verdict::Warning
        );
    }
}
