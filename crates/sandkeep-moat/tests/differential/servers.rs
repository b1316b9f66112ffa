//! Real servers in the small internet of the test, each of which takes down how it read every
//! request it served.

use std::{
    convert::Infallible,
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::world::{GOOD, LONG, at};

/// One way to serve: a program with its settings.
#[derive(Debug, Clone)]
pub struct Served {
    pub name: String,
    pub port: u16,
    /// What must stand before everything that is sent to it.
    pub before: &'static [u8],
    pub http2_only: bool,
}

#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[derive(Debug)]
pub struct Servers {
    pub list: Vec<Served>,
    running: Vec<Running>,
    logs: Mutex<Vec<(PathBuf, File, String)>>,
    directory: tempfile::TempDir,
}

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/differential/servers");
const PROXY: &[u8] = b"PROXY TCP4 192.0.2.1 192.0.2.2 4000 80\r\n";

impl Servers {
    /// Starts all. `kit`: what `script/lib.sh` put there (`ensure_http_servers`).
    pub async fn start(kit: &Path) -> Self {
        let mut servers = Self {
            list: Vec::new(),
            running: Vec::new(),
            logs: Mutex::default(),
            directory: tempfile::tempdir().unwrap(),
        };
        servers.nginx(kit);
        servers.apache();
        servers.envoy(kit);
        servers.node();
        servers.go(kit);
        servers.gunicorn(kit, "gunicorn", "venv", 8009);
        servers.gunicorn(kit, "gunicorn-20", "venv20", 8010);
        servers.python(kit);
        servers.hyper().await;
        servers.wait_for_all().await;
        servers
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn serve(&mut self, name: &str, port: u16) {
        self.list.push(Served {
            name: name.to_owned(),
            port,
            before: b"",
            http2_only: false,
        });
    }

    fn log(&mut self, name: &str) -> PathBuf {
        let path = self.path(name);
        let open = || OpenOptions::new().create(true).append(true).open(&path);
        drop(open().unwrap());
        let file = File::open(&path).unwrap();
        self.logs
            .get_mut()
            .unwrap()
            .push((path.clone(), file, String::new()));
        path
    }

    /// A file of settings with the blanks filled in.
    fn settings(&self, source: &str, name: &str, blanks: &[(&str, &str)]) -> PathBuf {
        let mut text = fs::read_to_string(format!("{SOURCES}/{source}")).unwrap();
        let directory = self.directory.path().to_str().unwrap();
        for (blank, value) in blanks
            .iter()
            .chain(&[("@DIR@", directory), ("@ADDRESS@", GOOD)])
        {
            text = text.replace(blank, value);
        }
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn run(&mut self, command: &mut Command) {
        let said = File::create(self.path(&format!("said-{}", self.running.len()))).unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(said.try_clone().unwrap())
            .stderr(said)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{command:?}: {error}; script/lib.sh: ensure_http_servers")
            });
        self.running.push(Running(child));
    }

    fn nginx(&mut self, kit: &Path) {
        let blanks = [
            ("@NAME@", "nginx"),
            ("@STRICT@", "8001"),
            ("@SLACK@", "8002"),
            ("@H2@", "8003"),
            ("@PROXY@", "8004"),
        ];
        let settings = self.settings("nginx.conf", "nginx.conf", &blanks);
        self.log("nginx.log");
        let directory = self.directory.path().to_owned();
        self.run(
            Command::new(kit.join("nginx/usr/sbin/nginx"))
                .arg("-c")
                .arg(settings)
                .arg("-p")
                .arg(directory),
        );
        self.serve("nginx", 8001);
        self.serve("nginx-slack", 8002);
        self.serve("nginx-h2", 8003);
        self.serve("nginx-proxy", 8004);
        self.list[2].http2_only = true;
        self.list[3].before = PROXY;
    }

    fn apache(&mut self) {
        let slack = "Unsafe LenientMethods Allow0.9";
        for (name, port, options) in [
            ("apache", 8005, "Strict LenientMethods Allow0.9"),
            ("apache-slack", 8006, slack),
        ] {
            let number = port.to_string();
            let blanks = [
                ("@NAME@", name),
                ("@PORT@", &number),
                ("@OPTIONS@", options),
                ("@MODULES@", "/usr/lib/apache2/modules"),
            ];
            let settings = self.settings("apache.conf", &format!("{name}.conf"), &blanks);
            self.log(&format!("apache{port}.log"));
            self.run(
                Command::new("/usr/sbin/apache2")
                    .arg("-DFOREGROUND")
                    .arg("-f")
                    .arg(settings),
            );
            self.serve(name, port);
        }
    }

    fn envoy(&mut self, kit: &Path) {
        let blanks = [("@NAME@", "envoy"), ("@PORT@", "8007")];
        let settings = self.settings("envoy.yaml", "envoy.yaml", &blanks);
        self.log("envoy.log");
        self.run(
            Command::new(kit.join("venv/bin/envoy"))
                .args(["--concurrency", "1", "--log-level", "critical"])
                .args(["--disable-hot-restart", "--file-flush-interval-msec", "20"])
                .arg("-c")
                .arg(settings),
        );
        self.serve("envoy", 8007);
    }

    fn node(&mut self) {
        for (name, port, mode) in [("node", 8011, "strict"), ("node-slack", 8012, "slack")] {
            let log = self.log(&format!("{name}.log"));
            self.run(
                Command::new("node")
                    .arg(format!("{SOURCES}/node.js"))
                    .args([name, GOOD, &port.to_string()])
                    .arg(log)
                    .arg(mode),
            );
            self.serve(name, port);
        }
    }

    fn go(&mut self, kit: &Path) {
        let log = self.log("go.log");
        let address = format!("{GOOD}:8008");
        self.run(
            Command::new(kit.join("go-server"))
                .args(["go", &address])
                .arg(log),
        );
        self.serve("go", 8008);
    }

    fn gunicorn(&mut self, kit: &Path, name: &str, venv: &str, port: u16) {
        let log = self.log(&format!("{name}.log"));
        self.run(
            Command::new(kit.join(venv).join("bin/gunicorn"))
                .args(["--bind", &format!("{GOOD}:{port}"), "--threads", "8"])
                .args(["--keep-alive", "2", "--log-level", "critical"])
                .args(["--chdir", SOURCES, "wsgi:app"])
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env("SAW_LOG", log)
                .env("SAW_NAME", name),
        );
        self.serve(name, port);
    }

    fn python(&mut self, kit: &Path) {
        let log = self.log("python.log");
        self.run(
            Command::new(kit.join("venv/bin/python"))
                .arg(format!("{SOURCES}/httpd.py"))
                .args(["python", GOOD, "8013"])
                .arg(log),
        );
        self.serve("python", 8013);
    }

    /// The library this is made with, which is a server of others as well.
    async fn hyper(&mut self) {
        let log = self.log("hyper.log");
        let out = Arc::new(OpenOptions::new().append(true).open(log).unwrap());
        let listener = TcpListener::bind(at(GOOD, 8014)).await.unwrap();
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let out = Arc::clone(&out);
                let service = service_fn(move |request: Request<Incoming>| {
                    saw(&out, &request);
                    std::future::ready(Ok::<_, Infallible>(Response::new("seen\n".to_owned())))
                });
                tokio::spawn(async move {
                    let served = hyper::server::conn::http1::Builder::new()
                        .timer(TokioTimer::new())
                        .header_read_timeout(Duration::from_secs(2))
                        .serve_connection(TokioIo::new(stream), service);
                    // The client may leave when it likes.
                    drop(served.await);
                });
            }
        });
        self.serve("hyper", 8014);
    }

    async fn wait_for_all(&mut self) {
        let until = Instant::now() + LONG;
        for served in self.list.clone() {
            while tokio::net::TcpStream::connect(at(GOOD, served.port))
                .await
                .is_err()
            {
                assert!(
                    Instant::now() < until,
                    "{served:?} does not come: {}",
                    self.said()
                );
                self.all_alive();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    fn said(&self) -> String {
        let texts = (0..self.running.len())
            .map(|at| fs::read_to_string(self.path(&format!("said-{at}"))).unwrap_or_default());
        texts.collect::<Vec<_>>().join("\n")
    }

    /// What was served since the last time: whole lines of all logs.
    pub fn news(&self) -> Vec<String> {
        let mut logs = self.logs.lock().unwrap();
        let mut lines = Vec::new();
        for (_, file, rest) in logs.iter_mut() {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            rest.push_str(&String::from_utf8_lossy(&bytes));
            while let Some((line, after)) = rest.split_once('\n') {
                lines.push(line.to_owned());
                *rest = after.to_owned();
            }
        }
        lines
    }

    /// Servers that died by what they were sent would see nothing more.
    pub fn all_alive(&mut self) {
        for at in 0..self.running.len() {
            let ended = self.running[at].0.try_wait().unwrap();
            assert!(ended.is_none(), "server {at} ended: {}", self.said());
        }
    }
}

fn saw(mut out: &File, request: &Request<Incoming>) {
    let header = |name: &str| {
        let value = request.headers().get(name);
        value.map_or(String::new(), |value| {
            value.as_bytes().escape_ascii().to_string()
        })
    };
    let over = [
        "x-http-method-override",
        "x-original-url",
        "x-forwarded-host",
    ]
    .map(header);
    let line = format!(
        "SAW\thyper\t200\t{}\t{}\t{}\t{}\t{}\n",
        request.method(),
        header("host"),
        request.uri().path(),
        request.uri(),
        over.concat()
    );
    out.write_all(line.as_bytes()).unwrap();
}
