//! Talking to the agent of a box over its cable.

use crate::{Kind, Live};
use sandkeep_agent_api::{channel::PORT, host::LimitsRequest};
use sandkeep_agent_client::Agent;
use sandkeep_host::{netns, stream::BoxStream};
use sandkeep_model::{Code, Error, Result, Secret};
use sandkeep_netlink::{AGENT_PORT, BOX_V4};
use std::{io, net::SocketAddr, os::fd::OwnedFd, time::Duration};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

const AGENT_PAUSE: Duration = Duration::from_millis(5);
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// An agent that is busy for longer is paused as it is.
const SETTLED_WITHIN: Duration = Duration::from_secs(2);
const LAST_WORDS: &[u8] = b"GET /health HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n";
// The moat knows the agent's answers by it.
const _: () = assert!(AGENT_PORT == PORT);

/// A connection to the agent at the other end of the cable in this namespace.
pub async fn dial(namespace: &OwnedFd, token: &Secret) -> Result<TcpStream> {
    let agent = SocketAddr::from((BOX_V4, PORT));
    let mut stream = netns::dial(namespace, agent).await?;
    let line = format!("{}\n", token.expose());
    stream.write_all(line.as_bytes()).await?;
    Ok(stream)
}

/// A connection on which the agent of a box listens to us.
pub async fn connect<K: Kind>(live: &Live<K>) -> Result<BoxStream> {
    let dialled = async {
        let stream = dial(live.netns(), &live.token).await?;
        Ok(BoxStream::new(stream, live.over.clone()))
    };
    timeout(CONNECT_DEADLINE, dialled)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
        .map_err(|error: Error| {
            Error::new(
                Code::BoxUnreachable,
                format!(
                    "the agent of box {} does not take connections: {}",
                    live.id, error.message
                ),
            )
            .hint("the box may be ending or overloaded; try again")
        })
}

/// Whether the agent answers within `wait`.
pub async fn answers<K: Kind>(live: &Live<K>, wait: Duration) -> bool {
    let asked = async {
        let mut agent = Agent::over(connect(live).await?).await?;
        agent.health().await
    };
    matches!(timeout(wait, asked).await, Ok(Ok(())))
}

/// Has the agent end every conversation with us, on both sides: none is cut in the middle when
/// the box is written down.
pub async fn settle<K: Kind>(live: &Live<K>) {
    let last = async {
        let mut stream = connect(live).await?;
        stream.write_all(LAST_WORDS).await?;
        // It closes first, after all that came before.
        stream.read_to_end(&mut Vec::new()).await?;
        drop(stream);
        sleep(AGENT_PAUSE).await;
        Ok::<_, Error>(())
    };
    if !matches!(timeout(SETTLED_WITHIN, last).await, Ok(Ok(()))) {
        tracing::debug!(id = %live.id, "a box is paused though its agent did not settle");
    }
}

/// Limits that only the kernel of the box can hold. Also waits for the agent. `ended` tells why a
/// box has ended meanwhile.
pub async fn set_limits<K: Kind>(
    live: &Live<K>,
    request: &LimitsRequest,
    wait: Duration,
    ended: impl Fn(&Live<K>) -> Error,
) -> Result<()> {
    let until = Instant::now() + wait;
    loop {
        let attempt = async {
            let mut agent = Agent::over(connect(live).await?).await?;
            agent.set_limits(request).await
        };
        match timeout(CONNECT_DEADLINE * 2, attempt).await {
            Ok(Ok(())) => return Ok(()),
            _ if !live.first.runs() => return Err(ended(live)),
            Ok(Err(error)) if Instant::now() >= until => return Err(error),
            Err(_) if Instant::now() >= until => {
                return Err(Error::new(
                    Code::BoxUnreachable,
                    format!("the agent of box {} does not answer", live.id),
                ));
            }
            _ => sleep(AGENT_PAUSE).await,
        }
    }
}
