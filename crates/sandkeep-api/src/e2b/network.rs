//! What a create may ask of the network while boxes have none.
//!
//! Nothing gets out of a box, so whatever only forbids is fulfilled. Everything that opens,
//! rewrites or protects something else is refused: a security setting is never dropped.

use sandkeep_model::{Error, Result};
use serde_json::{Map, Value};

use super::absent::not_yet;

pub(crate) fn check(network: &Map<String, Value>) -> Result<()> {
    for (name, value) in network {
        let field = format!("network.{name}");
        match name.as_str() {
            _ if value.is_null() => {}
            "denyOut" => check_list(&field, value)?,
            "allowOut" | "dnsServers" | "httpsPorts" if is_empty(value) => {}
            "rules" | "egressProxy" if is_empty(value) => {}
            // Ports of a box are reached through the gateway by whoever knows its id.
            "allowPublicTraffic" if *value == Value::Bool(true) => {}
            _ => {
                return Err(not_yet(&format!("the network setting `{name}`"))
                    .field(field)
                    .hint("boxes have no network at all yet; leave it out, or use only denyOut"));
            }
        }
    }
    Ok(())
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty)
}

/// Addresses and networks only; a name can not be denied by address.
fn check_list(field: &str, value: &Value) -> Result<()> {
    let wrong = || {
        Error::invalid(
            field,
            format!("{field} must be a list of addresses or networks"),
        )
        .hint("e.g. [\"0.0.0.0/0\"]")
    };
    for entry in value.as_array().ok_or_else(wrong)? {
        let text = entry.as_str().ok_or_else(wrong)?;
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: std::net::IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        if let Some(bits) = bits
            && bits.parse::<u8>().map_or(true, |bits| bits > most)
        {
            return Err(wrong());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_model::Code;
    use serde_json::json;

    fn checked(network: &Value) -> Result<()> {
        check(network.as_object().unwrap())
    }

    #[test]
    fn what_only_forbids_is_fulfilled() {
        for fine in [
            json!({}),
            json!({"denyOut": ["0.0.0.0/0", "10.0.0.1", "::/0"]}),
            json!({"allowOut": [], "rules": {}, "allowPublicTraffic": true}),
            json!({"egressProxy": null, "maskRequestHost": null}),
        ] {
            checked(&fine).unwrap();
        }
    }

    #[test]
    fn no_security_setting_is_dropped() {
        for (name, value) in [
            ("allowOut", json!(["1.1.1.1"])),
            ("allowPublicTraffic", json!(false)),
            ("maskRequestHost", json!("x")),
            ("httpsPorts", json!([443])),
            ("egressProxy", json!({"address": "p:1"})),
            ("rules", json!({"h": []})),
            ("dnsServers", json!(["1.1.1.1"])),
            ("somethingNew", json!(true)),
        ] {
            let error = checked(&json!({ name: value })).unwrap_err();
            assert_eq!(error.code, Code::NotImplemented, "{name}");
            assert_eq!(error.field, Some(format!("network.{name}")));
            assert!(error.message.contains(name));
        }
    }

    #[test]
    fn a_malformed_denial_is_an_error_not_a_pass() {
        for bad in [
            json!("0.0.0.0/0"),
            json!(["example.test"]),
            json!(["1.1.1.1/33"]),
            json!([1]),
        ] {
            let error = checked(&json!({ "denyOut": bad })).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument);
        }
    }
}
