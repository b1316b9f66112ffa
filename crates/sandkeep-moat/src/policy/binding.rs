//! Which secret goes where, as it is written down.
//!
//! A binding never widens what a box may reach: it only says what is added to a request that the
//! policy lets through.

use http::{HeaderName, header};
use sandkeep_model::{Audience, Error, Result, SecretName};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Host, HttpRule, PathPattern};

/// More than this are refused: each one is a host somebody decided to trust.
pub const MAX_BINDINGS: usize = 256;
const MAX_METHODS: usize = 16;
const MAX_WORD: usize = 128;
/// Stands for the value in the format of a header.
const VALUE: &str = "{}";
/// Shorter ones could stand in a request by chance.
const SHORTEST_PLACEHOLDER: usize = 12;
/// Begins the key of a token; no name of a secret holds a colon.
const TOKEN_KEY: &str = "token:";

/// Headers that say where a request goes or where it ends. A secret there would change both.
const FRAMING: [HeaderName; 11] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::CONNECTION,
    header::UPGRADE,
    header::TE,
    header::TRAILER,
    header::EXPECT,
    header::PROXY_AUTHORIZATION,
    header::PROXY_AUTHENTICATE,
    header::CONTENT_TYPE,
];

/// Where the value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A stored secret, by name.
    Secret(SecretName),
    /// A token of the box, made for this audience.
    Token(Audience),
}

impl Source {
    /// One word for both, as the proxy passes it on.
    pub fn key(&self) -> String {
        match self {
            Self::Secret(name) => name.to_string(),
            Self::Token(audience) => format!("{TOKEN_KEY}{audience}"),
        }
    }

    pub fn from_key(key: &str) -> Result<Self> {
        match key.strip_prefix(TOKEN_KEY) {
            Some(audience) => audience.parse().map(Self::Token),
            None => key.parse().map(Self::Secret),
        }
    }
}

/// How the value is put into a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The header becomes `before`, the value, `after`.
    Header {
        name: HeaderName,
        before: String,
        after: String,
    },
    /// `Authorization: Basic` with this user and the value as the password.
    Basic { user: String },
    /// The parameter of the query is replaced.
    Query { name: String },
    /// This text is replaced wherever it stands in a header.
    Placeholder { text: String },
}

