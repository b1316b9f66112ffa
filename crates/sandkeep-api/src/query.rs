//! The query of a request, taken apart by name so that every refusal can name the parameter.

use std::{collections::BTreeMap, fmt::Display, str::FromStr};

use axum::extract::FromRequestParts;
use http::request::Parts;
use percent_encoding::percent_decode_str;
use sandkeep_model::{Code, Error, Result};

use crate::error::{E2bError, NativeError};

/// More would not fit any sensible request.
const MAX_QUERY_BYTES: usize = 16 * 1024;
const MAX_PARAMETERS: usize = 256;

/// `a+b%20c` -> `a b c`; refuses what is not UTF-8.
pub(crate) fn form_decode(text: &str) -> Option<String> {
    let spaced = text.replace('+', " ");
    percent_decode_str(&spaced)
        .decode_utf8()
        .ok()
        .map(std::borrow::Cow::into_owned)
}

#[derive(Debug, Default)]
pub(crate) struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub(crate) fn parse(raw: &str) -> Result<Self> {
        if raw.len() > MAX_QUERY_BYTES {
            return Err(Error::new(
                Code::TooLarge,
                format!(
                    "the query is {} bytes, the limit is {MAX_QUERY_BYTES}",
                    raw.len()
                ),
            ));
        }
        let mut pairs = Vec::new();
        for part in raw.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let name = form_decode(name)
                .ok_or_else(|| Error::invalid("query", "a parameter's name is not UTF-8"))?;
            let value = form_decode(value).ok_or_else(|| {
                Error::invalid(&name, format!("the value of {} is not UTF-8", shown(&name)))
            })?;
            pairs.push((name, value));
        }
        if pairs.len() > MAX_PARAMETERS {
            return Err(Error::new(
                Code::TooLarge,
                format!("the query has more than {MAX_PARAMETERS} parameters"),
            ));
        }
        Ok(Self { pairs })
    }

    /// A parameter without a value is a mistake, but for metadata, whose values may be empty.
    fn refuse_empty(&self) -> Result<()> {
        let empty = |(name, value): &&(String, String)| value.is_empty() && !name.ends_with(']');
        match self.pairs.iter().find(empty) {
            Some((name, _)) => Err(Error::invalid(name, format!("{} is empty", shown(name)))
                .hint("give it a value, or leave it out")),
            None => Ok(()),
        }
    }

    /// The value of `name`. Given twice it is refused: nobody can know which one is meant.
    pub(crate) fn take(&mut self, name: &str) -> Result<Option<String>> {
        let mut found = None;
        let mut twice = false;
        self.pairs.retain(|(key, value)| {
            if key != name {
                return true;
            }
            twice |= found.replace(value.clone()).is_some();
            false
        });
        if twice {
            return Err(Error::invalid(name, format!("{name} is given twice")));
        }
        Ok(found)
    }

    /// Every value of a parameter that may be given many times.
    pub(crate) fn all(&mut self, name: &str) -> Vec<String> {
        let taken = self.pairs.extract_if(.., |(key, _)| key == name);
        taken.map(|(_, value)| value).collect()
    }

    /// [`Query::take`], parsed; an empty value counts as none.
    pub(crate) fn parsed<T>(&mut self, name: &str) -> Result<Option<T>>
    where
        T: FromStr,
        T::Err: Display,
    {
        match self.take(name)? {
            None => Ok(None),
            Some(text) if text.is_empty() => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|error| {
                Error::invalid(
                    name,
                    format!("{name} is {}, which does not fit: {error}", shown(&text)),
                )
            }),
        }
    }

    /// All of `name[key]=value`.
    pub(crate) fn map(&mut self, name: &str) -> Result<BTreeMap<String, String>> {
        let mut found = BTreeMap::new();
        let mut twice = None;
        self.pairs.retain(|(key, value)| {
            let inner = key
                .strip_prefix(name)
                .and_then(|rest| rest.strip_prefix('['))
                .and_then(|rest| rest.strip_suffix(']'));
            let Some(inner) = inner else { return true };
            if found.insert(inner.to_owned(), value.clone()).is_some() {
                twice = Some(key.clone());
            }
            false
        });
        match twice {
            Some(key) => Err(Error::invalid(
                &key,
                format!("{} is given twice", shown(&key)),
            )),
            None => Ok(found),
        }
    }

    /// Refuses whatever was not taken: a filter with a typing error must not list everything.
    pub(crate) fn finish(self, known: &str) -> Result<()> {
        match self.pairs.into_iter().next() {
            None => Ok(()),
            Some((name, _)) => {
                let error = Error::invalid(
                    &name,
                    format!("{} is no parameter of this request", shown(&name)),
                );
                Err(error.hint(if known.is_empty() {
                    "it takes no parameters".to_owned()
                } else {
                    format!("it takes {known}")
                }))
            }
        }
    }
}

