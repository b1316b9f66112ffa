//! One connection of a box, from accept to end.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use socket2::SockRef;
use tokio::{
    net::TcpStream,
    sync::watch,
    time::{Instant, timeout_at},
};

use super::{
    copy, dial,
    dial::DialError,
    first_words::{self, Kind},
    hello::{self, Hello, MAX_HELLO},
    http,
    meter::{Flow, Meter, Way},
    peek::{Peeked, peek, read_more},
    seam::Intercepted,
    stream::BoxStream,
    verdict::{
        Basis, ByAddress, OPEN, Sight, by_address, names_may_help, narrowed_at, narrows_requests,
    },
};
use crate::{
    denials::Via,
    dns,
    edge::{INSIDE_V4, original_destination},
    hooks::Place,
    policy::{Decision, Host, Policy, Reason, Refusal},
    state::{Attempt, BoxState, BoxView, Patience},
};

/// A client that has something to say says it at once: it is on the same machine. One that says
/// nothing for this long waits for the server, if the address alone allows that.
const SERVER_FIRST_AFTER: Duration = Duration::from_millis(50);
const METADATA: [u8; 4] = [169, 254, 169, 254];

pub(super) struct Connection {
    pub state: Arc<BoxState>,
    pub socket: Arc<TcpStream>,
    pub to: SocketAddr,
    pub meter: Arc<Meter>,
    pub head: Vec<u8>,
    pub watch: watch::Receiver<Arc<Policy>>,
}

/// Ends it with a reset: the box learns at once, and nothing lingers.
pub(super) fn reset(socket: &TcpStream) {
    // If the socket is gone already, so is what was to be reset.
    drop(SockRef::from(socket).set_linger(Some(Duration::ZERO)));
}

/// Takes on an accepted connection, in a task of its own, if there is room for it. `Some`: it was
/// refused, and the box has been refused so often that its loop should rest for so long.
pub fn take_on(state: &Arc<BoxState>, stream: TcpStream) -> Option<Duration> {
    let refused = |stream: &TcpStream| {
        reset(stream);
        Some(state.limiter.after_refusals(1)).filter(|pause| !pause.is_zero())
    };
    let Ok(to) = original_destination(&stream) else {
        return refused(&stream);
    };
    if to.port() == 53 {
        // A box does not hold more of them open than it may ask.
        let slot = Arc::clone(&state.dns_connections).try_acquire_owned();
        let (Ok(slot), Some(place)) = (slot, state.limiter.place()) else {
            return refused(&stream);
        };
        let state_of_it = Arc::clone(state);
        state.tasks.spawn(async move {
            let _held = (slot, place);
            let over = state_of_it.hung_up();
            // How it ends is the asker's affair.
            drop(
                over.run_until_cancelled(dns::stream(&state_of_it, stream))
                    .await,
            );
        });
        return None;
    }
    let mut watch = state.watch();
    let policy = Arc::clone(&watch.borrow_and_update());
    let place = place_of(to);
    let permit = match place {
        Some(_) => state.limiter.inside(),
        None => state.limiter.connection(&policy.limits),
    };
    let permit = match permit {
        Ok(permit) => permit,
        Err(why) => {
            let attempt = Attempt {
                via: Via::Tcp,
                host: to.ip().to_string(),
                port: to.port(),
            };
            let hint = "close connections that are not needed, or ask for larger `limits` in the policy of this sandbox";
            state.deny(&attempt, Refusal::new(Reason::Limit, why, hint));
            return refused(&stream);
        }
    };
    // Slower small writes are the only loss when this fails.
    drop(stream.set_nodelay(true));
    let connection = Connection {
        meter: Arc::new(Meter::new(Arc::clone(state), permit)),
        socket: Arc::new(stream),
        state: Arc::clone(state),
        to,
        head: Vec::new(),
        watch,
    };
    state.tasks.spawn(serve(connection, place, policy));
    None
}

async fn serve(connection: Connection, place: Option<Place>, policy: Arc<Policy>) {
    let socket = Arc::clone(&connection.socket);
    let (state, to) = (Arc::clone(&connection.state), connection.to.ip());
    let over = state.hung_up();
    state.used(to);
    let finished = Box::pin(over.run_until_cancelled(connection.run(place, &policy))).await;
    if !matches!(finished, Some(End::Clean)) {
        reset(&socket);
    }
    // Also for one that lasted long: the next will go there again.
    state.used(to);
}

