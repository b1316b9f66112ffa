//! Server-sent events, taken out of the bytes as they arrive.

/// No event of ours is larger; a stream that sends more is broken.
const MAX_EVENT: usize = 1 << 20;

/// Collects bytes and gives the `data` of every event that is complete.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    data: String,
    has_data: bool,
    after_return: bool,
}

impl Parser {
    /// The data of the events that these bytes complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<String>, TooLarge> {
        let mut events = Vec::new();
        for &byte in bytes {
            // A line ends with LF, CR or both.
            let second_half = byte == b'\n' && std::mem::take(&mut self.after_return);
            if second_half {
                continue;
            }
            self.after_return = byte == b'\r';
            if byte == b'\n' || byte == b'\r' {
                events.extend(self.end_line());
            } else {
                self.line.push(byte);
            }
            if self.line.len() + self.data.len() > MAX_EVENT {
                return Err(TooLarge);
            }
        }
        Ok(events)
    }

    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let complete = std::mem::take(&mut self.has_data);
            let data = std::mem::take(&mut self.data);
            return complete.then_some(data);
        }
        let line = String::from_utf8_lossy(&line);
        if let Some(rest) = line.strip_prefix("data:") {
            if self.has_data {
                self.data.push('\n');
            }
            self.has_data = true;
            self.data.push_str(rest.strip_prefix(' ').unwrap_or(rest));
        }
        // Comments keep the connection alive; ids and names are in the data as well.
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooLarge;

impl std::fmt::Display for TooLarge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an event of the server is larger than {MAX_EVENT} bytes")
    }
}

impl std::error::Error for TooLarge {}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str =
        ": hello\r\n\r\nid: 7\nevent: state\ndata: {\"a\":1}\n\ndata: x\ndata:y\n\nevent: none\n\n";

    #[test]
    fn events_come_out_whole_however_the_bytes_are_cut() {
        for size in 1..STREAM.len() {
            let mut parser = Parser::default();
            let events: Vec<String> = STREAM
                .as_bytes()
                .chunks(size)
                .flat_map(|chunk| parser.feed(chunk).unwrap())
                .collect();
            assert_eq!(events, ["{\"a\":1}", "x\ny"], "in chunks of {size}");
        }
    }

    #[test]
    fn what_is_not_finished_is_not_given() {
        assert!(Parser::default().feed(b"data: half\n").unwrap().is_empty());
    }

    #[test]
    fn an_endless_event_is_an_error() {
        let mut parser = Parser::default();
        parser.feed(b"data: ").unwrap();
        assert_eq!(parser.feed(&vec![b'x'; MAX_EVENT + 1]), Err(TooLarge));
    }
}
