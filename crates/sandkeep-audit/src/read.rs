//! Reading a log, also while it is written.

use std::path::Path;

use sandkeep_model::{Error, Result, SandboxId, Timestamp};

use crate::{
    Record,
    line::parse,
    scan::{Backward, Forward, Line},
    segment::Segment,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    #[default]
    NewestFirst,
    OldestFirst,
}

/// Which entries; what is not set does not matter.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub order: Order,
    pub sandbox: Option<SandboxId>,
    /// The wire name, e.g. `connection_denied`.
    pub action: Option<String>,
    /// From this time on.
    pub from: Option<Timestamp>,
    /// Before this time.
    pub to: Option<Timestamp>,
    /// Only numbers above this one: the next page, oldest first.
    pub after: Option<u64>,
    /// Only numbers below this one: the next page, newest first.
    pub before: Option<u64>,
    pub limit: Option<usize>,
}

impl Filter {
    fn fits(&self, record: &Record) -> bool {
        self.fits_number(record.seq)
            && self.from.is_none_or(|from| record.at >= from)
            && self.to.is_none_or(|to| record.at < to)
            && self
                .action
                .as_ref()
                .is_none_or(|action| record.action.name() == action)
            && self
                .sandbox
                .as_ref()
                .is_none_or(|sandbox| record.sandbox.as_ref() == Some(sandbox))
    }

    fn fits_number(&self, seq: u64) -> bool {
        self.after.is_none_or(|after| seq > after) && self.before.is_none_or(|before| seq < before)
    }

    /// Whether no later entry in reading order can fit.
    fn is_past(&self, seq: u64) -> bool {
        match self.order {
            Order::OldestFirst => self.before.is_some_and(|before| seq >= before),
            Order::NewestFirst => self.after.is_some_and(|after| seq <= after),
        }
    }
}

/// Reads the log in `dir`; nobody needs to hold it open.
pub fn read(dir: &Path, filter: Filter) -> Result<Reader> {
    Reader::new(dir, filter)
}

/// Entries one by one, holding one block of one file. A damaged line is an error of its own, and
/// the lines behind it follow.
#[derive(Debug)]
pub struct Reader {
    filter: Filter,
    /// Still to be read, the next one last.
    segments: Vec<Segment>,
    current: Option<(Segment, Lines)>,
    given: usize,
}

enum Lines {
    Forward(Forward),
    Backward(Backward),
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lines")
    }
}

impl Reader {
    pub(crate) fn new(dir: &Path, filter: Filter) -> Result<Self> {
        let all = Segment::list(dir)?;
        // Segment `i` holds the numbers from its own first up to the next one's.
        let mut segments: Vec<Segment> = all
            .iter()
            .enumerate()
            .filter(|(index, segment)| {
                let starts_before = filter.before.is_none_or(|before| segment.first < before);
                let ends_after = match (filter.after, all.get(index + 1)) {
                    (Some(after), Some(next)) => next.first > after.saturating_add(1),
                    _ => true,
                };
                starts_before && ends_after
            })
            .map(|(_, segment)| segment.clone())
            .collect();
        if filter.order == Order::OldestFirst {
            segments.reverse();
        }
        Ok(Self {
            filter,
            segments,
            current: None,
            given: 0,
        })
    }

    fn advance(&mut self) -> Result<Option<Record>> {
        loop {
            if self.current.is_none() {
                let Some(segment) = self.segments.pop() else {
                    return Ok(None);
                };
                let file = segment.open_to_read()?;
                let lines = match self.filter.order {
                    Order::OldestFirst => Lines::Forward(Forward::new(file)),
                    Order::NewestFirst => Lines::Backward(
                        Backward::new(file).map_err(|error| segment.doing("reading", error))?,
                    ),
                };
                self.current = Some((segment, lines));
            }
            let Some((segment, lines)) = &mut self.current else {
                return Ok(None);
            };
            let next = match lines {
                Lines::Forward(lines) => lines.next(),
                Lines::Backward(lines) => lines.next(),
            };
            let why = match next.map_err(|error| segment.doing("reading", error))? {
                None => {
                    self.current = None;
                    continue;
                }
                Some(Line::TooLong) => "the line is too long",
                Some(Line::Whole(line)) => match parse(&line) {
                    Ok(record) if self.filter.is_past(record.seq) => {
                        self.current = None;
                        self.segments.clear();
                        return Ok(None);
                    }
                    Ok(record) if self.filter.fits(&record) => return Ok(Some(record)),
                    Ok(_) => continue,
                    Err(why) => why,
                },
            };
            return Err(Error::internal(format!(
                "a line of {} is damaged: {why}",
                segment.path.display()
            ))
            .hint("`sandkeep audit verify` names the place"));
        }
    }
}

impl Iterator for Reader {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.filter.limit.is_some_and(|limit| self.given >= limit) {
            return None;
        }
        let next = self.advance().transpose();
        if matches!(next, Some(Ok(_))) {
            self.given += 1;
        }
        next
    }
}
