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
    ///
    /// Keys are decoded as values are. The host checks signatures over what *it* reads in the
    /// query: a key it knows and this did not would be signed but not obeyed.
    pub fn parse(query: Option<&str>) -> Result<Self, FileError> {
        let mut found = Self::default();
        for pair in query.unwrap_or_default().split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, place) = match decode(key).as_deref() {
                Some("path") => ("path", &mut found.path),
                Some("username") => ("username", &mut found.username),
                _ => continue,
            };
            if place.is_none() {
                let refused = || FileError::bad_request(format!("{name} is not UTF-8 text"));
                *place = Some(decode(value).ok_or_else(refused)?);
            }
        }
        Ok(found)
    }
}

/// Some clients write a space as `+`, others as `%20`. `None` when it is no UTF-8.
fn decode(text: &str) -> Option<String> {
    let spaced = text.replace('+', " ");
    let decoded = percent_decode_str(&spaced).decode_utf8().ok()?;
    Some(decoded.into_owned())
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

    #[test]
    fn keys_in_percent_signs_are_the_keys_they_spell() {
        let query = "%70ath=/signed&user%6Eame=root&p%61th=/other&%ff=x";
        let got = FilesQuery::parse(Some(query)).expect("query");
        assert_eq!(got.path.as_deref(), Some("/signed"));
        assert_eq!(got.username.as_deref(), Some("root"));
    }
}
