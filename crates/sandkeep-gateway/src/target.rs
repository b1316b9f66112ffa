//! Which box and port a request is for.

use std::net::IpAddr;

use http::{HeaderMap, request::Parts};

const ID_HEADER: &str = "e2b-sandbox-id";
const PORT_HEADER: &str = "e2b-sandbox-port";
/// A DNS label is not longer, and no id of ours is.
const MAX_ID: usize = 63;

/// A box by the name the client used, which may belong to no box at all, and a port in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Only `[a-z0-9]`, never empty.
    pub sandbox: String,
    pub port: u16,
}

/// A request that wants a box but says so wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadTarget {
    Host,
    SandboxId,
    Port,
}

impl BadTarget {
    /// The text clients of E2B know.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Host => "Invalid host",
            Self::SandboxId => "Invalid sandbox ID",
            Self::Port => "Invalid sandbox port",
        }
    }
}

/// Where a request goes, told from its addressing alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    Box(Target),
    /// To the API, unless it is a file URL whose signature names the box.
    Api,
}

/// The rule, on raw strings.
///
/// Both routing headers win over any host name. Otherwise the left-most label
/// `<port>-<id>` decides, under `domain` if one is set, and always under `.localhost`.
pub fn route(
    host: Option<&str>,
    id: Option<&str>,
    port: Option<&str>,
    domain: Option<&str>,
) -> Result<Route, BadTarget> {
    if let (Some(id), Some(port)) = (id, port) {
        return target(id, port).map(Route::Box);
    }
    if let Some(found) = host
        .map(|host| by_host(host, domain))
        .transpose()?
        .flatten()
    {
        return Ok(Route::Box(found));
    }
    match (id, port) {
        (Some(_), None) => Err(BadTarget::Port),
        (None, Some(_)) => Err(BadTarget::SandboxId),
        _ => Ok(Route::Api),
    }
}

/// [`route`] for the head of a request.
pub(crate) fn of_request(parts: &Parts, domain: Option<&str>) -> Result<Route, BadTarget> {
    let id = single(&parts.headers, ID_HEADER, BadTarget::SandboxId)?;
    let port = single(&parts.headers, PORT_HEADER, BadTarget::Port)?;
    let host = host(parts)?;
    route(host, id, port, domain)
}

/// The host the client means: an absolute URI (or HTTP/2's authority) wins over the header.
pub(crate) fn host(parts: &Parts) -> Result<Option<&str>, BadTarget> {
    match parts.uri.authority() {
        Some(authority) => Ok(Some(authority.as_str())),
        None => single(&parts.headers, "host", BadTarget::Host),
    }
}

/// A header that must not come twice: two readers could believe different ones.
fn single<'a>(
    headers: &'a HeaderMap,
    name: &str,
    bad: BadTarget,
) -> Result<Option<&'a str>, BadTarget> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(bad);
    }
    value.to_str().map(Some).map_err(|_| bad)
}

fn target(id: &str, port: &str) -> Result<Target, BadTarget> {
    // Clients may append `-<anything>` to an id.
    let id = id.split_once('-').map_or(id, |(id, _)| id);
    let good = !id.is_empty()
        && id.len() <= MAX_ID
        && id
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !good {
        return Err(BadTarget::SandboxId);
    }
    // `parse` alone would also take "+80".
    if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(BadTarget::Port);
    }
    match port.parse() {
        Ok(0) | Err(_) => Err(BadTarget::Port),
        Ok(port) => Ok(Target {
            sandbox: id.to_owned(),
            port,
        }),
    }
}

fn by_host(host: &str, domain: Option<&str>) -> Result<Option<Target>, BadTarget> {
    let name = without_port(host).ok_or(BadTarget::Host)?;
    if name.parse::<IpAddr>().is_ok() {
        return Ok(None);
    }
    let name = name.to_ascii_lowercase();
    let name = name.strip_suffix('.').unwrap_or(&name);
    let Some((label, rest)) = name.split_once('.') else {
        return Ok(None);
    };
    let domain = domain.map(|domain| without_port(domain).unwrap_or(domain).to_ascii_lowercase());
    let ours = |domain: &str| rest == domain || rest.ends_with(&format!(".{domain}"));
    let under_domain = domain.as_deref().is_some_and(ours);
    if domain.is_some() && !under_domain && !ours("localhost") {
        return Ok(None);
    }
    let numbered = label
        .split_once('-')
        .filter(|(port, _)| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()));
    match numbered {
        Some((port, id)) => target(id, port).map(Some),
        None if under_domain && !matches!(label, "api" | "sandbox" | "www") => Err(BadTarget::Host),
        None => Ok(None),
    }
}

