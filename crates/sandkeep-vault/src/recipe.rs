//! What is in the `base` template, and the last touches after the packages are in.

use sandkeep_model::Result;
use sha2::{Digest as _, Sha256};
use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    clients::{BRING_AUTHORITIES, Clients},
    doing::Doing as _,
    sources::{Release, Source, host_release, host_sources, text_of},
};

/// Raise it when the touches below change, so that cached bases are made anew.
const VERSION: u32 = 4;

/// What a coding agent expects to find.
const PACKAGES: &[&str] = &[
    "bash",
    "build-essential",
    "bzip2",
    "ca-certificates",
    "curl",
    "file",
    "git",
    "hostname",
    "iproute2",
    "jq",
    "less",
    "nano",
    "netbase",
    "nodejs",
    "npm",
    "openssh-client",
    "pkg-config",
    "procps",
    "psmisc",
    "python-is-python3",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
    "ripgrep",
    "rsync",
    "sudo",
    "tmux",
    "tzdata",
    "unzip",
    "vim-tiny",
    "wget",
    "xz-utils",
    "zip",
    "zstd",
];

/// Manuals and translations are a third of the size and no agent reads them.
const DPKG_OPTIONS: &[&str] = &[
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/lintian/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
];

/// Cargo looks for settings in every directory above the one it works in. See
/// [`Clients::pip_conf`] for why there are few retries.
const CARGO_CONFIG: &str = "[net]\nretry = 1\n";

/// The same for uv, which takes it from nowhere but its environment.
const LOGIN_SETTINGS: &str = "export UV_HTTP_RETRIES=\"${UV_HTTP_RETRIES:-1}\"\n";

const MAKE_USER: &str =
    r#"chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash user"#;

/// Everything that decides what the base will be.
#[derive(Debug)]
pub struct Recipe {
    pub release: Release,
    sources: Vec<Source>,
    /// The host's settings for reaching its mirrors (proxies, timeouts).
    apt_options: Vec<String>,
    clients: Clients,
}

impl Recipe {
    pub fn for_this_host() -> Result<Self> {
        let release = host_release()?;
        let sources = host_sources(&release)?;
        Ok(Self {
            release,
            sources,
            apt_options: host_apt_options(),
            clients: Clients::of_this_host(),
        })
    }

    pub fn origin(&self) -> String {
        format!("{} {}", self.release.id, self.release.codename)
    }

