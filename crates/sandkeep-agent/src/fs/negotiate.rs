//! Which content coding a client wants, by `Accept-Encoding`.

/// How the body of a reply may be coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    Identity,
    Gzip,
}

/// What the client said about the two codings we can produce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Quality in thousandths; 0 means "never".
    pub gzip: u16,
    /// Quality in thousandths; 0 means "never".
    pub identity: u16,
}

impl Accepted {
    /// Reads an `Accept-Encoding` value; no header accepts identity only.
    #[must_use]
    pub fn parse(header: Option<&str>) -> Self {
        let Some(header) = header else {
            return Self {
                gzip: 0,
                identity: 1000,
            };
        };
        let (mut gzip, mut identity, mut any) = (None, None, None);
        for item in header.split(',') {
            let mut pieces = item.split(';');
            let name = pieces.next().unwrap_or_default().trim();
            let quality = pieces
                .find_map(|piece| {
                    let (key, value) = piece.split_once('=')?;
                    key.trim()
                        .eq_ignore_ascii_case("q")
                        .then(|| quality(value.trim()))
                })
                .unwrap_or(Some(1000));
            // A quality we cannot read says nothing.
            let Some(quality) = quality else { continue };
            if name.eq_ignore_ascii_case("gzip") || name.eq_ignore_ascii_case("x-gzip") {
                gzip = Some(quality);
            } else if name.eq_ignore_ascii_case("identity") {
                identity = Some(quality);
            } else if name == "*" {
                any = Some(quality);
            }
        }
        Self {
            gzip: gzip.or(any).unwrap_or(0),
            // Identity is always acceptable unless it is ruled out, but who
            // lists other codings and not this one likes it least.
            identity: identity.unwrap_or(match any {
                Some(0) => 0,
                Some(quality) => quality,
                None => 1,
            }),
        }
    }

    /// Whether gzip is liked better than no coding.
    #[must_use]
    pub fn prefers_gzip(self) -> bool {
        self.gzip > self.identity
    }

    /// The coding to use when compressing would (or would not) help; `None`
    /// when the client takes neither.
    #[must_use]
    pub fn choose(self, gzip_helps: bool) -> Option<Coding> {
        match (self.identity > 0, self.gzip > 0) {
            (true, _) if !(gzip_helps && self.prefers_gzip()) => Some(Coding::Identity),
            (_, true) => Some(Coding::Gzip),
            (true, false) => Some(Coding::Identity),
            (false, false) => None,
        }
    }
}

/// A quality value in thousandths: `0`, `1`, `0.5`, `1.000`.
fn quality(text: &str) -> Option<u16> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let whole: u16 = match whole {
        "0" => 0,
        "1" => 1000,
        _ => return None,
    };
    let padded = format!("{fraction:0<3}");
    let total = whole + padded.parse::<u16>().ok()?;
    (total <= 1000).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(header: &str, helps: bool) -> Option<Coding> {
        Accepted::parse(Some(header)).choose(helps)
    }

    #[test]
    fn gzip_only_where_it_is_preferred_and_helps() {
        assert_eq!(Accepted::parse(None).choose(true), Some(Coding::Identity));
        assert_eq!(choose("gzip, deflate", true), Some(Coding::Gzip));
        assert_eq!(choose("gzip, deflate", false), Some(Coding::Identity));
        assert_eq!(choose("identity, gzip;q=0.5", true), Some(Coding::Identity));
        assert_eq!(
            choose("gzip;q=0.5, identity;q=0.4", true),
            Some(Coding::Gzip)
        );
        assert_eq!(choose("deflate, br", true), Some(Coding::Identity));
        assert_eq!(choose("gzip;q=0", true), Some(Coding::Identity));
        assert_eq!(choose("", true), Some(Coding::Identity));
        assert_eq!(choose("*", true), Some(Coding::Identity));
    }

    #[test]
    fn ruling_identity_out_forces_gzip_or_nothing() {
        assert_eq!(choose("gzip, identity;q=0", false), Some(Coding::Gzip));
        assert_eq!(choose("gzip;q=0.1, *;q=0", false), Some(Coding::Gzip));
        assert_eq!(choose("identity;q=0", true), None);
        assert_eq!(choose("br, *;q=0", true), None);
    }

    #[test]
    fn qualities() {
        assert_eq!(quality("1"), Some(1000));
        assert_eq!(quality("0.25"), Some(250));
        assert_eq!(quality("1.000"), Some(1000));
        for bad in ["1.1", "2", "", "0.1234", "-1", "0.x", ".5"] {
            assert_eq!(quality(bad), None, "{bad}");
        }
        assert_eq!(choose("gzip;q=high", true), Some(Coding::Identity));
    }
}
