//! Creating a box for a client that may vanish meanwhile.

use std::time::Duration;

use http::HeaderMap;
use sandkeep_keeper::{EgressWish, Keeper};
use sandkeep_model::{CreateSandbox, Error, Expiry, GoneReason, Result, Sandbox};
use tokio::sync::oneshot;

/// Ten years: longer than any box, short enough for every calendar.
pub(crate) const MAX_TIMEOUT_SECONDS: u64 = 10 * 365 * 24 * 3600;

/// Makes a box. The work goes on when the client is gone, because a box half made is worse
/// than one too many; but a box nobody was told of is ended again, unless the client can
/// ask for it again by its key.
pub(crate) async fn create(
    keeper: &Keeper,
    request: CreateSandbox,
    network: EgressWish,
) -> Result<Sandbox> {
    let (tell, told) = oneshot::channel();
    let keeper = keeper.clone();
    tokio::spawn(async move {
        let keep = request.idempotency_key.is_some();
        let by = request.by.clone();
        let made = keeper.create_reaching(request, network).await;
        let Err(Ok(unclaimed)) = tell.send(made) else {
            return;
        };
        if keep {
            return;
        }
        tracing::info!(sandbox = %unclaimed.id, "the client left while its sandbox was made");
        if let Err(error) = keeper.kill_for(&unclaimed.id, GoneReason::Killed, by).await {
            tracing::warn!(sandbox = %unclaimed.id, %error, "ending an unclaimed sandbox");
        }
    });
    told.await
        .map_err(|_| Error::internal("making the sandbox was broken off"))?
}

/// Seconds as somebody gave them.
pub(crate) fn expiry_after(field: &str, seconds: u64) -> Result<Expiry> {
    if seconds > MAX_TIMEOUT_SECONDS {
        return Err(Error::invalid(
            field,
            format!("{field} is {seconds} seconds, the limit is {MAX_TIMEOUT_SECONDS}"),
        ));
    }
    Ok(Expiry::After(Duration::from_secs(seconds)))
}

/// What [`idempotency_key`] lets pass, as a regular expression.
pub(crate) const IDEMPOTENCY_PATTERN: &str = "^[A-Za-z0-9_.:-]{1,255}$";

/// The `Idempotency-Key` header, checked.
pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>> {
    let Some(value) = headers.get("idempotency-key") else {
        return Ok(None);
    };
    let good = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
    let bytes = value.as_bytes();
    if (1..=255).contains(&bytes.len()) && bytes.iter().all(good) {
        return Ok(Some(String::from_utf8_lossy(bytes).into_owned()));
    }
    Err(
        Error::invalid("Idempotency-Key", "the Idempotency-Key can not be used")
            .hint("use 1 to 255 of a-z, A-Z, 0-9, and - _ . :"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_bounded() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("idempotency-key", value.parse().unwrap());
            idempotency_key(&headers)
        };
        assert_eq!(idempotency_key(&HeaderMap::new()).unwrap(), None);
        assert_eq!(with("a-1").unwrap().as_deref(), Some("a-1"));
        for bad in ["", "a b", &"x".repeat(256)] {
            let error = with(bad).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("Idempotency-Key"), "{bad:?}");
        }
    }

    #[test]
    fn times_are_bounded() {
        assert_eq!(
            expiry_after("timeout", 5).unwrap(),
            Expiry::After(Duration::from_secs(5))
        );
        let error = expiry_after("timeout", u64::MAX).unwrap_err();
        assert!(error.message.contains("315360000"), "{error}");
    }
}