    /// The same recipe on the same kind of machine has the same name.
    pub fn hash(&self) -> String {
        let text = format!(
            "{VERSION}\n{}\n{}\n{PACKAGES:?}\n{DPKG_OPTIONS:?}\n{MAKE_USER}\n{}\n{}",
            self.origin(),
            std::env::consts::ARCH,
            text_of(&self.sources, false),
            self.clients.text()
        );
        Sha256::digest(text.as_bytes())
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// For mmdebstrap; holds what is needed to reach private mirrors.
    pub fn sources_text(&self) -> String {
        text_of(&self.sources, true)
    }

    /// mmdebstrap in namespaces of its own: its mounts and all its children end with it.
    pub fn command(&self, sources: &Path, root: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation=private",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount-proc",
            "--",
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            "--format=directory",
            "--verbose",
        ]);
        let fixed = [
            r#"Acquire::Languages "none""#,
            r#"Acquire::Retries "3""#,
            r#"Acquire::http::Timeout "60""#,
            r#"Acquire::https::Timeout "60""#,
        ];
        for option in fixed
            .into_iter()
            .chain(self.apt_options.iter().map(String::as_str))
        {
            command.arg(format!("--aptopt={option}"));
        }
        for option in DPKG_OPTIONS {
            command.arg(format!("--dpkgopt={option}"));
        }
        command
            .arg(format!("--include={}", PACKAGES.join(",")))
            .arg(format!("--customize-hook={MAKE_USER}"));
        if self.clients.has_authorities() {
            command.arg(format!("--customize-hook={BRING_AUTHORITIES}"));
        }
        command
            .arg(&self.release.codename)
            .arg(root)
            .arg(sources)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C.UTF-8");
        command
    }

    /// The last touches.
    pub fn finish(&self, root: &Path) -> Result<()> {
        for (path, mode, text) in [
            ("etc/hostname", 0o644, "sandbox\n"),
            (
                "etc/hosts",
                0o644,
                "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost\n",
            ),
            // The resolver every box finds at the same address.
            ("etc/resolv.conf", 0o644, "nameserver 10.0.0.1\n"),
            ("etc/default/locale", 0o644, "LANG=C.UTF-8\n"),
            // Filled when a box starts, so that no two are the same.
            ("etc/machine-id", 0o444, ""),
            (
                "etc/sudoers.d/user",
                0o440,
                "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
            ),
            ("etc/pip.conf", 0o644, &self.clients.pip_conf()),
            ("etc/npmrc", 0o644, &self.clients.npmrc()),
            (".cargo/config.toml", 0o644, CARGO_CONFIG),
            ("etc/profile.d/sandkeep.sh", 0o644, LOGIN_SETTINGS),
            ("etc/apt/apt.conf.d/90sandkeep", 0o644, &self.box_apt_conf()),
            (
                "etc/apt/sources.list.d/base.sources",
                0o644,
                &text_of(&self.sources, false),
            ),
        ] {
            write_file(&root.join(path), mode, text)?;
        }
        quicken_logins(root)?;
        self.remove_build_traces(root)?;
        self.bring_keys(root)
    }

    fn box_apt_conf(&self) -> String {
        let mut out = String::from("Acquire::Languages \"none\";\nAcquire::Retries \"1\";\n");
        // A mirror that is a frozen copy has outdated lists on purpose.
        for option in &self.apt_options {
            if option.starts_with("Acquire::Check-Valid-Until") {
                out.push_str(&format!("{option};\n"));
            }
        }
        out
    }

    /// Options for mmdebstrap may name the host's proxy; devices are the ward's business.
    fn remove_build_traces(&self, root: &Path) -> Result<()> {
        remove_if_there(&root.join("etc/apt/apt.conf.d/99mmdebstrap"))?;
        remove_if_there(&root.join("etc/apt/sources.list"))?;
        let sources = root.join("etc/apt/sources.list.d");
        for path in entries(&sources)? {
            if path.file_name().is_some_and(|name| name != "base.sources") {
                remove_if_there(&path)?;
            }
        }
        for path in entries(&root.join("dev"))? {
            let meta = fs::symlink_metadata(&path).doing_to("looking at", &path)?;
            if meta.is_dir() {
                fs::remove_dir_all(&path).doing_to("removing", &path)?;
            } else {
                remove_if_there(&path)?;
            }
        }
        Ok(())
    }

    /// Keys the sources name which no package of the base brings.
    fn bring_keys(&self, root: &Path) -> Result<()> {
        for key in self.sources.iter().filter_map(Source::key_file) {
            let Ok(inside) = key.strip_prefix("/") else {
                continue;
            };
            let target = root.join(inside);
            if target.exists() {
                continue;
            }
            if let Some(parent) = target.parent() {
                fs::create_dir_all(parent).doing_to("making", parent)?;
            }
            fs::copy(key, &target).doing_to("copying the key", key)?;
        }
        Ok(())
    }
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(dir)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .doing_to("reading", dir)
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).doing_to("removing", path)
        }
        _ => Ok(()),
    }
}

fn write_file(path: &Path, mode: u32, text: &str) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).doing_to("making", parent)?;
    }
    // Never through a link: it would lead out of the new root.
    remove_if_there(path)?;
    fs::write(path, text)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        .doing_to("writing", path)
}

/// SDKs run every command in a login shell, and the system's profile starts `id` each time for
/// what bash knows by itself. A shell that does not know it still asks.
fn quicken_logins(root: &Path) -> Result<()> {
    let path = root.join("etc/profile");
    if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    let text = fs::read_to_string(&path).doing_to("reading", &path)?;
    write_file(&path, 0o644, &text.replace("$(id -u)", "${EUID:-$(id -u)}"))
}

