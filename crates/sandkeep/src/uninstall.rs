//! `uninstall`: everything a server made on this host goes, and nothing else.

use std::{
    fs,
    io::{self, IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mount::{UnmountFlags, unmount},
    process::{Pid, Signal, kill_process},
};
use sandkeep_model::{Code, Error, Result};
use sandkeep_verify::{cgroup_trees, find_cgroups, remove_cgroup_tree};
use serde_json::json;

use crate::{
    args::UninstallArgs,
    cli::output::{Output, clean},
    config::Config,
    running,
    state::{StateDir, holder_of, is_state, require_root},
};

/// What `script/server` builds for the host.
const PROGRAMS: &str = "/usr/local/lib/sandkeep";
const CGROUPS: &str = "/sys/fs/cgroup";
/// How deep a tree of ours may lie.
const DEPTH: usize = 6;
const STOPS_WITHIN: Duration = Duration::from_secs(60);
const ENDS_WITHIN: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(50);

/// What is there to end and to remove.
struct Found {
    state: PathBuf,
    server: Option<i32>,
    cgroups: Vec<PathBuf>,
    processes: Vec<i32>,
    mounts: Vec<PathBuf>,
    programs: Option<PathBuf>,
    /// Not ours to remove: somebody named this directory.
    stays: Option<PathBuf>,
}

pub fn uninstall(output: Output, args: &UninstallArgs) -> anyhow::Result<u8> {
    let config = Config::load(args.place.settings(), None)?;
    require_root("uninstall")?;
    let state = fs::canonicalize(&config.state).unwrap_or_else(|_| config.state.clone());
    if !is_state(&state) {
        return Err(Error::not_found(format!(
            "{} is not the state directory of a Sandkeep server",
            state.display()
        ))
        .hint("name it: sandkeep uninstall --state DIR")
        .into());
    }
    let found = Found::at(&state, args.keep_programs, config.storage_dir);
    let list = found.list();
    if args.dry_run {
        tell(output, &list, false)?;
        return Ok(0);
    }
    if !args.yes {
        confirm(&list)?;
    }
    found.end()?;
    found.remove()?;
    tell(output, &list, true)?;
    Ok(0)
}

fn tell(output: Output, list: &[String], done: bool) -> anyhow::Result<()> {
    if output.json {
        return output.json(&json!({ "removed": done, "what": list }));
    }
    for line in list {
        output.line(&clean(line))?;
    }
    if done {
        output.line("All of this is gone.")?;
    }
    Ok(())
}

fn confirm(list: &[String]) -> Result<()> {
    if !io::stdin().is_terminal() {
        return Err(Error::invalid(
            "yes",
            "uninstall asks before it removes anything, and there is no terminal to ask at",
        )
        .hint("see what it would remove with --dry-run, then run it with --yes"));
    }
    let mut stderr = io::stderr().lock();
    for line in list {
        writeln!(stderr, "  {}", clean(line))?;
    }
    write!(
        stderr,
        "All of this is ended and removed, and cannot be brought back. Type yes to go on: "
    )?;
    stderr.flush()?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    if answer.trim() == "yes" {
        return Ok(());
    }
    Err(Error::conflict("nothing was removed").hint("type yes, in full, to go on"))
}

impl Found {
    fn at(state: &Path, keep_programs: bool, stays: Option<PathBuf>) -> Self {
        let cgroups = Self::cgroups_of(state);
        let server = holder_of(state);
        let programs = Path::new(PROGRAMS);
        let others = running::servers().iter().any(|one| Some(one.pid) != server);
        Self {
            server,
            processes: processes_in(&cgroups),
            mounts: mounts_below(state),
            programs: (programs.exists() && !keep_programs && !others).then(|| programs.to_owned()),
            cgroups,
            state: state.to_owned(),
            stays,
        }
    }

    fn cgroups_of(state: &Path) -> Vec<PathBuf> {
        cgroup_trees(state)
            .iter()
            .flat_map(|name| find_cgroups(Path::new(CGROUPS), name, DEPTH))
            .collect()
    }

    fn list(&self) -> Vec<String> {
        let mut list = Vec::new();
        if let Some(pid) = self.server {
            list.push(format!("the server that runs (pid {pid})"));
        }
        if !self.processes.is_empty() {
            list.push(format!(
                "all sandboxes that run ({} processes)",
                self.processes.len()
            ));
        }
        for mount in &self.mounts {
            list.push(format!("the mount at {}", mount.display()));
        }
        for tree in &self.cgroups {
            list.push(format!("the cgroups in {}", tree.display()));
        }
        list.push(format!(
            "{} with all sandboxes, snapshots, templates, keys, secrets and logs",
            self.state.display()
        ));
        match &self.programs {
            Some(programs) => list.push(format!(
                "{} (the kernel and the CRIU that script/server built)",
                programs.display()
            )),
            None if Path::new(PROGRAMS).exists() => list.push(format!(
                "(stays: {PROGRAMS}, which other servers on this host use, or --keep-programs)"
            )),
            None => {}
        }
        if let Some(storage) = &self.stays {
            list.push(format!(
                "(stays: {}, the directory named as `storage_dir`)",
                storage.display()
            ));
        }
        list
    }

    /// The server first, so that nothing is made any more; then the sandboxes.
    fn end(&self) -> Result<()> {
        if let Some(pid) = self.server {
            send(pid, Signal::TERM);
            if !within(STOPS_WITHIN, || holder_of(&self.state) != Some(pid)) {
                send(pid, Signal::KILL);
            }
        }
        // Held from here on: no other server starts on it.
        let _held = StateDir::take(&self.state)?;
        end_processes_in(&self.cgroups)?;
        for tree in &self.cgroups {
            if !within(ENDS_WITHIN, || !tree.exists() || remove_cgroup_tree(tree)) {
                return Err(left_over("cgroups are still in use", [tree.display()]));
            }
        }
        Ok(())
    }

    fn remove(&self) -> Result<()> {
        // What is mounted in another mount comes after it.
        for mount in mounts_below(&self.state).iter().rev() {
            let done = unmount(mount, UnmountFlags::NOFOLLOW)
                .or_else(|_| unmount(mount, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW));
            done.map_err(|error| {
                Error::from(io::Error::from(error))
                    .context(format!("unmounting {}", mount.display()))
            })?;
        }
        let left = mounts_below(&self.state);
        if !left.is_empty() {
            let left = left.iter().map(|path| path.display());
            return Err(left_over("something is still mounted", left));
        }
        for dir in [Some(&self.state), self.programs.as_ref()]
            .into_iter()
            .flatten()
        {
            fs::remove_dir_all(dir).map_err(|error| {
                Error::from(error).context(format!("removing {}", dir.display()))
            })?;
        }
        Ok(())
    }
}

fn left_over<T: std::fmt::Display>(what: &str, left: impl IntoIterator<Item = T>) -> Error {
    let left: Vec<String> = left
        .into_iter()
        .take(8)
        .map(|one| one.to_string())
        .collect();
    Error::new(Code::Conflict, format!("{what}: {}", left.join(", ")))
        .hint("end what uses it, then run the same command again")
}

fn send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        // One that is gone is what is wanted.
        let _ = kill_process(pid, signal);
    }
}

