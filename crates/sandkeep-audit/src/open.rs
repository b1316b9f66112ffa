//! Finding the end of a log again, and cutting off what a crash left of a line.

use std::{fs::File, path::Path};

use sandkeep_model::{Error, Result};

use crate::{
    Action, Head,
    line::unseal,
    scan::{Backward, Line, end_of_last_line},
    segment::Segment,
};

/// The end of a log, ready to be written on.
pub(crate) struct End {
    pub segment: Segment,
    pub file: File,
    pub size: u64,
    pub head: Head,
    /// What was repaired, to be put on record.
    pub repaired: Option<Action>,
}

pub(crate) fn find_end(dir: &Path) -> Result<End> {
    let segments = Segment::list(dir)?;
    let Some(segment) = segments.last().cloned() else {
        let segment = Segment::new(dir, Head::EMPTY.seq + 1);
        return Ok(End {
            file: segment.open_to_write()?,
            segment,
            size: 0,
            head: Head::EMPTY,
            repaired: None,
        });
    };
    let file = segment.open_to_write()?;
    let (size, repaired) = cut_torn_line(&segment, &file)?;
    let head = match (last_head(&segment)?, segments.iter().rev().nth(1)) {
        (Some(head), _) => head,
        // A segment that was just begun has no line yet: the one before it has the last.
        (None, Some(before)) => last_head(before)?.unwrap_or(Head::EMPTY),
        (None, None) => Head::EMPTY,
    };
    if size == 0 && head.seq + 1 != segment.first {
        return Err(damaged(&segment, "the lines before it are missing"));
    }
    Ok(End {
        segment,
        file,
        size,
        head,
        repaired,
    })
}

/// Only the end of the last segment can be torn: a segment is durable before the next begins.
fn cut_torn_line(segment: &Segment, file: &File) -> Result<(u64, Option<Action>)> {
    let fault = |error| segment.doing("repairing", error);
    let length = file.metadata().map_err(fault)?.len();
    let end = end_of_last_line(file, length).map_err(fault)?;
    if end == length {
        return Ok((length, None));
    }
    file.set_len(end).map_err(fault)?;
    file.sync_all().map_err(fault)?;
    let cut = Action::LogRepaired {
        segment: segment.name().into(),
        bytes_cut: length - end,
    };
    Ok((end, Some(cut)))
}

/// The place in the chain the last line of this segment has. It must be sound: going on from a
/// line that is not would hide who changed it.
fn last_head(segment: &Segment) -> Result<Option<Head>> {
    let fault = |error| segment.doing("reading", error);
    let mut lines = Backward::new(segment.open_to_read()?).map_err(fault)?;
    match lines.next().map_err(fault)? {
        None => Ok(None),
        Some(Line::TooLong) => Err(damaged(segment, "its last line is too long")),
        Some(Line::Whole(line)) => unseal(&line)
            .map(|record| {
                Some(Head {
                    seq: record.seq,
                    hash: record.hash,
                })
            })
            .map_err(|why| damaged(segment, why)),
    }
}

fn damaged(segment: &Segment, why: &str) -> Error {
    Error::internal(format!(
        "the audit log is damaged at the end of {}: {why}",
        segment.path.display()
    ))
    .hint("keep the directory as evidence under another name; a new log begins in an empty one")
}
