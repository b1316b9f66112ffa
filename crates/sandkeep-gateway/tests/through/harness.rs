//! A real agent, a real gateway before it, and a way to end the box.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use sandkeep_agent_api::process::StartRequest;
use sandkeep_agent_client::{Agent, Body};
use sandkeep_gateway::{Boxes, Gateway, GatewayConfig};
use sandkeep_keeper::{Command, Counts, Hold};
use sandkeep_model::{Error, HostMask, Latched, PortAccess, Result, SandboxId, Secret};
use sandkeep_ward::Channel;
use tokio::{
    net::{TcpListener, TcpStream, UnixStream},
    sync::{Mutex, watch},
};

pub const TOKEN: &str = "tok123";

/// One box whose agent listens on a socket.
#[derive(Clone)]
pub struct OneBox(Arc<State>);

struct State {
    id: SandboxId,
    socket: PathBuf,
    ended: watch::Sender<bool>,
    connects: AtomicUsize,
    /// Handed out before the agent is asked.
    prepared: Mutex<Vec<Channel>>,
}

impl OneBox {
    pub fn id(&self) -> &SandboxId {
        &self.0.id
    }

    pub fn end(&self) {
        self.0.ended.send_replace(true);
    }

    /// How often the agent was connected to.
    pub fn connects(&self) -> usize {
        self.0.connects.load(Ordering::SeqCst)
    }

    pub async fn prepare(&self, channel: impl sandkeep_ward::ChannelIo + 'static) {
        self.0.prepared.lock().await.push(Box::new(channel));
    }
}

impl Boxes for OneBox {
    type Channel = Channel;

    async fn connect(&self, id: &SandboxId, _: Counts) -> Result<Channel> {
        if *id != self.0.id || *self.0.ended.borrow() {
            return Err(Error::sandbox_not_found(id));
        }
        if let Some(channel) = self.0.prepared.lock().await.pop() {
            return Ok(channel);
        }
        self.0.connects.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(UnixStream::connect(&self.0.socket).await?))
    }

    async fn command(&self, _: &SandboxId, _: &StartRequest) -> Command {
        Command::default()
    }

    fn hold(&self, _: &SandboxId) -> Option<Hold> {
        None
    }

    fn wanted_back(&self, _: &SandboxId) -> impl Future<Output = ()> + Send + 'static {
        std::future::pending()
    }

    async fn awake(&self, id: &SandboxId) -> Result<()> {
        if *id != self.0.id || *self.0.ended.borrow() {
            return Err(Error::sandbox_not_found(id));
        }
        Ok(())
    }

    fn closed(&self, _: &SandboxId) -> Latched<()> {
        let mut ended = self.0.ended.subscribe();
        Latched::new(async move {
            ended.wait_for(|ended| *ended).await.ok();
        })
    }

    fn access_token(&self, id: &SandboxId) -> Option<Secret> {
        (*id == self.0.id && !*self.0.ended.borrow()).then(|| Secret::new(TOKEN))
    }

    fn port_access(&self, id: &SandboxId) -> Option<PortAccess> {
        (*id == self.0.id && !*self.0.ended.borrow()).then_some(PortAccess::Public)
    }

    fn host_mask(&self, _: &SandboxId) -> Option<HostMask> {
        None
    }

    async fn note_api_key_refused(&self, _: &SandboxId, _: u16) {}

    fn live_tokens(&self) -> Vec<(SandboxId, Secret)> {
        vec![
            (SandboxId::random(), Secret::random()),
            (self.0.id.clone(), Secret::new(TOKEN)),
        ]
    }
}

pub struct World {
    pub boxed: OneBox,
    pub address: std::net::SocketAddr,
    pub files: tempfile::TempDir,
}

impl World {
    pub async fn new() -> Self {
        let files = tempfile::tempdir().unwrap();
        let socket = files.path().join("agent.sock");
        let listen = socket.clone();
        std::thread::spawn(move || {
            sandkeep_agent::run(["--listen".into(), listen.into_os_string()].into_iter())
        });
        while UnixStream::connect(&socket).await.is_err() {
            tokio::task::yield_now().await;
        }
        let boxed = OneBox(Arc::new(State {
            id: SandboxId::random(),
            socket,
            ended: watch::Sender::new(false),
            connects: AtomicUsize::new(0),
            prepared: Mutex::default(),
        }));
        let gateway = Gateway::new(boxed.clone(), GatewayConfig::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, gateway));
        Self {
            boxed,
            address,
            files,
        }
    }

    pub async fn client(&self) -> Agent {
        Agent::over(self.tcp().await).await.unwrap()
    }

    pub async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A request for a port of the box, with the token.
    pub fn request(&self, port: u16, method: &str, path: &str) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("e2b-sandbox-id", self.boxed.id().as_str())
            .header("e2b-sandbox-port", port)
            .header("x-access-token", TOKEN)
    }

    pub fn envd(&self, method: &str, path: &str) -> http::request::Builder {
        self.request(49983, method, path)
    }

    /// Sends over a connection of its own and reads everything.
    pub async fn ask(&self, request: Request<Body>) -> (http::response::Parts, Bytes) {
        let mut client = self.client().await;
        whole(client.request(request).await.unwrap()).await
    }
}

pub async fn whole(response: Response<Incoming>) -> (http::response::Parts, Bytes) {
    let (parts, body) = response.into_parts();
    (parts, body.collect().await.unwrap().to_bytes())
}

async fn serve(listener: TcpListener, gateway: Gateway<OneBox>) {
    loop {
        let (stream, peer) = listener.accept().await.unwrap();
        let gateway = gateway.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            let gateway = gateway.clone();
            async move {
                request
                    .extensions_mut()
                    .insert(axum::extract::ConnectInfo(peer));
                let (parts, body) = request.into_parts();
                let target = match gateway.target(&parts) {
                    Ok(Some(target)) => target,
                    Ok(None) => {
                        let answer = sandkeep_agent_client::full("the API");
                        return Ok::<_, std::convert::Infallible>(Response::new(answer));
                    }
                    Err(answer) => return Ok(answer),
                };
                let request = Request::from_parts(parts, body);
                Ok(gateway.serve(target, request).await)
            }
        });
        tokio::spawn(async move {
            hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades()
                .await
                .ok();
        });
    }
}
