//! Building the `base` template.

use rustix::process::{Pid, PidfdFlags, Signal};
use sandkeep_model::{Error, Result, TemplateName};
use std::{
    collections::VecDeque,
    fs,
    io::{self, BufRead as _, BufReader, Read},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::Path,
    process::{Child, Command},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    archive::{self, ImportLimits},
    cache::Cache,
    doing::Doing as _,
    progress::{BuildLines, Progress, Stage},
    recipe::Recipe,
    staging::make_private_dir,
    template::{Draft, TemplateInfo},
    vault::Inner,
};

/// Lines of the tool's output shown when it fails.
const SHOWN_LINES: usize = 12;
const MAX_LINE: usize = 4096;

/// Ends a running build from outside.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    state: Arc<Mutex<StopState>>,
}

#[derive(Debug, Default)]
struct StopState {
    stopped: bool,
    child: Option<OwnedFd>,
}

impl Stop {
    fn lock(&self) -> MutexGuard<'_, StopState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn on_drop(self) -> StopOnDrop {
        StopOnDrop(self)
    }

    fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        if let Some(child) = &state.child
            && let Err(error) = rustix::process::pidfd_send_signal(child, Signal::KILL)
        {
            tracing::debug!(%error, "the build had already ended");
        }
    }

    /// From now on stopping ends this child; if it was stopped before, at once.
    fn watch(&self, child: &Child) -> Result<()> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Error::internal("the build has no process id"))?;
        let fd =
            rustix::process::pidfd_open(pid, PidfdFlags::empty()).doing("watching the build")?;
        let mut state = self.lock();
        state.child = Some(fd);
        let stopped = state.stopped;
        drop(state);
        if stopped {
            self.stop();
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if self.lock().stopped {
            return Err(Error::conflict("the build was stopped"));
        }
        Ok(())
    }
}

#[derive(Debug)]
pub struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

pub fn build(
    vault: &Inner,
    stop: &Stop,
    mut progress: impl FnMut(Progress),
) -> Result<TemplateInfo> {
    let name: TemplateName = "base".parse()?;
    let recipe = Recipe::for_this_host()?;
    let cache = Cache::from_env(&recipe.hash());
    progress(Progress {
        stage: Stage::Preparing,
        fraction: 0.0,
    });
    let draft = Draft::begin(vault)?;
    let cached = match &cache {
        Some(cache) => cache.open()?,
        None => None,
    };
    if let Some((file, size)) = cached {
        let limits = ImportLimits::default();
        let file = Stoppable { file, stop };
        let unpacked = archive::unpack(file, Some(size), &draft.root(), &limits, &mut progress);
        // Said first: a stopped build looks like a broken archive to whoever reads it.
        stop.check()?;
        unpacked?;
    } else {
        bootstrap(vault, &recipe, &draft.root(), stop, &mut progress)?;
        progress(Progress {
            stage: Stage::Finishing,
            fraction: 0.95,
        });
        recipe.finish(&draft.root())?;
        if let Some(cache) = &cache {
            cache.save(&draft.root())?;
        }
    }
    stop.check()?;
    progress(Progress {
        stage: Stage::Saving,
        fraction: 0.97,
    });
    let info = draft.publish(&name, &recipe.origin(), true)?;
    progress(Progress {
        stage: Stage::Done,
        fraction: 1.0,
    });
    Ok(info)
}

struct Stoppable<'a, R> {
    file: R,
    stop: &'a Stop,
}

impl<R: Read> Read for Stoppable<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.stop.lock().stopped {
            return Err(io::Error::other("the build was stopped"));
        }
        self.file.read(buf)
    }
}

fn bootstrap(
    vault: &Inner,
    recipe: &Recipe,
    root: &Path,
    stop: &Stop,
    progress: &mut impl FnMut(Progress),
) -> Result<()> {
    // The sources may hold passwords of mirrors: in a closed place that is swept.
    let work = vault.layout.stage(&vault.quota);
    make_private_dir(&work.path)?;
    let sources = work.path.join("host.sources");
    fs::write(&sources, recipe.sources_text()).doing_to("writing", &sources)?;

    let mut command = recipe.command(&sources, root);
    let (reader, writer) = io::pipe().doing("making a pipe")?;
    command
        .stdin(std::process::Stdio::null())
        .stdout(writer.try_clone().doing("making a pipe")?)
        .stderr(writer);
    die_with_us(&mut command);
    let mut child = spawn(&mut command)?;
    // Our ends of the pipe must go, or it never says "end".
    drop(command);
    let followed = stop.watch(&child).and_then(|()| follow(reader, progress));
    if followed.is_err() {
        child.kill().doing("ending the build")?;
    }
    let status = child.wait().doing("waiting for the build")?;
    stop.lock().child = None;
    let last = followed?;
    stop.check()?;
    if status.success() {
        return Ok(());
    }
    vault.pool.check_room()?;
    Err(explain(&last))
}

/// Reads the build's output to its end, tells the progress, and keeps the last lines.
fn follow(output: impl Read, progress: &mut impl FnMut(Progress)) -> Result<VecDeque<String>> {
    let mut lines = BuildLines::new();
    let mut last = VecDeque::new();
    let mut reader = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = reader
            .read_until(b'\n', &mut line)
            .doing("reading the build's output")?;
        if read == 0 {
            return Ok(last);
        }
        line.truncate(MAX_LINE);
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        tracing::debug!(target: "sandkeep_vault::build", "{text}");
        if let Some(step) = lines.line(text) {
            progress(step);
        }
        if last.len() == SHOWN_LINES {
            last.pop_front();
        }
        last.push_back(text.to_owned());
    }
}

/// A server killed in the middle of a build must not leave the build running.
fn die_with_us(command: &mut Command) {
    // SAFETY: only async-signal-safe work is done between fork and exec: one prctl.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            Ok(())
        });
    }
}

fn spawn(command: &mut Command) -> Result<Child> {
    for (tool, package) in [("mmdebstrap", "mmdebstrap"), ("unshare", "util-linux")] {
        if !on_path(tool) {
            return Err(Error::host_not_ready(format!("{tool} is not installed"))
                .hint(format!(
                    "install it (`apt-get install {package}`), or bring a root file system with \
                     `sandkeep template import base ROOT.tar.zst`"
                ))
                .retryable(false));
        }
    }
    command.spawn().doing("starting mmdebstrap")
}

fn on_path(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())
}

fn explain(last: &VecDeque<String>) -> Error {
    let said: Vec<&str> = last
        .iter()
        .map(String::as_str)
        .filter(|line| line.starts_with("E: ") || line.starts_with("Err:"))
        .collect();
    let shown = if said.is_empty() {
        last.iter().map(String::as_str).collect()
    } else {
        said
    };
    Error::internal(format!("mmdebstrap failed: {}", shown.join(" | "))).hint(
        "check that `apt-get update` works on this host; the whole output is in the log at level debug",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_shown_not_the_noise() {
        let lines = ["Get:1 x", "E: Unable to fetch", "I: cleaning up"].map(str::to_owned);
        let error = explain(&VecDeque::from(lines));
        assert_eq!(error.message, "mmdebstrap failed: E: Unable to fetch");
    }

    #[test]
    fn stopping_before_the_start_ends_the_child() {
        let stop = Stop::default();
        drop(stop.clone().on_drop());
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        stop.watch(&child).unwrap();
        assert!(!child.wait().unwrap().success());
        assert!(stop.check().is_err());
    }
}
