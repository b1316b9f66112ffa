//! Listening TCP sockets, as the kernel lists them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sandkeep_agent_api::{channel, host::ListeningPort};

/// State `LISTEN` in the kernel's table.
const LISTEN: &str = "0A";

/// Who listens in this network namespace, in order of port.
pub(crate) fn listening() -> Vec<ListeningPort> {
    let mut ports: Vec<_> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| std::fs::read_to_string(path).ok())
        .flat_map(|table| parse(&table))
        // Our own door is nobody's service.
        .filter(|listening| listening.port != channel::PORT)
        .collect();
    ports.sort();
    ports.dedup();
    ports
}

/// Reads a table in the format of `/proc/net/tcp` and `tcp6`.
pub fn parse(table: &str) -> Vec<ListeningPort> {
    table.lines().skip(1).filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<ListeningPort> {
    let mut fields = line.split_ascii_whitespace();
    let (address, port) = fields.nth(1)?.split_once(':')?;
    if fields.nth(1)? != LISTEN {
        return None;
    }
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(ListeningPort {
        port,
        address: parse_address(address)?.to_string(),
    })
}

/// The kernel prints each 32-bit word of the address in its own byte order.
fn parse_address(hex: &str) -> Option<IpAddr> {
    let words: Vec<[u8; 4]> = hex
        .as_bytes()
        .chunks(8)
        .map(|word| {
            let word = std::str::from_utf8(word).ok()?;
            u32::from_str_radix(word, 16).ok().map(u32::to_ne_bytes)
        })
        .collect::<Option<_>>()?;
    match (hex.len(), words.as_slice()) {
        (8, [word]) => Some(IpAddr::V4(Ipv4Addr::from(*word))),
        (32, [a, b, c, d]) => {
            let mut bytes = [0; 16];
            for (to, word) in bytes.chunks_mut(4).zip([a, b, c, d]) {
                to.copy_from_slice(word);
            }
            Some(IpAddr::V6(Ipv6Addr::from(bytes)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_sockets_are_named() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n\
            1: 0100007F:1F91 0100007F:0050 01 00000000:00000000\n\
            2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A\n\
            3: zz:1 0:0 0A\n4: 0100007F 0 0A\n";
        let found: Vec<_> = parse(table)
            .into_iter()
            .map(|port| (port.port, port.address))
            .collect();
        assert_eq!(
            found,
            [(8080, "127.0.0.1".to_owned()), (80, "::1".to_owned())]
        );
    }
}
