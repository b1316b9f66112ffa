//! The byte stream between the host and the agent of a box.

use tokio::io::{AsyncRead, AsyncWrite};

/// What a channel can do, whatever it is made of (unix socket, TCP, virtio-serial).
pub trait ChannelIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ChannelIo for T {}

/// One fresh connection to the agent of one box. The agent speaks HTTP/1.1 on it.
pub type Channel = Box<dyn ChannelIo>;
