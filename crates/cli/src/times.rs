//! Parses and formats times and durations for the command line.

use std::str::FromStr;
use std::time::Duration;

use ipam_core::timestamps::{parse_rfc3339, parse_span, rfc3339};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use time::OffsetDateTime;

/// The start of a time span, as given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SinceTime {
    At(OffsetDateTime),
    /// The time span starts this long before now.
    Ago(Duration),
}

impl SinceTime {
    /// Returns the start of the time span when the current time is `now`.
    pub(crate) fn time(self, now: OffsetDateTime) -> OffsetDateTime {
        match self {
            Self::At(at) => at,
            Self::Ago(ago) => now.checked_sub(time::Duration::try_from(ago).unwrap_or_default()).unwrap_or(now),
        }
    }
}

impl FromStr for SinceTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(at) = parse_rfc3339(text) {
            return Ok(Self::At(at));
        }
        if let Ok(local) = text.parse::<DateTime>() {
            let at = local.to_zoned(TimeZone::system()).map_err(|error| error.to_string())?.timestamp();
            let at = OffsetDateTime::from_unix_timestamp(at.as_second());
            return at.map(Self::At).map_err(|error| error.to_string());
        }
        parse_duration(text).map(Self::Ago).map_err(|_| {
            "not a time such as 2026-11-21T10:00:00Z, or 2026-11-21T10:00 of this machine, and not a duration such as \
             90s, 15m, 2h or 3d"
                .to_owned()
        })
    }
}

/// Parses a duration: a whole number followed by `s`, `m`, `h` or `d`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    parse_span(text).ok_or_else(|| "not a duration such as 90s, 15m, 2h or 3d".to_owned())
}

/// Parses a duration in the notation of etcd's flags, such as `1m30s`, `1.5s` or `500us`, or in the notation of
/// [`parse_duration`].
pub(crate) fn parse_interval(text: &str) -> Result<Duration, String> {
    let parsed = text.parse::<SignedDuration>().ok().and_then(|parsed| Duration::try_from(parsed).ok());
    parsed.map_or_else(|| parse_duration(text), Ok)
}

/// Formats a time in UTC and in this machine's time zone, for example as `2026-11-21T10:00:00Z` and `2026-11-21
/// 11:00:00 +01`.
pub(crate) fn utc_and_local(at: OffsetDateTime) -> [String; 2] {
    let local = Timestamp::from_second(at.unix_timestamp())
        .map(|at| at.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S %Z").to_string());
    [rfc3339(at), local.unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn since_takes_times_and_durations() {
        let now = datetime!(2026-11-21 12:00 UTC);
        let time = |text: &str| text.parse::<SinceTime>().map(|since| since.time(now));
        assert_eq!(time("2026-11-21T10:00:00Z"), Ok(datetime!(2026-11-21 10:00 UTC)));
        assert_eq!(time("2026-11-21T10:00:00.5+01:00"), Ok(datetime!(2026-11-21 9:00:00.5 UTC)));
        for (text, expected) in [
            ("90s", datetime!(2026-11-21 11:58:30 UTC)),
            ("2h", datetime!(2026-11-21 10:00 UTC)),
            ("3d", datetime!(2026-11-18 12:00 UTC)),
        ] {
            assert_eq!(time(text), Ok(expected), "{text}");
        }
        for local in ["2026-11-21T10:00", "2026-11-21 10:00:00", "2026-11-21"] {
            assert!(matches!(local.parse(), Ok(SinceTime::At(_))), "{local}");
        }
        for wrong in
            ["", "s", "-1s", "1.5h", "5", "5 m", "5é", "99999999999999999999s", "99999999999999999d", "yesterday"]
        {
            assert!(time(wrong).unwrap_err().contains("15m"), "{wrong}");
        }
        assert_eq!(SinceTime::Ago(Duration::MAX).time(now), now, "longer than time itself");
    }

    #[test]
    fn intervals_are_read_as_etcd_reads_them() {
        for (text, expected) in [
            ("1m30s", Duration::from_secs(90)),
            ("1.5s", Duration::from_millis(1500)),
            ("100ms", Duration::from_millis(100)),
            ("500us", Duration::from_micros(500)),
            ("10m", Duration::from_secs(600)),
            ("3d", Duration::from_secs(3 * 24 * 60 * 60)),
        ] {
            assert_eq!(parse_interval(text), Ok(expected), "{text}");
        }
        for wrong in ["", "s", "-1s", "1", "1s2", "1.2.3s", "1x", "1e9s", "99999999999999999999999h", "1é"] {
            assert!(parse_interval(wrong).unwrap_err().contains("15m"), "{wrong}");
        }
    }

    #[test]
    fn time_is_shown_absolute_and_relative() {
        let [utc, local] = utc_and_local(datetime!(2026-11-21 10:00:00.9 UTC));
        assert_eq!(utc, "2026-11-21T10:00:00Z");
        assert!(local.starts_with("2026-11-2") && local.matches(' ').count() == 2, "{local}");
    }
}
