//! What each step does in the box.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use futures_util::TryStreamExt as _;
use sandkeep_agent_client::stream;
use sandkeep_model::{BoxDefaults, Error, Result, Step};
use tokio_util::io::ReaderStream;

use super::{
    log::{LineLevel, Lines},
    record::Build,
    workshop::{Call, run, went_well},
};
use crate::{agent, core::Core, registry::Entry};

/// Who runs what nobody else is named for.
const DEFAULT_USER: &str = "user";
/// What `$PATH` is when nobody set it.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Where an archive lies in the box while it is unpacked.
const ARCHIVE: &str = "/var/sandkeep-files.tar";
/// What a failed command said last, in the error.
const LAST_WORDS: usize = 5;

/// Unpacks an archive and puts what is meant in its place: the content of a directory into the
/// destination, a file at it or, with a slash at its end, into it. Arguments: the archive, the
/// source (the part without a glob), the destination, owner, mode.
const COPY: &str = r#"
set -eu
archive=$1 from=$2 to=$3 owner=$4 mode=$5
case $owner in *:*) ;; *) owner=$owner: ;; esac
files=$(mktemp -d /var/sandkeep-files.XXXXXX)
trap 'rm -rf "$files" "$archive"' EXIT
tar -xf "$archive" -C "$files"
source=$files${from:+/$from}
[ -e "$source" ] || [ -L "$source" ] || { echo "\"$from\" is not in the files that were sent" >&2; exit 1; }
if [ -d "$source" ] && [ ! -L "$source" ]; then
  [ -d "$to" ] || { mkdir -p "$to" && chown "$owner" "$to"; }
  chown -hR "$owner" "$source"
  [ -z "$mode" ] || chmod -R "$mode" "$source"
  find "$source" -mindepth 1 -maxdepth 1 -exec cp -a -t "$to" {} +
else
  chown -h "$owner" "$source"
  [ -z "$mode" ] || chmod "$mode" "$source"
  if [ "${to%/}" != "$to" ] || [ -d "$to" ]; then
    mkdir -p "$to"
    cp -a "$source" "$to/"
  else
    mkdir -p "$(dirname "$to")"
    cp -a -T "$source" "$to"
  fi
fi
"#;

/// Makes a user that is not there yet, as the base has its own.
const USER: &str = r#"id -u "$1" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$1""#;
const WORKDIR: &str = r#"[ -d "$2" ] || { mkdir -p "$2" && chown "$1" "$2"; }"#;

/// What holds for the next step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    pub env: BTreeMap<String, String>,
    pub defaults: BoxDefaults,
}

impl Standing {
    fn user(&self) -> &str {
        self.defaults.user.as_deref().unwrap_or(DEFAULT_USER)
    }

    fn home(&self) -> String {
        match self.user() {
            "root" => "/root".to_owned(),
            user => format!("/home/{user}"),
        }
    }

    fn place(&self, path: &str) -> String {
        if path.starts_with('/') {
            return path.to_owned();
        }
        let home = self.home();
        if path == "~" {
            return home;
        }
        if let Some(rest) = path.strip_prefix("~/") {
            return format!("{home}/{rest}");
        }
        let base = self.defaults.workdir.as_deref().unwrap_or(&home);
        match path.strip_prefix("./").unwrap_or(path) {
            "." | "" => base.to_owned(),
            rest => format!("{}/{rest}", base.trim_end_matches('/')),
        }
    }

    /// `$NAME` and `${NAME}`, by what is known so far.
    fn expand(&self, value: &str) -> String {
        let mut out = String::new();
        let mut rest = value;
        while let Some(at) = rest.find('$') {
            out.push_str(&rest[..at]);
            let after = &rest[at + 1..];
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let (name, next) = match after.strip_prefix('{').and_then(|a| a.split_once('}')) {
                Some((name, next)) => (name, next),
                None => after.split_at(after.find(|c| !word(c)).unwrap_or(after.len())),
            };
            if name.is_empty() || !name.chars().all(word) {
                out.push('$');
                rest = after;
                continue;
            }
            match (self.env.get(name), name) {
                (Some(value), _) => out.push_str(value),
                (None, "PATH") => out.push_str(PATH),
                (None, "HOME") => out.push_str(&self.home()),
                (None, "USER") => out.push_str(self.user()),
                (None, _) => {}
            }
            rest = next;
        }
        out.push_str(rest);
        out
    }

