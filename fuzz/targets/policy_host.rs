//! Names of destinations: one spelling for each, so that no two readers see two hosts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandkeep_moat::policy::{AddressGuard, Host, Rule, To};

fuzz_target!(|text: &str| {
    if let Ok(host) = text.parse::<Host>() {
        check(&host);
    }
    if let Ok((host, port)) = Host::parse_authority(text) {
        check(&host);
        assert_ne!(port, Some(0));
        let written = match (&host, port) {
            (Host::Address(address), Some(port)) if address.is_ipv6() => format!("[{host}]:{port}"),
            (Host::Address(address), None) if address.is_ipv6() => format!("[{host}]"),
            (_, Some(port)) => format!("{host}:{port}"),
            (_, None) => host.to_string(),
        };
        assert_eq!(Host::parse_authority(&written), Ok((host, port)));
    }
    if let Ok(to) = text.parse::<To>() {
        let again: To = to
            .to_string()
            .parse()
            .expect("what was written can be read");
        assert_eq!(again, to);
    }
    if let Ok(rule) = Rule::parse_short(text) {
        rule.name();
    }
});

fn check(host: &Host) {
    let written = host.to_string();
    assert_eq!(written.parse::<Host>().as_ref(), Ok(host), "{written}");
    match host {
        Host::Name(name) => {
            assert!(name.len() <= Host::MAX_LENGTH);
            assert!(
                !name
                    .bytes()
                    .any(|b| b.is_ascii_uppercase() || !b.is_ascii_graphic())
            );
            assert!(name.parse::<std::net::IpAddr>().is_err());
        }
        Host::Address(address) => {
            AddressGuard::default().refuses(*address);
        }
    }
}
