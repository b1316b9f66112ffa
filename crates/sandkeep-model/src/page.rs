//! Lists in pages.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};

use crate::{Error, SandboxId, State, TemplateName, Timestamp};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    Asc,
    #[default]
    Desc,
}

/// Which boxes to list. Everything left out does not filter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListFilter {
    /// All pairs must match.
    pub metadata: BTreeMap<String, String>,
    /// Empty means every state but gone.
    pub states: Vec<State>,
    pub template: Option<TemplateName>,
    pub started_after: Option<Timestamp>,
    pub order: Order,
    pub after: Option<PageToken>,
    /// 0 means the most a page may hold.
    pub limit: u32,
}

impl ListFilter {
    pub const MAX_LIMIT: u32 = 100;

    pub const fn page_size(&self) -> u32 {
        if self.limit == 0 || self.limit > Self::MAX_LIMIT {
            Self::MAX_LIMIT
        } else {
            self.limit
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next: Option<PageToken>,
}

/// Where the next page starts: the sort key of the last item seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageToken {
    pub started_at: Timestamp,
    pub id: SandboxId,
}

impl PageToken {
    /// What one looks like, as a regular expression.
    pub const PATTERN: &str = "^[0-9]{1,15}\\.i[a-z0-9]{20}$";
}

impl fmt::Display for PageToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.started_at.millis(), self.id)
    }
}

impl FromStr for PageToken {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || {
            Error::invalid("nextToken", "nextToken is not one this server gave")
                .hint("start again without it")
        };
        let (millis, id) = text.split_once('.').ok_or_else(bad)?;
        Ok(Self {
            started_at: Timestamp::from_millis(millis.parse().map_err(|_| bad())?),
            id: id.parse().map_err(|_| bad())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_as_they_went() {
        let token = PageToken {
            started_at: Timestamp::from_millis(-5),
            id: SandboxId::random(),
        };
        assert_eq!(token.to_string().parse::<PageToken>().unwrap(), token);
        for bad in ["", "1", "x.y", "1.../etc"] {
            assert!(bad.parse::<PageToken>().is_err());
        }
    }
}
