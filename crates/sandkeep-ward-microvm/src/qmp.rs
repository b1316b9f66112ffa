//! The control socket of a QEMU (QMP): JSON, one object a line, with descriptors beside it.
//!
//! QEMU runs the box, so what it answers is as hostile as the box.

use crate::qemu::{BLANK, DISK};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sandkeep_host::files::open_dir;
use sandkeep_model::{Code, Error, Result};
use serde_json::{Value, json};
use std::{
    io::{self, IoSlice, Read as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_secs(20);
const MOST_ANSWERED: usize = 256 << 10;
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    heard: Vec<u8>,
}

/// The path may be longer than an address holds, so it is named by its directory's descriptor.
fn short(path: &Path) -> Result<(OwnedFd, PathBuf)> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::internal("a socket without a name"));
    };
    let dir = open_dir(dir)?;
    let short = Path::new("/proc/self/fd")
        .join(dir.as_raw_fd().to_string())
        .join(name);
    Ok((dir, short))
}

/// A socket for a QEMU to answer at.
pub fn listen(path: &Path) -> Result<UnixListener> {
    let (_dir, short) = short(path)?;
    UnixListener::bind(short).map_err(unreachable)
}

impl Qmp {
    /// Blocks until QEMU answers.
    pub fn connect(path: &Path) -> Result<Self> {
        let (_dir, short) = short(path)?;
        let stream = UnixStream::connect(short).map_err(unreachable)?;
        for set in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
            set(&stream, Some(DEADLINE)).map_err(unreachable)?;
        }
        let mut qmp = Self {
            stream,
            heard: Vec::new(),
        };
        qmp.next()?;
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    pub fn call(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.call_with(command, arguments, None)
    }

    /// The same with a descriptor for QEMU.
    pub fn call_with(
        &mut self,
        command: &str,
        arguments: &Value,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Value> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        self.send(text.as_bytes(), fd).map_err(unreachable)?;
        loop {
            let answer = self.next()?;
            if let Some(result) = answer.get("return") {
                return Ok(result.clone());
            }
            if let Some(error) = answer.get("error") {
                let said = error.get("desc").and_then(Value::as_str).unwrap_or("?");
                let said: String = said.chars().take(500).collect();
                return Err(Error::internal(format!("QEMU refused {command}: {said}")));
            }
            // What is neither is news that nobody here waits for.
        }
    }

    /// Whether the machine runs, as QEMU sees it: `running`, `paused`, `inmigrate`.
    pub fn status(&mut self) -> Result<String> {
        let answer = self.call("query-status", &json!({}))?;
        Ok(answer["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits until the machine is no longer in this state.
    pub fn left(&mut self, state: &str) -> Result<String> {
        let until = Instant::now() + DEADLINE;
        loop {
            let status = self.status()?;
            if status != state {
                return Ok(status);
            }
            if Instant::now() >= until {
                return Err(Error::new(
                    Code::DeadlineExceeded,
                    format!("the machine stays {state}"),
                ));
            }
            sleep(PAUSE);
        }
    }

    pub fn stop(&mut self) -> Result<()> {
        self.call("stop", &json!({})).map(drop)
    }

    pub fn go_on(&mut self) -> Result<()> {
        self.call("cont", &json!({})).map(drop)
    }

    /// Puts a disk into the place of the empty one a QEMU begins with; given to read and write,
    /// and to read.
    pub fn give_disk(&mut self, disk: &[OwnedFd; 2]) -> Result<()> {
        const SET: u32 = 2;
        const OWN: &str = "own";
        for fd in disk {
            self.call_with("add-fd", &json!({ "fdset-id": SET }), Some(fd.as_fd()))?;
        }
        self.call(
            "blockdev-add",
            &json!({
                "driver": "file",
                "node-name": OWN,
                "filename": format!("/dev/fdset/{SET}"),
                "locking": "off",
                "discard": "unmap",
            }),
        )?;
        let disk = json!({ "driver": "raw", "node-name": DISK, "file": OWN, "discard": "unmap" });
        self.call("blockdev-reopen", &json!({ "options": [disk] }))?;
        self.call("blockdev-del", &json!({ "node-name": BLANK }))
            .map(drop)
    }

    /// Has QEMU write the state of its devices into an open file.
    pub fn save_devices(&mut self, file: BorrowedFd<'_>) -> Result<()> {
        let added = self.call_with("add-fd", &json!({}), Some(file))?;
        let set = added["fdset-id"].as_i64().unwrap_or(-1);
        let path = format!("/dev/fdset/{set}");
        let saved = self.call(
            "xen-save-devices-state",
            &json!({ "filename": path, "live": false }),
        );
        self.call("remove-fd", &json!({ "fdset-id": set }))?;
        saved.map(drop)
    }

    /// Has QEMU read the state of its devices.
    pub fn load_devices(&mut self, file: BorrowedFd<'_>) -> Result<()> {
        self.call_with("getfd", &json!({ "fdname": "devices" }), Some(file))?;
        self.call("migrate-incoming", &json!({ "uri": "fd:devices" }))?;
        match self.left("inmigrate")?.as_str() {
            "paused" | "prelaunch" | "running" => Ok(()),
            other => Err(Error::internal(format!(
                "QEMU could not read the machine: it is {other}"
            ))),
        }
    }

    fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.into_iter().collect();
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::other("no room for a descriptor"));
        }
        // Some hundred bytes: they go whole or not at all.
        let sent = sendmsg(
            &self.stream,
            &[IoSlice::new(bytes)],
            &mut beside,
            SendFlags::NOSIGNAL,
        )?;
        if sent == bytes.len() {
            Ok(())
        } else {
            Err(io::ErrorKind::WriteZero.into())
        }
    }

    fn next(&mut self) -> Result<Value> {
        loop {
            if let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                return serde_json::from_slice(&line)
                    .map_err(|error| unreachable(io::Error::other(error)));
            }
            if self.heard.len() > MOST_ANSWERED {
                return Err(unreachable(io::Error::other("it talks too much")));
            }
            let mut part = [0; 4096];
            match self.stream.read(&mut part) {
                Ok(0) => return Err(unreachable(io::ErrorKind::UnexpectedEof)),
                Ok(count) => self.heard.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(unreachable(error)),
            }
        }
    }
}

fn unreachable(error: impl Into<io::Error>) -> Error {
    let error = error.into();
    Error::new(
        Code::BoxUnreachable,
        format!("the machine does not answer: {error}"),
    )
    .hint("the box may be ending; try again")
}