fn within(time: Duration, mut done: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + time;
    while !done() {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(LOOK);
    }
    true
}

fn processes_in(trees: &[PathBuf]) -> Vec<i32> {
    let mut found = Vec::new();
    let mut look: Vec<PathBuf> = trees.to_vec();
    while let Some(dir) = look.pop() {
        let pids = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
        found.extend(pids.lines().filter_map(|pid| pid.parse::<i32>().ok()));
        let children = fs::read_dir(&dir).into_iter().flatten().flatten();
        look.extend(
            children
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    found.sort_unstable();
    found.dedup();
    found.retain(|pid| *pid > 0);
    found
}

/// The processes of sandboxes that belong to a state directory.
pub fn processes_of(state: &Path) -> Vec<i32> {
    processes_in(&cgroups_of(state))
}

/// Whoever calls this holds the directory, so that no server makes others.
pub fn end_processes_of(state: &Path) -> Result<()> {
    end_processes_in(&cgroups_of(state))
}

fn cgroups_of(state: &Path) -> Vec<PathBuf> {
    let state = fs::canonicalize(state).unwrap_or_else(|_| state.to_owned());
    Found::cgroups_of(&state)
}

fn end_processes_in(cgroups: &[PathBuf]) -> Result<()> {
    let ended = within(ENDS_WITHIN, || {
        let left = processes_in(cgroups);
        for pid in &left {
            send(*pid, Signal::KILL);
        }
        left.is_empty()
    });
    if ended {
        return Ok(());
    }
    Err(left_over(
        "processes of sandboxes do not end",
        processes_in(cgroups),
    ))
}

/// In the order they were mounted.
fn mounts_below(state: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|path| PathBuf::from(unescaped(path)))
        .filter(|path| path.starts_with(state))
        .collect()
}

/// As the kernel writes paths there.
fn unescaped(path: &str) -> String {
    [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ]
    .iter()
    .fold(path.to_owned(), |path, (code, plain)| {
        path.replace(code, plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_mounts_are_read_as_the_kernel_writes_them() {
        assert_eq!(unescaped("/a\\040b\\134c"), "/a b\\c");
    }
}
