//! The first message of a TLS connection a box makes: however it arrives, it asks for one server.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_fuzz::Cuts;
use sandkeep_moat::{Hello, parse_client_hello};

fuzz_target!(|data: &[u8]| {
    let (cuts, stream) = Cuts::take(data);
    let whole = parse_client_hello(stream);
    if let Ok(Some(hello)) = &whole {
        check(hello);
    }
    let mut arrived = 0;
    for piece in cuts.of(stream) {
        arrived += piece.len();
        match parse_client_hello(&stream[..arrived]) {
            Ok(None) => {}
            Ok(Some(hello)) => {
                check(&hello);
                // What follows the message may be refused, but never changes what it said.
                assert!(whole.as_ref().is_err() || whole == Ok(Some(hello)));
                return;
            }
            Err(_) => {
                assert!(whole.is_err());
                return;
            }
        }
    }
    assert_eq!(whole, Ok(None));
});

fn check(hello: &Hello) {
    if let Some(server) = &hello.server {
        assert!(server.name().is_some());
    }
}
