//! Where package clients go when nobody told them anything: read from the clients as they are
//! installed, because this repository names no registry.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{Host, registries::bounded};

const HTTPS: u16 = 443;

/// Hosts and ports the pip below this root goes to by itself: its index and where the files are.
pub fn pip(root: &Path) -> Vec<(Host, u16)> {
    first(
        python_homes(root).map(|home| home.join("pip/_internal/models/index.py")),
        of_pip,
    )
}

/// The same of npm.
pub fn npm(root: &Path) -> Vec<(Host, u16)> {
    let homes = [
        "usr/lib/node_modules/npm/node_modules/@npmcli/config/lib/definitions/definitions.js",
        "usr/local/lib/node_modules/npm/node_modules/@npmcli/config/lib/definitions/definitions.js",
        "usr/share/nodejs/@npmcli/config/lib/definitions/definitions.js",
        "usr/share/nodejs/npm/lib/utils/config/definitions.js",
    ];
    first(homes.into_iter().map(|home| root.join(home)), of_npm)
}

/// What the first of these files says that says anything.
fn first(
    files: impl IntoIterator<Item = PathBuf>,
    read: fn(&str) -> Vec<(Host, u16)>,
) -> Vec<(Host, u16)> {
    files
        .into_iter()
        .map(|file| read(&bounded(&file)))
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

fn python_homes(root: &Path) -> impl Iterator<Item = PathBuf> {
    let mut homes = vec![root.join("usr/lib/python3/dist-packages")];
    for library in ["usr/local/lib", "usr/lib"] {
        let versions = fs::read_dir(root.join(library)).into_iter().flatten();
        for version in versions.flatten() {
            let is_python = |name: &str| name.starts_with("python3");
            if version.file_name().to_str().is_some_and(is_python) {
                homes.push(version.path().join("site-packages"));
                homes.push(version.path().join("dist-packages"));
            }
        }
    }
    homes.into_iter()
}

/// One line of it names the index by its address and the host of the files by its name.
fn of_pip(text: &str) -> Vec<(Host, u16)> {
    let line = text.lines().find(|line| line.starts_with("PyPI = "));
    line.unwrap_or_default()
        .split('"')
        .skip(1)
        .step_by(2)
        .filter_map(host_of)
        .collect()
}

fn of_npm(text: &str) -> Vec<(Host, u16)> {
    let Some((_, after)) = text.split_once("define('registry'") else {
        return Vec::new();
    };
    let default = after
        .lines()
        .find(|line| line.trim().starts_with("default:"));
    default
        .and_then(|line| line.split('\'').nth(1))
        .and_then(host_of)
        .into_iter()
        .collect()
}

fn host_of(text: &str) -> Option<(Host, u16)> {
    let rest = text.strip_prefix("https://").unwrap_or(text);
    let (host, port) = Host::parse_authority(rest.split('/').next()?).ok()?;
    host.name()?;
    Some((host, port.unwrap_or(HTTPS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(found: &[(Host, u16)]) -> Vec<String> {
        found
            .iter()
            .map(|(host, port)| format!("{host}:{port}"))
            .collect()
    }

    #[test]
    fn clients_say_where_they_go() {
        let pip = "import x\nPyPI = PackageIndex(\"https://index.example/\", file_storage_domain=\"files.example\")\nTestPyPI = PackageIndex(\n    \"https://no.example/\"\n)\n";
        assert_eq!(
            words(&of_pip(pip)),
            ["index.example:443", "files.example:443"]
        );
        let npm = "define('save', {\n  default: 'x',\n})\ndefine('registry', {\n  default: 'https://npm.example/',\n  type: url,\n";
        assert_eq!(words(&of_npm(npm)), ["npm.example:443"]);
        assert!(of_pip("").is_empty() && of_npm("define('registry'").is_empty());
    }

    #[test]
    fn an_installed_pip_is_found() {
        let dir = tempfile::tempdir().unwrap();
        assert!(pip(dir.path()).is_empty());
        let home = dir
            .path()
            .join("usr/local/lib/python3.11/dist-packages/pip/_internal/models");
        fs::create_dir_all(&home).unwrap();
        fs::write(
            home.join("index.py"),
            "PyPI = PackageIndex(\"https://a.example/\")\n",
        )
        .unwrap();
        assert_eq!(words(&pip(dir.path())), ["a.example:443"]);
    }
}
