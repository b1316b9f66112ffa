//! What a person sees when the server is ready.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use sandkeep_moat::policy::Profile;
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
    fn in_shell(&self, sudo: bool) -> String {
        match self {
            Self::Text(key) => key.expose().to_owned(),
            Self::File(path) => format!("$({}cat {})", before_root(sudo), path.display()),
            Self::Environment => "'the SANDKEEP_API_KEY of the server'".to_owned(),
        }
    }
}

/// Whether the person at this terminal becomes root by sudo; where they are root there may be none.
pub fn uses_sudo() -> bool {
    !rustix::process::geteuid().is_root() || std::env::var_os("SUDO_UID").is_some()
}

const fn before_root(sudo: bool) -> &'static str {
    if sudo { "sudo " } else { "" }
}

/// How clients reach a server with TLS of its own.
#[derive(Debug)]
pub struct Encrypted<'a> {
    /// With the port, where it is no usual one.
    pub domain: &'a str,
    /// What clients must be told to trust.
    pub authority: Option<&'a Path>,
    /// Whether names below the domain are found on this machine.
    pub resolves: bool,
}

/// Whether names below the domain lead anywhere from here.
pub async fn resolves(domain: &str) -> bool {
    let (name, port) = domain.split_once(':').unwrap_or((domain, "443"));
    let port = port.parse().unwrap_or(443);
    tokio::net::lookup_host((format!("api.{name}"), port))
        .await
        .is_ok()
}

/// URL, key and a first example, ready to be pasted.
#[derive(Debug)]
pub struct Greeting<'a> {
    pub listen: SocketAddr,
    pub key: &'a KeyShown<'a>,
    pub program: &'a str,
    pub level: Option<Isolation>,
    /// What sandboxes reach whose create says nothing.
    pub network: Profile,
    pub encrypted: Option<Encrypted<'a>>,
    /// See [`uses_sudo`].
    pub sudo: bool,
}

impl Greeting<'_> {
    pub fn text(&self) -> String {
        let url = local_url(self.listen);
        let key = self.key.in_shell(self.sudo);
        let program = self.program;
        let shown = match &self.encrypted {
            Some(encrypted) => format!("https://{}", encrypted.domain),
            None => url.clone(),
        };
        let (level, network, address) = (self.level(), self.network(), self.address(&url));
        format!(
            "
Sandkeep is ready at {shown}
{level}
{network}

  In another terminal (pip install e2b, or npm install e2b):

{address}    export E2B_API_KEY={key}

  Then, in Python:

    from e2b import Sandbox
    box = Sandbox.create()
    print(box.commands.run('echo hello from $(hostname)').stdout)

  Or from the shell:

    export SANDKEEP_URL={url} SANDKEEP_API_KEY={key}
    {program} run -- echo hello

Ctrl-C stops the server; sandboxes keep running and are found again at the next start.
"
        )
    }

    fn level(&self) -> String {
        match self.level {
            None => "No isolation level works here: `sandkeep doctor` tells why.".to_owned(),
            Some(level) => format!(
                "Sandboxes are isolated at level {level} unless a create names another \
                 (settings isolation_default, isolation_minimum)."
            ),
        }
    }

    fn network(&self) -> String {
        let reached = match self.network {
            Profile::AirGapped => "nothing on the network",
            Profile::PackageRegistries => "the package registries of this host",
            Profile::Open => "everything public, as at E2B",
        };
        let change = match self.network {
            Profile::Open => "--network-default deny keeps them in",
            _ => "--network-default open is E2B's own default",
        };
        format!("A plain Sandbox.create() reaches {reached}, from every SDK; {change}.")
    }

    /// The lines that tell a client where the server is.
    fn address(&self, url: &str) -> String {
        let Some(encrypted) = &self.encrypted else {
            let port = self.listen.port();
            return format!(
                "    export E2B_API_URL={url} E2B_SANDBOX_URL={url}\n    export E2B_DOMAIN=localhost:{port}\n"
            );
        };
        let sudo = before_root(self.sudo);
        let mut lines = String::new();
        if !encrypted.resolves {
            let name = encrypted.domain.split(':').next().unwrap_or_default();
            let help = if name.ends_with(".localhost") {
                format!("`{sudo}apt install libnss-myhostname` makes this machine find them")
            } else {
                format!("point *.{name} at this server in your DNS")
            };
            lines += &format!("    # names below {name} are not found here yet: {help}\n");
        }
        if let Some(file) = encrypted.authority {
            let file = file.display();
            lines += &format!(
                "    {sudo}cat {file} > sandkeep-ca.pem\n    export SSL_CERT_FILE=$PWD/sandkeep-ca.pem NODE_EXTRA_CA_CERTS=$PWD/sandkeep-ca.pem\n"
            );
        }
        lines + &format!("    export E2B_DOMAIN={}\n", encrypted.domain)
    }
}

