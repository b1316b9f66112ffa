//! Which lines of a log somebody wants.

use sandkeep_model::{Error, Result};

use crate::query::{Query, shown};

/// How loud a line is; later is louder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Loudness {
    Info,
    Warn,
    Error,
}

/// A line of some log.
pub(super) trait LogLine {
    /// Milliseconds since 1970.
    fn at(&self) -> i64;
    fn loudness(&self) -> Loudness;
    fn message(&self) -> &str;
}

#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// Milliseconds: not before in reading order.
    pub cursor: Option<i64>,
    pub limit: Option<usize>,
    pub backward: bool,
    pub least: Option<Loudness>,
    pub search: Option<String>,
}

impl Wanted {
    pub(super) fn of(query: &mut Query) -> Result<Self> {
        let backward = match query.take("direction")?.as_deref() {
            None | Some("" | "forward") => false,
            Some("backward") => true,
            Some(other) => return Err(one_of("direction", other, "forward or backward")),
        };
        Ok(Self {
            cursor: query.parsed("cursor")?,
            limit: query.parsed("limit")?,
            backward,
            least: least(query)?,
            search: query.take("search")?.filter(|text| !text.is_empty()),
        })
    }

    pub(super) fn matches(&self, line: &impl LogLine) -> bool {
        let reached = match self.cursor {
            Some(cursor) if self.backward => line.at() <= cursor,
            Some(cursor) => line.at() >= cursor,
            None => true,
        };
        let search = self.search.as_deref();
        reached
            && self.least.is_none_or(|least| line.loudness() >= least)
            && search.is_none_or(|text| line.message().contains(text))
    }

    /// At most `most` of them, in the order that was asked for.
    pub(super) fn pick<T: LogLine>(&self, mut lines: Vec<T>, most: usize) -> Vec<T> {
        if self.backward {
            lines.reverse();
        }
        lines.retain(|line| self.matches(line));
        lines.truncate(self.limit.unwrap_or(most).min(most));
        lines
    }
}

/// The least loudness a query asks for.
pub(super) fn least(query: &mut Query) -> Result<Option<Loudness>> {
    match query.take("level")?.as_deref() {
        None | Some("" | "debug") => Ok(None),
        Some("info") => Ok(Some(Loudness::Info)),
        Some("warn") => Ok(Some(Loudness::Warn)),
        Some("error") => Ok(Some(Loudness::Error)),
        Some(other) => Err(one_of("level", other, "debug, info, warn or error")),
    }
}

fn one_of(name: &str, given: &str, what: &str) -> Error {
    Error::invalid(
        name,
        format!("{name} is {}, it must be {what}", shown(given)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Said(i64, Loudness, String);

    impl LogLine for Said {
        fn at(&self) -> i64 {
            self.0
        }
        fn loudness(&self) -> Loudness {
            self.1
        }
        fn message(&self) -> &str {
            &self.2
        }
    }

    fn picked(query: &str) -> Vec<String> {
        let levels = [Loudness::Info, Loudness::Warn, Loudness::Error];
        let said = (1..).zip(levels);
        let said = said.map(|(n, level)| Said(1000 * n, level, format!("line {n}")));
        let wanted = Wanted::of(&mut Query::parse(query).unwrap()).unwrap();
        let picked = wanted.pick(said.collect(), 100).into_iter();
        picked.map(|line| line.2).collect()
    }

    #[test]
    fn lines_are_picked() {
        assert_eq!(picked(""), ["line 1", "line 2", "line 3"]);
        assert_eq!(picked("direction=backward&limit=1"), ["line 3"]);
        assert_eq!(picked("cursor=2000"), ["line 2", "line 3"]);
        assert_eq!(
            picked("cursor=2000&direction=backward"),
            ["line 2", "line 1"]
        );
        assert_eq!(picked("level=warn"), ["line 2", "line 3"]);
        assert_eq!(picked("search=3"), ["line 3"]);
    }

    #[test]
    fn wrong_wishes_are_named() {
        for (query, field) in [
            ("direction=up", "direction"),
            ("level=loud", "level"),
            ("limit=x", "limit"),
            ("cursor=now", "cursor"),
        ] {
            let error = Wanted::of(&mut Query::parse(query).unwrap()).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{query}");
        }
    }
}