/// How this host reaches its mirrors, from its own apt.
fn host_apt_options() -> Vec<String> {
    let Ok(output) = Command::new("apt-config").arg("dump").output() else {
        return Vec::new();
    };
    parse_apt_options(&String::from_utf8_lossy(&output.stdout))
}

fn parse_apt_options(dump: &str) -> Vec<String> {
    let wanted = [
        "Acquire::Check-Valid-Until ",
        "Acquire::ForceIPv",
        "Acquire::http::",
        "Acquire::https::",
    ];
    dump.lines()
        .map(|line| line.trim_end_matches(';'))
        .filter(|line| wanted.iter().any(|start| line.starts_with(start)))
        .filter(|line| !line.ends_with("\"\""))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(uri: &str) -> Recipe {
        Recipe {
            release: Release {
                id: "debian".into(),
                codename: "bookworm".into(),
            },
            sources: vec![Source {
                uris: vec![uri.into()],
                suites: vec!["bookworm".into()],
                components: vec!["main".into()],
                signed_by: None,
                trusted: false,
            }],
            apt_options: vec![
                r#"Acquire::http::Proxy "http://me:pw@proxy.test""#.into(),
                r#"Acquire::Check-Valid-Until "false""#.into(),
            ],
            clients: Clients::default(),
        }
    }

    #[test]
    fn the_hash_follows_the_content() {
        let one = recipe("http://m.test/a").hash();
        assert_eq!(one, recipe("http://m.test/a").hash());
        assert_ne!(one, recipe("http://m.test/b").hash());
        assert_eq!(one.len(), 16);
    }

    #[test]
    fn the_hosts_proxy_does_not_enter_the_box() {
        let root = tempfile::tempdir().unwrap();
        for dir in ["etc/apt/apt.conf.d", "etc/apt/sources.list.d", "dev"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let trace = root.path().join("etc/apt/apt.conf.d/99mmdebstrap");
        fs::write(&trace, "Acquire::http::Proxy").unwrap();
        fs::write(root.path().join("dev/null"), "").unwrap();
        std::os::unix::fs::symlink("/etc/hostname", root.path().join("etc/hostname")).unwrap();
        recipe("http://m.test/a").finish(root.path()).unwrap();
        assert!(!trace.exists());
        assert!(!root.path().join("dev/null").exists());
        let conf = fs::read_to_string(root.path().join("etc/apt/apt.conf.d/90sandkeep")).unwrap();
        assert!(!conf.contains("Proxy") && conf.contains("Check-Valid-Until"));
        let hostname = root.path().join("etc/hostname");
        assert!(fs::symlink_metadata(&hostname).unwrap().is_file());
        let sudoers = fs::metadata(root.path().join("etc/sudoers.d/user")).unwrap();
        assert_eq!(sudoers.permissions().mode() & 0o7777, 0o440);
    }

    #[test]
    fn a_login_starts_no_program() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("etc")).unwrap();
        quicken_logins(root.path()).unwrap();
        let profile = root.path().join("etc/profile");
        fs::write(&profile, "if [ \"$(id -u)\" -eq 0 ]; then\n").unwrap();
        quicken_logins(root.path()).unwrap();
        let text = fs::read_to_string(&profile).unwrap();
        assert_eq!(text, "if [ \"${EUID:-$(id -u)}\" -eq 0 ]; then\n");
    }

    #[test]
    fn apt_options_are_chosen() {
        let dump = "APT \"\";\nAcquire::http \"\";\nAcquire::http::Proxy \"http://p.test\";\nAcquire::Languages:: \"none\";\nAcquire::Check-Valid-Until \"false\";\n";
        assert_eq!(
            parse_apt_options(dump),
            [
                "Acquire::http::Proxy \"http://p.test\"",
                "Acquire::Check-Valid-Until \"false\""
            ]
        );
    }
}
