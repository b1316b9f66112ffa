//! The outside: a network namespace at the end of a cable, where *every* address answers and every
//! packet is counted. Whatever gets past the moat is seen, wherever it goes, and nothing reaches a
//! real network.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustls::ServerConfig;

use crate::{
    capture, certs, dns,
    fault::{Doing as _, Fault, Result},
    origin,
};

pub const GOOD: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 1);
pub const EVIL: Ipv4Addr = Ipv4Addr::new(198, 18, 66, 6);
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 53);
/// Private, and not opened by the private server's settings.
pub const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 77, 77, 77);
/// Public to the private server: whatever else is private stays closed.
pub const OPENED: &str = "198.18.0.0/16";
/// Certificates for it are signed by an authority that nobody trusts.
pub const IMPOSTOR: &str = "impostor.test";
const NAMES: [&str; 6] = [
    "good.test",
    "open.test",
    "narrow.test",
    "echo.test",
    "other.test",
    "evil.test",
];
const HERE: &str = "198.18.0.1/30";
const THERE: &str = "198.18.0.2";
/// Answered with silence; who connects is noted.
const SILENT: [u16; 6] = [23, 853, 5432, 8080, 8443, 9418];

/// A request as the origin saw it.
#[derive(Debug, Clone)]
pub struct Request {
    pub to: IpAddr,
    pub tls: bool,
    pub method: String,
    pub target: String,
    pub host: String,
    pub headers: Vec<(String, String)>,
}

/// All that was seen outside.
#[derive(Debug, Default)]
pub struct Seen {
    pub packets: Mutex<BTreeMap<(u8, IpAddr, u16), u64>>,
    pub connections: Mutex<Vec<SocketAddr>>,
    pub requests: Mutex<Vec<Request>>,
    pub questions: Mutex<Vec<String>>,
    /// What `/need` wants to see in `Authorization: Bearer …`, and `/show` shows.
    pub expected: Mutex<String>,
}

pub fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    /// Packets to an address, whatever the protocol.
    pub fn packets_to(&self, address: IpAddr) -> u64 {
        held(&self.packets)
            .iter()
            .filter(|((_, to, _), _)| *to == address)
            .map(|(_, count)| count)
            .sum()
    }

    /// Where packets went, but for what the private server does for an allowed name.
    pub fn strangers(&self) -> Vec<String> {
        let known = [IpAddr::V4(GOOD), IpAddr::V4(RESOLVER)];
        held(&self.packets)
            .keys()
            .filter(|(_, to, _)| !known.contains(to))
            .map(|(protocol, to, port)| format!("{} to {to} port {port}", protocol_name(*protocol)))
            .collect()
    }

    pub fn forget(&self) {
        held(&self.packets).clear();
        held(&self.connections).clear();
        held(&self.requests).clear();
        held(&self.questions).clear();
    }

    pub fn requests_for(&self, path: &str) -> Vec<Request> {
        held(&self.requests)
            .iter()
            .filter(|request| request.target.contains(path))
            .cloned()
            .collect()
    }
}

fn protocol_name(number: u8) -> String {
    match number {
        1 | 58 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        other => format!("protocol {other}"),
    }
}

#[derive(Debug)]
pub struct World {
    pub seen: Arc<Seen>,
}

impl World {
    /// Builds the outside and connects the network of this process to it.
    pub fn build(dir: &Path) -> Result<Self> {
        let (tls, root) = certs::authority(&NAMES, IMPOSTOR)?;
        fs::write(dir.join("outside-ca.pem"), root).doing("writing the outside's certificate")?;
        let seen = Arc::new(Seen::default());
        ip(&["link", "set", "lo", "up"])?;
        ip(&[
            "link", "add", "way-out", "type", "veth", "peer", "name", "world",
        ])?;
        let (tell, told) = mpsc::channel();
        let (plugged, plug) = mpsc::channel();
        let (ready, wait) = mpsc::channel();
        let there = Arc::clone(&seen);
        thread::Builder::new()
            .name("outside".to_owned())
            .spawn(move || {
                let made = namespace();
                let good = made.is_ok();
                let _ = tell.send(made);
                if good && plug.recv().is_ok() {
                    let _ = ready.send(populate(&there, &tls));
                }
                // The namespace lives as long as this thread.
                loop {
                    thread::park();
                }
            })
            .doing("starting the outside")?;
        let lost = |_| Fault::cannot("the outside's thread ended early");
        let namespace = told.recv().map_err(lost)??;
        ip(&["link", "set", "world", "netns", &namespace])?;
        ip(&["address", "add", HERE, "dev", "way-out"])?;
        ip(&[
            "-6",
            "address",
            "add",
            "fd77::1/64",
            "dev",
            "way-out",
            "nodad",
        ])?;
        ip(&["link", "set", "way-out", "up"])?;
        plugged
            .send(())
            .map_err(|_| Fault::cannot("the outside's thread ended early"))?;
        wait.recv_timeout(Duration::from_secs(20))
            .map_err(|_| Fault::cannot("the outside was not ready within 20 s"))??;
        ip(&["route", "add", "default", "via", THERE])?;
        // Hosts without IPv6 have no such route.
        let _without_v6 = ip(&["-6", "route", "add", "default", "via", "fd77::2"]);
        Ok(Self { seen })
    }

