//! The host's own package sources, so that its mirrors are used and no others.
//!
//! Only the distribution's own entries are taken: what third parties offer on this host
//! is no part of a base for boxes.

use sandkeep_model::{Error, Result};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

const COMPONENTS: [&str; 2] = ["main", "universe"];

/// Which distribution this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    pub id: String,
    pub codename: String,
}

/// One source: where, which suites, signed by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    pub uris: Vec<String>,
    pub suites: Vec<String>,
    pub components: Vec<String>,
    /// A path, or a whole key with its lines as they were.
    pub signed_by: Option<String>,
    /// `trusted=yes` of a local mirror the operator vouches for.
    pub trusted: bool,
}

impl Source {
    /// In apt's newer format. Without `secrets`, user names and passwords in the
    /// addresses are left out: this goes into boxes.
    pub fn text(&self, secrets: bool) -> String {
        let uris: Vec<String> = self
            .uris
            .iter()
            .map(|uri| {
                if secrets {
                    uri.clone()
                } else {
                    without_login(uri)
                }
            })
            .collect();
        let mut out = format!(
            "Types: deb\nURIs: {}\nSuites: {}\nComponents: {}\n",
            uris.join(" "),
            self.suites.join(" "),
            self.components.join(" ")
        );
        if let Some(key) = &self.signed_by {
            out.push_str(&format!("Signed-By: {key}\n"));
        }
        if self.trusted {
            out.push_str("Trusted: yes\n");
        }
        out
    }

    /// The file with the key, if it is one.
    pub fn key_file(&self) -> Option<&Path> {
        self.signed_by
            .as_deref()
            .filter(|key| key.starts_with('/') && !key.contains(char::is_whitespace))
            .map(Path::new)
    }
}

pub fn text_of(sources: &[Source], secrets: bool) -> String {
    let parts: Vec<String> = sources.iter().map(|source| source.text(secrets)).collect();
    parts.join("\n")
}

/// An address without user name and password.
pub fn without_login(uri: &str) -> String {
    let Some((scheme, rest)) = uri.split_once("://") else {
        return uri.to_owned();
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    format!("{scheme}://{host}/{path}")
}

pub fn host_release() -> Result<Release> {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    parse_release(&text).ok_or_else(|| no_sources("this host is neither Debian nor Ubuntu"))
}

fn parse_release(text: &str) -> Option<Release> {
    let fields: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(key, value)| (key.trim(), value.trim().trim_matches(['"', '\''])))
        .collect();
    let id = *fields.get("ID")?;
    let like = fields.get("ID_LIKE").copied().unwrap_or("");
    let family = |name: &str| id == name || like.split_whitespace().any(|word| word == name);
    if !family("debian") && !family("ubuntu") {
        return None;
    }
    // A derivative names the release it is built on.
    let codename = ["UBUNTU_CODENAME", "DEBIAN_CODENAME", "VERSION_CODENAME"]
        .iter()
        .find_map(|key| fields.get(key).copied().filter(|name| !name.is_empty()))?;
    Some(Release {
        id: id.to_owned(),
        codename: codename.to_owned(),
    })
}

fn no_sources(why: &str) -> Error {
    Error::host_not_ready(format!("the base template can not be built here: {why}"))
        .hint(
            "build it on a Debian or Ubuntu host, or bring a root file system with \
             `sandkeep template import base ROOT.tar.zst`",
        )
        .retryable(false)
}

pub fn host_sources(release: &Release) -> Result<Vec<Source>> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    files.sort();
    let mut out = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else {
            continue;
        };
        let found = match file.extension().and_then(|end| end.to_str()) {
            Some("list") => parse_lines(&text),
            Some("sources") => parse_stanzas(&text),
            _ => continue,
        };
        out.extend(
            found
                .into_iter()
                .filter_map(|source| fitting(source, &release.codename)),
        );
    }
    if out.is_empty() {
        return Err(no_sources(&format!(
            "no package source for {} is in /etc/apt",
            release.codename
        )));
    }
    Ok(out)
}

/// What of a source belongs to the release itself.
fn fitting(mut source: Source, codename: &str) -> Option<Source> {
    let wanted = ["", "-updates", "-security", "/updates"].map(|end| format!("{codename}{end}"));
    source.suites.retain(|suite| wanted.contains(suite));
    source
        .components
        .retain(|component| COMPONENTS.contains(&component.as_str()));
    source.uris.retain(|uri| {
        ["http://", "https://", "mirror+http://", "mirror+https://"]
            .iter()
            .any(|scheme| uri.starts_with(scheme))
    });
    let whole = !source.suites.is_empty()
        && source.components.iter().any(|name| name == "main")
        && !source.uris.is_empty();
    whole.then_some(source)
}

