//! The keys by which an ssh server proves which machine it is. A copy of a machine that has those
//! of another could be taken for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandkeep_agent_api::host::LogLevel;

use crate::State;
use crate::host::run_to_end;
use crate::reap::Exit;

const DIR: &str = "/etc/ssh";
const MAKER: &str = "/usr/bin/ssh-keygen";
/// Its words are the kinds of keys there were. A server that runs reads them anew.
const MAKE: &str = "for kind; do /usr/bin/ssh-keygen -q -t $kind -N '' -f /etc/ssh/ssh_host_${kind}_key || bad=1; done
    { read -r pid </run/sshd.pid && kill -HUP $pid; } 2>/dev/null
    test -z \"$bad\"";
/// Large primes take long in an emulated machine.
const LIMIT: Duration = Duration::from_secs(300);
/// There are four kinds of them.
const MOST: usize = 64;

/// Takes the keys away at once, if there are any, and has new ones made meanwhile.
pub(crate) fn renew(state: &State) -> io::Result<()> {
    let keys = keys_in(Path::new(DIR))?;
    if keys.is_empty() {
        return Ok(());
    }
    if !Path::new(MAKER).exists() {
        return Err(io::Error::other(format!("there is no {MAKER}")));
    }
    for key in &keys {
        fs::remove_file(key)?;
        // Not everybody keeps the public half beside it.
        let _none = fs::remove_file(key.with_extension("pub"));
    }
    let kinds: Vec<String> = keys.iter().filter_map(|key| kind_of(key)).collect();
    let state = state.clone();
    tokio::spawn(async move {
        let mut words = vec!["/bin/sh", "-c", MAKE, "sh"];
        words.extend(kinds.iter().map(String::as_str));
        let made = run_to_end(&state, &State::root(), &words, LIMIT).await;
        let why = match made {
            Ok(Exit::Code(0)) => return,
            Ok(other) => format!("{other:?}"),
            Err(error) => error.message,
        };
        let message = format!("the ssh server of this box has no keys: {why}");
        state.log().add(LogLevel::Warn, message);
    });
    Ok(())
}

fn keys_in(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed?,
    };
    Ok(listed
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| kind_of(path).is_some())
        .take(MOST)
        .collect())
}

/// `/etc/ssh/ssh_host_rsa_key` -> `rsa`.
fn kind_of(key: &Path) -> Option<String> {
    let kind = key
        .file_name()?
        .to_str()?
        .strip_prefix("ssh_host_")?
        .strip_suffix("_key")?;
    kind.bytes()
        .all(|byte| byte.is_ascii_alphanumeric())
        .then(|| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_of_the_machine_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "ssh_host_rsa_key",
            "ssh_host_rsa_key.pub",
            "ssh_config",
            "moduli",
        ] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        let found = keys_in(dir.path()).unwrap();
        assert_eq!(found, [dir.path().join("ssh_host_rsa_key")]);
        assert!(keys_in(&dir.path().join("nowhere")).unwrap().is_empty());
    }
}
