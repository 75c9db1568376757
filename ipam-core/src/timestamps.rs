//! Formats and parses times in the two formats that Calico writes, which are RFC 3339 in whole seconds and Go's
//! `Time.String`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use time::format_description::BorrowedFormatItem;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;
use time::{Duration, OffsetDateTime, PrimitiveDateTime, UtcOffset};

const SECONDS: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second]Z");
const GO_SECONDS: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
const GO_FRACTION: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day] [hour]:[minute]:[second].[subsecond]");

/// Formats a time as RFC 3339 in UTC, truncated to seconds, for example `2026-11-21T02:41:03Z`.
pub fn rfc3339(at: OffsetDateTime) -> String {
    // Formatting fails only if the time lacks a component of the format, and an `OffsetDateTime` has all components.
    at.to_offset(UtcOffset::UTC).format(SECONDS).unwrap_or_default()
}

/// Parses an RFC 3339 time with any offset, with or without a fraction. Returns `None` if the text is not an RFC 3339
/// time.
pub fn parse_rfc3339(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok()
}

/// Formats a time in UTC like Go's `Time.String`, for example `2026-11-21 02:41:03.956790656 +0000 UTC`. The fraction
/// of the second has no trailing zeros, and is omitted if it is 0.
pub fn go_string(at: OffsetDateTime) -> String {
    let at = at.to_offset(UtcOffset::UTC);
    let format = if at.nanosecond() == 0 { GO_SECONDS } else { GO_FRACTION };
    // Formatting cannot fail, because an `OffsetDateTime` has all components of the format.
    at.format(format).unwrap_or_default() + " +0000 UTC"
}

/// Rounds a time up to the next whole millisecond, so that a recorded assignment never looks older than it is.
pub fn whole_milliseconds(at: OffsetDateTime) -> OffsetDateTime {
    let beyond = at.nanosecond() % 1_000_000;
    let up = if beyond == 0 { 0 } else { 1_000_000 - beyond };
    at.checked_add(Duration::nanoseconds(up.into())).unwrap_or(at)
}

/// Parses a time in the format of [`go_string`]; returns `None` if the text has another format.
pub fn parse_go_string(text: &str) -> Option<OffsetDateTime> {
    let text = text.strip_suffix(" +0000 UTC")?;
    let format = if text.contains('.') { GO_FRACTION } else { GO_SECONDS };
    PrimitiveDateTime::parse(text, format).ok().map(PrimitiveDateTime::assume_utc)
}

/// Parses a duration, which is a whole number followed by `s`, `m`, `h` or `d`. Returns `None` if the text is no
/// duration, or if the number of seconds does not fit into 64 bits.
pub fn parse_span(text: &str) -> Option<std::time::Duration> {
    let units = [('s', 1), ('m', 60), ('h', 60 * 60), ('d', 24 * 60 * 60)];
    let seconds = units.into_iter().find_map(|(unit, seconds)| {
        let count: u64 = text.strip_suffix(unit)?.parse().ok()?;
        count.checked_mul(seconds)
    });
    seconds.map(std::time::Duration::from_secs)
}

/// Returns the time from `then` to `now`; zero if `then` is later, which can happen because the clocks of nodes differ.
pub fn age(now: OffsetDateTime, then: OffsetDateTime) -> Duration {
    (now - then).max(Duration::ZERO)
}

/// Returns the number of nanoseconds since 1970; 0 for an earlier time. As in Calico, the sequence numbers of a new
/// block start at the current time in nanoseconds.
pub fn unix_nanos(at: OffsetDateTime) -> u64 {
    u64::try_from(at.unix_timestamp_nanos().max(0)).unwrap_or(u64::MAX)
}

/// An RFC 3339 time in a stored document, with its exact text, so that rewriting the document does not change the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTime {
    text: String,
    at: OffsetDateTime,
}

impl StoredTime {
    /// Creates a stored time, truncated to the second as in Calico.
    pub fn new(at: OffsetDateTime) -> Self {
        let text = rfc3339(at);
        let at = at.replace_nanosecond(0).unwrap_or(at);
        Self { text, at }
    }

    /// Returns the stored text as a parsed time.
    pub fn at(&self) -> OffsetDateTime {
        self.at
    }
}

impl fmt::Display for StoredTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for StoredTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for StoredTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match parse_rfc3339(&text) {
            Some(at) => Ok(Self { text, at }),
            None => Err(serde::de::Error::custom(format_args!("{text:?} is not an RFC 3339 time"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn rfc3339_is_cut_to_seconds_in_utc() {
        assert_eq!(rfc3339(datetime!(2026-11-21 02:41:03.999 UTC)), "2026-11-21T02:41:03Z");
        assert_eq!(rfc3339(datetime!(2026-11-21 02:41:03 +02:00)), "2026-11-21T00:41:03Z");
        assert_eq!(StoredTime::new(datetime!(2026-11-21 02:41:03.999 UTC)).at(), datetime!(2026-11-21 02:41:03 UTC));
    }

    #[test]
    fn go_prints_no_trailing_zeros() {
        for (at, text) in [
            (datetime!(2026-11-21 02:41:03.956790656 UTC), "2026-11-21 02:41:03.956790656 +0000 UTC"),
            (datetime!(2026-11-21 03:08:37.198697360 UTC), "2026-11-21 03:08:37.19869736 +0000 UTC"),
            (datetime!(2026-01-02 03:04:05.5 UTC), "2026-01-02 03:04:05.5 +0000 UTC"),
            (datetime!(2026-01-02 03:04:05.000000001 UTC), "2026-01-02 03:04:05.000000001 +0000 UTC"),
            (datetime!(2026-01-02 03:04:05 UTC), "2026-01-02 03:04:05 +0000 UTC"),
            (datetime!(2026-01-02 03:04:05 +01:00), "2026-01-02 02:04:05 +0000 UTC"),
        ] {
            assert_eq!(go_string(at), text);
            assert_eq!(parse_go_string(text), Some(at));
        }
        assert_eq!(parse_go_string("2026-01-02 03:04:05 +0100 CET"), None);
    }

    #[test]
    fn whole_milliseconds_are_never_earlier() {
        for (at, text) in [
            (datetime!(2026-11-21 02:41:03.956790656 UTC), "2026-11-21 02:41:03.957 +0000 UTC"),
            (datetime!(2026-11-21 02:41:03.956 UTC), "2026-11-21 02:41:03.956 +0000 UTC"),
            (datetime!(2026-12-31 23:59:59.999000001 UTC), "2027-01-01 00:00:00 +0000 UTC"),
        ] {
            assert_eq!(go_string(whole_milliseconds(at)), text);
        }
    }

    #[test]
    fn ages_are_never_negative() {
        let now = datetime!(2026-11-21 02:41:03 UTC);
        assert_eq!(age(now, now + Duration::days(400)), Duration::ZERO);
        assert_eq!(age(now, now - Duration::SECOND), Duration::SECOND);
        assert_eq!(unix_nanos(datetime!(1960-01-01 00:00 UTC)), 0);
        assert_eq!(unix_nanos(datetime!(1970-01-01 00:00:01 UTC)), 1_000_000_000);
    }
}
