//! Who may ask the agent for what.

use http::{HeaderMap, Method};
use sandkeep_model::Secret;

use crate::signature::{FileQuery, Operation};

pub(crate) const TOKEN_HEADER: &str = "x-access-token";

/// The ways through the wall to an agent. What is not one of these is refused, so the
/// host's own calls can not be reached from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    /// A browser asking whether it may ask.
    Preflight,
    /// Open to all, as it is at E2B.
    Health,
    /// Token or signature.
    Files(Operation),
    /// Token.
    Token,
}

/// Matches the path as it stands: nothing is decoded or normalised, and exactly this
/// path is what the agent gets.
pub(crate) fn door(method: &Method, path: &str) -> Option<Door> {
    let known = matches!(path, "/files" | "/health" | "/metrics" | "/envs")
        || ["/process.Process/", "/filesystem.Filesystem/"]
            .iter()
            .filter_map(|service| path.strip_prefix(service))
            .any(|call| !call.is_empty() && call.bytes().all(|b| b.is_ascii_alphabetic()));
    if !known {
        return None;
    }
    Some(match (path, method) {
        (_, &Method::OPTIONS) => Door::Preflight,
        (_, &Method::CONNECT) => return None,
        ("/health", &Method::GET | &Method::HEAD) => Door::Health,
        ("/files", &Method::GET | &Method::HEAD) => Door::Files(Operation::Read),
        ("/files", &Method::POST) => Door::Files(Operation::Write),
        _ => Door::Token,
    })
}

/// Why somebody may not enter, in the words E2B's clients know.
pub(crate) fn check(
    door: Door,
    headers: &HeaderMap,
    query: &str,
    token: &Secret,
    now_seconds: i64,
) -> Result<(), &'static str> {
    let mut given = headers.get_all(TOKEN_HEADER).iter();
    let shown = given.next();
    let matches = shown.is_some_and(|shown| {
        // A box without a token would let in whoever shows nothing.
        !token.expose().is_empty() && given.next().is_none() && token.matches(shown.as_bytes())
    });
    match door {
        Door::Preflight | Door::Health => Ok(()),
        _ if matches => Ok(()),
        Door::Token => Err(
            "unauthorized access, please provide a valid access token or method signing if supported",
        ),
        Door::Files(_) if shown.is_some() => {
            Err("access token present in header but does not match")
        }
        Door::Files(operation) => {
            let query = FileQuery::parse(query);
            if query.signature.is_none() {
                Err("missing signature query parameter")
            } else if token.expose().is_empty() || !query.signed_with(operation, token) {
                Err("invalid signature")
            } else if query.expired(now_seconds) {
                Err("signature is already expired")
            } else {
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sign;

    #[test]
    fn only_envds_own_paths_have_doors() {
        let get = |path| door(&Method::GET, path);
        let post = |path| door(&Method::POST, path);
        assert_eq!(get("/health"), Some(Door::Health));
        assert_eq!(post("/health"), Some(Door::Token));
        assert_eq!(get("/files"), Some(Door::Files(Operation::Read)));
        assert_eq!(post("/files"), Some(Door::Files(Operation::Write)));
        assert_eq!(door(&Method::DELETE, "/files"), Some(Door::Token));
        assert_eq!(get("/metrics"), Some(Door::Token));
        assert_eq!(get("/envs"), Some(Door::Token));
        assert_eq!(post("/process.Process/Start"), Some(Door::Token));
        assert_eq!(post("/filesystem.Filesystem/Stat"), Some(Door::Token));
        assert_eq!(door(&Method::OPTIONS, "/files"), Some(Door::Preflight));
    }

    #[test]
    fn tricks_do_not_open_others() {
        for path in [
            "",
            "/",
            "*",
            "/init",
            "/sandkeep.host/init",
            "/sandkeep.host/logs",
            "//files",
            "/files/",
            "/./files",
            "/%66iles",
            "/files/compose",
            "/files/../sandkeep.host/init",
            "/process.Process/",
            "/process.Process/../sandkeep.host/init",
            "/process.Process/%2e%2e/sandkeep.host/init",
            "/process.Process//sandkeep.host/init",
            "/process.Process/Start/",
            "/process.Process/Start;x",
            "/PROCESS.Process/Start",
            "/health/",
            "/health\\..\\init",
        ] {
            for method in [Method::GET, Method::POST, Method::OPTIONS, Method::CONNECT] {
                assert_eq!(door(&method, path), None, "{method} {path}");
            }
        }
        assert_eq!(door(&Method::CONNECT, "/files"), None);
    }

    fn headers(token: Option<&str>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers.insert(TOKEN_HEADER, token.parse().unwrap());
        }
        headers
    }

    #[test]
    fn the_token_opens() {
        let token = Secret::new("right");
        for door in [Door::Token, Door::Files(Operation::Read)] {
            assert!(check(door, &headers(Some("right")), "", &token, 0).is_ok());
            assert!(check(door, &headers(Some("wrong")), "", &token, 0).is_err());
            assert!(check(door, &headers(Some("")), "", &token, 0).is_err());
            assert!(check(door, &headers(None), "", &token, 0).is_err());
            assert!(check(door, &headers(Some("")), "", &Secret::new(""), 0).is_err());
        }
        assert!(check(Door::Health, &headers(None), "", &token, 0).is_ok());
        let mut twice = headers(Some("right"));
        twice.append(TOKEN_HEADER, "right".parse().unwrap());
        assert!(check(Door::Token, &twice, "", &token, 0).is_err());
    }

    #[test]
    fn files_say_what_is_wrong() {
        let token = Secret::new("right");
        let read = Door::Files(Operation::Read);
        let ask = |shown, query: &str| check(read, &headers(shown), query, &token, 1000);
        let signature = sign("/a", Operation::Read, None, &token, Some(999));
        let coded: String =
            percent_encoding::utf8_percent_encode(&signature, percent_encoding::NON_ALPHANUMERIC)
                .collect();
        let old = format!("path=/a&signature={coded}&signature_expiration=999");
        assert_eq!(
            ask(Some("wrong"), &old),
            Err("access token present in header but does not match")
        );
        assert_eq!(
            ask(None, "path=/a"),
            Err("missing signature query parameter")
        );
        assert_eq!(
            ask(None, "path=/a&signature=v1_x"),
            Err("invalid signature")
        );
        assert_eq!(ask(None, &old), Err("signature is already expired"));
        assert_eq!(check(read, &headers(None), &old, &token, 999), Ok(()));
    }
}