    /// What a step changes for those after it; no box is needed for that.
    pub fn after(&mut self, step: &Step) {
        match step {
            Step::Run { .. } | Step::Copy { .. } => {}
            Step::Env(map) => {
                // All by what was before, as they stand side by side.
                let new: Vec<_> = map
                    .iter()
                    .map(|(name, value)| (name.clone(), self.expand(value)))
                    .collect();
                self.env.extend(new);
            }
            Step::Workdir(path) => self.defaults.workdir = Some(self.place(path)),
            Step::User(name) => self.defaults.user = Some(name.clone()),
        }
    }
}

/// Whether a step does anything to files.
pub const fn changes_files(step: &Step) -> bool {
    !matches!(step, Step::Env(_))
}

/// Where a step stands in its build.
pub struct At<'a> {
    pub core: &'a Core,
    pub build: &'a Build,
    pub number: &'a str,
    pub entry: &'a Arc<Entry>,
    pub standing: &'a Standing,
}

impl At<'_> {
    pub async fn perform(&self, step: &Step) -> Result<()> {
        match step {
            Step::Env(_) => Ok(()),
            Step::Run { command, user } => {
                let call = Call {
                    user: Some(user.as_deref().unwrap_or_else(|| self.standing.user())),
                    cwd: self.standing.defaults.workdir.as_deref(),
                    env: self.standing.env.clone(),
                    ..Call::shell(command)
                };
                self.call(&call, command).await
            }
            Step::User(name) => self.script(USER, &[name], &step.words()).await,
            Step::Workdir(path) => {
                let place = self.standing.place(path);
                let words = [self.standing.user(), &place];
                self.script(WORKDIR, &words, &step.words()).await
            }
            Step::Copy {
                from,
                to,
                user,
                mode,
                files,
            } => {
                let archive = self.core.vault.context(files).await?.ok_or_else(|| {
                    Error::not_found(format!("the files of COPY {from} were not sent"))
                        .hint("send them with PUT /v1/templates/{name}/files/{sha256} first")
                })?;
                self.send(&archive).await?;
                let source = source_of(from);
                let to = self.standing.place(to);
                let owner = user.as_deref().unwrap_or_else(|| self.standing.user());
                let mode = mode.as_deref().unwrap_or_default();
                let words = [ARCHIVE, &source, &to, owner, mode];
                self.script(COPY, &words, &step.words()).await
            }
        }
    }

    /// Makes the account that steps act as, in a template from before templates got it when they
    /// were imported. Where that cannot be done, a step that needs it says so.
    pub async fn make_account(&self) {
        if let Err(error) = self.script(USER, &[DEFAULT_USER], "useradd").await {
            tracing::debug!(%error, "making the account of a build");
        }
    }

    /// A script of ours, as root; `shown` is what it does, for errors.
    async fn script(&self, script: &str, words: &[&str], shown: &str) -> Result<()> {
        let mut argv = vec!["/bin/bash", "-c", script, "sandkeep"];
        argv.extend(words);
        let call = Call {
            argv,
            user: Some("root"),
            cwd: Some("/"),
            ..Call::default()
        };
        self.call(&call, shown).await
    }

    async fn call(&self, call: &Call<'_>, shown: &str) -> Result<()> {
        let (mut out, mut err) = (Lines::default(), Lines::default());
        let mut last = std::collections::VecDeque::new();
        let mut tell = |level, line: String| {
            self.build.say(level, self.number, &line);
            last.push_back(line);
            if last.len() > LAST_WORDS {
                last.pop_front();
            }
        };
        let ended = run(self.entry, call, |is_err, bytes| {
            let lines = if is_err { &mut err } else { &mut out };
            for line in lines.feed(bytes) {
                tell(LineLevel::Info, line);
            }
        })
        .await;
        for line in [out.end(), err.end()].into_iter().flatten() {
            tell(LineLevel::Info, line);
        }
        for denial in self.entry.reach.denials() {
            let words = format!("refused {}:{}: {}", denial.host, denial.port, denial.why);
            self.build.say(LineLevel::Warn, self.number, &words);
        }
        let why = match ended {
            Ok(end) if went_well(&end) => return Ok(()),
            Ok(end) => end.status,
            Err(error) if error.field.as_deref() == Some("user") => {
                format!("unauthenticated: {}", error.message)
            }
            Err(error) => error.message,
        };
        let said: Vec<String> = last.into();
        let said = if said.is_empty() {
            String::new()
        } else {
            format!("; it said: {}", said.join(" | "))
        };
        let shown: String = shown.chars().take(200).collect();
        Err(Error::invalid(
            "steps",
            format!("failed to run command '{shown}': command failed: {why}{said}"),
        ))
    }

    async fn send(&self, archive: &Path) -> Result<()> {
        let file = tokio::fs::File::open(archive)
            .await
            .map_err(|error| Error::from(error).context("opening the files of the build"))?;
        let body = stream(ReaderStream::with_capacity(file, 256 * 1024).map_err(Error::from));
        let mut agent = agent::visit(self.entry).await?;
        agent.write_file(ARCHIVE, Some("root"), body).await?;
        Ok(())
    }

    /// What the kernel of the box still holds goes to its disk.
    pub async fn settle(&self) {
        let call = Call {
            argv: vec!["sync", "-f", "/"],
            user: Some("root"),
            cwd: Some("/"),
            ..Call::default()
        };
        match run(self.entry, &call, |_, _| {}).await {
            Ok(end) if went_well(&end) => {}
            Ok(end) => tracing::debug!(id = %self.entry.id, status = %end.status, "sync in a box"),
            Err(error) => tracing::debug!(id = %self.entry.id, %error, "sync in a box"),
        }
    }
}

