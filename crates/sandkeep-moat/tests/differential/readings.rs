//! What may be served, and all the ways in which a path is read.

/// One request that a server served, as it read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saw {
    pub server: String,
    pub method: String,
    pub host: String,
    pub path: String,
    pub target: String,
    pub overridden: String,
}

impl Saw {
    /// `None`: the server refused it, or the line is no such line.
    pub fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split('\t').collect();
        let [_, server, status, method, host, path, target, overridden] = *fields else {
            // It must not be lost what could not be told apart.
            assert!(
                !line.contains("SAW"),
                "a line that cannot be read: {line:?}"
            );
            return None;
        };
        // Envoy says 0 where the client left before the answer, and no method where it read none.
        // Apache takes down its whole request line.
        let target = match server.starts_with("apache") {
            true => target.split(' ').nth(1).unwrap_or_default(),
            false => target,
        };
        (matches!(status, "200" | "0" | "101") && method != "-").then(|| Self {
            server: server.to_owned(),
            method: method.to_owned(),
            host: host.to_owned(),
            path: unescaped(path),
            target: unescaped(target),
            overridden: overridden.replace('-', ""),
        })
    }

    /// Why the policy of neither box lets it through.
    pub fn forbidden(&self) -> Option<&'static str> {
        let host = self.host.split(':').next().unwrap_or_default();
        if self.target.contains("://") {
            return Some("the server was told of a host in the request line");
        }
        match host {
            "a.test" | "o.test" => None,
            "b.test" if self.method != "GET" => Some("a method that is not allowed"),
            "b.test" if !self.overridden.is_empty() => Some("a header that changes the request"),
            "b.test" => readings(&self.path)
                .iter()
                .chain(&readings(&self.target))
                .any(|path| !path.starts_with("/public/"))
                .then_some("a path that is not allowed"),
            _ => Some("a host that is not allowed"),
        }
    }
}

/// nginx and Apache write a quote as `\x22`, which is no backslash.
fn unescaped(text: &str) -> String {
    text.replace("\\x", "%")
}

/// The path as it is, and as servers and what stands behind them decode, cut and join it.
fn readings(path: &str) -> Vec<String> {
    let path = path.split('?').next().unwrap_or(path);
    let mut decoded = vec![path.to_owned()];
    for _ in 0..2 {
        let last = decoded.last().unwrap();
        decoded.push(decode(last));
    }
    let mut all = Vec::new();
    for text in decoded {
        let text = text.replace('\\', "/");
        let text = text
            .split(['\0', '?', '#'])
            .next()
            .unwrap_or_default()
            .to_owned();
        all.push(joined(&text));
        let bare: Vec<&str> = text
            .split('/')
            .map(|part| part.split(';').next().unwrap_or(part))
            .collect();
        all.push(joined(&bare.join("/")));
    }
    all
}

/// Percent signs, `%uXXXX`, and overlong forms of ASCII.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    let hex = |from: usize, count: usize| {
        let digits = text.get(from..from + count)?;
        u32::from_str_radix(digits, 16).ok()
    };
    while at < bytes.len() {
        let short = (bytes[at] == b'%').then(|| hex(at + 1, 2)).flatten();
        let long = (bytes[at] == b'%' && matches!(bytes.get(at + 1), Some(b'u' | b'U')))
            .then(|| hex(at + 2, 4))
            .flatten();
        if let Some(wide) = long {
            out.push(u8::try_from(wide & 0x7f).unwrap());
            at += 6;
        } else if let Some(byte) = short {
            out.push(u8::try_from(byte).unwrap());
            at += 3;
        } else {
            out.push(bytes[at]);
            at += 1;
        }
    }
    // 0xc0 0xae is a dot to those who do not look twice.
    let mut plain = Vec::new();
    let mut at = 0;
    while at < out.len() {
        match (out[at], out.get(at + 1)) {
            (0xc0 | 0xc1, Some(next)) => {
                plain.push(((out[at] & 1) << 6) | (next & 0x3f));
                at += 2;
            }
            (byte, _) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// Without dots and doubled slashes.
fn joined(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part.trim_end() {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    let end = if path.ends_with('/') { "/" } else { "" };
    format!("/{}{end}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_in_a_log_is_no_backslash() {
        let line = r"SAW	nginx	200	GET	b.test	/public/..\x220/private	/public/..%220/private	-";
        assert_eq!(Saw::parse(line).unwrap().forbidden(), None);
        let line = r"SAW	nginx	200	GET	b.test	/public/..\private	/public/..%5cprivate	-";
        assert!(Saw::parse(line).unwrap().forbidden().is_some());
    }

    #[test]
    fn every_reading_counts() {
        let saw = |host: &str, method: &str, target: &str| Saw {
            server: "x".to_owned(),
            method: method.to_owned(),
            host: host.to_owned(),
            path: target.to_owned(),
            target: target.to_owned(),
            overridden: String::new(),
        };
        for good in ["/public/x", "/public/%61?/../private", "/public/a;b"] {
            assert_eq!(saw("b.test", "GET", good).forbidden(), None, "{good}");
        }
        for bad in [
            "/private",
            "/public/../private",
            "/public/%2e%2e/private",
            "/public/..%3b/private",
            "/public/..;/private",
            "/public/%252e%252e/private",
            "/public/%c0%ae%c0%ae/private",
            "/public/%u002e%u002e/private",
            "/public/..%5cprivate",
            "*",
        ] {
            assert!(saw("b.test", "GET", bad).forbidden().is_some(), "{bad}");
        }
        assert!(saw("b.test", "POST", "/public/x").forbidden().is_some());
        assert!(saw("nowhere", "GET", "/public/x").forbidden().is_some());
        assert!(saw("", "GET", "/public/x").forbidden().is_some());
        assert!(saw("a.test", "POST", "/private").forbidden().is_none());
    }
}
