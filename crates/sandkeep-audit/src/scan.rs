//! Lines of a file from either end, in bounded memory.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _},
    os::unix::fs::FileExt as _,
};

use crate::line::MAX_LINE_BYTES;

const BLOCK: usize = 64 * 1024;

/// A finished line, without its newline.
pub(crate) enum Line {
    Whole(Vec<u8>),
    /// Longer than any line of ours; its bytes were skipped.
    TooLong,
}

/// Lines from the start.
pub(crate) struct Forward {
    reader: BufReader<File>,
    /// Bytes behind the last newline, once the end was seen.
    pub unfinished: u64,
}

impl Forward {
    pub fn new(file: File) -> Self {
        Self {
            reader: BufReader::with_capacity(BLOCK, file),
            unfinished: 0,
        }
    }

    pub fn next(&mut self) -> io::Result<Option<Line>> {
        let mut line = Vec::new();
        let limit = MAX_LINE_BYTES as u64 + 1;
        self.reader
            .by_ref()
            .take(limit)
            .read_until(b'\n', &mut line)?;
        if line.pop_if(|last| *last == b'\n').is_some() {
            return Ok(Some(Line::Whole(line)));
        }
        let mut skipped = line.len() as u64;
        if skipped < limit {
            self.unfinished = skipped;
            return Ok(None);
        }
        // Too long: on to its end, without holding it.
        loop {
            let chunk = self.reader.fill_buf()?;
            if chunk.is_empty() {
                self.unfinished = skipped;
                return Ok(None);
            }
            if let Some(at) = chunk.iter().position(|byte| *byte == b'\n') {
                self.reader.consume(at + 1);
                return Ok(Some(Line::TooLong));
            }
            let length = chunk.len();
            skipped += length as u64;
            self.reader.consume(length);
        }
    }
}

/// Lines from the end.
pub(crate) struct Backward {
    file: File,
    /// Everything from here on was handed out or stands in `held`.
    at: u64,
    /// The file from `at` up to the newline of the last line not handed out, that one included.
    held: Vec<u8>,
    /// The line at the end of `held` has lost its end, because it is too long.
    cut: bool,
}

impl Backward {
    /// Bytes behind the last newline are left out.
    pub fn new(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let at = end_of_last_line(&file, length)?;
        Ok(Self {
            file,
            at,
            held: Vec::new(),
            cut: false,
        })
    }

    pub fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let body = &self.held[..self.held.len().saturating_sub(1)];
            if let Some(newline) = body.iter().rposition(|byte| *byte == b'\n') {
                let line = body[newline + 1..].to_vec();
                self.held.truncate(newline + 1);
                return Ok(Some(self.finished(line)));
            }
            if self.at == 0 {
                if self.held.is_empty() {
                    return Ok(None);
                }
                let line = body.to_vec();
                self.held = Vec::new();
                return Ok(Some(self.finished(line)));
            }
            if self.held.len() > MAX_LINE_BYTES {
                // Its newline is kept, to know where it ends.
                self.held = vec![b'\n'];
                self.cut = true;
            }
            self.load()?;
        }
    }

    fn finished(&mut self, line: Vec<u8>) -> Line {
        if std::mem::take(&mut self.cut) || line.len() > MAX_LINE_BYTES {
            Line::TooLong
        } else {
            Line::Whole(line)
        }
    }

    fn load(&mut self) -> io::Result<()> {
        let size = usize::try_from(self.at).unwrap_or(usize::MAX).min(BLOCK);
        let start = self.at - size as u64;
        let mut block = vec![0; size];
        self.file.read_exact_at(&mut block, start)?;
        block.append(&mut self.held);
        self.held = block;
        self.at = start;
        Ok(())
    }
}

/// Where the last finished line ends: behind its newline, or at zero.
pub(crate) fn end_of_last_line(file: &File, length: u64) -> io::Result<u64> {
    let mut end = length;
    let mut block = vec![0; BLOCK];
    while end > 0 {
        let size = usize::try_from(end).unwrap_or(usize::MAX).min(BLOCK);
        let start = end - size as u64;
        file.read_exact_at(&mut block[..size], start)?;
        if let Some(newline) = block[..size].iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + newline as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        file
    }

    fn shown(line: Line) -> Option<Vec<u8>> {
        match line {
            Line::Whole(bytes) => Some(bytes),
            Line::TooLong => None,
        }
    }

    /// Both ways give the same lines, whatever their lengths are.
    #[test]
    fn both_ways_agree() {
        let long = MAX_LINE_BYTES;
        let cases: [&[usize]; 8] = [
            &[],
            &[0],
            &[0, 0, 5],
            &[10; 20_000],
            &[long, 1, long],
            &[long + 1, 3, long + 1],
            &[1, 5 * BLOCK, 2, BLOCK, BLOCK - 1, BLOCK + 1],
            &[3 * BLOCK + 7, 3 * BLOCK],
        ];
        for lengths in cases {
            for tail in [0, 3, BLOCK, 2 * BLOCK] {
                let mut bytes = Vec::new();
                for (index, length) in lengths.iter().enumerate() {
                    let letter = b'a' + u8::try_from(index % 26).unwrap();
                    bytes.extend(std::iter::repeat_n(letter, *length));
                    bytes.push(b'\n');
                }
                bytes.extend(std::iter::repeat_n(0, tail));
                let mut forward = Forward::new(file(&bytes));
                let mut there = Vec::new();
                while let Some(line) = forward.next().unwrap() {
                    there.push(shown(line));
                }
                assert_eq!(forward.unfinished, tail as u64);
                let mut backward = Backward::new(file(&bytes)).unwrap();
                let mut back = Vec::new();
                while let Some(line) = backward.next().unwrap() {
                    back.push(shown(line));
                }
                back.reverse();
                assert_eq!(there, back);
                assert_eq!(there.len(), lengths.len());
                for (line, length) in there.iter().zip(lengths) {
                    assert_eq!(
                        line.as_ref().map(Vec::len),
                        (*length <= long).then_some(*length)
                    );
                }
            }
        }
    }
}