/// The part of a path before its first glob: only what matched was sent.
fn source_of(from: &str) -> String {
    let is_glob = |part: &&str| part.contains(['*', '?', '[']);
    let parts: Vec<&str> = from
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .take_while(|part| !is_glob(part))
        .collect();
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_known_from_before() {
        let mut standing = Standing::default();
        let env = |name: &str, value: &str| {
            Step::Env(BTreeMap::from([(name.to_owned(), value.to_owned())]))
        };
        standing.after(&env("APP", "/opt/app"));
        standing.after(&env("PATH", "$APP/bin:${APP}/sbin:$PATH$"));
        assert_eq!(
            standing.env["PATH"],
            format!("/opt/app/bin:/opt/app/sbin:{PATH}$")
        );
        standing.after(&env("NONE", "a$missing-b${no!}"));
        assert_eq!(standing.env["NONE"], "a-b${no!}");
    }

    #[test]
    fn paths_stand_where_the_step_stands() {
        let mut standing = Standing::default();
        assert_eq!(standing.place("a"), "/home/user/a");
        standing.after(&Step::Workdir("/srv/".to_owned()));
        assert_eq!(standing.place("./a/b"), "/srv/a/b");
        assert_eq!(standing.place("."), "/srv/");
        standing.after(&Step::User("root".to_owned()));
        assert_eq!(standing.place("~/x"), "/root/x");
        assert_eq!(standing.place("/x"), "/x");
    }

    #[test]
    fn globs_are_cut_off() {
        for (from, expected) in [
            ("app", "app"),
            ("./app/", "app"),
            (".", ""),
            ("app/*.py", "app"),
            ("*.py", ""),
        ] {
            assert_eq!(source_of(from), expected, "{from}");
        }
    }
}
