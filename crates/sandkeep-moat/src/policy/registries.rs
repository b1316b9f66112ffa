//! Where this host gets its packages from, read from the settings of its own package clients.
//!
//! A box that may reach these installs what the host itself could. Nothing is guessed: a
//! client that is not configured adds where it goes by itself, which the installed client says
//! ([`shipped`]), and one that is not installed adds nothing.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use super::{Host, Policy, Ports, Rule, To, shipped};

/// No settings file of a package client is larger; the rest is not read.
const LARGEST_FILE: u64 = 1 << 20;
/// More than a policy could hold.
const MOST: usize = 128;

/// Hosts and ports of package registries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Registries {
    found: BTreeSet<(Host, u16)>,
    /// Clients whose settings say where to go, so that where they would go by themselves is of
    /// no interest: a host that was given a mirror does not ask for more.
    told: BTreeSet<&'static str>,
}

/// One client: where its settings are, and which of their lines name a registry.
struct Client {
    name: &'static str,
    /// Below `/etc` or another absolute directory.
    system: &'static [&'static str],
    /// Below the home directory.
    home: &'static [&'static str],
    /// Directories all of whose files count.
    directories: &'static [&'static str],
    variables: &'static [&'static str],
    names_a_registry: fn(&str) -> bool,
    /// Settings, in files and in the environment, that stand in the place of the default.
    replaces_the_default: &'static [&'static str],
    /// Where it goes without settings.
    shipped: fn(&Path) -> Vec<(Host, u16)>,
}

fn unknown(_root: &Path) -> Vec<(Host, u16)> {
    Vec::new()
}

const CLIENTS: [Client; 5] = [
    Client {
        name: "apt",
        system: &["etc/apt/sources.list"],
        home: &[],
        directories: &["etc/apt/sources.list.d"],
        variables: &[],
        names_a_registry: |line| {
            line.starts_with("deb ") || line.starts_with("deb-src ") || line.starts_with("URIs:")
        },
        replaces_the_default: &[],
        shipped: unknown,
    },
    Client {
        name: "pip",
        system: &["etc/pip.conf", "etc/xdg/pip/pip.conf"],
        home: &[".config/pip/pip.conf", ".pip/pip.conf"],
        directories: &[],
        variables: &[
            "PIP_INDEX_URL",
            "PIP_EXTRA_INDEX_URL",
            "PIP_FIND_LINKS",
            "UV_INDEX_URL",
            "UV_DEFAULT_INDEX",
        ],
        names_a_registry: |line| {
            ["index-url", "extra-index-url", "find-links", "http"]
                .iter()
                .any(|key| line.starts_with(key))
        },
        replaces_the_default: &["index-url", "PIP_INDEX_URL"],
        shipped: shipped::pip,
    },
    Client {
        name: "npm",
        system: &["etc/npmrc", "usr/etc/npmrc", "usr/local/etc/npmrc"],
        home: &[".npmrc"],
        directories: &[],
        variables: &["npm_config_registry", "NPM_CONFIG_REGISTRY"],
        names_a_registry: |line| {
            line.split_once('=').is_some_and(|(key, _)| {
                let key = key.trim();
                key == "registry" || key.ends_with(":registry")
            })
        },
        replaces_the_default: &["registry", "npm_config_registry", "NPM_CONFIG_REGISTRY"],
        shipped: shipped::npm,
    },
    Client {
        name: "cargo",
        system: &[],
        home: &[".cargo/config.toml", ".cargo/config"],
        directories: &[],
        variables: &["CARGO_REGISTRIES_CRATES_IO_INDEX"],
        names_a_registry: |line| {
            ["index", "registry", "git"].iter().any(|key| {
                line.split_once('=')
                    .is_some_and(|(name, _)| name.trim() == *key)
            }) || line.contains("index =")
        },
        replaces_the_default: &[],
        shipped: unknown,
    },
    Client {
        name: "go",
        system: &["usr/local/go/go.env", "usr/lib/go/go.env"],
        home: &[".config/go/env"],
        directories: &[],
        variables: &["GOPROXY"],
        names_a_registry: |line| line.starts_with("GOPROXY="),
        replaces_the_default: &[],
        shipped: unknown,
    },
];