fn place_of(to: SocketAddr) -> Option<Place> {
    let ours = match to.ip() {
        ip if ip == INSIDE_V4 => Place::Internal,
        ip if ip == std::net::IpAddr::from(METADATA) => Place::Metadata,
        _ => return None,
    };
    (to.port() == 80).then_some(ours)
}

/// What is still looked at where bytes are passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    No,
    /// At how the client begins, when it does.
    AtFirst,
    /// At the end of the first line.
    AtLine,
}

impl Look {
    const fn after(kind: Kind) -> Self {
        match kind {
            Kind::Binary => Self::AtLine,
            _ => Self::No,
        }
    }
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Clean,
    Reset,
}

impl Connection {
    async fn run(mut self, place: Option<Place>, policy: &Policy) -> End {
        let shared = Arc::clone(&self.state.shared);
        if let Some(room) = shared.hooks.room() {
            room.await;
        }
        if let Some(place) = place {
            return self.inside(place).await;
        }
        if let Some(refusal) = Refusal::of_address(self.state.guard(), self.to.ip(), None) {
            return self.refuse(Via::Tcp, &Host::from(self.to.ip()), refusal);
        }
        let by_address = by_address(&self.state, policy, self.to);
        let by_rule = match &by_address {
            Some(found) => self.may_say_anything(found, policy).await,
            None => false,
        };
        let Patience {
            name_within,
            decide_within,
            ..
        } = self.patience();
        let hopeful = by_address.is_none() && names_may_help(policy, self.to.port());
        let first = if hopeful {
            name_within
        } else {
            SERVER_FIRST_AFTER
        };
        // Where the address alone decides, either way, what is said matters little: no need to
        // wait for all of it.
        let rest = if by_rule || (by_address.is_none() && !hopeful) {
            SERVER_FIRST_AFTER
        } else {
            decide_within
        };
        const SILENT: &str = "it said nothing, and its address alone is not allowed";
        match (
            peek(&self.socket, &mut self.head, first, rest).await,
            by_address,
        ) {
            (Ok(Peeked::Kind(kind)), found) => self.decide(kind, found, policy).await,
            (Ok(Peeked::Silent), Some(found)) => self.server_first(found).await,
            (Ok(Peeked::Unfinished), Some(found)) if by_rule => {
                self.pass(Via::Tcp, found.basis, found.rule, None, Look::No)
                    .await
            }
            (Ok(Peeked::Unfinished), _) => {
                self.refuse_address("it began a request and did not finish it")
            }
            (Ok(Peeked::Closed), Some(_)) => End::Clean,
            (Ok(Peeked::Closed | Peeked::Silent), _) => self.refuse_address(SILENT),
            (Err(_), _) => End::Reset,
        }
    }

    /// Whether the address is allowed whatever is said, and no name that only some requests are
    /// allowed to is at it.
    async fn may_say_anything(&self, found: &ByAddress, policy: &Policy) -> bool {
        found.whatever_is_said && narrowed_at(&self.state, policy, self.to).await.is_none()
    }

    fn patience(&self) -> Patience {
        self.state.shared.patience
    }

    async fn inside(mut self, place: Place) -> End {
        let Some(inside) = self.state.shared.inside.clone() else {
            return self.refuse_address("nothing is served there");
        };
        let stream = self.stream();
        http::serve_inside(&self.state, inside, place, stream).await
    }

    /// The connection as a stream, beginning with what was read already.
    pub(super) fn stream(&mut self) -> BoxStream {
        BoxStream::new(
            Arc::clone(&self.socket),
            std::mem::take(&mut self.head),
            Arc::clone(&self.meter),
        )
    }

