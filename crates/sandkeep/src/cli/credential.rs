//! `--credential SECRET@HOST[:PORT][=PLACE]`.

use serde_json::{Value, json};

const FORM: &str = "write SECRET@HOST[:PORT][=PLACE], where PLACE is header:NAME[:FORMAT], basic:USER, query:NAME or placeholder:TEXT";

/// As the API has it.
pub fn credential(text: &str) -> Result<Value, String> {
    let bad = |why: &str| format!("{why}; {FORM}");
    let (secret, rest) = text
        .split_once('@')
        .ok_or_else(|| bad("there is no @ between a secret and a host"))?;
    let (target, place) = match rest.split_once('=') {
        Some((target, place)) => (target, Some(place)),
        None => (rest, None),
    };
    let (host, port) = match target.split_once(':') {
        Some((host, port)) => {
            let port: u16 = port
                .parse()
                .map_err(|_| bad(&format!("\"{port}\" is no port")))?;
            (host, Some(port))
        }
        None => (target, None),
    };
    if secret.is_empty() || host.is_empty() {
        return Err(bad("a name is missing"));
    }
    let mut binding = json!({"secret": secret, "host": host});
    if let Some(port) = port {
        binding["port"] = port.into();
    }
    if let Some(place) = place {
        let (kind, rest) = place
            .split_once(':')
            .filter(|(_, rest)| !rest.is_empty())
            .ok_or_else(|| bad("the place names nothing"))?;
        binding[kind] = match kind {
            "header" => match rest.split_once(':') {
                Some((name, format)) => json!({"name": name, "format": format}),
                None => json!({"name": rest}),
            },
            "basic" => json!({"user": rest}),
            "query" => json!({"name": rest}),
            "placeholder" => json!({"text": rest}),
            other => return Err(bad(&format!("\"{other}\" is no place"))),
        };
    }
    Ok(binding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandkeep_moat::policy::Binding;

    #[test]
    fn every_place_has_a_spelling() {
        for (text, wanted) in [
            (
                "github@api.example.org",
                json!({"secret": "github", "host": "api.example.org"}),
            ),
            (
                "k@h.example:8443=header:X-Key",
                json!({"secret": "k", "host": "h.example", "port": 8443, "header": {"name": "X-Key"}}),
            ),
            (
                "k@h.example=header:Authorization:token {}",
                json!({"secret": "k", "host": "h.example", "header": {"name": "Authorization", "format": "token {}"}}),
            ),
            (
                "k@h.example=basic:robot",
                json!({"secret": "k", "host": "h.example", "basic": {"user": "robot"}}),
            ),
            (
                "k@h.example=query:api_key",
                json!({"secret": "k", "host": "h.example", "query": {"name": "api_key"}}),
            ),
            (
                "k@h.example=placeholder:PLACEHOLDER_k_1",
                json!({"secret": "k", "host": "h.example", "placeholder": {"text": "PLACEHOLDER_k_1"}}),
            ),
        ] {
            let read = credential(text).unwrap();
            assert_eq!(read, wanted, "{text}");
            Binding::from_json(&read).unwrap();
        }
    }

    #[test]
    fn other_spellings_are_explained() {
        for bad in [
            "github",
            "@h.example",
            "k@",
            "k@h:port",
            "k@h=cookie:x",
            "k@h=header",
            "k@h=basic:",
        ] {
            assert!(
                credential(bad).unwrap_err().contains("SECRET@HOST"),
                "{bad}"
            );
        }
    }
}
