//! The query of `/files`.

use super::error::FileError;
use percent_encoding::percent_decode_str;

/// What a `/files` request names. Signatures are the host's business.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct FilesQuery {
    pub path: Option<String>,
    pub username: Option<String>,
}

impl FilesQuery {
    /// Reads a query; the first of several equal keys counts.
    pub(crate) fn parse(query: Option<&str>) -> Result<Self, FileError> {
        let mut found = Self::default();
        for pair in query.unwrap_or_default().split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let place = match key {
                "path" => &mut found.path,
                "username" => &mut found.username,
                _ => continue,
            };
            if place.is_none() {
                *place = Some(decode(key, value)?);
            }
        }
        Ok(found)
    }
}

/// Some clients write a space as `+`, others as `%20`.
fn decode(key: &str, value: &str) -> Result<String, FileError> {
    let spaced = value.replace('+', " ");
    match percent_decode_str(&spaced).decode_utf8() {
        Ok(text) => Ok(text.into_owned()),
        Err(_) => Err(FileError::bad_request(format!("{key} is not UTF-8 text"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_a_space() {
        let parse = |text| FilesQuery::parse(Some(text));
        let got = parse("path=a+b%20c%2B&signature=x&username=root&path=second").expect("query");
        assert_eq!(got.path.as_deref(), Some("a b c+"));
        assert_eq!(got.username.as_deref(), Some("root"));
        assert_eq!(FilesQuery::parse(None), Ok(FilesQuery::default()));
        assert_eq!(parse("path").expect("query").path.as_deref(), Some(""));
        assert_eq!(parse("path=%ff").expect_err("refused").status, 400);
    }
}
