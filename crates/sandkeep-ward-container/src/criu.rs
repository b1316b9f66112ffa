//! The program `criu`: where it is and which build it is.

use sandkeep_host::failure::Doing as _;
use sandkeep_model::{Code, Error, Result};
use std::{
    env,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};
use tokio::{process::Command, time::timeout};

/// Older ones do not run on newer kernels.
pub const OLDEST: (u32, u32) = (4, 2);
/// Where `script/server` puts the one it builds.
const OURS: &str = "/usr/local/lib/sandkeep/criu";
/// In the version of a build with our patches, see `deploy/criu`; their number follows.
const MARK: &str = "sandkeep";
/// The first patches with which CRIU follows no links of a sandbox, makes user namespaces that
/// belong to root in them, and brings back what it has written.
const CAREFUL: u32 = 6;
const DEADLINE: Duration = Duration::from_secs(20);

/// A CRIU that is new enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    pub program: PathBuf,
    pub version: String,
}

impl Criu {
    /// Whether it brings open TCP connections back into the network namespace of a box.
    pub fn keeps_connections(&self) -> bool {
        self.patch().is_some()
    }

    /// Whether it brings deleted files back without following links of the sandbox, leaves out of
    /// the image what is to be wiped in copies, and makes user namespaces that belong to root in
    /// them: those of another build belong to root of the host, and the kernel counts for the host
    /// what is taken in them.
    pub fn is_careful(&self) -> bool {
        self.patch().is_some_and(|patch| patch >= CAREFUL)
    }

    /// Which of our patches it was built with.
    fn patch(&self) -> Option<u32> {
        let (_, patch) = self.version.split_once(MARK)?;
        patch.parse().ok()
    }
}

/// Where the operator said, the one that was built for us, or `criu` in the PATH.
pub fn find(given: Option<&Path>) -> Option<PathBuf> {
    if let Some(given) = given {
        return given.is_file().then(|| given.to_owned());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let others = env::split_paths(&path)
        // Services often have a short PATH.
        .chain(["/usr/local/sbin", "/usr/sbin"].map(PathBuf::from))
        .map(|dir| dir.join("criu"));
    std::iter::once(PathBuf::from(OURS))
        .chain(others)
        .find(|file| file.is_file())
}

/// Asks the program which version it is.
pub async fn look(program: &Path) -> Result<Criu> {
    let run = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(DEADLINE, run)
        .await
        .map_err(|_| Error::host_not_ready("`criu --version` does not end"))?
        .doing(format_args!("running {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))
        .unwrap_or_default()
        .trim();
    match number(version) {
        Some(number) if number >= OLDEST => Ok(Criu {
            program: program.to_owned(),
            version: version.to_owned(),
        }),
        _ => Err(missing(format!(
            "CRIU {version:?} at {} is too old, {}.{} or newer is needed",
            program.display(),
            OLDEST.0,
            OLDEST.1
        ))),
    }
}

/// Why there is no engine, and what can be done about it.
pub fn missing(why: impl Into<String>) -> Error {
    Error::new(Code::NotEnforceable, why)
        .hint("`sandkeep doctor` tells where to get it; until then paused boxes stay in memory")
}

/// Major and minor of `4.2.1`.
fn number(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        (Some(Ok(major)), None) => Some((major, 0)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(number("4.2.1.sandkeep6"), Some((4, 2)));
        assert_eq!(number("4.3"), Some((4, 3)));
        assert!(number("3.17.1").unwrap() < OLDEST);
        assert_eq!(number(""), None);
    }

    #[test]
    fn builds() {
        let criu = |version: &str| Criu {
            program: PathBuf::new(),
            version: version.to_owned(),
        };
        let (plain, old, ours) = (
            criu("4.2.1"),
            criu("4.2.1.sandkeep2"),
            criu("4.2.1.sandkeep6"),
        );
        assert!(!plain.keeps_connections() && !plain.is_careful());
        assert!(old.keeps_connections() && !old.is_careful());
        assert!(ours.keeps_connections() && ours.is_careful());
    }

    #[test]
    fn what_is_not_there_is_not_found() {
        assert_eq!(find(Some(Path::new("/no/such/criu"))), None);
    }
}
