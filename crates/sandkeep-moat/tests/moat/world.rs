//! A small internet in a namespace of its own, a moat at the end of a cable to it, and a box.

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use hickory_proto::{
    op::{Message, MessageType, OpCode, Query, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata},
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use sandkeep_moat::{
    AttachSpec, BoxMoat, ConnectionRecord, Denial, Hooks, Moat, MoatConfig, Patience, UpstreamDns,
    Via,
    policy::{Host, Policy, To},
};
use sandkeep_model::SandboxId;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

/// The server everybody may reach, and one nobody may.
pub const GOOD: &str = "203.0.113.10";
pub const EVIL: &str = "203.0.113.66";
pub const RESOLVER: &str = "203.0.113.53";
pub const GOOD_V6: &str = "2001:db8::10";
/// Nothing in a test takes this long unless it hangs.
pub const LONG: Duration = Duration::from_secs(60);

#[derive(Default)]
pub struct Seen {
    pub connections: Mutex<Vec<ConnectionRecord>>,
    pub denials: Mutex<Vec<Denial>>,
}

impl Hooks for Seen {
    fn connection(&self, record: &ConnectionRecord) {
        self.connections.lock().unwrap().push(record.clone());
    }

    fn denial(&self, _: &SandboxId, denial: &Denial) {
        self.denials.lock().unwrap().push(denial.clone());
    }
}

/// Names and what they resolve to; takes down what it is asked.
#[derive(Default)]
pub struct Zone {
    records: Mutex<HashMap<String, Vec<RData>>>,
    pub asked: Mutex<Vec<String>>,
}

impl Zone {
    pub fn set(&self, name: &str, data: Vec<RData>) {
        self.records.lock().unwrap().insert(name.to_owned(), data);
    }

    pub fn address(&self, name: &str, address: &str) {
        self.set(name, vec![data(address)]);
    }

    /// Follows CNAMEs like a recursive resolver does.
    fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let query = Message::from_vec(query).ok()?;
        let question = query.queries.first()?.clone();
        let mut owner = question.name().to_ascii();
        self.asked
            .lock()
            .unwrap()
            .push(owner.trim_end_matches('.').to_owned());
        let mut response = Message::new(query.metadata.id, MessageType::Response, OpCode::Query);
        response.add_query(question.clone());
        // Names that stand for a resolver in trouble.
        if owner.starts_with("silent.") {
            return None;
        }
        if owner.starts_with("servfail.") {
            response.metadata.response_code = ResponseCode::ServFail;
            return response.to_vec().ok();
        }
        let records = self.records.lock().unwrap();
        if !records.contains_key(owner.trim_end_matches('.')) {
            response.metadata.response_code = ResponseCode::NXDomain;
        }
        for _ in 0..8 {
            let Some(found) = records.get(owner.trim_end_matches('.')) else {
                break;
            };
            let name = Name::from_ascii(&owner).unwrap();
            let mut next = None;
            for data in found {
                if let RData::CNAME(target) = data {
                    next = Some(target.0.to_ascii());
                } else if data.record_type() != question.query_type() {
                    continue;
                }
                response.add_answer(Record::from_rdata(name.clone(), 0, data.clone()));
            }
            let Some(target) = next else { break };
            owner = target;
        }
        response.to_vec().ok()
    }
}

pub fn data(address: &str) -> RData {
    match address.parse().unwrap() {
        IpAddr::V4(v4) => RData::A(rdata::A(v4)),
        IpAddr::V6(v6) => RData::AAAA(rdata::AAAA(v6)),
    }
}

pub struct World {
    pub moat: Arc<Moat>,
    pub zone: Arc<Zone>,
    pub seen: Arc<Seen>,
    pub namespace: Arc<OwnedFd>,
    /// Where the moat dials from.
    pub here: Arc<OwnedFd>,
}

/// Runs a test in a fresh internet. The test's runtime lives in it, as the server does in its.
pub fn in_world<F: Future<Output = ()>>(test: impl FnOnce(World) -> F + Send + 'static) {
    in_world_with(|_| {}, test);
}

/// Where silence shall be seen to end: only for tests whose clients say nothing more.
pub fn in_impatient_world<F: Future<Output = ()>>(test: impl FnOnce(World) -> F + Send + 'static) {
    let short = |config: &mut MoatConfig| {
        config.patience = Patience {
            name_within: Duration::from_millis(300),
            decide_within: Duration::from_millis(500),
            head_within: Duration::from_millis(500),
            inside_within: Duration::from_millis(500),
        };
    };
    in_world_with(short, test);
}

pub fn in_world_with<F: Future<Output = ()>>(
    change: impl FnOnce(&mut MoatConfig) + Send + 'static,
    test: impl FnOnce(World) -> F + Send + 'static,
) {
    in_world_for(4 * LONG, change, test);
}

