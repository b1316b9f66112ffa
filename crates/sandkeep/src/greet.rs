//! What a person sees when the server is ready.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use sandkeep_model::{Isolation, Secret};

/// The address a client on this machine uses.
pub fn local_url(listen: SocketAddr) -> String {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    format!("http://{}", SocketAddr::new(ip, listen.port()))
}

/// How to call this program: by its name where a shell finds it, else by its path.
pub fn program() -> String {
    let named = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join("sandkeep").is_file()));
    match std::env::current_exe() {
        Ok(path) if !named => path.display().to_string(),
        _ => "sandkeep".to_owned(),
    }
}

/// How the greeting names the API key.
#[derive(Debug)]
pub enum KeyShown<'a> {
    /// On a terminal: a person reads it and it is gone.
    Text(&'a Secret),
    /// Elsewhere it would stay in a log: only what prints it is named.
    File(&'a Path),
    /// It came from the environment of the server.
    Environment,
}

impl KeyShown<'_> {
    fn in_shell(&self) -> String {
        match self {
            Self::Text(key) => key.expose().to_owned(),
            Self::File(path) => format!("$(sudo cat {})", path.display()),
            Self::Environment => "'the SANDKEEP_API_KEY of the server'".to_owned(),
        }
    }
}

/// URL, key and a first example, ready to be pasted.
pub fn greeting(
    listen: SocketAddr,
    key: &KeyShown<'_>,
    program: &str,
    level: Option<Isolation>,
) -> String {
    let url = local_url(listen);
    let port = listen.port();
    let key = key.in_shell();
    let level = level.map_or_else(
        || "No isolation level works here: `sandkeep doctor` tells why.".to_owned(),
        |level| {
            format!(
                "Sandboxes are isolated at level {level} unless a create names another \
                 (settings isolation_default, isolation_minimum)."
            )
        },
    );
    format!(
        "
Sandkeep is ready at {url}
{level}

  In another terminal (pip install e2b, or npm install e2b):

    export E2B_API_URL={url} E2B_SANDBOX_URL={url}
    export E2B_DOMAIN=localhost:{port}
    export E2B_API_KEY={key}

  Then, in Python:

    from e2b import Sandbox
    box = Sandbox.create()
    print(box.commands.run('echo hello from $(hostname)').stdout)

  Or from the shell:

    export SANDKEEP_URL={url} SANDKEEP_API_KEY={key}
    {program} run -- echo hello

Ctrl-C stops the server; boxes go on running and are found again at the next start.
"
    )
}

/// What an operator must know who opens the server to the network.
pub fn exposure_warning(listen: SocketAddr) -> Option<String> {
    (!listen.ip().is_loopback()).then(|| {
        format!(
            "listening on {listen}: whoever reaches this address and has the key runs code in boxes on this machine, \
             and the key travels unencrypted; put a TLS proxy in front, or listen on 127.0.0.1"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_the_example_needs() {
        let text = greeting(
            "127.0.0.1:3000".parse().unwrap(),
            &KeyShown::Text(&Secret::new("e2b_00ff")),
            "/opt/sandkeep",
            Some(Isolation::Gvisor),
        );
        for piece in [
            "http://127.0.0.1:3000",
            "E2B_API_URL=http://127.0.0.1:3000",
            "E2B_SANDBOX_URL=http://127.0.0.1:3000",
            "E2B_DOMAIN=localhost:3000",
            "E2B_API_KEY=e2b_00ff",
            "from e2b import Sandbox",
            "/opt/sandkeep run -- echo hello",
            "isolated at level gvisor",
        ] {
            assert!(text.contains(piece), "{piece} is missing in:\n{text}");
        }
    }

    #[test]
    fn a_log_file_does_not_get_the_key() {
        let shown = KeyShown::File(Path::new("/state/api-key"));
        let text = greeting("127.0.0.1:3000".parse().unwrap(), &shown, "sandkeep", None);
        assert!(
            text.contains("SANDKEEP_API_KEY=$(sudo cat /state/api-key)"),
            "{text}"
        );
    }

    #[test]
    fn a_wildcard_address_is_shown_as_one_that_can_be_dialled() {
        assert_eq!(
            local_url("0.0.0.0:80".parse().unwrap()),
            "http://127.0.0.1:80"
        );
        assert_eq!(local_url("[::]:80".parse().unwrap()), "http://[::1]:80");
        assert_eq!(
            local_url("10.0.0.9:80".parse().unwrap()),
            "http://10.0.0.9:80"
        );
    }

    #[test]
    fn only_loopback_is_quiet() {
        assert!(exposure_warning("127.0.0.2:1".parse().unwrap()).is_none());
        assert!(exposure_warning("[::1]:1".parse().unwrap()).is_none());
        assert!(exposure_warning("0.0.0.0:1".parse().unwrap()).is_some());
    }
}
