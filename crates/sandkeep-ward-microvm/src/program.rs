//! Which program QEMU is: where it lies, and whether it does what it will be asked to do.

use crate::qemu::{Accel, Qemu};
use sandkeep_host::failure::Doing as _;
use sandkeep_model::Result;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

const PROGRAM: &str = "qemu-system-x86_64";
/// Without emulation, and there in a third of the time. Some distributions build it without the filter
/// of system calls that every machine here has.
const SLIM_PROGRAM: &str = "qemu-system-x86_64-microvm";
/// The oldest with which this was tried.
pub const OLDEST: u32 = 7;
const MOST_SAID: usize = 300;
/// What machines are made of; each is on a line of `-device help` in quotes.
const DEVICES: [&str; 5] = [
    "virtio-serial-device",
    "virtserialport",
    "virtio-blk-device",
    "virtio-net-device",
    "virtio-balloon-device",
];

/// A program that is there, and what speaks against it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub program: PathBuf,
    /// `None`: it does everything it will be asked to.
    pub lacks: Option<String>,
}

/// The programs of this host that could run machines in this way, the best first; or the one that the
/// operator named, and no other.
pub fn candidates(given: Option<&Path>, accel: Accel) -> Vec<Candidate> {
    let programs = match (given, accel) {
        (Some(given), _) => given
            .is_file()
            .then(|| given.to_owned())
            .into_iter()
            .collect(),
        (None, Accel::Kvm) => [SLIM_PROGRAM, PROGRAM]
            .into_iter()
            .filter_map(named)
            .collect(),
        (None, Accel::Tcg) => named(PROGRAM).into_iter().collect::<Vec<_>>(),
    };
    let examined = |program: PathBuf| Candidate {
        lacks: lacks(&program, accel).err(),
        program,
    };
    programs.into_iter().map(examined).collect()
}

/// The one that will be used; without one that does everything, the first that is there at all.
pub fn best(candidates: Vec<Candidate>) -> Option<Candidate> {
    let mut all = candidates.into_iter();
    let first = all.next()?;
    if first.lacks.is_none() {
        return Some(first);
    }
    Some(all.find(|other| other.lacks.is_none()).unwrap_or(first))
}

/// Whether QEMU is there at all, good or not.
pub fn is_installed() -> bool {
    named(PROGRAM).is_some()
}

fn named(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        // Services often have a short PATH. The jail shows /usr alone.
        .chain(["/usr/bin", "/usr/local/bin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|file| {
            file.is_file() && fs::canonicalize(file).is_ok_and(|real| real.starts_with("/usr"))
        })
}

/// Asks a program for exactly what it will be asked for, without a machine.
fn lacks(program: &Path, accel: Accel) -> std::result::Result<(), String> {
    let version = version(program).map_err(|error| error.message)?;
    if major(&version).is_none_or(|major| major < OLDEST) {
        return Err(format!(
            "QEMU {version:?} is too old, {OLDEST} or newer is needed"
        ));
    }
    // Every option as it will be; the last one ends it before it makes anything.
    let mut words = Qemu::options(accel);
    words.push("-version".to_owned());
    let output = ran(program, &words).map_err(|error| error.message)?;
    if !output.status.success() {
        return Err(said(&output));
    }
    let listed = |option: &str| -> std::result::Result<String, String> {
        let output =
            ran(program, &[option.to_owned(), "help".to_owned()]).map_err(|error| error.message)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr))
    };
    let accels = listed("-accel")?;
    if !accels.lines().any(|line| line.trim() == accel.name()) {
        return Err(format!("it is built without {}", accel.name()));
    }
    let machines = listed("-M")?;
    if !machines.lines().any(|line| line.starts_with("microvm ")) {
        return Err("it is built without the machine microvm".to_owned());
    }
    let devices = listed("-device")?;
    match DEVICES
        .iter()
        .find(|name| !devices.contains(&format!("\"{name}\"")))
    {
        Some(missing) => Err(format!("it is built without {missing}")),
        None => Ok(()),
    }
}

