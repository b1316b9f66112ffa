//! Reading a query string.

use percent_encoding::percent_decode_str;

/// The value of a parameter, when it stands there once and is text.
pub fn parameter(query: &str, wanted: &str) -> Option<String> {
    let mut found = query.split('&').filter_map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name).as_deref() == Some(wanted)).then_some(value)
    });
    match (found.next(), found.next()) {
        (Some(value), None) => decoded(value),
        _ => None,
    }
}

fn decoded(text: &str) -> Option<String> {
    let spaced = text.replace('+', " ");
    percent_decode_str(&spaced)
        .decode_utf8()
        .ok()
        .map(std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters() {
        let query = "host=a.test&p%6Frt=443&x=%ff&twice=1&twice=2";
        assert_eq!(parameter(query, "host").as_deref(), Some("a.test"));
        assert_eq!(parameter(query, "port").as_deref(), Some("443"));
        for bad in ["x", "twice", "none"] {
            assert_eq!(parameter(query, bad), None, "{bad}");
        }
    }
}
