//! The program `runsc`: running it.

use crate::{release::Release, stage::Stage};
use sandkeep_host::{failure::Doing as _, proc};
use sandkeep_model::{Code, Error, Result};
use std::{
    ffi::OsStr, fs, os::fd::OwnedFd, path::PathBuf, process::Stdio, sync::Arc, time::Duration,
};
use tokio::{process::Command, time::timeout};

/// For anything `runsc` does; an image of some GiB is written within.
const DEADLINE: Duration = Duration::from_secs(300);
const LOG: &str = "runsc.log";
const MOST_SAID: usize = 600;

/// One box as `runsc` sees it: its state is in a directory of its own, so that no two boxes
/// can be taken for one another.
#[derive(Debug, Clone)]
pub struct Runsc {
    pub release: Arc<Release>,
    /// The directory of the box.
    pub dir: PathBuf,
    pub name: String,
}

impl Runsc {
    /// Where `runsc` keeps its own notes about the box.
    pub fn root(&self) -> PathBuf {
        self.dir.join("runsc")
    }

    pub fn bundle(&self) -> PathBuf {
        self.dir.join("bundle")
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.release.program);
        let with = |option: &str, path: PathBuf| {
            let mut text = std::ffi::OsString::from(option);
            text.push(path);
            text
        };
        command
            .arg(with("--root=", self.root()))
            .arg(with("--log=", self.dir.join(LOG)))
            .args([
                "--log-format=json",
                "--platform=systrap",
                "--network=sandbox",
                "--net-disconnect-ok=true",
                "--overlay2=none",
                // The ward has put it into the box's cgroups already.
                "--ignore-cgroups",
            ])
            .args(self.release.flags())
            .env_clear()
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // SAFETY: one system call between fork and exec.
        unsafe { command.pre_exec(proc::close_all_on_exec) };
        command
    }

    /// Runs or restores the box; `stdin` becomes the standard input of its PID 1.
    pub async fn launch(&self, words: &[&OsStr], stdin: OwnedFd, stage: Stage) -> Result<()> {
        let mut command = self.command();
        command
            .args(words)
            .arg("-detach")
            .arg("-bundle")
            .arg(self.bundle())
            .arg(&self.name)
            .stdin(stdin);
        // SAFETY: between fork and exec only `Stage::enter` runs, which makes system calls on
        // memory prepared before; it neither allocates nor takes a lock.
        unsafe { command.pre_exec(move || stage.enter()) };
        self.finish(command, words.first().copied().unwrap_or_default())
            .await
    }

    /// Any other call.
    pub async fn call(&self, words: &[&OsStr]) -> Result<()> {
        let mut command = self.command();
        command.args(words).arg(&self.name).stdin(Stdio::null());
        self.finish(command, words.first().copied().unwrap_or_default())
            .await
    }

    async fn finish(&self, mut command: Command, what: &OsStr) -> Result<()> {
        let log = self.dir.join(LOG);
        // What it says this time must not be taken for what it said last time.
        let _gone = fs::remove_file(&log);
        let mut child = command
            .kill_on_drop(true)
            .spawn()
            .doing(format_args!("running {}", self.release.program.display()))?;
        // The program holds what was opened for it; ours would keep it open.
        drop(command);
        let status = timeout(DEADLINE, child.wait())
            .await
            .map_err(|_| {
                Error::new(
                    Code::DeadlineExceeded,
                    format!("`runsc {}` does not end", what.display()),
                )
            })?
            .doing("waiting for runsc")?;
        if status.success() {
            return Ok(());
        }
        let said = last_words(&fs::read_to_string(&log).unwrap_or_default());
        Err(refusal(&what.to_string_lossy(), &said))
    }
}

/// The last error in a log of one JSON object per line.
fn last_words(log: &str) -> String {
    log.lines()
        .rev()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .find_map(|line| Some(line.get("msg")?.as_str()?.trim().to_owned()))
        .unwrap_or_else(|| "it does not say why".to_owned())
}

fn refusal(what: &str, said: &str) -> Error {
    let short: String = said.chars().take(MOST_SAID).collect();
    if what == "checkpoint" {
        return Error::new(Code::NotEnforceable, obstacle(said).unwrap_or(short))
            .hint("end what holds it, or pause without memory; the box goes on as before");
    }
    Error::internal(format!("`runsc {what}` failed: {short}"))
        .hint("run `sandkeep doctor`: it looks at everything this level needs")
}

/// The few states that can not be written, in our words.
fn obstacle(said: &str) -> Option<String> {
    // Releases say it in different words, and all of them name the entry that is no more.
    let dead = ["deleted", "invalidated"];
    if said.contains("gofer.dentry(") && dead.iter().any(|word| said.contains(word)) {
        let path = said
            .split("dentry(\"")
            .nth(1)?
            .split('"')
            .next()
            .map(|path| format!("/{}", path.trim_start_matches('/')))?;
        return Some(format!(
            "{path} was deleted or replaced while a process has it open, and it is not in /tmp, /run or /dev/shm: such memory cannot be written to disk"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deleted_file_is_named() {
        for said in [
            r#"gofer.dentry(\"root/a\").beforeSave: deleted and invalidated dentries can't be restored"#,
            r#"gofer.dentry(\"root/a\").prepareSaveDead: only deleted dentries for regular files and directories can be saved, got p---------"#,
            r#"gofer.dentry(\"root/a\").beforeSave: dead dentry is not saved in fs.savedDeletedOpenDentries (deleted=true, synthetic=true)"#,
            r#"gofer.dentry(\"root/a\").prepareSaveDead: invalidated dentries can't be saved"#,
        ] {
            let log = format!(
                "{{\"msg\":\"starting\",\"level\":\"info\"}}\n\
                 {{\"msg\":\"checkpoint failed: {said}\",\"level\":\"error\"}}\n"
            );
            let error = refusal("checkpoint", &last_words(&log));
            assert_eq!(error.code, Code::NotEnforceable);
            assert!(
                error.message.starts_with("/root/a was deleted"),
                "{error:?}"
            );
        }
    }

    #[test]
    fn other_failures_say_what_runsc_said() {
        let error = refusal("run", "no such file");
        assert_eq!(error.code, Code::Internal);
        assert!(error.message.contains("no such file"));
        assert_eq!(last_words(""), "it does not say why");
    }
}