/// The name of `name[:port]` or `[v6][:port]`.
fn without_port(host: &str) -> Option<&str> {
    let (name, rest) = if let Some(v6) = host.strip_prefix('[') {
        v6.split_once(']')?
    } else {
        let cut = host.find(':').unwrap_or(host.len());
        host.split_at(cut)
    };
    let port = rest.strip_prefix(':').unwrap_or(rest);
    let good = !name.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    good.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "iabcdefghij0123456789";

    fn to(port: u16) -> Result<Route, BadTarget> {
        Ok(Route::Box(Target {
            sandbox: ID.to_owned(),
            port,
        }))
    }

    #[test]
    fn headers_decide() {
        for host in [
            "localhost",
            "localhost:3000",
            "127.0.0.1:3000",
            "[::1]:3000",
            "sandbox.example.org",
            "api.example.org",
            "1-other.example.org",
        ] {
            assert_eq!(
                route(Some(host), Some(ID), Some("49983"), None),
                to(49983),
                "{host}"
            );
        }
        assert_eq!(route(None, Some(ID), Some("80"), None), to(80));
        let suffixed = format!("{ID}-client");
        assert_eq!(route(None, Some(&suffixed), Some("80"), None), to(80));
    }

    #[test]
    fn bad_headers_are_named() {
        use BadTarget::{Port, SandboxId};
        for (id, port, bad) in [
            (Some(ID), None, Port),
            (None, Some("80"), SandboxId),
            (Some(""), Some("80"), SandboxId),
            (Some("../etc"), Some("80"), SandboxId),
            (Some("IABC"), Some("80"), SandboxId),
            (Some("-x"), Some("80"), SandboxId),
            (Some(ID), Some(""), Port),
            (Some(ID), Some("0"), Port),
            (Some(ID), Some("65536"), Port),
            (Some(ID), Some("+80"), Port),
            (Some(ID), Some("-1"), Port),
            (Some(ID), Some("80 "), Port),
            (Some(ID), Some("99999999999999999999"), Port),
        ] {
            assert_eq!(
                route(Some("localhost"), id, port, None),
                Err(bad),
                "{id:?} {port:?}"
            );
        }
        let long = "a".repeat(64);
        assert_eq!(route(None, Some(&long), Some("1"), None), Err(SandboxId));
    }

    #[test]
    fn the_leftmost_label_decides() {
        for host in [
            format!("3000-{ID}.example.org"),
            format!("3000-{ID}.localhost:8080"),
            format!("3000-{ID}.a.b.c:1"),
            format!("3000-{}.Example.ORG.", ID.to_uppercase()),
            format!("3000-{ID}-client.example.org"),
        ] {
            assert_eq!(route(Some(&host), None, None, None), to(3000), "{host}");
        }
        // One header too few does not hurt when the name says it all.
        let host = format!("3000-{ID}.example.org");
        assert_eq!(route(Some(&host), Some(ID), None, None), to(3000));
    }

    #[test]
    fn a_domain_narrows_it() {
        let domain = Some("box.example.org:8443");
        let under = format!("3000-{ID}.box.example.org:8443");
        assert_eq!(route(Some(&under), None, None, domain), to(3000));
        let local = format!("3000-{ID}.localhost");
        assert_eq!(route(Some(&local), None, None, domain), to(3000));
        let foreign = format!("3000-{ID}.evilbox.example.org");
        assert_eq!(route(Some(&foreign), None, None, domain), Ok(Route::Api));
        assert_eq!(
            route(Some("what.box.example.org"), None, None, domain),
            Err(BadTarget::Host)
        );
    }

    #[test]
    fn everything_else_is_the_apis() {
        for host in [
            None,
            Some("localhost:3000"),
            Some("127.0.0.1"),
            Some("[::1]"),
            Some("api.example.org"),
            Some("sandbox.example.org"),
            Some("example.org"),
            Some("ip-10-0-0-1.example.org"),
            Some("3000-iabcdefghij0123456789"),
        ] {
            assert_eq!(route(host, None, None, None), Ok(Route::Api), "{host:?}");
        }
        let domain = Some("example.org");
        for host in ["example.org", "api.example.org", "10.1.2.3:80", "other.net"] {
            assert_eq!(route(Some(host), None, None, domain), Ok(Route::Api));
        }
    }

    #[test]
    fn bad_hosts_are_named() {
        for (host, bad) in [
            ("", BadTarget::Host),
            ("[::1", BadTarget::Host),
            ("a:b", BadTarget::Host),
            ("3000-.example.org", BadTarget::SandboxId),
            ("3000-ünicode.example.org", BadTarget::SandboxId),
            ("0-abc.example.org", BadTarget::Port),
            ("70000-abc.example.org", BadTarget::Port),
        ] {
            assert_eq!(route(Some(host), None, None, None), Err(bad), "{host}");
        }
    }

    #[test]
    fn a_header_that_comes_twice_is_refused() {
        let parts = http::Request::builder()
            .header("host", "localhost")
            .header(ID_HEADER, ID)
            .header(ID_HEADER, "iother")
            .header(PORT_HEADER, "80")
            .body(())
            .unwrap()
            .into_parts()
            .0;
        assert_eq!(of_request(&parts, None), Err(BadTarget::SandboxId));
    }

    #[test]
    fn an_absolute_uri_wins_over_the_host_header() {
        let parts = http::Request::builder()
            .uri(format!("http://80-{ID}.localhost/x"))
            .header("host", "localhost")
            .body(())
            .unwrap()
            .into_parts()
            .0;
        assert_eq!(of_request(&parts, None), to(80));
    }
}
