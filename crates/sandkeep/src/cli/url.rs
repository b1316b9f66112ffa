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
    let at = Server {
        base: client.base(),
        domain: version["domain"].as_str(),
        tls: version["tls"] == true,
    };
    let plain = at.address(&id, port)?;
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

/// Where a server is.
struct Server<'a> {
    /// As we reach it.
    base: &'a Url,
    /// As it says; with the port where it is no usual one.
    domain: Option<&'a str>,
    /// Whether it speaks TLS itself. It may have answered us without, over loopback; the link
    /// holds a token, which must not travel so.
    tls: bool,
}

impl Server<'_> {
    /// `<port>-<id>.<domain>`: the server's domain, or `localhost`, which every machine has.
    fn address(&self, id: &str, port: u16) -> Result<Url> {
        let bad = |what: &str| Error::internal(format!("{what} is not an address"));
        let domain = self.domain.unwrap_or("localhost");
        let (name, own_port) = match domain.split_once(':') {
            Some((name, port)) => (name, port.parse().ok()),
            None => (domain, None),
        };
        let mut url = self.base.clone();
        url.set_path("/");
        url.set_query(None);
        let host = format!("{port}-{id}.{name}");
        url.set_host(Some(&host)).map_err(|_| bad(&host))?;
        if self.tls && self.domain.is_some() {
            url.set_scheme("https").map_err(|()| bad(&host))?;
            url.set_port(own_port).map_err(|()| bad(&host))?;
        } else if own_port.is_some() {
            url.set_port(own_port).map_err(|()| bad(&host))?;
        }
        Ok(url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(base: &str, domain: Option<&str>, tls: bool) -> String {
        let base = base.parse().unwrap();
        let server = Server {
            base: &base,
            domain,
            tls,
        };
        server.address("iabc", 8000).unwrap().to_string()
    }

    #[test]
    fn a_token_never_travels_unencrypted_where_the_server_speaks_tls() {
        assert_eq!(
            on("http://127.0.0.1:3000", Some("example.org:3000"), true),
            "https://8000-iabc.example.org:3000/"
        );
        assert_eq!(
            on("http://127.0.0.1:443", Some("example.org"), true),
            "https://8000-iabc.example.org/"
        );
    }

    #[test]
    fn an_address_keeps_scheme_and_port_of_the_server() {
        let at = |base: &str, domain| on(base, domain, false);
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
