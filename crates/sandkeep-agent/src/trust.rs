//! Whom the programs of a box trust besides the world: the box's own authority, under which the
//! host looks into connections that need it. It is put where each kind of program looks.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use memchr::memmem;
use sandkeep_agent_api::ConnectError;
use sandkeep_agent_api::host::{LogLevel, TrustRequest};
use sandkeep_agent_api::process::ProcessConfig;
use tokio::time::{Instant, timeout_at};

use crate::connect::{error_response, read_json};
use crate::process::{Launch, StdioKind, spawn};
use crate::server::no_content;
use crate::{Body, State};

/// Ours alone. `update-ca-certificates` takes it into the bundle again when packages change it.
const OWN: &str = "usr/local/share/ca-certificates/sandkeep.crt";
/// Where distributions keep all roots in one file; some of them are links to others.
const BUNDLES: [&str; 5] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];
/// Programs that bring roots of their own are told of the bundle by these.
const BUNDLE_VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
];
/// Node adds what it names to its own roots.
const EXTRA_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";
const KEYTOOL: [&str; 3] = [
    "/usr/bin/keytool",
    "/usr/local/bin/keytool",
    "/opt/java/openjdk/bin/keytool",
];
/// Starting a Java machine takes a second; the host waits fifteen.
const JAVA_TIME: Duration = Duration::from_secs(10);
const MAX_BUNDLE: u64 = 8 << 20;
const MAX_PEM: usize = 16 << 10;

/// Takes the place of the authority of an earlier call.
pub(crate) async fn trust(state: State, request: Request<Incoming>) -> Response<Body> {
    let done = async {
        let TrustRequest { certificate } = read_json(request.into_body()).await?;
        install_here(&state, certificate).await
    };
    match done.await {
        Ok(()) => no_content(),
        Err(error) => error_response(&error),
    }
}

async fn install_here(state: &State, certificate: String) -> Result<(), ConnectError> {
    check(&certificate)?;
    // Only PID 1 has a box of its own; elsewhere this would be the trust of the machine.
    if rustix::process::getpid() != rustix::process::Pid::INIT {
        return Err(ConnectError::failed_precondition("this is no box"));
    }
    let installed = tokio::task::spawn_blocking(move || install(Path::new("/"), &certificate))
        .await
        .map_err(io::Error::from)
        .flatten()
        .map_err(|error| {
            ConnectError::failed_precondition(format!(
                "the certificate of the box can not be installed: {error}"
            ))
        })?;
    state.settings().trust = installed.variables;
    for failed in installed.failed {
        state.log().add(LogLevel::Warn, failed);
    }
    if let Some(keytool) = KEYTOOL.iter().find(|path| Path::new(path).exists()) {
        for_java(state, keytool).await;
    }
    Ok(())
}

fn check(certificate: &str) -> Result<(), ConnectError> {
    let good = certificate.len() <= MAX_PEM
        && certificate.is_ascii()
        && certificate.starts_with("-----BEGIN CERTIFICATE-----")
        && certificate
            .trim_end()
            .ends_with("-----END CERTIFICATE-----");
    if good {
        return Ok(());
    }
    Err(ConnectError::invalid_argument("this is no certificate"))
}

struct Installed {
    /// Each names a file that is there.
    variables: BTreeMap<String, String>,
    failed: Vec<String>,
}

fn install(root: &Path, certificate: &str) -> io::Result<Installed> {
    let certificate = format!("{}\n", certificate.trim_end());
    let own = root.join(OWN);
    let old = read(&own)?.filter(|old| *old != certificate.as_bytes());
    let mut bundle = None;
    let mut failed = Vec::new();
    for name in BUNDLES {
        match renew(&root.join(name), old.as_deref(), certificate.as_bytes()) {
            Ok(true) => bundle = bundle.or(Some(name)),
            Ok(false) => {}
            Err(error) => failed.push(format!(
                "cannot add the box's authority to /{name}: {error}"
            )),
        }
    }
    let bundle = match bundle {
        Some(name) => name,
        None => {
            write(&root.join(BUNDLES[0]), certificate.as_bytes())?;
            BUNDLES[0]
        }
    };
    // Last: as long as the old one is there it is known what to take out of the bundles.
    write(&own, certificate.as_bytes())?;
    let mut variables: BTreeMap<String, String> = BUNDLE_VARIABLES
        .iter()
        .map(|name| ((*name).to_owned(), format!("/{bundle}")))
        .collect();
    variables.insert(EXTRA_VARIABLE.to_owned(), format!("/{OWN}"));
    Ok(Installed { variables, failed })
}