impl Registries {
    /// Each host once.
    pub fn hosts(&self) -> Vec<(Host, u16)> {
        let mut hosts: Vec<(Host, u16)> = self.found.iter().cloned().collect();
        hosts.dedup_by(|one, other| one.0 == other.0);
        hosts
    }

    /// Of the user this server runs as.
    pub fn of_this_host() -> Self {
        let home = env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
        Self::read(Path::new("/"), &home, |name| env::var(name).ok()).or_defaults_in(Path::new("/"))
    }

    /// Clients that nobody configured go where those installed below this root (the host's, or
    /// a template's) go by themselves.
    #[must_use]
    pub fn or_defaults_in(mut self, root: &Path) -> Self {
        for client in &CLIENTS {
            if !self.told.contains(client.name) {
                let room = MOST.saturating_sub(self.found.len());
                self.found
                    .extend((client.shipped)(root).into_iter().take(room));
            }
        }
        self
    }

    fn read(root: &Path, home: &Path, variable: impl Fn(&str) -> Option<String>) -> Self {
        let mut registries = Self::default();
        for client in &CLIENTS {
            let mut files: Vec<PathBuf> = client.system.iter().map(|p| root.join(p)).collect();
            files.extend(client.home.iter().map(|p| home.join(p)));
            for directory in client.directories {
                let entries = fs::read_dir(root.join(directory)).into_iter().flatten();
                let files_of_apt = entries.flatten().map(|entry| entry.path());
                files.extend(files_of_apt.filter(|path| {
                    // Apt itself looks at no others: that is how sources are switched off.
                    path.extension()
                        .is_some_and(|end| end == "list" || end == "sources")
                }));
            }
            for file in files {
                let text = bounded(&file);
                for line in text.lines().map(str::trim) {
                    if !line.starts_with(['#', ';']) && (client.names_a_registry)(line) {
                        registries.take_from(line);
                        let key = line.split_once('=').map_or(line, |(key, _)| key).trim();
                        if client.replaces_the_default.contains(&key) {
                            registries.told.insert(client.name);
                        }
                    }
                }
            }
            for name in client.variables {
                let value = variable(name).unwrap_or_default();
                registries.take_from(&value);
                if !value.is_empty() && client.replaces_the_default.contains(name) {
                    registries.told.insert(client.name);
                }
            }
        }
        registries
    }