/// For tests that take as long as they are told to.
pub fn in_world_for<F: Future<Output = ()>>(
    limit: Duration,
    change: impl FnOnce(&mut MoatConfig) + Send + 'static,
    test: impl FnOnce(World) -> F + Send + 'static,
) {
    let thread = thread::spawn(move || {
        // SAFETY: only the network namespace of this thread changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("these tests need root");
        run("ip link set lo up");
        // On the loopback device every address of a network is ours.
        run("ip addr add 203.0.113.1/24 dev lo");
        run("ip addr add 192.168.7.1/24 dev lo");
        run("ip -6 addr add 2001:db8::10/128 dev lo");
        // The moat is another machine: it reaches no address of its own.
        let here = new_namespace();
        lay_cable(&here);
        let runtime = runtime_in(&here);
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
            .block_on(async {
                let zone = Arc::new(Zone::default());
                serve_dns(&zone).await;
                let seen = Arc::new(Seen::default());
                let mut config = MoatConfig {
                    upstream_dns: UpstreamDns::Servers(vec![at(RESOLVER, 53)]),
                    allow_private: vec![
                        "203.0.113.0/24".parse().unwrap(),
                        "2001:db8::/64".parse().unwrap(),
                    ],
                    hooks: seen.clone(),
                    // Nobody is cut off because the machine is busy.
                    patience: Patience {
                        name_within: LONG,
                        decide_within: LONG,
                        head_within: LONG,
                        inside_within: LONG,
                    },
                    runtime: Some(runtime.handle().clone()),
                    ..MoatConfig::default()
                };
                change(&mut config);
                let world = World {
                    moat: Moat::new(config),
                    zone,
                    seen,
                    namespace: Arc::new(new_namespace()),
                    here: Arc::new(here),
                };
                tokio::time::timeout(limit, test(world))
                    .await
                    .expect("the test hangs");
            });
        runtime.shutdown_background();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

pub fn run(line: &str) {
    let mut words = line.split(' ');
    let status = Command::new(words.next().unwrap())
        .args(words)
        .status()
        .unwrap();
    assert!(status.success(), "{line}");
}

pub fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// Runs something on a thread of its own in another namespace.
pub fn inside<T: Send>(namespace: &OwnedFd, work: impl FnOnce() -> T + Send) -> T {
    let work = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn lay_cable(here: &OwnedFd) {
    use std::os::fd::AsRawFd;
    let (pid, descriptor) = (std::process::id(), here.as_raw_fd());
    run("ip link add world type veth peer name out");
    run(&format!(
        "ip link set out netns /proc/{pid}/fd/{descriptor}"
    ));
    run("ip addr add 100.64.9.2/30 dev world");
    run("ip -6 addr add fd77::2/64 dev world nodad");
    run("ip link set world up");
    inside(here, || {
        for line in [
            "ip link set lo up",
            "ip addr add 100.64.9.1/30 dev out",
            "ip -6 addr add fd77::1/64 dev out nodad",
            "ip link set out up",
            "ip route add default via 100.64.9.2",
            "ip -6 route add default via fd77::2",
        ] {
            run(line);
        }
    });
}

/// Its threads are in the namespace.
fn runtime_in(here: &OwnedFd) -> tokio::runtime::Runtime {
    inside(here, || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
    })
}

pub fn another_box() -> Arc<OwnedFd> {
    Arc::new(new_namespace())
}

fn new_namespace() -> OwnedFd {
    thread::spawn(|| {
        // SAFETY: only the network namespace of this thread changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        std::fs::File::open("/proc/thread-self/ns/net")
            .unwrap()
            .into()
    })
    .join()
    .unwrap()
}

async fn serve_dns(zone: &Arc<Zone>) {
    let socket = tokio::net::UdpSocket::bind(at(RESOLVER, 53)).await.unwrap();
    let zone = Arc::clone(zone);
    tokio::spawn(async move {
        let mut buffer = [0; 4096];
        while let Ok((count, from)) = socket.recv_from(&mut buffer).await {
            if let Some(answer) = zone.answer(&buffer[..count]) {
                socket.send_to(&answer, from).await.unwrap();
            }
        }
    });
}

impl World {
    /// A box whose programs looked up every name their policy has.
    pub async fn attach(&self, policy: Policy) -> BoxMoat {
        let moat = self.attach_only(policy.clone()).await;
        self.look_up(&policy).await;
        moat
    }

    pub async fn attach_only(&self, policy: Policy) -> BoxMoat {
        self.moat
            .attach(AttachSpec {
                id: SandboxId::random(),
                netns: self.namespace.try_clone().unwrap(),
                policy,
                bindings: Vec::new(),
                from_point: None,
                copy_of: None,
            })
            .await
            .unwrap()
    }

    pub async fn look_up(&self, policy: &Policy) {
        for rule in &policy.allow {
            if let To::Host(Host::Name(name)) = &rule.to {
                self.ask(name, RecordType::A).await;
                self.ask(name, RecordType::AAAA).await;
            }
        }
    }

    pub async fn allowing(&self, rules: &[&str]) -> BoxMoat {
        self.attach(Policy::allowing(rules.iter().copied()).unwrap())
            .await
    }

    /// Runs something in the namespace of the box, on a thread of its own.
    pub async fn in_box<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let namespace = Arc::clone(&self.namespace);
        let (send, wait) = tokio::sync::oneshot::channel();
        thread::spawn(move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            drop(send.send(work()));
        });
        wait.await.expect("what ran in the box failed")
    }

    /// Sends these bytes from the box and reads all that comes back.
    pub async fn talk(&self, to: SocketAddr, bytes: impl Into<Vec<u8>>) -> io::Result<String> {
        let bytes = bytes.into();
        self.in_box(move || talk(to, &bytes)).await
    }

    /// A server that takes down what each connection sent first, and answers.
    pub async fn server(
        &self,
        address: SocketAddr,
        answer: &'static str,
    ) -> Arc<Mutex<Vec<String>>> {
        let listener = TcpListener::bind(address).await.unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let taken = Arc::clone(&heard);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let heard = Arc::clone(&heard);
                let at = {
                    let mut heard = heard.lock().unwrap();
                    heard.push(String::new());
                    heard.len() - 1
                };
                tokio::spawn(async move {
                    let mut buffer = [0; 4096];
                    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                        let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                        heard.lock().unwrap()[at].push_str(&text);
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        taken
    }
}

/// An answer that lets the connection live.
pub const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

pub fn get(host: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}

pub fn dial(to: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to, LONG)?;
    stream.set_read_timeout(Some(LONG))?;
    stream.set_write_timeout(Some(LONG))?;
    Ok(stream)
}

pub fn talk(to: SocketAddr, bytes: &[u8]) -> io::Result<String> {
    let mut stream = dial(to)?;
    stream.write_all(bytes)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Asks a resolver at this address from the thread's namespace.
pub fn ask(server: SocketAddr, name: &str, kind: RecordType) -> io::Result<Message> {
    ask_within(LONG, server, name, kind)
}

pub fn ask_within(
    patience: Duration,
    server: SocketAddr,
    name: &str,
    kind: RecordType,
) -> io::Result<Message> {
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.set_edns(hickory_proto::op::Edns::new());
    query.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    let any = if server.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(patience))?;
    socket.connect(server)?;
    // More than some hundred flows a second are dropped at the sender.
    while let Err(error) = socket.send(&query.to_vec().unwrap()) {
        if error.kind() != io::ErrorKind::PermissionDenied {
            return Err(error);
        }
        thread::sleep(Duration::from_millis(20));
    }
    let mut buffer = [0; 4096];
    let count = socket.recv(&mut buffer)?;
    Ok(Message::from_vec(&buffer[..count]).unwrap())
}

impl World {
    pub async fn ask(&self, name: &str, kind: RecordType) -> Message {
        let name = name.to_owned();
        self.in_box(move || ask(at("10.0.0.1", 53), &name, kind).unwrap())
            .await
    }

    /// The addresses the box is told.
    pub async fn resolve(&self, name: &str) -> Vec<IpAddr> {
        self.ask(name, RecordType::A)
            .await
            .answers
            .iter()
            .filter_map(|record| match record.data {
                RData::A(a) => Some(a.0.into()),
                _ => None,
            })
            .collect()
    }
}

/// The refusal a box got, which must be ours.
pub fn denied(answer: &str) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
    assert!(head.starts_with("HTTP/1.1 403"), "{answer}");
    let value: Value = serde_json::from_str(body).unwrap();
    assert_eq!(value["error"], "egress_denied");
    assert!(value["hint"].as_str().is_some_and(|hint| !hint.is_empty()));
    value
}

pub fn was_reset<T: std::fmt::Debug>(outcome: &io::Result<T>) -> bool {
    // With the first packet, or after what it said.
    matches!(outcome, Err(error) if error.kind() == io::ErrorKind::ConnectionReset
        || error.kind() == io::ErrorKind::ConnectionRefused
        || error.kind() == io::ErrorKind::BrokenPipe)
}

pub fn refused_via(moat: &BoxMoat, via: Via, host: &str) -> bool {
    moat.denials()
        .iter()
        .any(|denial| denial.via == via && denial.host == host)
}