fn ran(program: &Path, words: &[String]) -> Result<Output> {
    Ok(Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .output()
        .doing(format_args!("running {}", program.display()))?)
}

/// The last thing it complained about.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().last().unwrap_or_default();
    let short: String = line.chars().take(MOST_SAID).collect();
    if short.is_empty() {
        output.status.to_string()
    } else {
        short
    }
}

/// The first line of `--version`, without the words before the number.
pub fn version(program: &Path) -> Result<String> {
    let output = ran(program, &["--version".to_owned()])?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next().unwrap_or_default();
    Ok(line
        .trim_start_matches("QEMU emulator version ")
        .trim()
        .to_owned())
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn versions_are_read() {
        assert_eq!(major("7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)"), Some(7));
        assert_eq!(major("10.0.2"), Some(10));
        assert_eq!(major("x"), None);
    }

    /// A program that says what QEMU would, and refuses an option that it was built without.
    fn stand_in(dir: &Path, name: &str, without: &str, version: &str) -> PathBuf {
        let path = dir.join(name);
        let text = format!(
            "#!/bin/sh\n\
             for word; do [ \"$word\" != \"{without}\" ] || {{ echo \"qemu: $word: no such thing\" >&2; exit 1; }}; done\n\
             case $1 in\n\
             -accel) [ \"$2\" != help ] || {{ printf 'Accelerators:\\nkvm\\n'; exit; }} ;;\n\
             -M) [ \"$2\" != help ] || {{ echo 'microvm  microvm (i386)'; exit; }} ;;\n\
             -device) [ \"$2\" != help ] || {{ printf 'name \"%s\"\\n' {} >&2; exit; }} ;;\n\
             esac\n\
             echo 'QEMU emulator version {version} (test)'\n",
            DEVICES.join(" "),
        );
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_program_that_lacks_what_it_will_be_asked_for_is_not_chosen() {
        let dir = tempfile::tempdir().unwrap();
        let candidate = |name: &str, without: &str, version: &str| {
            let program = stand_in(dir.path(), name, without, version);
            candidates(Some(&program), Accel::Kvm).remove(0)
        };
        let full = candidate("full", "nothing", "7.2.22");
        assert_eq!(full.lacks, None);
        // As Debian 12 builds the slim one.
        let slim = candidate("slim", "-sandbox", "7.2.22");
        assert_eq!(slim.lacks.as_deref(), Some("qemu: -sandbox: no such thing"));
        let old = candidate("old", "nothing", "6.2.0");
        assert!(old.lacks.clone().unwrap().contains("too old"));
        let chosen = best(vec![slim.clone(), full.clone()]);
        assert_eq!(chosen, Some(full.clone()), "the full one is tried");
        assert_eq!(best(vec![full.clone(), slim.clone()]), Some(full));
        assert_eq!(best(vec![slim.clone(), old]), Some(slim), "to say why");
        assert_eq!(best(Vec::new()), None);
        let emulated = candidates(Some(&dir.path().join("full")), Accel::Tcg).remove(0);
        assert_eq!(emulated.lacks.as_deref(), Some("it is built without tcg"));
        assert!(candidates(Some(Path::new("/none")), Accel::Kvm).is_empty());
    }

    /// Whatever is installed here: what is said of it is what happens.
    #[test]
    fn programs_of_this_host_are_what_is_said_of_them() {
        for name in [SLIM_PROGRAM, PROGRAM] {
            let Some(program) = named(name) else { continue };
            let asked = ["-sandbox", "on", "-version"].map(str::to_owned);
            let filters = ran(&program, &asked).unwrap().status.success();
            let found = candidates(Some(&program), Accel::Kvm).remove(0);
            assert_eq!(found.lacks.is_none(), filters, "{found:?}");
            if !filters {
                assert!(found.lacks.unwrap().contains("-sandbox"));
            }
        }
    }
}
