//! Making boxes and looking at them.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use http::{HeaderMap, StatusCode, header::LOCATION};
use sandkeep_keeper::{EgressWish, PointUse};
use sandkeep_model::{
    CreateSandbox, E2bSettings, Error, ListFilter, Order, Result, State as BoxState, TemplateName,
    TimeWish, check_env, check_metadata,
};

use super::time::meant;
use super::types::{CreateRequest, SandboxPage, SandboxView, TimeoutWish};
use crate::{
    caller::Caller,
    create::{create as create_box, idempotency_key},
    error::NativeError,
    extract::{NativeId, NativeJson},
    network::egress,
    query::{NativeQuery, Query, shown},
    state::Shared,
};

/// Makes a sandbox; answers when it is ready for commands.
///
/// The same `Idempotency-Key` with the same body gives the same sandbox.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes",
    params(("Idempotency-Key" = Option<String>, Header,
        description = "1 to 255 of a-z, A-Z, 0-9, - _ . :")),
    request_body = CreateRequest,
    responses((status = 201, body = SandboxView)))]
pub(crate) async fn create(
    State(state): State<Shared>,
    caller: Caller,
    headers: HeaderMap,
    NativeJson(request): NativeJson<CreateRequest>,
) -> Result<
    (
        StatusCode,
        [(http::HeaderName, String); 1],
        Json<SandboxView>,
    ),
    NativeError,
> {
    let standing = state.keeper.standing_policy().clone();
    let network = match &request.network {
        Some(wish) => egress(&state, wish, &standing)?,
        None => EgressWish::default(),
    };
    let from_point = match &request.from_point {
        Some(point) => Some(meant(&state, "from_point", point, None, PointUse::Read).await?),
        None => None,
    };
    let mut request = CreateSandbox {
        by: Some(caller.0),
        ..checked(request, &headers)?
    };
    request.time.from_point = from_point;
    let sandbox = create_box(&state.keeper, request, network).await?;
    let location = format!("/v1/sandboxes/{}", sandbox.id);
    let view = SandboxView::with_token(sandbox);
    Ok((StatusCode::CREATED, [(LOCATION, location)], Json(view)))
}

fn checked(request: CreateRequest, headers: &HeaderMap) -> Result<CreateSandbox> {
    if request.timeout_seconds == TimeoutWish::Seconds(0) {
        return Err(
            Error::invalid("timeout_seconds", "timeout_seconds must be at least 1")
                .hint("use null for a sandbox without an end"),
        );
    }
    let auto_resume = request.auto_resume.unwrap_or(true);
    if request.idle_seconds.is_some() && !auto_resume {
        return Err(Error::invalid(
            "idle_seconds",
            "a sandbox that is paused when idle must wake by itself",
        )
        .hint("leave auto_resume out"));
    }
    check_env(&request.env)?;
    check_metadata(&request.metadata)?;
    Ok(CreateSandbox {
        template: request.template.parse()?,
        isolation: request.isolation,
        limits: request.limits.into(),
        expiry: request.timeout_seconds.expiry()?,
        on_timeout: request.on_timeout,
        env: request.env,
        metadata: request.metadata,
        ports: request.ports,
        e2b: E2bSettings::default(),
        identity: request.identity.into(),
        time: TimeWish {
            from_point: None,
            auto_resume,
            pause_files_only: !request.pause_memory,
            idle_seconds: request.idle_seconds,
            paused_limit_seconds: request.paused_limit_seconds,
            points: request.auto_points.map(Into::into),
        },
        idempotency_key: idempotency_key(headers)?,
        by: None,
    })
}

/// Lists sandboxes, newest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes",
    params(
        ("state" = Option<String>, Query, description = "States, comma-separated; all but `gone` when left out",
            example = "running,paused"),
        ("metadata" = Option<BTreeMap<String, String>>, Query, style = DeepObject, explode,
            description = "All pairs must match: `metadata[team]=a&metadata[env]=ci`, or shorter \
                `metadata=team:a&metadata=env:ci` (the key ends at the first colon)"),
        ("template" = Option<String>, Query, description = "Only those made from it"),
        ("order" = Option<String>, Query, description = "`desc` (newest first) or `asc`"),
        ("limit" = Option<u32>, Query, description = "1 to 100, 100 when left out"),
        ("next_token" = Option<String>, Query, description = "`next_token` of the page before"),
    ),
    responses((status = 200, body = SandboxPage)))]
pub(crate) async fn list(
    State(state): State<Shared>,
    NativeQuery(query): NativeQuery,
) -> Result<Json<SandboxPage>, NativeError> {
    let page = state.keeper.list(&filter(query)?).await?;
    Ok(Json(SandboxPage {
        sandboxes: page.items.into_iter().map(SandboxView::from).collect(),
        next_token: page.next.map(|token| token.to_string()),
    }))
}

