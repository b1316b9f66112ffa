//! Walking the chain.

use std::path::Path;

use sandkeep_model::Result;
use serde::Serialize;

use crate::{
    Hash, Head,
    line::unseal,
    scan::{Forward, Line},
    segment::Segment,
};

/// The first place where the log is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Broken {
    /// The file.
    pub segment: String,
    /// The line in it, counted from one.
    pub line: u64,
    pub why: String,
}

/// What a walk over the whole log found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Sound lines, up to the end or the break.
    pub entries: u64,
    /// The number of the first line; more than one if old segments were moved away.
    pub first: Option<u64>,
    /// The last sound line.
    pub head: Option<Head>,
    /// Bytes behind the last line: a write under way, or the trace of a crash.
    pub unfinished_bytes: u64,
    pub broken: Option<Broken>,
}

impl Verdict {
    pub fn is_sound(&self) -> bool {
        self.broken.is_none()
    }
}

/// Checks the log in `dir`. With a `head` remembered from before, also that everything up to it
/// is still there.
pub fn verify(dir: &Path, head: Option<&Head>) -> Result<Verdict> {
    verify_files(dir, head)
}

/// Checks one file of a log by itself, wherever it was moved to. What comes before its first
/// line is not known, so only the chain within it is checked.
pub fn verify_file(path: &Path) -> Result<Verdict> {
    let segment = Segment::alone(path)?;
    let mut walk = Walk::new(None);
    walk.segment(&segment, true)?;
    Ok(walk.verdict)
}

pub(crate) fn verify_files(dir: &Path, expected: Option<&Head>) -> Result<Verdict> {
    let mut walk = Walk::new(expected);
    let segments = Segment::list(dir)?;
    for (index, segment) in segments.iter().enumerate() {
        let is_last = index + 1 == segments.len();
        walk.segment(segment, is_last)?;
        if walk.verdict.broken.is_some() {
            return Ok(walk.verdict);
        }
    }
    let reached = walk.verdict.head.map_or(0, |head| head.seq);
    if let Some(expected) = expected
        && reached < expected.seq
    {
        walk.verdict.broken = Some(Broken {
            segment: segments.last().map(Segment::name).unwrap_or_default(),
            line: 0,
            why: format!(
                "the log ends at entry {reached}, but entry {} was written",
                expected.seq
            ),
        });
    }
    Ok(walk.verdict)
}

struct Walk<'a> {
    expected: Option<&'a Head>,
    verdict: Verdict,
}

impl<'a> Walk<'a> {
    const fn new(expected: Option<&'a Head>) -> Self {
        Self {
            expected,
            verdict: Verdict {
                entries: 0,
                first: None,
                head: None,
                unfinished_bytes: 0,
                broken: None,
            },
        }
    }

    fn segment(&mut self, segment: &Segment, is_last: bool) -> Result<()> {
        let mut lines = Forward::new(segment.open_to_read()?);
        let mut number = 0;
        loop {
            let next = lines
                .next()
                .map_err(|error| segment.doing("reading", error))?;
            number += 1;
            let checked = match next {
                Some(Line::Whole(line)) => self.line(&line, segment, number),
                Some(Line::TooLong) => Err("the line is too long"),
                None if lines.unfinished > 0 && !is_last => Err("the last line has no end"),
                None => {
                    self.verdict.unfinished_bytes = lines.unfinished;
                    return Ok(());
                }
            };
            if let Err(why) = checked {
                self.verdict.broken = Some(Broken {
                    segment: segment.name(),
                    line: number,
                    why: why.into(),
                });
                return Ok(());
            }
        }
    }

    fn line(&mut self, line: &[u8], segment: &Segment, number: u64) -> Result<(), &'static str> {
        let record = unseal(line)?;
        let follows = match self.verdict.head {
            Some(head) => record.seq == head.seq + 1 && record.prev == head.hash,
            None => (record.seq == 1) == (record.prev == Hash::START),
        };
        if !follows {
            return Err("the line does not follow the one before it");
        }
        if number == 1 && record.seq != segment.first {
            return Err("the file is named by another number than that of its first line");
        }
        let head = Head {
            seq: record.seq,
            hash: record.hash,
        };
        if self
            .expected
            .is_some_and(|expected| expected.seq == head.seq && expected.hash != head.hash)
        {
            return Err("the line is not the one that was written");
        }
        self.verdict.entries += 1;
        self.verdict.first.get_or_insert(record.seq);
        self.verdict.head = Some(head);
        Ok(())
    }
}
