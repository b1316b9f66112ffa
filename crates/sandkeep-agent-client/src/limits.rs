use std::time::Duration;

/// How much of an agent's answer is believed, and how long is waited for it.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From sending a unary request to the last byte of its answer; for streams, to the head only.
    pub deadline: Duration,
    /// The whole body of a unary answer.
    pub unary_bytes: usize,
    /// One frame of a stream.
    pub frame_bytes: usize,
    /// The longest silence on a stream. The agent sends keepalives far more often.
    pub silence: Duration,
}

impl Limits {
    /// What the agent is asked to send a keepalive after, in seconds.
    pub(crate) const KEEPALIVE_SECONDS: u64 = 50;
    /// Heads larger than this end the connection.
    pub(crate) const HEAD_BYTES: usize = 64 * 1024;
    pub(crate) const HEADERS: usize = 100;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            unary_bytes: 8 << 20,
            frame_bytes: 4 << 20,
            silence: Duration::from_secs(3 * Self::KEEPALIVE_SECONDS),
        }
    }
}
