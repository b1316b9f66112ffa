//! The state directory: its lock, its key, and the agent put into it.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{Read, Seek as _, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::FlockOperation;
use sandkeep_model::{API_KEY_PREFIX, Code, Error, Result, Secret};
use sha2::{Digest, Sha256};

use crate::{args::KeyCommand, cli::output::Output, config::Config};

const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/sandkeep-agent"));
pub const LOCK_FILE: &str = "server.lock";
/// What is known of every sandbox.
pub const LEDGER: &str = "ledger.db";
/// A server that was killed may have been about to start a program. That child holds what the server had
/// open, the lock as well, until it has become the program.
const HALF_BORN: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);
const KEY_FILE: &str = "api-key";
/// Shorter keys could be guessed over the network.
const KEY_LEAST: usize = 20;

/// The state directory, held by this process alone until it is dropped.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    lock: File,
}

/// Where the key came from, for the greeting and the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySource {
    Environment,
    File,
    JustMade,
}

impl StateDir {
    /// Makes the directory when it is not there, and takes its lock.
    pub fn take(path: &Path) -> Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| {
                Error::from(error)
                    .context(format!("making the state directory {}", path.display()))
                    .hint("run it as root, or name a directory you may write with --state")
            })?;
        let lock = lock(&path.join(LOCK_FILE))?;
        Ok(Self {
            path: path.to_owned(),
            lock,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn key_file(&self) -> PathBuf {
        self.path.join(KEY_FILE)
    }

    /// Leaves word where the server of this directory is reached, see [`served_at`].
    pub fn announce(&self, listen: SocketAddr) -> Result<()> {
        // Somebody on this machine reaches "all addresses" by the loopback.
        let ip = match listen.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        let address = SocketAddr::new(ip, listen.port());
        (&self.lock)
            .write_all(format!("{address}\n").as_bytes())
            .map_err(|error| Error::from(error).context(format!("writing {LOCK_FILE}")))
    }

    /// `given` (from the environment), or the key in the state directory, made on first use.
    pub fn api_key(&self, given: Option<String>) -> Result<(Secret, KeySource)> {
        if let Some(text) = given {
            return Ok((
                checked_key(&text, "SANDKEEP_API_KEY")?,
                KeySource::Environment,
            ));
        }
        let path = self.path.join(KEY_FILE);
        match read_key_file(&path)? {
            Some(key) => Ok((key, KeySource::File)),
            None => {
                let key = new_key();
                write_new(&path, format!("{}\n", key.expose()).as_bytes(), 0o600)?;
                Ok((key, KeySource::JustMade))
            }
        }
    }

    /// Puts the agent where wards start it from. Its name holds its hash: a new version is a
    /// new file, so boxes that run the old one keep it.
    pub fn install_agent(&self) -> Result<PathBuf> {
        let dir = self.path.join("agent");
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&dir)
            .map_err(|error| Error::from(error).context("making the agent's directory"))?;
        let hash = Sha256::digest(AGENT);
        let path = dir.join(format!("sandkeep-agent-{}", hex(&hash[..8])));
        let same = fs::read(&path).is_ok_and(|found| found == AGENT);
        if same {
            fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        } else {
            write_new(&path, AGENT, 0o755)?;
        }
        Ok(path)
    }
}

/// Whether a server keeps its things there.
pub fn is_state(path: &Path) -> bool {
    let has = |name: &str| path.join(name).exists();
    path.parent().is_some() && has(LOCK_FILE) && (has(KEY_FILE) || has("pool.img") || has("pool"))
}

/// The process that holds a state directory, if one does.
pub fn holder_of(state: &Path) -> Option<i32> {
    let mut file = File::open(state.join(LOCK_FILE)).ok()?;
    let taken = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
    if taken != Err(rustix::io::Errno::WOULDBLOCK) {
        return None;
    }
    holder(&mut file).parse().ok()
}

