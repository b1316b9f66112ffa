//! How the package clients of this host reach their registries, for the clients in boxes: the
//! mirrors it is configured for and the authorities it trusts besides the usual ones. User names
//! and passwords stay here.

use sha2::{Digest as _, Sha256};
use std::{
    env,
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
};

use crate::sources::without_login;

/// Where administrators put the authorities of their company.
const AUTHORITIES: &str = "usr/local/share/ca-certificates";
/// No settings file of a client is larger; the rest is not read.
const LARGEST_FILE: u64 = 1 << 20;
const MOST_AUTHORITIES: usize = 256;

/// For mmdebstrap, whose `$1` is the new root.
pub const BRING_AUTHORITIES: &str = r#"mkdir -p "$1/usr/local/share/ca-certificates" && cd /usr/local/share/ca-certificates && find . -name '*.crt' -exec cp --parents --dereference --target-directory "$1/usr/local/share/ca-certificates" {} + && chroot "$1" update-ca-certificates"#;

const PIP_FILES: [&str; 2] = ["etc/pip.conf", "etc/xdg/pip/pip.conf"];
const PIP_HOME_FILES: [&str; 2] = [".config/pip/pip.conf", ".pip/pip.conf"];
const PIP_KEYS: [&str; 3] = ["index-url", "extra-index-url", "trusted-host"];
const NPM_FILES: [&str; 3] = ["etc/npmrc", "usr/etc/npmrc", "usr/local/etc/npmrc"];
const NPM_HOME_FILES: [&str; 1] = [".npmrc"];

/// Settings in the order they were found; a later one of the same name wins.
type Settings = Vec<(String, String)>;

#[derive(Debug, Clone, Default)]
pub struct Clients {
    pip: Settings,
    npm: Settings,
    /// One hash over all of them, if there are any.
    authorities: Option<String>,
}

impl Clients {
    /// Of the user this runs as.
    pub fn of_this_host() -> Self {
        let home = env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
        Self::read(Path::new("/"), &home, |name| env::var(name).ok())
    }

    fn read(root: &Path, home: &Path, variable: impl Fn(&str) -> Option<String>) -> Self {
        let texts = |system: &[&str], own: &[&str]| -> Vec<String> {
            let system = system.iter().map(|path| root.join(path));
            let own = own.iter().map(|path| home.join(path));
            system.chain(own).map(|path| bounded(&path)).collect()
        };
        let mut pip = Settings::new();
        for text in texts(&PIP_FILES, &PIP_HOME_FILES) {
            take(&mut pip, &text, |key| PIP_KEYS.contains(&key));
        }
        for key in PIP_KEYS {
            let name = format!("PIP_{}", key.replace('-', "_").to_uppercase());
            if let Some(value) = variable(&name) {
                set(&mut pip, key, &value);
            }
        }
        let mut npm = Settings::new();
        for text in texts(&NPM_FILES, &NPM_HOME_FILES) {
            take(&mut npm, &text, names_a_registry);
        }
        for name in ["npm_config_registry", "NPM_CONFIG_REGISTRY"] {
            if let Some(value) = variable(name) {
                set(&mut npm, "registry", &value);
            }
        }
        Self {
            pip,
            npm,
            authorities: hash_of_authorities(&root.join(AUTHORITIES)),
        }
    }

    pub const fn has_authorities(&self) -> bool {
        self.authorities.is_some()
    }

    /// What of it becomes part of the base.
    pub fn text(&self) -> String {
        format!("{}{}{:?}", self.pip_conf(), self.npmrc(), self.authorities)
    }

    /// `pip install` works as it does elsewhere: a box is nobody's system. What its policy does not
    /// allow is refused at once and stays refused: all clients try again seldom, and soon.
    pub fn pip_conf(&self) -> String {
        let mut out = String::from("[global]\nbreak-system-packages = true\nretries = 2\n");
        for (key, value) in &self.pip {
            out.push_str(&format!("{key} = {value}\n"));
        }
        out
    }

    pub fn npmrc(&self) -> String {
        let mut out = String::from(
            "fund=false\nupdate-notifier=false\nfetch-retries=2\nfetch-retry-mintimeout=500\nfetch-retry-maxtimeout=1000\n",
        );
        if self.has_authorities() {
            // Node knows only the authorities it was built with.
            out.push_str("cafile=/etc/ssl/certs/ca-certificates.crt\n");
        }
        for (key, value) in &self.npm {
            out.push_str(&format!("{key}={value}\n"));
        }
        out
    }
}