/// A value bound to one host. It holds the name of a secret, never the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    pub source: Source,
    /// Exactly this host: no wildcard can widen where a secret goes.
    pub host: Host,
    pub port: u16,
    /// Empty: with every request. Else with these only.
    pub only: Vec<HttpRule>,
    pub place: Place,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    secret: Option<SecretName>,
    token: Option<TokenDocument>,
    host: String,
    port: Option<u16>,
    path: Option<String>,
    #[serde(default)]
    methods: Vec<String>,
    header: Option<HeaderDocument>,
    basic: Option<BasicDocument>,
    query: Option<QueryDocument>,
    placeholder: Option<PlaceholderDocument>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenDocument {
    audience: Audience,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderDocument {
    name: String,
    #[serde(default = "just_the_value")]
    format: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BasicDocument {
    user: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueryDocument {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlaceholderDocument {
    text: String,
}

fn just_the_value() -> String {
    VALUE.to_owned()
}

impl Binding {
    pub fn from_json(value: &Value) -> Result<Self> {
        // The message of serde could quote a value somebody put where a name belongs.
        let document: Document = serde_json::from_value(value.clone()).map_err(|error| {
            let known = error.to_string();
            let missing = known.starts_with("missing field") || known.starts_with("unknown field");
            let what = if missing { known.as_str() } else { "a field has a wrong form" };
            Error::invalid("binding", format!("the binding can not be read: {what}"))
                .hint("it looks like {\"secret\": \"github\", \"host\": \"api.example.org\", \"header\": {\"name\": \"Authorization\", \"format\": \"Bearer {}\"}}")
        })?;
        let source = match (document.secret, document.token) {
            (Some(name), None) => Source::Secret(name),
            (None, Some(token)) => Source::Token(token.audience),
            _ => {
                return Err(Error::invalid(
                    "secret",
                    "a binding names either a secret or a token",
                ));
            }
        };
        let place = place(
            document.header,
            document.basic,
            document.query,
            document.placeholder,
        )?;
        let port = document.port.unwrap_or(443);
        if port == 0 {
            return Err(Error::invalid("port", "0 is no port"));
        }
        Ok(Self {
            source,
            host: host(&document.host)?,
            port,
            only: only(document.path.as_deref(), &document.methods)?,
            place,
        })
    }

    /// A list as a create or a `PUT` has it; the error names the place.
    pub fn list_from_json(list: &[Value]) -> Result<Vec<Self>> {
        if list.len() > MAX_BINDINGS {
            return Err(Error::invalid(
                "network.credentials",
                format!("a box has at most {MAX_BINDINGS} credentials"),
            ));
        }
        let mut bindings: Vec<Self> = Vec::with_capacity(list.len());
        for (at, value) in list.iter().enumerate() {
            let binding = Self::from_json(value).map_err(|error| {
                let inner = error.field.clone().unwrap_or_default();
                error.field(format!("network.credentials[{at}].{inner}"))
            })?;
            if let Some(other) = bindings.iter().find(|other| other.clashes(&binding)) {
                return Err(Error::invalid(
                    format!("network.credentials[{at}]"),
                    format!(
                        "two bindings would put a value in the same place of requests to {}",
                        other.host
                    ),
                )
                .hint("give each its own path or method, or remove one"));
            }
            bindings.push(binding);
        }
        Ok(bindings)
    }

    pub fn to_json(&self) -> Value {
        let mut object = match &self.source {
            Source::Secret(name) => json!({ "secret": name }),
            Source::Token(audience) => json!({ "token": { "audience": audience } }),
        };
        object["host"] = json!(self.host);
        object["port"] = json!(self.port);
        if let Some(rule) = self.only.first() {
            object["path"] = json!(rule.path);
            object["methods"] = json!(rule.methods);
        }
        let (key, value) = match &self.place {
            Place::Header {
                name,
                before,
                after,
            } => (
                "header",
                json!({ "name": name.as_str(), "format": format!("{before}{VALUE}{after}") }),
            ),
            Place::Basic { user } => ("basic", json!({ "user": user })),
            Place::Query { name } => ("query", json!({ "name": name })),
            Place::Placeholder { text } => ("placeholder", json!({ "text": text })),
        };
        object[key] = value;
        object
    }

    pub fn is_for(&self, host: &Host, port: u16) -> bool {
        self.host == *host && self.port == port
    }

    /// Whether it goes with a request of this method and path (without the query).
    pub fn goes_with(&self, method: &str, path: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|rule| rule.matches(method, path))
    }

    /// The same requests and the same place: one of the two values would win by chance.
    fn clashes(&self, other: &Self) -> bool {
        let same_place = match (&self.place, &other.place) {
            (Place::Query { name: a }, Place::Query { name: b }) => a == b,
            (Place::Placeholder { text: a }, Place::Placeholder { text: b }) => {
                a.contains(b.as_str()) || b.contains(a.as_str())
            }
            (a, b) => a.header().is_some() && a.header() == b.header(),
        };
        same_place && self.is_for(&other.host, other.port) && self.only == other.only
    }
}

impl Place {
    fn header(&self) -> Option<&HeaderName> {
        match self {
            Self::Header { name, .. } => Some(name),
            Self::Basic { .. } => Some(&header::AUTHORIZATION),
            Self::Query { .. } | Self::Placeholder { .. } => None,
        }
    }
}

fn host(text: &str) -> Result<Host> {
    match text.parse::<Host>() {
        Ok(host @ Host::Name(_)) => Ok(host),
        Ok(Host::Address(_)) => Err(Error::invalid(
            "host",
            "a secret is bound to a name: an address proves nothing about who answers",
        )),
        Err(_) if text.contains('*') => Err(Error::invalid(
            "host",
            "a secret is bound to exactly one host, not to a wildcard",
        )
        .hint("write one binding for each host")),
        Err(error) => Err(Error::invalid("host", error.to_string())),
    }
}

fn only(path: Option<&str>, methods: &[String]) -> Result<Vec<HttpRule>> {
    if path.is_none() && methods.is_empty() {
        return Ok(Vec::new());
    }
    let good = methods.len() <= MAX_METHODS
        && methods.iter().all(|method| {
            (1..=32).contains(&method.len())
                && method.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-')
        });
    if !good {
        return Err(Error::invalid("methods", "this is no list of HTTP methods")
            .hint("write it like [\"GET\", \"POST\"]"));
    }
    Ok(vec![HttpRule {
        methods: methods.iter().map(|m| m.to_ascii_uppercase()).collect(),
        path: PathPattern::new(path.unwrap_or("/*"))?,
    }])
}

fn place(
    header: Option<HeaderDocument>,
    basic: Option<BasicDocument>,
    query: Option<QueryDocument>,
    placeholder: Option<PlaceholderDocument>,
) -> Result<Place> {
    match (header, basic, query, placeholder) {
        (Some(header), None, None, None) => header_place(&header),
        (None, Some(basic), None, None) => {
            // The first colon ends the user.
            let good = basic.user.len() <= MAX_WORD
                && basic
                    .user
                    .bytes()
                    .all(|b| b.is_ascii_graphic() && b != b':');
            if !good {
                return Err(Error::invalid("basic.user", "this can not be a user name"));
            }
            Ok(Place::Basic { user: basic.user })
        }
        (None, None, Some(query), None) => {
            let good = (1..=MAX_WORD).contains(&query.name.len())
                && query
                    .name
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b));
            if !good {
                return Err(Error::invalid(
                    "query.name",
                    "this can not be the name of a query parameter",
                ));
            }
            Ok(Place::Query { name: query.name })
        }
        (None, None, None, Some(placeholder)) => {
            let text = placeholder.text;
            let good = (SHORTEST_PLACEHOLDER..=2 * MAX_WORD).contains(&text.len())
                && text
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b));
            if !good {
                return Err(Error::invalid(
                    "placeholder.text",
                    "a placeholder is 12 to 256 letters, digits, - . _ or ~",
                )
                .hint("make it long and unlike anything else, e.g. PLACEHOLDER_github_7f3a"));
            }
            Ok(Place::Placeholder { text })
        }
        (None, None, None, None) => Ok(Place::Header {
            name: header::AUTHORIZATION,
            before: "Bearer ".to_owned(),
            after: String::new(),
        }),
        _ => Err(Error::invalid(
            "header",
            "a binding has one place: header, basic, query or placeholder",
        )),
    }
}