/// `deb [signed-by=/k arch=amd64] URI SUITE COMPONENT...`
fn parse_lines(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_one_line).collect()
}

fn parse_one_line(line: &str) -> Option<Source> {
    let line = line.split('#').next()?.trim();
    let rest = line.strip_prefix("deb")?;
    if !rest.starts_with([' ', '\t']) {
        return None;
    }
    let rest = rest.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => ("", rest),
    };
    let option = |name: &str| {
        options.split_whitespace().find_map(|word| {
            let (key, value) = word.split_once('=')?;
            key.eq_ignore_ascii_case(name).then(|| value.to_owned())
        })
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    Some(Source {
        uris: vec![words.next()?],
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by: option("signed-by"),
        trusted: option("trusted").is_some_and(|value| value == "yes"),
    })
}

/// Paragraphs of `Key: value`, values going on in indented lines.
fn parse_stanzas(text: &str) -> Vec<Source> {
    let mut out = Vec::new();
    let mut fields: BTreeMap<String, String> = BTreeMap::new();
    let mut current = String::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            out.extend(stanza(&fields));
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some(value) = fields.get_mut(&current) {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((key, value)) = line.split_once(':') {
            current = key.trim().to_ascii_lowercase();
            fields.insert(current.clone(), value.trim().to_owned());
        }
    }
    out
}

fn stanza(fields: &BTreeMap<String, String>) -> Option<Source> {
    let words = |key: &str| -> Vec<String> {
        let value = fields.get(key).map_or("", String::as_str);
        value.split_whitespace().map(str::to_owned).collect()
    };
    let on = fields.get("enabled").is_none_or(|value| value != "no");
    if !on || !words("types").iter().any(|kind| kind == "deb") {
        return None;
    }
    Some(Source {
        uris: words("uris"),
        suites: words("suites"),
        components: words("components"),
        signed_by: fields.get("signed-by").cloned(),
        trusted: fields.get("trusted").is_some_and(|value| value == "yes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_style() {
        let text = "# comment\ndeb-src http://m.test/d bookworm main\n\
            deb [arch=amd64 signed-by=/k.gpg] http://m.test/d bookworm main contrib # x\n\
            deb http://third.test/x bookworm-pgdg main\ndebx y z\ndeb [broken\n";
        let found: Vec<Source> = parse_lines(text)
            .into_iter()
            .filter_map(|source| fitting(source, "bookworm"))
            .collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].components, ["main"]);
        assert_eq!(found[0].key_file(), Some(Path::new("/k.gpg")));
    }

    #[test]
    fn paragraph_style_with_a_key_inside() {
        let text = "Types: deb deb-src\n# a note\nURIs: http://m.test/d\nSuites: noble noble-updates noble-backports\n\
            Components: main universe multiverse\nSigned-By:\n -----BEGIN\n .\n abc\n\n\
            Types: deb\nEnabled: no\nURIs: http://m.test/d\nSuites: noble\nComponents: main\n\n\
            Types: deb\nURIs: https://third.test\nSuites: noble\nComponents: stable\n";
        let found: Vec<Source> = parse_stanzas(text)
            .into_iter()
            .filter_map(|source| fitting(source, "noble"))
            .collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].suites, ["noble", "noble-updates"]);
        assert_eq!(found[0].key_file(), None);
        assert!(
            found[0]
                .text(true)
                .contains("Signed-By: \n -----BEGIN\n .\n abc\n")
        );
    }

    #[test]
    fn passwords_stay_on_the_host() {
        let source = parse_one_line("deb https://me:pw@m.test/d bookworm main").unwrap();
        assert!(source.text(true).contains("me:pw@"));
        assert!(!source.text(false).contains("pw"));
        assert!(source.text(false).contains("https://m.test/d"));
    }

    #[test]
    fn releases() {
        let debian = parse_release("ID=debian\nVERSION_CODENAME=trixie\n").unwrap();
        assert_eq!(debian.codename, "trixie");
        let mint = "ID=linuxmint\nID_LIKE=\"ubuntu debian\"\nVERSION_CODENAME=wilma\nUBUNTU_CODENAME=noble\n";
        assert_eq!(parse_release(mint).unwrap().codename, "noble");
        assert_eq!(parse_release("ID=fedora\nVERSION_CODENAME=\"\"\n"), None);
    }
}