    /// Every web address in a line.
    fn take_from(&mut self, line: &str) {
        for (at, _) in line.match_indices("://") {
            let head = &line[..at];
            let port = match () {
                () if head.ends_with("https") => 443,
                () if head.ends_with("http") => 80,
                () => continue,
            };
            let rest = &line[at + 3..];
            let end = rest
                .find(|c: char| c.is_whitespace() || "/?#\"',|;]".contains(c))
                .unwrap_or(rest.len());
            let authority = &rest[..end];
            // A password may stand before the host.
            let host = authority
                .rsplit_once('@')
                .map_or(authority, |(_, host)| host);
            if let Ok((host, given)) = Host::parse_authority(host)
                && self.found.len() < MOST
            {
                self.found.insert((host, given.unwrap_or(port)));
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// These and nothing else, each on its own port.
    pub fn policy(&self) -> Policy {
        let allow = self.found.iter().filter_map(|(host, port)| {
            Some(Rule {
                ports: Ports::parse(&[(*port).into()]).ok()?,
                ..Rule::to(To::Host(host.clone()))
            })
        });
        Policy {
            allow: allow.collect(),
            ..Policy::air_gapped()
        }
    }
}

/// Empty when it is not there or can not be read.
pub(super) fn bounded(path: &Path) -> String {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(LARGEST_FILE).read_to_string(&mut text));
    match read {
        Ok(_) => text,
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let registries = Registries::read(dir.path(), &dir.path().join("home"), |name| {
            let known = variables.iter().find(|(known, _)| *known == name);
            known.map(|(_, value)| (*value).to_owned())
        });
        let hosts = registries.found.iter();
        hosts.map(|(host, port)| format!("{host}:{port}")).collect()
    }

    #[test]
    fn every_client_is_understood() {
        let files = [
            (
                "etc/apt/sources.list",
                "# deb http://old.example/ a main\ndeb [signed-by=/x] http://deb.example/debian a main\n",
            ),
            (
                "etc/apt/sources.list.d/more.sources",
                "Types: deb\nURIs: https://more.example/debian http://two.example:8080\nSuites: a\n",
            ),
            (
                "etc/pip.conf",
                "[global]\nindex-url = https://user:word@pip.example/simple\nproxy = http://proxy.example:3128\n",
            ),
            (
                "home/.npmrc",
                "registry=https://npm.example/\n@me:registry=https://own.example:8443/\n//npm.example/:_authToken=x\n",
            ),
            (
                "home/.cargo/config.toml",
                "[source.x]\nregistry = \"sparse+https://cargo.example/index/\"\n[net]\noffline = false\n",
            ),
        ];
        let variables = [("GOPROXY", "https://go.example|https://go2.example,direct")];
        assert_eq!(
            found(&files, &variables),
            [
                "cargo.example:443",
                "deb.example:80",
                "go.example:443",
                "go2.example:443",
                "more.example:443",
                "npm.example:443",
                "own.example:8443",
                "pip.example:443",
                "two.example:8080",
            ]
        );
    }

    #[test]
    fn nothing_configured_is_nothing_allowed() {
        assert!(found(&[], &[]).is_empty());
        assert_eq!(Registries::default().policy(), Policy::air_gapped());
        assert!(found(&[], &[("PIP_INDEX_URL", "file:///srv/wheels")]).is_empty());
    }

    #[test]
    fn sources_that_are_switched_off_open_nothing() {
        let off = "deb https://off.example/apt a main\n";
        assert!(found(&[("etc/apt/sources.list.d/a.list.disabled", off)], &[]).is_empty());
    }

    #[test]
    fn a_mirror_stands_in_the_place_of_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir
            .path()
            .join("usr/lib/python3/dist-packages/pip/_internal/models");
        fs::create_dir_all(&home).unwrap();
        fs::write(
            home.join("index.py"),
            "PyPI = PackageIndex(\"https://default.example/\")\n",
        )
        .unwrap();
        let of = |variables: &'static [(&str, &str)]| {
            let found = Registries::read(dir.path(), dir.path(), |name| {
                let known = variables.iter().find(|(known, _)| *known == name);
                known.map(|(_, value)| (*value).to_owned())
            })
            .or_defaults_in(dir.path());
            let hosts: Vec<String> = found
                .found
                .iter()
                .map(|(host, _)| host.to_string())
                .collect();
            hosts
        };
        assert_eq!(of(&[]), ["default.example"]);
        assert_eq!(
            of(&[("PIP_INDEX_URL", "https://own.example/simple")]),
            ["own.example"]
        );
        assert_eq!(
            of(&[("PIP_EXTRA_INDEX_URL", "https://own.example/simple")]),
            ["default.example", "own.example"]
        );
    }

    #[test]
    fn a_policy_opens_each_on_its_own_port() {
        let mut registries = Registries::default();
        registries.take_from("https://pip.example/simple");
        let json = registries.policy().to_json();
        assert_eq!(json["default"], "deny");
        assert_eq!(json["allow"][0]["to"], "pip.example");
        assert_eq!(json["allow"][0]["ports"], serde_json::json!([443]));
    }
}
