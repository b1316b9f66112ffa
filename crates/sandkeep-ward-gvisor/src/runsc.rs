//! The program `runsc`: where it is, which build it is, and running it.

use crate::stage::Stage;
use sandkeep_host::{failure::Doing as _, proc};
use sandkeep_model::{Code, Error, Result};
use std::{
    env,
    ffi::OsStr,
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{process::Command, time::timeout};

/// Older ones lose boxes that are written to disk while they run.
pub const OLDEST: u32 = 20_240_729;
/// For anything `runsc` does; an image of some GiB is written within.
const DEADLINE: Duration = Duration::from_secs(300);
const VERSION_DEADLINE: Duration = Duration::from_secs(20);
const LOG: &str = "runsc.log";
const MOST_SAID: usize = 600;

/// `runsc` in the PATH, or where the operator said.
pub fn find(given: Option<&Path>) -> Option<PathBuf> {
    if let Some(given) = given {
        return given.is_file().then(|| given.to_owned());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        // Services often have a short PATH.
        .chain(["/usr/local/bin", "/usr/bin", "/usr/sbin"].map(PathBuf::from))
        .map(|dir| dir.join("runsc"))
        .find(|file| file.is_file())
}

/// The first line of `runsc --version`, without the words before the number.
pub async fn version(program: &Path) -> Result<String> {
    let run = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(VERSION_DEADLINE, run)
        .await
        .map_err(|_| Error::host_not_ready("`runsc --version` does not end"))?
        .doing(format_args!("running {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .lines()
        .next()
        .unwrap_or_default()
        .trim_start_matches("runsc version ")
        .trim()
        .to_owned())
}

/// The date in a version: `0.0~20240729.0`, `release-20240729.0`.
pub fn date(version: &str) -> Option<u32> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .find(|digits| digits.len() == 8)?
        .parse()
        .ok()
}

/// One box as `runsc` sees it: its state is in a directory of its own, so that no two boxes
/// can be taken for one another.
#[derive(Debug, Clone)]
pub struct Runsc {
    pub program: PathBuf,
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
        let mut command = Command::new(&self.program);
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
            .doing(format_args!("running {}", self.program.display()))?;
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
    if said.contains("deleted and invalidated dentries") {
        let path = said
            .split("dentry(\"")
            .nth(1)?
            .split('"')
            .next()
            .map(|path| format!("/{}", path.trim_start_matches('/')))?;
        return Some(format!(
            "{path} was deleted or replaced while a process has it open, and it is not in /tmp, /run or /dev/shm: such memory can not be written to disk"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_versions() {
        assert_eq!(date("0.0~20240729.0"), Some(20_240_729));
        assert_eq!(date("release-20250101.0-12-gabcdef"), Some(20_250_101));
        assert_eq!(date("1.2.3"), None);
    }

    #[test]
    fn a_deleted_file_is_named() {
        let log = concat!(
            r#"{"msg":"starting","level":"info"}"#,
            "\n",
            r#"{"msg":"checkpoint failed: gofer.dentry(\"root/a\").beforeSave: deleted and invalidated dentries can't be restored","level":"error"}"#,
            "\n"
        );
        let error = refusal("checkpoint", &last_words(log));
        assert_eq!(error.code, Code::NotEnforceable);
        assert!(
            error.message.starts_with("/root/a was deleted"),
            "{error:?}"
        );
    }

    #[test]
    fn other_failures_say_what_runsc_said() {
        let error = refusal("run", "no such file");
        assert_eq!(error.code, Code::Internal);
        assert!(error.message.contains("no such file"));
        assert_eq!(last_words(""), "it does not say why");
    }
}
