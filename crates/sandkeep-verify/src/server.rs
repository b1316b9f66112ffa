//! The private server: the same program, with a state directory, a key and a network of its own.

use std::{
    fs::{self, File},
    io,
    net::TcpListener,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use reqwest::Method;
use tokio::runtime::Runtime;

use crate::{
    api::Api,
    fault::{Doing as _, Fault, Result},
    stop::Stop,
    world::{OPENED, RESOLVER},
};

/// A cold machine is warmed up while it starts.
const START: Duration = Duration::from_secs(90);
const STOP: Duration = Duration::from_secs(20);

/// What the private server is made of.
#[derive(Debug, Clone)]
pub struct Place {
    /// This program.
    pub program: PathBuf,
    pub state: PathBuf,
    pub storage_bytes: u64,
    pub microvm_kernel: Option<PathBuf>,
    pub runsc: Option<PathBuf>,
    /// Root certificate of the outside.
    pub outside_ca: PathBuf,
}

#[derive(Debug)]
pub struct Server {
    child: Child,
    pub api: Arc<Api>,
    pub log: PathBuf,
    pub state: PathBuf,
}

impl Place {
    /// The settings stand in a file of its own, so that none of the operator's get in.
    fn write_settings(&self, file: &Path) -> Result<()> {
        let mut text = format!(
            "allow_private = [\"{OPENED}\"]\ndns = [\"{RESOLVER}:53\"]\nupstream_ca = \"{}\"\n\
             pool_size = 0\npool_isolation = \"container\"\nmax_boxes = 64\nmicrovm_waiting = 1\n",
            self.outside_ca.display(),
        );
        if let Some(kernel) = &self.microvm_kernel {
            text.push_str(&format!("microvm_kernel = \"{}\"\n", kernel.display()));
        }
        if let Some(runsc) = &self.runsc {
            text.push_str(&format!("runsc = \"{}\"\n", runsc.display()));
        }
        fs::write(file, text).doing("writing the private server's settings")
    }

    /// This program with only what is meant for the private server.
    pub fn command(&self, word: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(word).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if (text.starts_with("SANDKEEP_") && text != "SANDKEEP_BASE_CACHE")
                || text == "RUST_LOG"
            {
                command.env_remove(&name);
            }
        }
        command
    }

    pub fn start(&self, runtime: &Arc<Runtime>, stop: &Stop) -> Result<Server> {
        let settings = self.state.join("verify.toml");
        self.write_settings(&settings)?;
        let port = free_port()?;
        let key = format!("e2b_{}", random(20)?);
        let log = self.state.join("verify-server.log");
        let out = File::create(&log).doing("making the private server's log")?;
        let also = out.try_clone().doing("making the private server's log")?;
        let child = self
            .command("serve")
            // Prints the key on a terminal only; this is none.
            .arg("--greet")
            .arg("--listen")
            .arg(format!("127.0.0.1:{port}"))
            .arg("--state")
            .arg(&self.state)
            .arg("--storage-size")
            .arg(self.storage_bytes.to_string())
            .arg("--config")
            .arg(&settings)
            .env("SANDKEEP_API_KEY", &key)
            .stdout(out)
            .stderr(also)
            // Ctrl-C is for us: sandboxes are ended before the server is.
            .process_group(0)
            .spawn()
            .doing("starting the private server")?;
        let api = Api::new(Arc::clone(runtime), stop.clone(), port, key)?;
        let mut server = Server {
            child,
            api: Arc::new(api),
            log,
            state: self.state.clone(),
        };
        server.wait_ready(stop)?;
        Ok(server)
    }
}

impl Server {
    fn wait_ready(&mut self, stop: &Stop) -> Result<()> {
        let end = Instant::now() + START;
        loop {
            stop.check()?;
            if let Some(status) = self.child.try_wait().doing("watching the private server")? {
                return Err(Fault::Cannot(format!(
                    "the private server ended at once ({status}): {}",
                    self.last_words()
                )));
            }
            let patience = Duration::from_secs(2);
            if let Ok(answer) = self
                .api
                .request(Method::GET, "/v1/health", None, &[], patience)
                && answer.status == 200
            {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(Fault::Cannot(format!(
                    "the private server did not answer within {} s: {}",
                    START.as_secs(),
                    self.last_words()
                )));
            }
            stop.sleep(Duration::from_millis(50))?;
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }

    /// Ends all its sandboxes and then itself; also after Ctrl-C.
    pub fn end(&mut self) {
        if self.running() {
            self.end_sandboxes();
            self.signal(rustix::process::Signal::TERM);
        }
        let end = Instant::now() + STOP;
        while self.running() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.signal(rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }

    fn signal(&mut self, signal: rustix::process::Signal) {
        if self.running()
            && let Some(pid) = i32::try_from(self.child.id())
                .ok()
                .and_then(rustix::process::Pid::from_raw)
        {
            // It was not waited for, so the id is still its own.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    fn end_sandboxes(&self) {
        let patience = Duration::from_secs(10);
        let Ok(answer) = self
            .api
            .last_request(Method::GET, "/v1/sandboxes?limit=100", patience)
        else {
            return;
        };
        let list: serde_json::Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        for item in list["sandboxes"].as_array().into_iter().flatten() {
            if let Some(id) = item["id"].as_str() {
                let path = format!("/v1/sandboxes/{id}");
                // What cannot be ended now ends with the room.
                let _ = self.api.last_request(Method::DELETE, &path, patience);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn free_port() -> Result<u16> {
    let probe = TcpListener::bind(("127.0.0.1", 0));
    probe
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .doing("looking for a free port")
}

/// Hexadecimal, of so many random bytes.
pub fn random(bytes: usize) -> Result<String> {
    let mut buffer = vec![0; bytes];
    getrandom::fill(&mut buffer)
        .map_err(|error| io::Error::other(error.to_string()))
        .doing("drawing random bytes")?;
    Ok(buffer.iter().map(|byte| format!("{byte:02x}")).collect())
}
