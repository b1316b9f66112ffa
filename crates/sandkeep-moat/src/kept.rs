//! What a sandbox has spent, moved and been refused, written down as it happens: a pause, a server
//! that begins anew and one that is killed take nothing back of it.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{
    denials::{Denial, Denials},
    traffic::Traffic,
};

/// A file that has more than this is ours no more.
const LARGEST: u64 = 8 << 20;
/// Lines in the file of refusals before it is written anew.
const MOST_LINES: usize = 1024;

/// What is kept of one sandbox.
#[derive(Debug, Clone, Default)]
pub(crate) struct Before {
    /// Of the bytes its policy gives it.
    pub spent: u64,
    pub traffic: Traffic,
    /// Oldest first.
    pub denials: Vec<Denial>,
}

/// Where it is kept.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub spent: PathBuf,
    pub denials: PathBuf,
}

impl Places {
    pub fn read(&self) -> Before {
        let (spent, traffic) = self.numbers().unwrap_or_default();
        Before {
            spent,
            traffic,
            denials: self.refusals(),
        }
    }

    /// `None`: nothing was ever written down.
    pub fn numbers(&self) -> Option<(u64, Traffic)> {
        let text = read(&self.spent)?;
        let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        let found = (|| {
            let spent = next()?;
            Some((
                spent,
                Traffic {
                    bytes_sent: next()?,
                    bytes_received: next()?,
                    connections: next()?,
                    open_connections: 0,
                    denied: next()?,
                    dns_queries: next()?,
                    dns_blocked: next()?,
                },
            ))
        })();
        if found.is_none() {
            tracing::warn!(file = %self.spent.display(), "what a sandbox has spent of its budget cannot be read; it is counted from zero");
        }
        found
    }

    fn refusals(&self) -> Vec<Denial> {
        let mut denials = Denials::default();
        for line in read(&self.denials).unwrap_or_default().lines() {
            // The last line of a server that was killed may be cut.
            if let Ok(denial) = serde_json::from_str(line) {
                denials.restore(denial);
            }
        }
        denials.into_oldest_first()
    }
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let opened = fs::File::open(path).and_then(|file| file.take(LARGEST).read_to_string(&mut text));
    match opened {
        Ok(_) => Some(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "what a sandbox has spent or was refused cannot be read");
            None
        }
    }
}

/// The pen of a sandbox that is attached.
#[derive(Debug)]
pub(crate) struct Pen {
    places: Places,
    /// `None` once it is put down: whoever comes after writes the same files.
    files: Mutex<Option<Files>>,
}

#[derive(Debug)]
struct Files {
    spent: fs::File,
    denials: fs::File,
    lines: usize,
}

impl Pen {
    pub fn take_up(places: Places) -> io::Result<Self> {
        let spent = fs::File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&places.spent)?;
        let denials = appending(&places.denials)?;
        Ok(Self {
            places,
            files: Mutex::new(Some(Files {
                spent,
                denials,
                // It is written anew soon, whatever is in it.
                lines: MOST_LINES / 2,
            })),
        })
    }

    pub fn numbers(&self, spent: u64, traffic: &Traffic) {
        let mut files = self.lock();
        if let Some(files) = &mut *files {
            told(
                &self.places.spent,
                write_numbers(&files.spent, spent, traffic),
            );
        }
    }

    /// One refusal more; `all`: every one there is, oldest first, for when the file is too long.
    pub fn refusal(&self, denial: &Denial, all: impl FnOnce() -> Vec<Denial>) {
        let mut files = self.lock();
        let Some(open) = &mut *files else {
            return;
        };
        open.lines += 1;
        let done = if open.lines > MOST_LINES {
            self.rewrite(&all()).and_then(|lines| {
                open.denials = appending(&self.places.denials)?;
                open.lines = lines;
                Ok(())
            })
        } else {
            open.denials.write_all(line(denial).as_bytes())
        };
        told(&self.places.denials, done);
    }

    /// The last words. Nothing is written after them.
    pub fn put_down(&self, spent: u64, traffic: &Traffic, all: &[Denial]) {
        let Some(files) = self.lock().take() else {
            return;
        };
        told(
            &self.places.spent,
            write_numbers(&files.spent, spent, traffic),
        );
        told(&self.places.denials, self.rewrite(all).map(drop));
    }

    fn rewrite(&self, all: &[Denial]) -> io::Result<usize> {
        let text: String = all.iter().map(line).collect();
        let beside = self.places.denials.with_extension("denials-new");
        fs::write(&beside, text)?;
        fs::rename(beside, &self.places.denials)?;
        Ok(all.len())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Files>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn appending(path: &Path) -> io::Result<fs::File> {
    fs::File::options().append(true).create(true).open(path)
}

/// Always as long, so that the new words cover the old ones.
fn write_numbers(file: &fs::File, spent: u64, traffic: &Traffic) -> io::Result<()> {
    let text = format!(
        "{spent:020} {:020} {:020} {:020} {:020} {:020} {:020}\n",
        traffic.bytes_sent,
        traffic.bytes_received,
        traffic.connections,
        traffic.denied,
        traffic.dns_queries,
        traffic.dns_blocked
    );
    file.write_all_at(text.as_bytes(), 0)
}

fn line(denial: &Denial) -> String {
    let mut text = serde_json::to_string(denial).unwrap_or_default();
    text.push('\n');
    text
}

fn told(path: &Path, done: io::Result<()>) {
    if let Err(error) = done {
        tracing::warn!(file = %path.display(), %error, "what a sandbox has spent or was refused is not written down");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denials::Via;
    use sandkeep_model::Timestamp;

    fn denial(host: &str) -> Denial {
        Denial {
            via: Via::Tcp,
            host: host.to_owned(),
            port: 22,
            reason: crate::policy::Reason::NoRule,
            range: None,
            request: None,
            why: "because".to_owned(),
            hint: String::new(),
            first: Timestamp::from_millis(1),
            last: Timestamp::from_millis(2),
            count: 1,
        }
    }

    #[test]
    fn what_was_written_is_read_whether_or_not_it_ended_well() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places {
            spent: dir.path().join("i.spent"),
            denials: dir.path().join("i.denials"),
        };
        assert!(places.numbers().is_none());
        let pen = Pen::take_up(places.clone()).unwrap();
        let traffic = Traffic {
            bytes_sent: 7,
            denied: 3,
            dns_blocked: 2,
            ..Traffic::default()
        };
        pen.numbers(123_456, &traffic);
        pen.numbers(9, &traffic);
        pen.refusal(&denial("a.test"), Vec::new);
        let again = Denial {
            count: 4,
            ..denial("a.test")
        };
        pen.refusal(&denial("b.test"), Vec::new);
        pen.refusal(&again, Vec::new);
        // As a killed server leaves it.
        let found = places.read();
        assert_eq!((found.spent, found.traffic), (9, traffic));
        assert_eq!(found.denials, [denial("b.test"), again.clone()]);
        // Many are not kept line by line.
        for _ in 0..2 * MOST_LINES {
            pen.refusal(&again, || vec![again.clone()]);
        }
        let text = fs::read_to_string(&places.denials).unwrap();
        assert!(
            text.lines().count() <= MOST_LINES,
            "{}",
            text.lines().count()
        );
        pen.put_down(10, &traffic, &[denial("c.test")]);
        pen.numbers(11, &traffic);
        pen.refusal(&again, Vec::new);
        let found = places.read();
        assert_eq!(found.spent, 10, "nothing is written after the last words");
        assert_eq!(found.denials, [denial("c.test")]);
    }
}