/// What an operator must know who opens the server to the network.
pub fn exposure_warning(listen: SocketAddr) -> Option<String> {
    (!listen.ip().is_loopback()).then(|| {
        format!(
            "listening on {listen}: whoever reaches this address and has the key runs code in boxes on this machine, \
             and the key travels unencrypted; give it a certificate with --tls-cert and --tls-key, or listen on 127.0.0.1"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain<'a>(key: &'a KeyShown<'a>) -> Greeting<'a> {
        Greeting {
            listen: "127.0.0.1:3000".parse().unwrap(),
            key,
            program: "/opt/sandkeep",
            level: Some(Isolation::Gvisor),
            network: Profile::AirGapped,
            encrypted: None,
            sudo: true,
        }
    }

    #[test]
    fn with_tls_the_domain_and_what_to_trust_are_all_a_client_needs() {
        let key = KeyShown::Text(&Secret::new("e2b_00ff"));
        let mut greeting = plain(&key);
        greeting.encrypted = Some(Encrypted {
            domain: "boxes.localhost:3000",
            authority: Some(Path::new("/state/ca.pem")),
            resolves: false,
        });
        let text = greeting.text();
        for piece in [
            "ready at https://boxes.localhost:3000",
            "export E2B_DOMAIN=boxes.localhost:3000",
            "sudo cat /state/ca.pem > sandkeep-ca.pem",
            "SSL_CERT_FILE=$PWD/sandkeep-ca.pem NODE_EXTRA_CA_CERTS=$PWD/sandkeep-ca.pem",
            "libnss-myhostname",
        ] {
            assert!(text.contains(piece), "{piece} is missing in:\n{text}");
        }
        assert!(!text.contains("E2B_API_URL"), "{text}");
    }

    #[test]
    fn holds_what_the_example_needs() {
        let text = plain(&KeyShown::Text(&Secret::new("e2b_00ff"))).text();
        for piece in [
            "http://127.0.0.1:3000",
            "E2B_API_URL=http://127.0.0.1:3000",
            "E2B_SANDBOX_URL=http://127.0.0.1:3000",
            "E2B_DOMAIN=localhost:3000",
            "E2B_API_KEY=e2b_00ff",
            "from e2b import Sandbox",
            "/opt/sandkeep run -- echo hello",
            "isolated at level gvisor",
            "reaches nothing on the network",
            "--network-default open",
        ] {
            assert!(text.contains(piece), "{piece} is missing in:\n{text}");
        }
    }

    #[test]
    fn a_log_file_does_not_get_the_key() {
        let shown = KeyShown::File(Path::new("/state/api-key"));
        let text = plain(&shown).text();
        assert!(
            text.contains("SANDKEEP_API_KEY=$(sudo cat /state/api-key)"),
            "{text}"
        );
        let mut as_root = plain(&shown);
        as_root.sudo = false;
        let text = as_root.text();
        assert!(text.contains("=$(cat /state/api-key)"), "{text}");
        assert!(!text.contains("sudo"), "{text}");
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