/// `key rotate`: another key in the place of the one of the file.
pub fn key(output: Output, command: &KeyCommand) -> anyhow::Result<u8> {
    let KeyCommand::Rotate { place } = command;
    let config = Config::load(place.settings(), None)?;
    require_root("key rotate")?;
    let state = &config.state;
    if !is_state(state) {
        return Err(Error::not_found(format!(
            "{} is not the state directory of a Sandkeep server",
            state.display()
        ))
        .hint("name it: sandkeep key rotate --state DIR")
        .into());
    }
    let path = state.join(KEY_FILE);
    let key = new_key();
    write_new(&path, format!("{}\n", key.expose()).as_bytes(), 0o600)?;
    // On standard output nothing but where it is: what is printed stays in logs.
    if output.json {
        output.json(&serde_json::json!({ "file": path }))?;
    } else {
        output.line(&path.display().to_string())?;
        output.note(
            "the new key is in this file; the old one counts until the server is restarted, sandboxes go on meanwhile",
        )?;
        output.note(
            "a server that is started with SANDKEEP_API_KEY set uses that one, and not the file",
        )?;
    }
    Ok(0)
}

/// Where the server is reached that holds a state directory, once it serves. Only true while
/// the directory can not be taken.
pub fn served_at(state: &Path) -> Option<SocketAddr> {
    let file = File::open(state.join(LOCK_FILE)).ok()?;
    let mut text = String::new();
    file.take(128).read_to_string(&mut text).ok()?;
    text.lines().nth(1)?.parse().ok()
}

/// The key a state directory holds, if it is there and readable.
pub fn readable_key(state: &Path) -> Option<Secret> {
    read_key_file(&state.join(KEY_FILE)).ok().flatten()
}

fn read_key_file(path: &Path) -> Result<Option<Secret>> {
    let mut text = String::new();
    match File::open(path) {
        Ok(file) => {
            file.take(4096).read_to_string(&mut text).map_err(|error| {
                Error::from(error).context(format!("reading the API key in {}", path.display()))
            })?;
            checked_key(text.trim(), &path.display().to_string()).map(Some)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(Error::from(error).context(format!("reading the API key in {}", path.display())))
        }
    }
}

fn checked_key(text: &str, source: &str) -> Result<Secret> {
    let refuse = |why: &str| {
        Error::invalid("api_key", format!("the API key in {source} {why}")).hint(format!(
            "use {API_KEY_PREFIX} and 40 hex digits, or remove it and let the server make one"
        ))
    };
    if text.is_empty() {
        return Err(refuse("is empty; the server does not run without a key"));
    }
    if text.len() < KEY_LEAST {
        return Err(refuse(&format!(
            "has {} characters, it must have at least {KEY_LEAST}",
            text.len()
        )));
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(refuse("has spaces or characters a header can not carry"));
    }
    Ok(Secret::new(text))
}

fn new_key() -> Secret {
    let mut bytes = [0_u8; 20];
    if getrandom::fill(&mut bytes).is_err() {
        // A key that can be guessed is worse than no server.
        std::process::abort();
    }
    Secret::new(format!("{API_KEY_PREFIX}{}", hex(&bytes)))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String can not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Writes a whole file under another name and renames it: it is never seen half written.
fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let named =
        |error: std::io::Error| Error::from(error).context(format!("writing {}", path.display()));
    let staged = path.with_extension("new");
    let _ = fs::remove_file(&staged);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&staged)
        .map_err(named)?;
    // The umask may have taken bits away that we mean.
    file.set_permissions(Permissions::from_mode(mode))
        .map_err(named)?;
    file.write_all(bytes).map_err(named)?;
    file.sync_all().map_err(named)?;
    drop(file);
    fs::rename(&staged, path).map_err(named)
}

/// The number of the process that took the lock, as it wrote it there.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file
        .rewind()
        .and_then(|()| Read::by_ref(file).take(32).read_to_string(&mut text));
    // What can not be read is nobody's.
    let first = read.ok().and_then(|_| text.lines().next());
    let digits = first.unwrap_or_default().chars();
    digits.filter(char::is_ascii_digit).collect()
}

fn lock(path: &Path) -> Result<File> {
    let named = |error: std::io::Error| {
        Error::from(error)
            .context(format!("opening {}", path.display()))
            .hint("run it as root, or name a directory you may write with --state")
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .open(path)
        .map_err(named)?;
    let until = Instant::now() + HALF_BORN;
    let (taken, holder) = loop {
        let taken = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        let holder = holder(&mut file);
        let is_gone = !holder.is_empty() && !Path::new("/proc").join(&holder).exists();
        if taken != Err(rustix::io::Errno::WOULDBLOCK) || !is_gone || Instant::now() >= until {
            break (taken, holder);
        }
        thread::sleep(PAUSE);
    };
    match taken {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let state = path.parent().unwrap_or(path).display().to_string();
            let who = if holder.is_empty() {
                String::new()
            } else {
                format!(" (pid {holder})")
            };
            return Err(Error::new(
                Code::Conflict,
                format!("another sandkeep{who} is using the state directory {state}"),
            )
            .hint("stop that one first, or give this one a directory of its own with --state"));
        }
        Err(error) => return Err(named(error.into())),
    }
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(named)?;
    Ok(file)
}