    async fn decide(self, kind: Kind, by_address: Option<ByAddress>, policy: &Policy) -> End {
        let by_rule = by_address.clone().filter(|found| found.whatever_is_said);
        if kind == Kind::Http1 {
            return http::serve(self, by_rule).await;
        }
        if let Kind::Raw | Kind::Binary = kind {
            return self.raw(by_address, policy, Look::after(kind)).await;
        }
        // What goes on unseen must not be for a name that is narrowed.
        let by_rule = match by_rule {
            Some(found) if self.may_say_anything(&found, policy).await => Some(found),
            _ => None,
        };
        match (kind, by_rule) {
            (Kind::Tls, by_rule) => self.tls(by_rule, policy).await,
            (_, Some(found)) => self.pass(Via::Tcp, found.basis, found.rule, None, Look::No).await,
            (_, None) => self.refuse_address(
                "HTTP/2 without TLS hides which host each request is for, and so does malformed HTTP",
            ),
        }
    }

    /// Bytes that are neither TLS nor HTTP.
    async fn raw(self, by_address: Option<ByAddress>, policy: &Policy, look: Look) -> End {
        let Some(found) = by_address else {
            return self.refuse_address("its address is not allowed, and it names no host");
        };
        if let Some(no) = self.shared_with(&found, policy).await {
            return self.refuse(Via::Tcp, &found.basis.host(), no);
        }
        let look = match self.may_say_anything(&found, policy).await {
            true => Look::No,
            false => look,
        };
        self.pass(Via::Tcp, found.basis, found.rule, None, look)
            .await
    }

    /// Why nothing may be sent there unseen, because of another name that is narrowed. Not where
    /// a rule names the address itself: there what is no HTTP is allowed.
    async fn shared_with(&self, found: &ByAddress, policy: &Policy) -> Option<Refusal> {
        if matches!(found.basis, Basis::Address(_)) && found.rule != OPEN {
            return None;
        }
        let narrowed = narrowed_at(&self.state, policy, self.to).await?;
        Some(Refusal::of_form(
            format!(
                "only some requests to {narrowed} are allowed, which is or may be at this address ({}), too, and what is not HTTP can not be told from them",
                self.to.ip()
            ),
            format!(
                "give the rule for {narrowed} its `ports`, for example [80, 443], so that it leaves others alone"
            ),
        ))
    }

    async fn tls(mut self, by_rule: Option<ByAddress>, policy: &Policy) -> End {
        let hello = match self.read_hello().await {
            Ok(hello) => hello,
            Err(_) if by_rule.is_some() => Hello {
                server: None,
                encrypted: false,
            },
            Err(why) => return self.refuse_address(why),
        };
        let port = self.to.port();
        let Some(host) = hello.server else {
            return match by_rule {
                Some(found) => {
                    self.pass(Via::Tls, found.basis, found.rule, None, Look::No)
                        .await
                }
                None => self.refuse_address(
                    "it is TLS without a server name (SNI), and its address is not allowed",
                ),
            };
        };
        let wanted = self.state.shared.interceptor.clone().filter(|interceptor| {
            policy.needs_interception(&host, port)
                || interceptor.wants(&BoxView(Arc::clone(&self.state)), &host, port)
        });
        let sight = if wanted.is_some() {
            Sight::Seen
        } else {
            Sight::Unseen
        };
        let basis = Basis::Name(host.clone());
        match basis.decide(port, sight, policy, self.state.guard()) {
            // Where everything is open a hidden name hides nothing from the policy.
            Decision::Allow { rule } if hello.encrypted && rule != OPEN && by_rule.is_none() => {
                let no = Refusal::of_form(
                    "its ClientHello is encrypted (ECH), so the real host can not be seen",
                    "switch ECH off in this program; our resolver gives out no keys for it",
                );
                self.refuse(Via::Tls, &host, no)
            }
            Decision::Allow { rule } => match wanted {
                Some(interceptor) => self.intercept(interceptor, basis, rule).await,
                None => self.pass(Via::Tls, basis, rule, None, Look::No).await,
            },
            Decision::Deny(refusal) => match by_rule {
                Some(found) => {
                    self.pass(Via::Tls, found.basis, found.rule, None, Look::No)
                        .await
                }
                None => self.refuse(Via::Tls, &host, refusal),
            },
        }
    }

