//! Identities of boxes, where this server is the verifier.

use axum::{Json, extract::State};
use sandkeep_audit::Action;
use sandkeep_identity::Verified;
use sandkeep_model::{Audience, Identity, Label, NamedTokens, SandboxId, Scopes, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{caller::Caller, error::NativeError, extract::NativeJson, oidc::issuer, state::Shared};

/// Who a sandbox is to be, in its identity document and its tokens.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct IdentityBody {
    #[schema(value_type = Option<String>, example = "acme")]
    org: Option<Label>,
    #[schema(value_type = Option<String>, example = "fix-42")]
    task: Option<Label>,
    /// What it may do at others, e.g. `repo:acme/web:read`; up to 32.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    scopes: Scopes,
    /// Tokens it can ask for by a name: `{"vault": "https://vault.example.org"}`; up to 5.
    #[serde(default)]
    #[schema(value_type = std::collections::BTreeMap<String, String>)]
    tokens: NamedTokens,
}

impl From<IdentityBody> for Identity {
    fn from(body: IdentityBody) -> Self {
        Self {
            org: body.org,
            task: body.task,
            scopes: body.scopes,
            tokens: body.tokens,
            parent: None,
        }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VerifyRequest {
    /// The token (JWT) that was presented.
    token: String,
    /// Whom it must be for.
    #[schema(value_type = String, example = "https://vault.example.org")]
    audience: Audience,
    /// Which sandbox presents it, if that is known: tokens of others are refused.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    sandbox_id: Option<SandboxId>,
}

/// A token that is good now.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct VerifiedView {
    /// The SPIFFE id of the sandbox.
    #[schema(example = "spiffe://keep.example.org/box/i4f2k8s0qwertyuiop123")]
    subject: String,
    #[schema(value_type = String)]
    sandbox_id: SandboxId,
    template: String,
    #[schema(value_type = Option<String>, required)]
    org: Option<Label>,
    #[schema(value_type = Option<String>, required)]
    task: Option<Label>,
    #[schema(value_type = Vec<String>)]
    scopes: Scopes,
    /// The sandbox it was forked from.
    #[schema(value_type = Option<String>, required)]
    parent: Option<SandboxId>,
    #[schema(value_type = String)]
    audience: Audience,
    jti: String,
    #[schema(value_type = String, format = DateTime)]
    expires_at: Timestamp,
}

impl From<Verified> for VerifiedView {
    fn from(read: Verified) -> Self {
        let claims = read.claims;
        Self {
            subject: read.subject,
            sandbox_id: claims.sandbox,
            template: claims.template.to_string(),
            org: claims.org,
            task: claims.task,
            scopes: claims.scopes,
            parent: claims.parent,
            audience: claims.audience,
            jti: read.jti,
            expires_at: read.expires,
        }
    }
}

/// Checks a token of a sandbox. Beyond what anybody can check with the published keys, tokens
/// of a sandbox that is gone are refused, and those of one sandbox presented by another.
#[utoipa::path(post, path = "/v1/identity/verify", tag = "identity",
    request_body = VerifyRequest,
    responses((status = 200, body = VerifiedView)))]
pub(crate) async fn verify(
    State(state): State<Shared>,
    NativeJson(request): NativeJson<VerifyRequest>,
) -> Result<Json<VerifiedView>, NativeError> {
    let boxes = state.keeper.finder();
    let read = issuer(&state)?.verify(
        &request.token,
        &request.audience,
        request.sandbox_id.as_ref(),
        |id| boxes.living(id).is_some(),
    )?;
    Ok(Json(read.into()))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RotatedView {
    /// The id of the key that signs from now on.
    kid: String,
}

/// Signs with a new key from now on. The old one stays published until its last token ended.
#[utoipa::path(post, path = "/v1/identity/rotate", tag = "identity",
    responses((status = 200, body = RotatedView)))]
pub(crate) async fn rotate(
    State(state): State<Shared>,
    caller: Caller,
) -> Result<Json<RotatedView>, NativeError> {
    issuer(&state)?;
    let at_work = state.clone();
    // RSA keys take their time, and the file is made durable.
    let kid = tokio::task::spawn_blocking(move || issuer(&at_work)?.rotate())
        .await
        .map_err(|_| sandkeep_model::Error::internal("making a key was broken off"))??;
    let action = Action::SigningKeyRotated {
        kid: kid.as_str().into(),
    };
    caller.did(&state, action).await;
    Ok(Json(RotatedView { kid }))
}
