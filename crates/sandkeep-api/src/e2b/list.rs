//! Listing boxes.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use http::HeaderValue;
use percent_encoding::percent_decode_str;
use sandkeep_model::{Error, ListFilter, Order, Result, State as BoxState};

use super::types::{ListedBody, TemplateRef, started_after};
use crate::{
    error::E2bError,
    query::{E2bQuery, Query, form_decode, shown},
    state::Shared,
};

/// Running boxes, for old clients.
pub(crate) async fn v1(
    State(state): State<Shared>,
    E2bQuery(mut query): E2bQuery,
) -> Result<Response, E2bError> {
    let filter = ListFilter {
        metadata: metadata(&mut query)?,
        states: vec![BoxState::Running],
        ..ListFilter::default()
    };
    answer(&state, &filter).await
}

pub(crate) async fn v2(
    State(state): State<Shared>,
    E2bQuery(query): E2bQuery,
) -> Result<Response, E2bError> {
    match filter(query)? {
        Some(filter) => answer(&state, &filter).await,
        None => Ok(Json(Vec::<ListedBody>::new()).into_response()),
    }
}

async fn answer(state: &Shared, filter: &ListFilter) -> Result<Response, E2bError> {
    let page = state.keeper.list(filter).await?;
    let listed: Vec<ListedBody> = page.items.iter().map(ListedBody::from).collect();
    let mut response = Json(listed).into_response();
    let headers = response.headers_mut();
    let running = state.keeper.live_tokens().len();
    headers.insert("x-total-running", HeaderValue::from(running));
    if let Some(next) = page.next
        && let Ok(token) = HeaderValue::from_str(&next.to_string())
    {
        headers.insert("x-next-token", token);
    }
    Ok(response)
}

/// The filter of a query; `None` when nothing can match it.
fn filter(mut query: Query) -> Result<Option<ListFilter>> {
    let mut filter = ListFilter {
        metadata: metadata(&mut query)?,
        states: states(query.take("state")?.as_deref())?,
        limit: crate::v1::limit(&mut query)?,
        ..ListFilter::default()
    };
    filter.order = match query.take("order")?.as_deref() {
        None | Some("" | "desc") => Order::Desc,
        Some("asc") => Order::Asc,
        Some(other) => {
            return Err(Error::invalid(
                "order",
                format!("order is {}, it must be asc or desc", shown(other)),
            ));
        }
    };
    if let Some(text) = query.take("startedAfter")?.filter(|text| !text.is_empty()) {
        filter.started_after = Some(started_after(&text)?);
    }
    if let Some(token) = query.take("nextToken")?.filter(|token| !token.is_empty()) {
        filter.after = Some(token.parse()?);
    }
    if let Some(text) = query.take("template")?.filter(|text| !text.is_empty()) {
        if text.contains(':') {
            return Err(Error::invalid(
                "template",
                "template must not name a tag here",
            ));
        }
        match TemplateRef::parse(&text) {
            Ok(template) => filter.template = Some(template.name),
            // No box can have been made from what is no name.
            Err(_) => return Ok(None),
        }
    }
    Ok(Some(filter))
}

fn states(given: Option<&str>) -> Result<Vec<BoxState>> {
    const RUNNING: [BoxState; 1] = [BoxState::Running];
    const PAUSED: [BoxState; 3] = [BoxState::Pausing, BoxState::Paused, BoxState::Resuming];
    let names = given.unwrap_or_default().split(',');
    let mut states = Vec::new();
    for name in names.filter(|name| !name.is_empty()) {
        match name {
            "running" => states.extend(RUNNING),
            "paused" => states.extend(PAUSED),
            other => {
                return Err(Error::invalid(
                    "state",
                    format!("state is {}, it must be running or paused", shown(other)),
                ));
            }
        }
    }
    if states.is_empty() {
        states.extend(RUNNING);
        states.extend(PAUSED);
    }
    Ok(states)
}

fn metadata(query: &mut Query) -> Result<BTreeMap<String, String>> {
    match query.take("metadata")? {
        None => Ok(BTreeMap::new()),
        Some(text) => decode_metadata(&text),
    }
}

/// The SDKs encode three times: each key and value, then the pairs as a form, then the form
/// as one parameter. The outermost is undone when this is called.
fn decode_metadata(text: &str) -> Result<BTreeMap<String, String>> {
    let wrong = |what: &str| {
        Error::invalid("metadata", format!("metadata can not be read: {what}"))
            .hint("send key=value pairs joined by &, percent-encoded")
    };
    let form = form_decode(text).ok_or_else(|| wrong("not UTF-8"))?;
    let mut pairs = BTreeMap::new();
    for pair in form.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| wrong("a pair has no ="))?;
        let decode = |part: &str| {
            percent_decode_str(part)
                .decode_utf8()
                .map(std::borrow::Cow::into_owned)
                .map_err(|_| wrong("not UTF-8"))
        };
        pairs.insert(decode(key)?, decode(value)?);
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

    fn parse(query: &str) -> Result<Option<ListFilter>> {
        filter(Query::parse(query)?)
    }

    /// As the wire carried it for {"a b": "c&d/é"}.
    #[test]
    fn metadata_of_the_sdks_is_decoded() {
        let filter = parse("metadata=a%252520b%3Dc%252526d%252F%2525C3%2525A9")
            .unwrap()
            .unwrap();
        assert_eq!(filter.metadata.len(), 1);
        assert_eq!(filter.metadata["a b"], "c&d/é");
    }

    #[test]
    fn metadata_survives_whatever_is_in_it() {
        let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        for (key, value) in [
            ("plain", "x"),
            ("a=b", "c=d"),
            ("a&b", "&"),
            ("100%", "50%25"),
            ("+", " + "),
            ("ключ", "😀"),
            ("k", ""),
        ] {
            // The form encoding of what is percent-encoded already only touches the %.
            let form = format!("{}={}", encode(&encode(key)), encode(&encode(value)));
            let query = format!("metadata={}", encode(&form));
            let filter = parse(&query).unwrap().unwrap();
            assert_eq!(filter.metadata.get(key).map(String::as_str), Some(value));
        }
    }

    #[test]
    fn several_pairs_and_plain_ones() {
        let filter = parse("metadata=a%3Db%26c%3Dd").unwrap().unwrap();
        assert_eq!(filter.metadata.len(), 2);
        assert_eq!(filter.metadata["c"], "d");
        assert!(parse("metadata=novalue").is_err());
        assert!(parse("metadata=a%3D%2525FF").is_err());
    }

    #[test]
    fn states_orders_and_times() {
        let filter = parse("state=paused&order=asc&limit=7").unwrap().unwrap();
        assert!(!filter.states.contains(&BoxState::Running));
        assert_eq!(filter.order, Order::Asc);
        assert_eq!(filter.limit, 7);
        let both = parse("state=running,paused").unwrap().unwrap().states;
        assert_eq!(both, parse("").unwrap().unwrap().states);
        for (query, field) in [
            ("state=gone", "state"),
            ("order=up", "order"),
            ("limit=1000", "limit"),
            ("startedAfter=now", "startedAfter"),
            ("nextToken=x", "nextToken"),
            ("template=base:v1", "template"),
        ] {
            let error = parse(query).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{query}");
        }
        assert!(parse("template=a%20b").unwrap().is_none());
        assert!(parse("unheard=of").unwrap().is_some());
    }
}