/// Namespaces, mounts and cgroups need root; say so before anything else fails in a less clear way.
pub fn require_root(command: &str) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(
        Error::host_not_ready(format!("`sandkeep {command}` must run as root"))
            .hint(format!("run it with sudo: sudo sandkeep {command} …; boxes themselves never get the host's root")),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_made_once_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::take(dir.path()).unwrap();
        let (first, source) = state.api_key(None).unwrap();
        assert_eq!(source, KeySource::JustMade);
        let digits = first.expose().strip_prefix("e2b_").unwrap();
        assert_eq!(digits.len(), 40);
        assert!(digits.bytes().all(|b| b.is_ascii_hexdigit()));
        let (again, source) = state.api_key(None).unwrap();
        assert_eq!((again, source), (first.clone(), KeySource::File));
        let mode = fs::metadata(dir.path().join(KEY_FILE))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(readable_key(dir.path()), Some(first));
    }

    #[test]
    fn empty_and_short_keys_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::take(dir.path()).unwrap();
        for bad in ["", "short", "has a space in the middle"] {
            assert!(state.api_key(Some(bad.to_owned())).is_err(), "{bad:?}");
        }
        fs::write(dir.path().join(KEY_FILE), "\n").unwrap();
        assert!(
            state.api_key(None).is_err(),
            "an emptied key file must not open the server"
        );
        assert!(
            state
                .api_key(Some("e2b_0123456789abcdef0123".to_owned()))
                .is_ok()
        );
    }

    #[test]
    fn a_second_server_is_told_who_holds_the_state() {
        let dir = tempfile::tempdir().unwrap();
        let held = StateDir::take(dir.path()).unwrap();
        let error = StateDir::take(dir.path()).unwrap_err();
        assert_eq!(error.code, Code::Conflict);
        assert!(
            error
                .message
                .contains(&format!("pid {}", std::process::id()))
        );
        drop(held);
        StateDir::take(dir.path()).unwrap();
    }

    #[test]
    fn a_server_that_was_killed_is_waited_for_until_its_children_are_born() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK_FILE);
        // Nobody has this number: the largest that a kernel gives is far below.
        fs::write(&path, "999999999\n").unwrap();
        let child = File::open(&path).unwrap();
        rustix::fs::flock(&child, FlockOperation::LockExclusive).unwrap();
        let becomes_a_program = thread::spawn(move || {
            thread::sleep(PAUSE * 5);
            drop(child);
        });
        let held = lock(&path).unwrap();
        becomes_a_program.join().unwrap();
        let written = fs::read_to_string(&path).unwrap();
        assert_eq!(written, format!("{}\n", std::process::id()));
        drop(held);
    }

    #[test]
    fn whoever_holds_the_state_says_where_it_serves() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(served_at(dir.path()), None);
        for (listen, reached) in [
            ("127.0.0.1:3000", "127.0.0.1:3000"),
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "[::1]:80"),
        ] {
            let held = StateDir::take(dir.path()).unwrap();
            assert_eq!(served_at(dir.path()), None, "not before it serves");
            held.announce(listen.parse().unwrap()).unwrap();
            assert_eq!(served_at(dir.path()), Some(reached.parse().unwrap()));
            let error = StateDir::take(dir.path()).unwrap_err();
            let pid = std::process::id();
            assert!(error.message.contains(&format!("(pid {pid})")), "{error}");
        }
    }

    #[test]
    fn the_agent_is_installed_whole_and_mended_when_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::take(dir.path()).unwrap();
        let path = state.install_agent().unwrap();
        assert_eq!(fs::read(&path).unwrap(), AGENT);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o755
        );
        fs::write(&path, b"half").unwrap();
        assert_eq!(state.install_agent().unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), AGENT);
    }
}