    /// Waits until packets that are under way have been counted.
    pub fn settle(&self) {
        let end = Instant::now() + Duration::from_secs(5);
        let total = || held(&self.seen.packets).values().sum::<u64>();
        let mut last = total();
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(200));
            let now = total();
            if now == last {
                return;
            }
            last = now;
        }
    }
}

/// Gives this thread a network of its own; a path that leads to it.
fn namespace() -> Result<String> {
    // SAFETY: a new network namespace touches neither memory nor descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
        .doing("making the outside's network namespace")?;
    let thread = rustix::thread::gettid().as_raw_nonzero();
    Ok(format!("/proc/{}/task/{thread}/ns/net", std::process::id()))
}

/// In the outside's thread: addresses, servers, the capture.
fn populate(seen: &Arc<Seen>, tls: &Arc<ServerConfig>) -> Result<()> {
    ip(&["link", "set", "lo", "up"])?;
    ip(&["address", "add", &format!("{THERE}/30"), "dev", "world"])?;
    ip(&[
        "-6",
        "address",
        "add",
        "fd77::2/64",
        "dev",
        "world",
        "nodad",
    ])?;
    ip(&["link", "set", "world", "up"])?;
    // Every address of the world is here.
    ip(&[
        "route",
        "add",
        "local",
        "0.0.0.0/0",
        "dev",
        "lo",
        "table",
        "main",
    ])?;
    let _without_v6 = ip(&[
        "-6", "route", "add", "local", "::/0", "dev", "lo", "table", "main",
    ]);
    capture::start("world", Arc::clone(seen))?;

    let resolver = UdpSocket::bind((RESOLVER, 53)).doing("the outside's resolver")?;
    let knows = Arc::clone(seen);
    thread::spawn(move || dns::serve(&resolver, &knows));

    listen(80, seen, None, Speaks::Http)?;
    listen(443, seen, Some(tls), Speaks::Http)?;
    for port in SILENT {
        listen(port, seen, None, Speaks::Nothing)?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy)]
enum Speaks {
    Http,
    Nothing,
}

fn listen(
    port: u16,
    seen: &Arc<Seen>,
    tls: Option<&Arc<ServerConfig>>,
    speaks: Speaks,
) -> Result<()> {
    let mut listeners = vec![
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
            .doing(format_args!("the outside's port {port}"))?,
    ];
    // Where the first one took both families this one is in use: just as good.
    listeners.extend(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).ok());
    for listener in listeners {
        let (seen, tls) = (Arc::clone(seen), tls.cloned());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (seen, tls) = (Arc::clone(&seen), tls.clone());
                thread::spawn(move || one(stream, &seen, tls, speaks));
            }
        });
    }
    Ok(())
}

fn one(stream: TcpStream, seen: &Seen, tls: Option<Arc<ServerConfig>>, speaks: Speaks) {
    let Ok(to) = stream.local_addr() else { return };
    held(&seen.connections).push(to);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
    let _ = stream.set_write_timeout(Some(Duration::from_secs(30)));
    let _ = stream.set_nodelay(true);
    // The other side may end it at any time; what was seen is noted by then.
    let _ended: io::Result<()> = match (speaks, tls) {
        (Speaks::Nothing, _) => {
            let mut stream = stream;
            io::copy(&mut stream, &mut io::sink()).map(drop)
        }
        (Speaks::Http, None) => origin::serve(stream, to.ip(), false, seen),
        (Speaks::Http, Some(config)) => match rustls::ServerConnection::new(config) {
            Ok(connection) => origin::serve(
                rustls::StreamOwned::new(connection, stream),
                to.ip(),
                true,
                seen,
            ),
            Err(_) => Ok(()),
        },
    };
}

/// Runs `ip` of iproute2 in the network namespace of this thread.
pub fn ip(words: &[&str]) -> Result<()> {
    let ran = Command::new("ip").args(words).output().map_err(|error| {
        Fault::Cannot(format!(
            "running `ip`: {error}; install iproute2 (Debian, Ubuntu: `apt-get install iproute2`)"
        ))
    })?;
    if ran.status.success() {
        return Ok(());
    }
    Err(Fault::Cannot(format!(
        "`ip {}` failed: {}",
        words.join(" "),
        String::from_utf8_lossy(&ran.stderr).trim()
    )))
}