    async fn read_hello(&mut self) -> Result<Hello, &'static str> {
        let until = Instant::now() + self.patience().decide_within;
        loop {
            if let Some(hello) = hello::parse(&self.head)? {
                return Ok(hello);
            }
            if self.head.len() > MAX_HELLO {
                return Err("its ClientHello is too large");
            }
            match timeout_at(until, read_more(&self.socket, &mut self.head)).await {
                Ok(Ok(count)) if count > 0 => {}
                _ => return Err("its ClientHello did not come to an end"),
            }
        }
    }

    /// The client waits for the server. Dials, and then whoever speaks first decides: a server
    /// that greets is passed on, a client that speaks after all is decided by what it says.
    async fn server_first(mut self, found: ByAddress) -> End {
        let policy = self.state.policy();
        if let Some(no) = self.shared_with(&found, &policy).await {
            return self.refuse(Via::Tcp, &found.basis.host(), no);
        }
        let by_rule = self.may_say_anything(&found, &policy).await;
        let upstream = match self.dial(&found.basis).await {
            Ok(upstream) => upstream,
            Err(error) => return self.undialled(Via::Tcp, &found.basis.host(), error),
        };
        let mut watch = self.watch.clone();
        let greeted = {
            let wait = async {
                tokio::select! {
                    _ = upstream.readable() => true,
                    _ = self.socket.readable() => false,
                }
            };
            match supervised(&mut watch, &self, &found.basis, Sight::Unseen, wait).await {
                Some(greeted) => greeted,
                None => return End::Reset,
            }
        };
        if greeted {
            // Some servers of HTTP/2 greet as well: a client may still have requests to hide.
            let look = match !by_rule && narrows_requests(&policy, self.to.port()) {
                true => Look::AtFirst,
                false => Look::No,
            };
            return self
                .pass(Via::Tcp, found.basis, found.rule, Some(upstream), look)
                .await;
        }
        let policy = self.state.policy();
        self.watch = watch;
        let Patience {
            name_within,
            decide_within,
            ..
        } = self.patience();
        match peek(&self.socket, &mut self.head, name_within, decide_within).await {
            Ok(Peeked::Kind(kind @ (Kind::Raw | Kind::Binary))) => {
                let look = if by_rule { Look::No } else { Look::after(kind) };
                self.pass(Via::Tcp, found.basis, found.rule, Some(upstream), look)
                    .await
            }
            Ok(Peeked::Kind(kind)) => {
                drop(upstream);
                let again = by_address(&self.state, &policy, self.to);
                Box::pin(self.decide(kind, again, &policy)).await
            }
            Ok(peeked) if peeked == Peeked::Closed || by_rule => {
                self.pass(Via::Tcp, found.basis, found.rule, Some(upstream), Look::No)
                    .await
            }
            _ => End::Reset,
        }
    }

    pub(super) async fn dial(&self, basis: &Basis) -> Result<TcpStream, DialError> {
        let port = self.to.port();
        match basis {
            Basis::Address(address) | Basis::NameAt(_, address) => {
                dial::address(&self.state, *address, port).await
            }
            Basis::Name(host) => dial::name(&self.state, host, port, Some(self.to.ip())).await,
        }
    }

    /// Passes the bytes on, unseen but for what `look` says.
    async fn pass(
        mut self,
        via: Via,
        basis: Basis,
        rule: String,
        dialled: Option<TcpStream>,
        look: Look,
    ) -> End {
        let upstream = match dialled {
            Some(upstream) => upstream,
            None => match self.dial(&basis).await {
                Ok(upstream) => upstream,
                Err(error) => return self.undialled(via, &basis.host(), error),
            },
        };
        let flow = Flow::open(&self.meter, via, basis.host(), self.to.port(), rule, false);
        if let Ok(peer) = upstream.peer_addr() {
            flow.dialled(peer.ip());
        }
        let head = std::mem::take(&mut self.head);
        let mut watch = self.watch.clone();
        let head = async {
            match look {
                Look::No => Ok(head),
                Look::AtFirst => self.first_words(&upstream, head).await,
                Look::AtLine => self.first_line(&upstream, head).await,
            }
        };
        let work = copy::both_ways(&self.socket, &upstream, head, &self.meter);
        let done = supervised(&mut watch, &self, &basis, Sight::Unseen, work).await;
        match done {
            Some(Ok(())) => End::Clean,
            _ => {
                reset(&upstream);
                End::Reset
            }
        }
    }

    /// What a client says to a server that has greeted it, if it is neither HTTP nor TLS.
    async fn first_words(&self, upstream: &TcpStream, mut head: Vec<u8>) -> io::Result<Vec<u8>> {
        const ANY_TIME: Duration = Duration::from_secs(365 * 86400);
        let within = self.patience().decide_within;
        match peek(&self.socket, &mut head, ANY_TIME, within).await? {
            Peeked::Kind(Kind::Raw) | Peeked::Closed => Ok(head),
            Peeked::Kind(Kind::Binary) => self.first_line(upstream, head).await,
            _ => Err(self.hides(
                "it speaks HTTP or TLS to a server that spoke first, and only some requests are allowed on this port",
            )),
        }
    }

    /// Passes on what the client says up to the end of its first line, and that only if the line
    /// is no request: no server acts on one before.
    async fn first_line(&self, upstream: &TcpStream, mut head: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut sent = 0;
        // No server takes a longer one.
        while head.len() <= MAX_HELLO {
            let mut kind = first_words::classify_binary(&head);
            if kind.is_none() {
                copy::forward(upstream, &head[sent..], Way::Out, &self.meter).await?;
                sent = head.len();
                if read_more(&self.socket, &mut head).await? > 0 {
                    continue;
                }
                kind = Some(first_words::at_the_end(&head));
            }
            if kind == Some(Kind::Raw) {
                break;
            }
            return Err(self.hides(
                "it begins with what some servers read as a request, though it is not HTTP",
            ));
        }
        head.drain(..sent);
        Ok(head)
    }

    fn hides(&self, why: &str) -> io::Error {
        self.refuse_address(why);
        io::ErrorKind::PermissionDenied.into()
    }

    async fn intercept(
        mut self,
        interceptor: Arc<dyn crate::hooks::Interceptor>,
        basis: Basis,
        rule: String,
    ) -> End {
        let host = basis.host();
        let flow = Flow::open(
            &self.meter,
            Via::Tls,
            host.clone(),
            self.to.port(),
            rule,
            true,
        );
        let intercepted = Intercepted::new(
            self.stream(),
            host,
            self.to,
            Arc::clone(&self.state),
            Arc::new(flow),
        );
        let mut watch = self.watch.clone();
        let work = interceptor.serve(intercepted);
        match supervised(&mut watch, &self, &basis, Sight::Seen, work).await {
            Some(()) => End::Clean,
            None => End::Reset,
        }
    }

    pub(super) fn undialled(&self, via: Via, host: &Host, error: DialError) -> End {
        match error {
            DialError::Refused(refusal) => self.refuse(via, host, refusal),
            DialError::Failed(error) => {
                tracing::debug!(box_id = %self.state.id, %host, port = self.to.port(), %error, "not reached");
                End::Reset
            }
        }
    }

    fn refuse_address(&self, why: &str) -> End {
        let address = Host::from(self.to.ip());
        let hint = format!(
            "use a name the policy allows, or ask for \"{address}:{}\" to be added to the policy of this sandbox",
            self.to.port()
        );
        let refusal = Refusal::new(Reason::NoName, why, hint);
        self.refuse(Via::Tcp, &address, refusal)
    }

    pub(super) fn refuse(&self, via: Via, host: &Host, refusal: Refusal) -> End {
        let attempt = Attempt {
            via,
            host: host.to_string(),
            port: self.to.port(),
        };
        self.state.deny(&attempt, refusal);
        End::Reset
    }
}

/// Does the work until it is done (`Some`) or the policy no longer bears it (`None`).
pub(super) async fn supervised<T>(
    watch: &mut watch::Receiver<Arc<Policy>>,
    connection: &Connection,
    basis: &Basis,
    sight: Sight,
    work: impl Future<Output = T>,
) -> Option<T> {
    let (state, port) = (&connection.state, connection.to.port());
    cut_when(watch, work, |policy| {
        basis
            .decide(port, sight, policy, state.guard())
            .is_allowed()
    })
    .await
}

pub(super) async fn cut_when<T>(
    watch: &mut watch::Receiver<Arc<Policy>>,
    work: impl Future<Output = T>,
    holds: impl Fn(&Policy) -> bool,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    // The policy may have changed between the decision and now.
    while holds(&Arc::clone(&watch.borrow_and_update())) {
        tokio::select! {
            done = &mut work => return Some(done),
            changed = watch.changed() => changed.ok()?,
        }
    }
    None
}
