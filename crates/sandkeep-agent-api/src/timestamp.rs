//! Points in time as RFC 3339 text.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

const DAY: i64 = 86_400;

/// A moment, as `google.protobuf.Timestamp` has it: seconds since 1970 and nanoseconds (0..1e9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    pub seconds: i64,
    pub nanos: u32,
}

impl Timestamp {
    /// 0001-01-01T00:00:00Z and 9999-12-31T23:59:59Z: what RFC 3339 can say.
    const RANGE: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

    /// A moment; what RFC 3339 cannot say is moved to the nearest it can.
    #[must_use]
    pub fn new(seconds: i64, nanos: u32) -> Self {
        let seconds = seconds.clamp(*Self::RANGE.start(), *Self::RANGE.end());
        Self {
            seconds,
            nanos: nanos.min(999_999_999),
        }
    }

    /// The present.
    #[must_use]
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let number = |from: usize, to: usize| -> Option<i64> {
            let digits = bytes.get(from..to)?;
            let valid = digits.iter().all(u8::is_ascii_digit);
            valid.then(|| {
                digits
                    .iter()
                    .fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0'))
            })
        };
        let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
        let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
        let separators = [
            bytes[4],
            bytes[7],
            bytes[10].to_ascii_uppercase(),
            bytes[13],
            bytes[16],
        ];
        let in_range = (1..=12).contains(&month)
            && (1..=31).contains(&day)
            && hour < 24
            && minute < 60
            && second < 61;
        if separators != *b"--T::" || !in_range {
            return None;
        }
        let rest = &bytes[19..];
        let (fraction, zone) = match rest.strip_prefix(b".") {
            Some(rest) => rest.split_at(rest.iter().take_while(|b| b.is_ascii_digit()).count()),
            None => (&rest[..0], rest),
        };
        let nanos = fraction
            .iter()
            .chain(std::iter::repeat(&b'0'))
            .take(9)
            .fold(0u32, |sum, digit| sum * 10 + u32::from(digit - b'0'));
        let offset = match zone {
            b"Z" | b"z" => 0,
            [sign @ (b'+' | b'-'), h1, h2, b':', m1, m2]
                if [h1, h2, m1, m2].iter().all(|b| b.is_ascii_digit()) =>
            {
                let two = |a: &u8, b: &u8| i64::from(a - b'0') * 10 + i64::from(b - b'0');
                let minutes = two(h1, h2) * 60 + two(m1, m2);
                if *sign == b'+' {
                    minutes * 60
                } else {
                    -minutes * 60
                }
            }
            _ => return None,
        };
        let days = days_from_civil(year, month, day);
        Some(Self::new(
            days * DAY + hour * 3600 + minute * 60 + second - offset,
            nanos,
        ))
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Self::new(to_i64(after), after.subsec_nanos()),
            Err(before) => {
                let before = before.duration();
                match before.subsec_nanos() {
                    0 => Self::new(-to_i64(before), 0),
                    nanos => Self::new(-to_i64(before) - 1, 1_000_000_000 - nanos),
                }
            }
        }
    }
}

fn to_i64(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = civil_from_days(self.seconds.div_euclid(DAY));
        let second = self.seconds.rem_euclid(DAY);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}"
        )?;
        if self.nanos != 0 {
            write!(f, ".{:09}", self.nanos)?;
        }
        f.write_str("Z")
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| de::Error::custom("not an RFC 3339 time"))
    }
}

// Gregorian calendar in eras of 400 years that start on 1 March, so that a leap day is the last
// day of its year.
const ERA_DAYS: i64 = 146_097;
const DAYS_TO_1970: i64 = 719_468;

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + DAYS_TO_1970;
    let era = days.div_euclid(ERA_DAYS);
    let day_of_era = days.rem_euclid(ERA_DAYS);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let shifted_month = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    era * ERA_DAYS + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year
        - DAYS_TO_1970
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        for (seconds, nanos, text) in [
            (0, 0, "1970-01-01T00:00:00Z"),
            (951_782_400, 0, "2000-02-29T00:00:00Z"),
            (1_735_689_599, 5_000_000, "2024-12-31T23:59:59.005000000Z"),
            (-1, 0, "1969-12-31T23:59:59Z"),
            (
                253_402_300_799,
                999_999_999,
                "9999-12-31T23:59:59.999999999Z",
            ),
        ] {
            let time = Timestamp::new(seconds, nanos);
            assert_eq!(time.to_string(), text);
            assert_eq!(Timestamp::parse(text), Some(time));
        }
    }

    #[test]
    fn zones_and_short_fractions_are_read() {
        let time = Timestamp::parse("2024-01-01T02:00:00.5+02:00").unwrap();
        assert_eq!(time.to_string(), "2024-01-01T00:00:00.500000000Z");
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "2024",
            "2024-13-01T00:00:00Z",
            "2024-01-01T00:00:00",
            "2024-01-01T00:00:00.1+1",
            "2024-01-01 é:00:00Z",
        ] {
            assert_eq!(Timestamp::parse(text), None, "{text}");
        }
    }

    #[test]
    fn moments_before_1970_keep_their_fraction() {
        let time = UNIX_EPOCH - Duration::from_millis(250);
        assert_eq!(Timestamp::from(time), Timestamp::new(-1, 750_000_000));
    }
}
