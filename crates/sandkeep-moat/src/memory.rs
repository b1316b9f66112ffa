//! What sandboxes were told about names, written down: a server that begins anew knows it again,
//! and so does a sandbox that comes back from the disk.

use std::{
    fmt::Write as _,
    fs,
    io::{self, Read as _, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use sandkeep_model::SandboxId;

use crate::{dns::Given, kept::Places, policy::Host};

/// A file that has more than this is ours no more.
const LARGEST: u64 = 8 << 20;

/// One file for each sandbox, with the times as the clock says; and one for each of its points,
/// with what was left then: for who sleeps, no time goes by.
#[derive(Debug, Clone)]
pub struct Memory {
    dir: PathBuf,
}

impl Memory {
    pub fn open(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        Ok(Self {
            dir: dir.to_owned(),
        })
    }

    fn running(&self, id: &SandboxId) -> PathBuf {
        self.dir.join(format!("{id}.running"))
    }

    fn resting(&self, point: &str) -> PathBuf {
        self.dir.join(format!("{point}.resting"))
    }

    /// Where it is kept what a sandbox has spent, moved and been refused.
    pub fn kept(&self, id: &SandboxId) -> Places {
        Places {
            spent: self.dir.join(format!("{id}.spent")),
            denials: self.dir.join(format!("{id}.denials")),
        }
    }

    pub fn note(&self, id: &SandboxId, given: &[Given]) -> io::Result<()> {
        let text = written(given, now());
        let mut file = fs::File::options()
            .append(true)
            .create(true)
            .open(self.running(id))?;
        file.write_all(text.as_bytes())
    }

    /// In the place of all that was noted.
    pub fn rewrite(&self, id: &SandboxId, given: &[Given]) -> io::Result<()> {
        replace(&self.running(id), &written(given, now()))
    }

    pub fn of_sandbox(&self, id: &SandboxId) -> Vec<Given> {
        read(&self.running(id), now())
    }

    pub fn keep_at(&self, point: &str, given: &[Given]) -> io::Result<()> {
        if given.is_empty() {
            return Ok(());
        }
        replace(&self.resting(point), &written(given, Duration::ZERO))
    }

    pub fn of_point(&self, point: &str) -> Vec<Given> {
        read(&self.resting(point), Duration::ZERO)
    }

    pub fn forget_sandbox(&self, id: &SandboxId) {
        forget(&self.running(id));
        let Places { spent, denials } = self.kept(id);
        forget(&spent);
        forget(&denials);
    }

    pub fn forget_point(&self, point: &str) {
        forget(&self.resting(point));
    }

    /// Forgets all sandboxes and points but those that are there.
    pub fn keep_only(
        &self,
        sandbox: impl Fn(&str) -> bool,
        point: impl Fn(&str) -> bool,
    ) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let kind = path.extension().and_then(|kind| kind.to_str());
            let known = match (name, kind) {
                (Some(name), Some("running" | "spent" | "denials")) => sandbox(name),
                (Some(name), Some("resting")) => point(name),
                _ => false,
            };
            if !known {
                forget(&path);
            }
        }
        Ok(())
    }
}

fn forget(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(file = %path.display(), %error, "a file that is not needed any more stays");
        }
        _ => {}
    }
}

fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// One line each: until when it speaks, until when it opens, the address, the name.
fn written(given: &[Given], from: Duration) -> String {
    let mut text = String::new();
    for one in given {
        let (speaks, opens) = (from + one.speaks, from + one.opens);
        let _infallible = writeln!(
            text,
            "{} {} {} {}",
            speaks.as_millis(),
            opens.as_millis(),
            one.address,
            one.name
        );
    }
    text
}

fn replace(path: &Path, text: &str) -> io::Result<()> {
    let beside = path.with_extension("new");
    fs::write(&beside, text)?;
    fs::rename(beside, path)
}

/// What cannot be read is not known: the sandbox asks its resolver again.
fn read(path: &Path, from: Duration) -> Vec<Given> {
    let mut text = String::new();
    let opened = fs::File::open(path).and_then(|file| file.take(LARGEST).read_to_string(&mut text));
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "what a sandbox was told about names is lost");
            return Vec::new();
        }
        Ok(_) => {}
    }
    text.lines().filter_map(|line| parsed(line, from)).collect()
}

fn parsed(line: &str, from: Duration) -> Option<Given> {
    let mut words = line.split(' ');
    let mut until = || {
        let millis: u64 = words.next()?.parse().ok()?;
        Some(Duration::from_millis(millis).saturating_sub(from))
    };
    let (speaks, opens) = (until()?, until()?);
    let address: IpAddr = words.next()?.parse().ok()?;
    let name = words.next()?.parse().ok()?;
    let whole = words.next().is_none() && matches!(name, Host::Name(_)) && !opens.is_zero();
    whole.then_some(Given {
        address,
        name,
        speaks,
        opens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(address: &str, name: &str, opens: u64) -> Given {
        Given {
            address: address.parse().unwrap(),
            name: name.parse().unwrap(),
            speaks: Duration::from_secs(opens / 2),
            opens: Duration::from_secs(opens),
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::open(dir.path()).unwrap();
        let id = SandboxId::random();
        assert!(memory.of_sandbox(&id).is_empty());
        let both = [
            given("192.0.2.1", "a.test", 7200),
            given("2001:db8::1", "b.test", 600),
        ];
        memory.note(&id, &both[..1]).unwrap();
        memory.note(&id, &both[1..]).unwrap();
        let found = memory.of_sandbox(&id);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[1].address, &found[1].name),
            (both[1].address, &both[1].name)
        );
        assert!(found[0].opens <= both[0].opens && found[0].opens > both[0].opens / 2);
        // Those that rest lose no time.
        memory.keep_at("point", &both).unwrap();
        assert_eq!(memory.of_point("point"), both);
        memory
            .keep_only(|_| false, |point| point == "point")
            .unwrap();
        assert!(memory.of_sandbox(&id).is_empty());
        assert_eq!(memory.of_point("point").len(), 2);
        memory.forget_point("point");
        assert!(memory.of_point("point").is_empty());
    }

    #[test]
    fn what_is_over_and_what_is_none_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let memory = Memory::open(dir.path()).unwrap();
        let id = SandboxId::random();
        let far = u64::MAX / 2;
        let text = format!(
            "1 2 192.0.2.1 over.test\n\
             {far} {far} 192.0.2.1 good.test\n\
             {far} {far} 192.0.2.1 two.test words\n\
             {far} {far} nowhere bad.test\n\
             {far} {far} 192.0.2.1 192.0.2.9\n\
             {far} x 192.0.2.1 c.test\n\
             {far} {far} 192.0.2.2 cut"
        );
        fs::write(memory.running(&id), text).unwrap();
        let names: Vec<String> = memory
            .of_sandbox(&id)
            .iter()
            .map(|given| given.name.to_string())
            .collect();
        assert_eq!(names, ["good.test", "cut"]);
    }
}