fn header_place(document: &HeaderDocument) -> Result<Place> {
    let bad = |why: &str| Error::invalid("header", why.to_owned());
    let name: HeaderName = document
        .name
        .parse()
        .ok()
        .filter(|name: &HeaderName| name.as_str().len() <= MAX_WORD)
        .ok_or_else(|| bad("this can not be the name of a header"))?;
    if FRAMING.contains(&name) || name.as_str().starts_with("proxy-") {
        return Err(bad(
            "this header says how a request is sent; no secret goes there",
        ));
    }
    let (before, after) = document
        .format
        .split_once(VALUE)
        .filter(|(_, after)| !after.contains(VALUE))
        .ok_or_else(|| bad("the format must hold {} once").hint("write it like \"Bearer {}\""))?;
    let visible = |b: u8| b.is_ascii_graphic() || b == b' ';
    if document.format.len() > 2 * MAX_WORD || !document.format.bytes().all(visible) {
        return Err(bad("the format is too long or holds a control character"));
    }
    Ok(Place::Header {
        name,
        before: before.to_owned(),
        after: after.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &Value) -> Result<Binding> {
        Binding::from_json(value)
    }

    #[test]
    fn every_place_is_read_and_written_back() {
        for (key, place) in [
            ("header", json!({"name": "x-api-key", "format": "{}"})),
            (
                "header",
                json!({"name": "authorization", "format": "token {};v=1"}),
            ),
            ("basic", json!({"user": "x-access-token"})),
            ("query", json!({"name": "api_key"})),
            ("placeholder", json!({"text": "PLACEHOLDER_github_7f3a"})),
        ] {
            for source in [
                json!({"secret": "github"}),
                json!({"token": {"audience": "https://vault.test"}}),
            ] {
                let mut document = source;
                document["host"] = json!("api.test");
                document["port"] = json!(8443);
                document["path"] = json!("/repos/me/*");
                document["methods"] = json!(["GET"]);
                document[key] = place.clone();
                let binding = read(&document).unwrap();
                assert_eq!(binding.to_json(), document);
                assert_eq!(
                    Source::from_key(&binding.source.key()).unwrap(),
                    binding.source
                );
            }
        }
    }

    #[test]
    fn without_a_place_it_is_a_bearer_token() {
        let binding = read(&json!({"secret": "a", "host": "API.test."})).unwrap();
        assert_eq!(
            binding.to_json(),
            json!({"secret": "a", "host": "api.test", "port": 443,
                   "header": {"name": "authorization", "format": "Bearer {}"}})
        );
    }

    #[test]
    fn it_goes_only_where_it_was_bound() {
        let binding = read(&json!({
            "secret": "a", "host": "api.test", "path": "/repos/me/*", "methods": ["get"]
        }))
        .unwrap();
        let host = |text: &str| text.parse::<Host>().unwrap();
        assert!(binding.is_for(&host("api.test"), 443));
        assert!(!binding.is_for(&host("api.test"), 80));
        assert!(!binding.is_for(&host("x.api.test"), 443));
        assert!(binding.goes_with("GET", "/repos/me/x"));
        assert!(!binding.goes_with("POST", "/repos/me/x"));
        assert!(!binding.goes_with("GET", "/repos/me/../you"));
    }

    #[test]
    fn what_could_misplace_a_secret_is_refused() {
        let with = |key: &str, value: Value| {
            let mut document = json!({"secret": "a", "host": "api.test"});
            document[key] = value;
            document
        };
        for bad in [
            with("host", json!("*.api.test")),
            with("host", json!("192.0.2.1")),
            with("host", json!("api.test:443")),
            with("host", json!("user@api.test")),
            with("secret", json!("a b")),
            with("secret", Value::Null),
            with("token", json!({"audience": "b"})),
            with("port", json!(0)),
            with("path", json!("repos")),
            with("methods", json!(["GET /"])),
            with("header", json!({"name": "Host"})),
            with("header", json!({"name": "content-length"})),
            with("header", json!({"name": "Proxy-Authorization"})),
            with("header", json!({"name": "a b"})),
            with("header", json!({"name": "a", "format": "no value"})),
            with("header", json!({"name": "a", "format": "{} {}"})),
            with(
                "header",
                json!({"name": "a", "format": "{}\r\nHost: evil.test"}),
            ),
            with("basic", json!({"user": "a:b"})),
            with("query", json!({"name": "a&b"})),
            with("query", json!({"name": ""})),
            with("placeholder", json!({"text": "short"})),
            with("placeholder", json!({"text": "with spaces in the text"})),
            with("value", json!("ghp_x")),
        ] {
            assert!(read(&bad).is_err(), "{bad}");
        }
        let two = json!({"secret": "a", "host": "api.test",
                         "query": {"name": "k"}, "basic": {"user": "u"}});
        assert!(read(&two).is_err());
    }

    #[test]
    fn a_value_in_the_place_of_a_name_is_not_repeated() {
        for bad in [
            json!({"secret": "ghp canary", "host": "api.test"}),
            json!({"secret": {"value": "canary"}, "host": "api.test"}),
            json!({"secret": "a", "host": "api.test", "port": "canary"}),
            json!({"secret": "a", "host": "api.test", "methods": "canary"}),
        ] {
            let error = read(&bad).unwrap_err();
            assert!(!error.to_string().contains("canary"), "{error}");
        }
    }

    #[test]
    fn two_for_the_same_place_are_refused() {
        let one = json!({"secret": "a", "host": "api.test"});
        let basic = json!({"secret": "b", "host": "api.test", "basic": {"user": "u"}});
        let error = Binding::list_from_json(&[one.clone(), basic.clone()]).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("network.credentials[1]"));
        let mut elsewhere = basic;
        elsewhere["path"] = json!("/git/*");
        assert_eq!(
            Binding::list_from_json(&[one.clone(), elsewhere])
                .unwrap()
                .len(),
            2
        );
        let hold =
            |text: &str| json!({"secret": "a", "host": "h.test", "placeholder": {"text": text}});
        let inside = [hold("PLACEHOLDER_one"), hold("PLACEHOLDER_one_more")];
        assert!(Binding::list_from_json(&inside).is_err());
        assert!(Binding::list_from_json(&vec![one; MAX_BINDINGS + 1]).is_err());
    }
}
