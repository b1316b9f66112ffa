//! The first message of a TLS connection: which server it asks for, and whether it hides one.

use rustls::server::Acceptor;

use crate::policy::Host;

/// A ClientHello larger than this is not one. Those with post-quantum keys have some 2 KiB.
pub const MAX_HELLO: usize = 64 * 1024;

const HANDSHAKE: u8 = 0x16;
const CLIENT_HELLO: u8 = 1;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
const MAX_RECORD: usize = 16 * 1024 + 256;

#[derive(Debug, PartialEq, Eq)]
pub struct Hello {
    /// `None`: it names no server, or an address, which is the same.
    pub server: Option<Host>,
    /// Another name may hide inside. Whether one does can not be seen from outside.
    pub encrypted: bool,
}

/// `Ok(None)`: more bytes are needed. It may come in any number of records and packets.
pub fn parse(bytes: &[u8]) -> Result<Option<Hello>, &'static str> {
    let Some(message) = assemble(bytes)? else {
        return Ok(None);
    };
    let encrypted = has_extension(&message, ENCRYPTED_CLIENT_HELLO)
        .ok_or("the extensions of the ClientHello are malformed")?;
    Ok(Some(Hello {
        server: server_name(bytes)?,
        encrypted,
    }))
}

/// Puts the handshake message together from its records.
fn assemble(bytes: &[u8]) -> Result<Option<Vec<u8>>, &'static str> {
    let mut message = Vec::new();
    let mut rest = bytes;
    loop {
        let [kind, major, _, high, low, after @ ..] = rest else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if *kind != HANDSHAKE || *major != 3 || length == 0 || length > MAX_RECORD {
            return Err("it begins like TLS but is none");
        }
        let there = &after[..length.min(after.len())];
        message.extend_from_slice(there);
        if let [kind, a, b, c, ..] = message[..] {
            let length = u32::from_be_bytes([0, a, b, c]) as usize;
            if kind != CLIENT_HELLO || length > MAX_HELLO {
                return Err("the first message is no ClientHello");
            }
            if message.len() >= 4 + length {
                message.truncate(4 + length);
                return Ok(Some(message));
            }
        }
        if there.len() < length {
            return Ok(None);
        }
        rest = &after[length..];
    }
}

/// `None`: malformed.
fn has_extension(message: &[u8], wanted: u16) -> Option<bool> {
    // Type and length, version, random.
    let mut rest = message.get(4 + 2 + 32..)?;
    let session = usize::from(*rest.first()?);
    rest = rest.get(1 + session..)?;
    let suites = read_length(rest)?;
    rest = rest.get(2 + suites..)?;
    let compression = usize::from(*rest.first()?);
    rest = rest.get(1 + compression..)?;
    if rest.is_empty() {
        return Some(false);
    }
    let all = read_length(rest)?;
    rest = rest.get(2..2 + all)?;
    while !rest.is_empty() {
        let kind = u16::from_be_bytes([*rest.first()?, *rest.get(1)?]);
        if kind == wanted {
            return Some(true);
        }
        let length = read_length(rest.get(2..)?)?;
        rest = rest.get(4 + length..)?;
    }
    Some(false)
}

fn read_length(bytes: &[u8]) -> Option<usize> {
    Some(usize::from(u16::from_be_bytes([
        *bytes.first()?,
        *bytes.get(1)?,
    ])))
}

/// The name by a parser that real servers use: it is the one they will see.
fn server_name(bytes: &[u8]) -> Result<Option<Host>, &'static str> {
    const MALFORMED: &str = "the ClientHello is malformed";
    let mut acceptor = Acceptor::default();
    let mut rest = bytes;
    let accepted = loop {
        let read = acceptor.read_tls(&mut rest).map_err(|_| MALFORMED)?;
        match acceptor.accept() {
            Ok(Some(accepted)) => break accepted,
            Ok(None) if read > 0 => {}
            _ => return Err(MALFORMED),
        }
    };
    accepted
        .client_hello()
        .server_name()
        .map(|name| name.parse::<Host>().map_err(|_| MALFORMED))
        .transpose()
        .map(|host| host.filter(|host| host.name().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn hello(server: &'static str) -> Vec<u8> {
        let config = rustls::ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
        let mut client =
            rustls::ClientConnection::new(Arc::new(config), server.try_into().unwrap()).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_name_is_found_however_it_is_cut() {
        let whole = hello("Example.test");
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), Ok(None), "{end}");
        }
        let found = parse(&whole).unwrap().unwrap();
        assert_eq!(found.server, Some("example.test".parse().unwrap()));
        assert!(!found.encrypted);

        // The same message in records of seven bytes.
        let mut cut = Vec::new();
        for piece in whole[5..].chunks(7) {
            cut.extend_from_slice(&[HANDSHAKE, 3, 1, 0, u8::try_from(piece.len()).unwrap()]);
            cut.extend_from_slice(piece);
        }
        assert_eq!(parse(&cut).unwrap().unwrap(), found);
    }

    #[test]
    fn no_name_and_nonsense() {
        assert_eq!(parse(&hello("192.0.2.1")).unwrap().unwrap().server, None);
        assert!(parse(&[HANDSHAKE, 2, 0, 0, 5, 1, 2, 3, 4, 5]).is_err());
        assert!(parse(&[HANDSHAKE, 3, 1, 0, 4, 2, 0, 0, 0]).is_err());
        assert!(parse(&[HANDSHAKE, 3, 1, 0, 4, 1, 0, 0, 0]).is_err());
        assert!(parse(&[HANDSHAKE, 3, 1, 0, 4, 1, 0xff, 0, 0]).is_err());
    }

    #[test]
    fn an_encrypted_hello_is_seen() {
        let mut bytes = hello("a.test");
        // Append one of that kind and mend the three lengths.
        let outer = [0, 0, 1, 0, 1, 7, 0, 1, 9, 0, 1, 9];
        bytes.extend_from_slice(&[0xfe, 0x0d, 0, 12]);
        bytes.extend_from_slice(&outer);
        let add = |bytes: &mut Vec<u8>, at: usize| {
            let value = u16::from_be_bytes([bytes[at], bytes[at + 1]]) + 16;
            bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
        };
        add(&mut bytes, 3);
        add(&mut bytes, 7);
        let session = usize::from(bytes[43]);
        let suites = 44 + session;
        let skipped = usize::from(u16::from_be_bytes([bytes[suites], bytes[suites + 1]]));
        let compression = suites + 2 + skipped;
        let extensions = compression + 1 + usize::from(bytes[compression]);
        add(&mut bytes, extensions);
        assert!(parse(&bytes).unwrap().unwrap().encrypted);
    }
}
