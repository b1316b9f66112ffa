//! What lies on the host for attacks to find: none of it is worth anything, and each of it tells
//! whether it was touched.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpListener},
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::PermissionsExt as _,
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::fs::Dev;

use crate::{
    fault::{Doing as _, Fault, Result},
    server::random,
    world::ip,
};

/// An address of the host that is public: in this room it is on the loopback device only.
pub const OWN_PUBLIC: Ipv4Addr = Ipv4Addr::new(8, 8, 4, 99);
/// What host services answer; read by a sandbox it proves that it got there.
const GREETING: &str = "host-service ";

#[derive(Debug)]
pub struct Bait {
    pub dir: PathBuf,
    /// Stands in the canary file, on the disk, in the arguments of the process, in answers.
    pub mark: String,
    pub port: u16,
    touched: Arc<AtomicUsize>,
    disk: Option<(String, Dev)>,
    process: Child,
    /// The write end of a pipe that is open without close-on-exec when the server starts.
    pub stray: String,
    _pipe: (std::os::fd::OwnedFd, std::os::fd::OwnedFd),
}

impl Bait {
    pub fn lay(dir: &Path) -> Result<Self> {
        let mark = format!("canary-{}", random(12)?);
        fs::create_dir_all(dir).doing("making a directory for canaries")?;
        fs::write(dir.join(&mark), format!("{mark}\n")).doing("writing a canary")?;
        let touched = Arc::new(AtomicUsize::new(0));
        let socket = UnixListener::bind(dir.join("engine.sock")).doing("making a socket")?;
        // As engines' sockets often are: whoever sees it may use it.
        fs::set_permissions(dir.join("engine.sock"), fs::Permissions::from_mode(0o777))
            .doing("opening a socket")?;
        watch_unix(socket, &touched);
        let name = SocketAddr::from_abstract_name(mark.as_bytes()).doing("naming a socket")?;
        watch_unix(
            UnixListener::bind_addr(&name).doing("making an abstract socket")?,
            &touched,
        );
        ip(&["address", "add", &format!("{OWN_PUBLIC}/32"), "dev", "lo"])?;
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).doing("a host service")?;
        let port = listener.local_addr().doing("a host service")?.port();
        watch_tcp(listener, &touched, format!("{GREETING}{mark}\n"));
        let process = Command::new("sh")
            .args(["-c", "sleep 86400; :", &mark])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .doing("starting a process to be found")?;
        let (read, write) = rustix::pipe::pipe().doing("making a pipe")?;
        let stray = descriptor_name(&write);
        Ok(Self {
            dir: dir.to_owned(),
            disk: disk(dir, &mark).ok(),
            mark,
            port,
            touched,
            process,
            stray,
            _pipe: (read, write),
        })
    }

    /// How often a service of the host was reached so far.
    pub fn touched(&self) -> usize {
        self.touched.load(Ordering::SeqCst)
    }

    /// A block device that holds the canary, by its numbers.
    pub fn disk(&self) -> Result<(u32, u32)> {
        let (_, device) = self
            .disk
            .as_ref()
            .ok_or_else(|| Fault::cannot("this host has no loop device to lay out as bait"))?;
        Ok((rustix::fs::major(*device), rustix::fs::minor(*device)))
    }
}

impl Drop for Bait {
    fn drop(&mut self) {
        // What is left of them ends with the room.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some((device, _)) = &self.disk {
            let _ = Command::new("losetup").args(["--detach", device]).output();
        }
    }
}

fn descriptor_name(descriptor: &impl std::os::fd::AsRawFd) -> String {
    fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
        .map(|path| path.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn watch_unix(listener: UnixListener, touched: &Arc<AtomicUsize>) {
    let touched = Arc::clone(touched);
    thread::spawn(move || {
        for _stream in listener.incoming().flatten() {
            touched.fetch_add(1, Ordering::SeqCst);
        }
    });
}

fn watch_tcp(listener: TcpListener, touched: &Arc<AtomicUsize>, greeting: String) {
    let touched = Arc::clone(touched);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            touched.fetch_add(1, Ordering::SeqCst);
            let greeting = greeting.clone();
            thread::spawn(move || {
                let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
                // Whoever called may be gone; that they called is counted.
                let _ = stream.write_all(greeting.as_bytes());
                let _ = stream.read(&mut [0; 512]);
            });
        }
    });
}

/// A loop device over a file that begins with the canary.
fn disk(dir: &Path, mark: &str) -> Result<(String, Dev)> {
    let file = dir.join("disk.img");
    let mut bytes = format!("{mark}\n").into_bytes();
    bytes.resize(1 << 20, 0);
    fs::write(&file, bytes).doing("writing a disk")?;
    let ran = Command::new("losetup")
        .args(["--find", "--show", "--read-only"])
        .arg(&file)
        .output()
        .doing("running losetup")?;
    let device = String::from_utf8_lossy(&ran.stdout).trim().to_owned();
    if !ran.status.success() || device.is_empty() {
        return Err(Fault::cannot("no loop device"));
    }
    let stat = rustix::fs::stat(&device).doing("looking at the loop device")?;
    Ok((device, stat.st_rdev))
}
