//! `url`: where a port of a sandbox is reached.

use reqwest::Url;
use sandkeep_model::{Error, Result};
use serde_json::json;

use super::{client::Client, output::Output};

/// A browser that opens the link gets a session for this port.
const LINK_PARAMETER: &str = "sandkeep_token";

pub async fn url(client: &Client, output: Output, sandbox: &str, port: u16) -> anyhow::Result<u8> {
    let id = client.find(sandbox).await?;
    let view = client.get(&["sandboxes", &id]).await?;
    let version = client.get(&["version"]).await?;
    let plain = address(client.base(), version["domain"].as_str(), &id, port)?;
    let token = view["traffic_token"].as_str();
    let mut link = plain.clone();
    if let Some(token) = token {
        link.query_pairs_mut().append_pair(LINK_PARAMETER, token);
    }
    if output.json {
        let headers = token.map(|token| json!({ "e2b-traffic-access-token": token }));
        output.json(&json!({
            "url": plain.as_str(), "link": link.as_str(), "ports": view["ports"], "headers": headers,
        }))?;
    } else {
        output.line(link.as_str())?;
    }
    Ok(0)
}

/// `<port>-<id>.<domain>`: the server's domain, or `localhost`, which every machine has.
fn address(base: &Url, domain: Option<&str>, id: &str, port: u16) -> Result<Url> {
    let mut url = base.clone();
    let host = format!("{port}-{id}.{}", domain.unwrap_or("localhost"));
    url.set_path("/");
    url.set_query(None);
    url.set_host(Some(&host))
        .map_err(|error| Error::internal(format!("{host} is not a host name: {error}")))?;
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_scheme_and_port_of_the_server() {
        let at = |base: &str, domain| {
            address(&base.parse().unwrap(), domain, "iabc", 8000)
                .unwrap()
                .to_string()
        };
        assert_eq!(
            at("http://127.0.0.1:3000", None),
            "http://8000-iabc.localhost:3000/"
        );
        assert_eq!(
            at("https://api.example.org/x", Some("example.org")),
            "https://8000-iabc.example.org/"
        );
    }
}