fn filter(mut query: Query) -> Result<ListFilter> {
    let mut filter = ListFilter {
        metadata: metadata(&mut query)?,
        template: query.parsed::<TemplateName>("template")?,
        ..ListFilter::default()
    };
    if let Some(states) = query.take("state")? {
        for name in states.split(',').filter(|name| !name.is_empty()) {
            let state: BoxState = name.parse().map_err(|error: String| {
                Error::invalid("state", error)
                    .hint("use creating, running, pausing, paused, resuming, stopping, gone")
            })?;
            filter.states.push(state);
        }
    }
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
    filter.limit = limit(&mut query)?;
    if let Some(token) = query.take("next_token")?.filter(|token| !token.is_empty()) {
        filter.after = Some(token.parse().map_err(|_| {
            Error::invalid("next_token", "next_token is not one this server gave")
                .hint("start again without it")
        })?);
    }
    query.finish("state, metadata[KEY], template, order, limit and next_token")?;
    Ok(filter)
}

/// `metadata[KEY]=VALUE` and `metadata=KEY:VALUE`, any number of both.
fn metadata(query: &mut Query) -> Result<BTreeMap<String, String>> {
    let mut pairs = query.map("metadata")?;
    for text in query.all("metadata") {
        let (key, value) = text.split_once(':').ok_or_else(|| {
            Error::invalid(
                "metadata",
                format!("metadata is {}, which has no colon", shown(&text)),
            )
            .hint("write metadata=KEY:VALUE or metadata[KEY]=VALUE")
        })?;
        if let Some(other) = pairs.insert(key.to_owned(), value.to_owned())
            && other != value
        {
            return Err(Error::invalid(
                "metadata",
                format!("metadata {} is given with two values", shown(key)),
            ));
        }
    }
    Ok(pairs)
}

/// `limit`, bounded; shared with the E2B API.
pub(crate) fn limit(query: &mut Query) -> Result<u32> {
    match query.parsed::<u32>("limit")? {
        None => Ok(ListFilter::MAX_LIMIT),
        Some(limit) if (1..=ListFilter::MAX_LIMIT).contains(&limit) => Ok(limit),
        Some(limit) => Err(Error::invalid(
            "limit",
            format!(
                "limit is {limit}, it must be from 1 to {}",
                ListFilter::MAX_LIMIT
            ),
        )),
    }
}

/// One sandbox, also one that is gone while its history is kept.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, body = SandboxView)))]
pub(crate) async fn get(
    State(state): State<Shared>,
    id: NativeId,
) -> Result<Json<SandboxView>, NativeError> {
    let sandbox = state.keeper.get_any(&id).await?;
    if sandbox.state != BoxState::Running {
        return Ok(Json(SandboxView::with_token(sandbox)));
    }
    // It may end between the two questions; what is known stays true then.
    let (usage, acceleration, held) = match state.keeper.view(&id).await {
        Ok(view) => (view.usage, view.acceleration, view.held),
        Err(_) => (None, None, None),
    };
    Ok(Json(SandboxView {
        acceleration,
        held,
        usage: usage.map(Into::into),
        ..SandboxView::with_token(sandbox)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extract::parse_json;
    use sandkeep_model::Expiry;

    fn parse(query: &str) -> Result<ListFilter> {
        filter(Query::parse(query)?)
    }

    #[test]
    fn filters_are_read() {
        let filter = parse("state=running,gone&metadata[a]=b%3Dc&limit=5&order=asc").unwrap();
        assert_eq!(filter.states, [BoxState::Running, BoxState::Gone]);
        assert_eq!(filter.metadata["a"], "b=c");
        assert_eq!(filter.limit, 5);
        assert_eq!(filter.order, Order::Asc);
        assert_eq!(parse("").unwrap().limit, 100);
        let filter = parse("metadata=a:b:c&metadata=d:&metadata[e]=f").unwrap();
        assert_eq!(filter.metadata["a"], "b:c");
        assert_eq!(filter.metadata["d"], "");
        assert_eq!(filter.metadata["e"], "f");
    }

    #[test]
    fn bad_filters_are_named() {
        for (query, field) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=-1", "limit"),
            ("state=alive", "state"),
            ("order=up", "order"),
            ("next_token=x", "next_token"),
            ("template=a/b", "template"),
            ("stat=running", "stat"),
            ("metadata=a", "metadata"),
            ("metadata=a:b&metadata=a:c", "metadata"),
        ] {
            let error = parse(query).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field), "{query}");
        }
    }

    #[test]
    fn requests_are_bounded() {
        let none = HeaderMap::new();
        let request = checked(parse_json(b"{}").unwrap(), &none).unwrap();
        assert_eq!(request.template.as_str(), "base");
        assert_eq!(
            request.expiry,
            Expiry::After(std::time::Duration::from_secs(300))
        );
        let refused = |change: fn(&mut CreateRequest)| {
            let mut request: CreateRequest = parse_json(b"{}").unwrap();
            change(&mut request);
            checked(request, &none).unwrap_err().field.unwrap()
        };
        let field = refused(|r| r.timeout_seconds = TimeoutWish::Seconds(0));
        assert_eq!(field, "timeout_seconds");
        let field = refused(|r| r.timeout_seconds = TimeoutWish::Seconds(u64::MAX));
        assert_eq!(field, "timeout_seconds");
        assert_eq!(refused(|r| r.template = "../x".to_owned()), "template");
        let field = refused(|r| {
            r.env.insert("A=B".to_owned(), String::new());
        });
        assert_eq!(field, "env");
    }
}