fn names_a_registry(key: &str) -> bool {
    key == "registry" || (key.starts_with('@') && key.ends_with(":registry"))
}

/// The settings of these names in a file of lines `key = value`; lines that are indented belong
/// to the value above them.
fn take(into: &mut Settings, text: &str, wanted: impl Fn(&str) -> bool) {
    let mut current: Option<String> = None;
    for line in text.lines() {
        let words = line.trim();
        if words.is_empty() || words.starts_with(['#', ';', '[']) {
            current = None;
            continue;
        }
        match (line.starts_with([' ', '\t']), &current) {
            (true, Some(key)) => {
                let key = key.clone();
                add(into, &key, words);
            }
            _ => {
                let Some((key, value)) = words.split_once('=') else {
                    continue;
                };
                let key = key.trim();
                current = wanted(key).then(|| key.to_owned());
                if current.is_some() {
                    set(into, key, value.trim());
                }
            }
        }
    }
}

fn set(into: &mut Settings, key: &str, value: &str) {
    // A value that refers to the environment means something on the host only.
    if value.contains('$') {
        return;
    }
    into.retain(|(known, _)| known != key);
    add(into, key, value);
}

fn add(into: &mut Settings, key: &str, value: &str) {
    let clean: Vec<String> = value.split_whitespace().map(without_login).collect();
    if clean.is_empty() {
        return;
    }
    let clean = clean.join(" ");
    match into.iter_mut().find(|(known, _)| known == key) {
        Some((_, known)) => *known = format!("{known} {clean}"),
        None => into.push((key.to_owned(), clean)),
    }
}

fn hash_of_authorities(directory: &Path) -> Option<String> {
    let mut found = Vec::new();
    let mut waiting = vec![directory.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                waiting.push(path);
            } else if path.extension().is_some_and(|end| end == "crt") {
                found.push(path);
            }
        }
    }
    found.sort();
    found.truncate(MOST_AUTHORITIES);
    if found.is_empty() {
        return None;
    }
    let mut hash = Sha256::new();
    for path in found {
        hash.update(bounded(&path));
    }
    Some(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Empty when it is not there or can not be read.
fn bounded(path: &Path) -> String {
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

    fn clients(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Clients {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Clients::read(dir.path(), &dir.path().join("home"), |name| {
            let known = variables.iter().find(|(known, _)| *known == name);
            known.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn mirrors_come_along_and_passwords_do_not() {
        let found = clients(
            &[
                (
                    "etc/pip.conf",
                    "[global]\nindex-url = https://me:word@pip.example/simple\nextra-index-url =\n    https://one.example/simple\n    https://u@two.example/simple\nproxy = http://me:word@proxy.example\n",
                ),
                (
                    "home/.npmrc",
                    "registry=https://npm.example/\n@me:registry=https://own.example/x/\n//npm.example/:_authToken=word\n",
                ),
                ("usr/local/share/ca-certificates/own/a.crt", "PEM"),
            ],
            &[],
        );
        assert_eq!(
            found.pip_conf(),
            "[global]\nbreak-system-packages = true\nretries = 2\nindex-url = https://pip.example/simple\n\
             extra-index-url = https://one.example/simple https://two.example/simple\n"
        );
        let npmrc = found.npmrc();
        assert!(
            npmrc
                .contains("\nregistry=https://npm.example/\n@me:registry=https://own.example/x/\n")
        );
        assert!(npmrc.contains("cafile="));
        assert!(!found.text().contains("word") && !found.text().contains("proxy"));
    }

    #[test]
    fn the_environment_goes_before_files() {
        let found = clients(
            &[("etc/pip.conf", "[global]\nindex-url = https://a.example/\n")],
            &[
                ("PIP_INDEX_URL", "https://b.example/simple"),
                ("npm_config_registry", "https://${HOST}/"),
            ],
        );
        assert!(
            found
                .pip_conf()
                .ends_with("index-url = https://b.example/simple\n")
        );
        assert!(!found.npmrc().contains("registry"));
        assert!(!found.has_authorities());
    }

    #[test]
    fn what_is_trusted_decides_what_the_base_is() {
        let one = clients(&[("usr/local/share/ca-certificates/a.crt", "A")], &[]);
        let two = clients(&[("usr/local/share/ca-certificates/a.crt", "B")], &[]);
        assert_ne!(one.text(), two.text());
        assert_ne!(one.text(), Clients::default().text());
    }
}