/// Whether there is such a bundle; it has the certificate then, once, and not the old one.
fn renew(path: &Path, old: Option<&[u8]>, certificate: &[u8]) -> io::Result<bool> {
    let Some(mut text) = read(path)? else {
        return Ok(false);
    };
    let has = memmem::find(&text, certificate).is_some();
    let stale = old.and_then(|old| Some((memmem::find(&text, old)?, old.len())));
    if let Some((at, length)) = stale {
        text.drain(at..at + length);
        if !has {
            text.extend_from_slice(certificate);
        }
        write(path, &text)?;
        return Ok(true);
    }
    if has {
        return Ok(true);
    }
    // Only added to: who reads it at this moment sees the whole of what was there.
    let mut file = OpenOptions::new()
        .append(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let gap: &[u8] = if text.last().is_none_or(|last| *last == b'\n') {
        b""
    } else {
        b"\n"
    };
    file.write_all(&[gap, certificate].concat())?;
    Ok(true)
}

/// `None`: it is not there. Never blocks on a pipe somebody in the box made.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path);
    let file = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BUNDLE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BUNDLE {
        return Err(io::Error::other("it is too large"));
    }
    Ok(Some(bytes))
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    file.write_all(content)
}

/// Java keeps its roots in a format of its own, which only its own tool writes.
async fn for_java(state: &State, keytool: &str) {
    let until = Instant::now() + JAVA_TIME;
    let own = format!("/{OWN}");
    // One of an earlier call has the same name; none is no fault.
    let _ = java(state, keytool, &["-delete"], until).await;
    let import = ["-importcert", "-noprompt", "-file", &own];
    if let Err(error) = java(state, keytool, &import, until).await {
        let message = format!("cannot add the box's authority to the Java keystore: {error}");
        state.log().add(LogLevel::Warn, message);
    }
}

async fn java(state: &State, keytool: &str, words: &[&str], until: Instant) -> io::Result<()> {
    let store = ["-cacerts", "-storepass", "changeit", "-alias", "sandkeep"];
    let config = ProcessConfig {
        cmd: keytool.to_owned(),
        args: words
            .iter()
            .chain(&store)
            .map(|word| (*word).to_owned())
            .collect(),
        ..Default::default()
    };
    let user = State::root();
    let launch = Launch {
        config: &config,
        user: &user,
        box_envs: &BTreeMap::new(),
        cwd: &PathBuf::from("/"),
        stdio: StdioKind::Nothing,
        score: state.child_score(),
        fence: state.fence(),
    };
    let mut spawned = spawn(state.reaper(), &launch)?;
    if timeout_at(until, spawned.exit.wait_for(Option::is_some))
        .await
        .is_err()
    {
        // Failing means that it has just ended.
        let _ = state.reaper().kill(spawned.pid);
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem(text: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    }

    fn bundle(root: &Path) -> String {
        std::fs::read_to_string(root.join(BUNDLES[0])).unwrap()
    }

    fn with_bundle(text: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        write(&root.path().join(BUNDLES[0]), text.as_bytes()).unwrap();
        root
    }

    #[test]
    fn it_is_added_once_and_the_old_one_goes() {
        let world = pem("world");
        // Without the last line break, as some people leave it.
        let root = with_bundle(world.trim_end());
        for _ in 0..2 {
            install(root.path(), &pem("one")).unwrap();
            assert_eq!(bundle(root.path()), format!("{world}{}", pem("one")));
        }
        let installed = install(root.path(), pem("two").trim_end()).unwrap();
        assert_eq!(bundle(root.path()), format!("{world}{}", pem("two")));
        assert_eq!(
            installed.variables["SSL_CERT_FILE"],
            format!("/{}", BUNDLES[0])
        );
        assert!(installed.failed.is_empty());
        for file in installed.variables.values() {
            assert!(root.path().join(file.trim_start_matches('/')).is_file());
        }
    }

    #[test]
    fn what_packages_made_of_the_bundle_is_understood() {
        let root = with_bundle(&pem("world"));
        install(root.path(), &pem("one")).unwrap();
        // update-ca-certificates writes it anew, with ours somewhere in it.
        let anew = format!("{}{}", pem("one"), pem("more"));
        write(&root.path().join(BUNDLES[0]), anew.as_bytes()).unwrap();
        install(root.path(), &pem("two")).unwrap();
        assert_eq!(
            bundle(root.path()),
            format!("{}{}", pem("more"), pem("two"))
        );
    }

    #[test]
    fn a_box_without_roots_gets_a_bundle_of_one() {
        let root = tempfile::tempdir().unwrap();
        install(root.path(), &pem("one")).unwrap();
        assert_eq!(bundle(root.path()), pem("one"));
    }

    #[test]
    fn what_a_box_made_of_its_files_does_not_hang_us() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(BUNDLES[0]);
        std::fs::create_dir_all(&path).unwrap();
        write(&root.path().join(BUNDLES[4]), pem("world").as_bytes()).unwrap();
        let installed = install(root.path(), &pem("one")).unwrap();
        assert_eq!(installed.failed.len(), 1);
        assert_eq!(installed.variables["PIP_CERT"], format!("/{}", BUNDLES[4]));
    }

    #[test]
    fn only_certificates_are_taken() {
        assert!(check(&pem("x")).is_ok());
        for bad in [
            "",
            "x",
            "-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----",
        ] {
            assert!(check(bad).is_err());
        }
        assert!(check(&pem(&"x".repeat(MAX_PEM))).is_err());
    }
}