/// Somebody else's text, safe and short enough for a message.
pub(crate) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(80).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    format!("\"{}{dots}\"", cut.escape_debug())
}

/// The query, refusals in the native way.
#[derive(Debug)]
pub(crate) struct NativeQuery(pub Query);

impl<S: Sync> FromRequestParts<S> for NativeQuery {
    type Rejection = NativeError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NativeError> {
        let query = Query::parse(parts.uri.query().unwrap_or_default())?;
        query.refuse_empty()?;
        Ok(Self(query))
    }
}

/// The query, refusals in E2B's way.
#[derive(Debug)]
pub(crate) struct E2bQuery(pub Query);

impl<S: Sync> FromRequestParts<S> for E2bQuery {
    type Rejection = E2bError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, E2bError> {
        Ok(Self(Query::parse(parts.uri.query().unwrap_or_default())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_is_wrong() {
        let mut query = Query::parse("limit=ten&a=1&a=2&x=%FF").unwrap_err();
        assert_eq!(query.field.as_deref(), Some("x"));
        let mut parsed = Query::parse("limit=ten&a=1&a=2&odd=").unwrap();
        query = parsed.parsed::<u32>("limit").unwrap_err();
        assert_eq!(query.field.as_deref(), Some("limit"));
        assert!(query.message.contains("\"ten\""));
        assert!(parsed.take("a").unwrap_err().message.contains("twice"));
        let error = parsed.finish("limit").unwrap_err();
        assert_eq!(error.field.as_deref(), Some("odd"));
        assert_eq!(error.hint.as_deref(), Some("it takes limit"));
    }

    #[test]
    fn both_spellings_of_a_space() {
        let mut query = Query::parse("path=%2Fa+b%20c&empty").unwrap();
        assert_eq!(query.take("path").unwrap().as_deref(), Some("/a b c"));
        assert_eq!(query.parsed::<u32>("empty").unwrap(), None);
        query.finish("").unwrap();
    }

    #[test]
    fn maps_are_taken_by_their_brackets() {
        let mut query = Query::parse("metadata%5Ba%5D=1&metadata[b]=2&metadatac=3").unwrap();
        let map = query.map("metadata").unwrap();
        assert_eq!(map.len(), 2);
        assert_eq!(map["a"], "1");
        assert!(query.finish("").is_err());
        let mut query = Query::parse("metadata[a]=1&metadata[a]=2").unwrap();
        assert!(query.map("metadata").is_err());
    }

    #[test]
    fn over_long_queries_are_refused_with_the_limit() {
        let error = Query::parse(&"a".repeat(MAX_QUERY_BYTES + 1)).unwrap_err();
        assert_eq!(error.code, Code::TooLarge);
        assert!(error.message.contains("16384"));
        let error = Query::parse(&"a&".repeat(MAX_PARAMETERS + 1)).unwrap_err();
        assert_eq!(error.code, Code::TooLarge);
    }
}
