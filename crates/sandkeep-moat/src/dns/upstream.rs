//! Asking the resolvers of the operator's choice.
//!
//! A query is made anew from name and type: nothing else of what a box wrote leaves the host.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use hickory_proto::{
    op::{Edns, Message, MessageType, Query},
    rr::{Name, RecordType},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

const PER_SERVER: Duration = Duration::from_secs(2);
const ROUNDS: usize = 2;
const PAYLOAD: u16 = 1232;

/// Which resolvers to ask.
#[derive(Debug, Clone, Default)]
pub enum UpstreamDns {
    /// Those of this host's `resolv.conf`, read when they are needed first.
    #[default]
    System,
    Servers(Vec<SocketAddr>),
}

impl UpstreamDns {
    pub fn servers(&self) -> Vec<SocketAddr> {
        match self {
            Self::Servers(servers) => servers.clone(),
            Self::System => {
                from_resolv_conf(&fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
            }
        }
    }
}

fn from_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let found: Vec<SocketAddr> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("nameserver"))
        .filter_map(|rest| rest.trim().parse::<IpAddr>().ok())
        .take(3)
        .map(|address| SocketAddr::new(address, 53))
        .collect();
    if found.is_empty() {
        // What libc does with an empty file.
        return vec![SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 53)];
    }
    found
}

/// Asks one server after the other until one answers.
pub async fn ask(servers: &[SocketAddr], name: &Name, kind: RecordType) -> io::Result<Message> {
    let mut last: io::Error = io::ErrorKind::NotConnected.into();
    for _ in 0..ROUNDS {
        for server in servers {
            match timeout(PER_SERVER, ask_one(*server, name, kind)).await {
                Ok(Ok(message)) => return Ok(message),
                Ok(Err(error)) => last = error,
                Err(_) => last = io::ErrorKind::TimedOut.into(),
            }
        }
    }
    Err(last)
}

async fn ask_one(server: SocketAddr, name: &Name, kind: RecordType) -> io::Result<Message> {
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.add_query(Query::query(name.clone(), kind));
    let mut edns = Edns::new();
    edns.set_max_payload(PAYLOAD);
    query.set_edns(edns);
    let bytes = query.to_vec().map_err(io::Error::other)?;

    let any: SocketAddr = if server.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    // A socket of its own for each query: a random port and a random id must both be guessed.
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    socket.send(&bytes).await?;
    let mut buffer = vec![0_u8; usize::from(PAYLOAD) + 512];
    loop {
        let got = socket.recv(&mut buffer).await?;
        let Some(answer) = fitting(&buffer[..got], &query) else {
            continue;
        };
        if answer.metadata.truncation {
            return ask_by_tcp(server, &bytes, &query).await;
        }
        return Ok(answer);
    }
}

async fn ask_by_tcp(server: SocketAddr, bytes: &[u8], query: &Message) -> io::Result<Message> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream
        .write_all(&[&length.to_be_bytes(), bytes].concat())
        .await?;
    let length = stream.read_u16().await?;
    let mut answer = vec![0; usize::from(length)];
    stream.read_exact(&mut answer).await?;
    fitting(&answer, query).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The answer, when it is one to this very question.
fn fitting(bytes: &[u8], query: &Message) -> Option<Message> {
    let answer = Message::from_vec(bytes).ok()?;
    let fits = answer.metadata.id == query.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && answer.queries.len() == 1
        && answer.queries == query.queries;
    fits.then_some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf() {
        let text = "# x\nsearch a\nnameserver 192.0.2.1\nnameserver bad\n nameserver 2001:db8::1\n";
        assert_eq!(
            from_resolv_conf(text),
            [
                "192.0.2.1:53".parse().unwrap(),
                "[2001:db8::1]:53".parse().unwrap()
            ]
        );
        assert_eq!(from_resolv_conf("").len(), 1);
    }
}
