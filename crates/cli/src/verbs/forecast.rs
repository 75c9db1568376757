//! `margay ipam show --forecast`.

use std::time::Duration;

use datastore::Location;
use ipam_core::census::Census;
use ipam_operator::forecast::{Ahead, Forecast, SHORTEST};
use kv::Deadline;

use super::{READING, on_ipam, yielding};
use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, five_digits, render};
use crate::store::Use;

/// A longer time is not shown as a number.
const LONG: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// Shows when each pool will be full.
pub(super) async fn run(location: &Location) -> Result<Answer> {
    let census = yielding(location, async |ipam| Ok(ipam.census(Deadline::after(READING)).await?)).await?;
    let forecast = of_census(location, &census).await?;
    let answer = Answer::new(table(&forecast), &forecast)?;
    if forecast.pools.is_empty() {
        return Ok(answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"));
    }
    // The table says if the history is too short.
    match forecast.history_seconds < SHORTEST.as_secs() {
        true => Ok(answer),
        false => Ok(answer.note(format!("from {} of history", span(forecast.history_seconds)))),
    }
}

/// The forecast of the pools of a census. It watches the past, for which an embedded store must stay open.
pub(super) async fn of_census(location: &Location, census: &Census) -> Result<Forecast> {
    on_ipam(location, Use::Existing, async |ipam| Ok(ipam.forecast(census, Deadline::after(READING)).await?)).await
}

fn table(forecast: &Forecast) -> String {
    let columns = [
        Column::Text("POOL"),
        Column::Text("CIDR"),
        Column::Number("IPS FREE"),
        Column::Number("MORE PER DAY"),
        Column::Text("FULL IN"),
    ];
    let rows: Vec<Vec<String>> = forecast
        .pools
        .iter()
        .map(|pool| {
            let [per_day, full_in] = words(pool.ahead);
            vec![pool.name.clone(), pool.cidr.to_string(), five_digits(pool.free.to_f64()), per_day, full_in]
        })
        .collect();
    render(&columns, &rows)
}

/// The growth and the time until a pool is full.
fn words(ahead: Ahead) -> [String; 2] {
    let (per_day, full_in) = match ahead {
        Ahead::Full => (String::new(), "full".to_owned()),
        Ahead::Filling { days, per_day } => {
            let time = Duration::try_from_secs_f64(days * 86_400.0).ok().filter(|time| *time < LONG);
            let full_in = time.map_or_else(|| "over 10 years".to_owned(), |time| span(time.as_secs()));
            (format!("{per_day:.1}"), full_in)
        }
        Ahead::Steady => (String::new(), "not filling".to_owned()),
        Ahead::Short => (String::new(), "unknown: less than 10 minutes of history".to_owned()),
        Ahead::Unknown => (String::new(), "unknown: the store keeps no times".to_owned()),
    };
    [per_day, full_in]
}

/// A time span in its largest fitting unit, rounded down.
fn span(seconds: u64) -> String {
    let units = [(86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
    let (size, name) = units.into_iter().find(|(size, _)| seconds >= 2 * size).unwrap_or((1, "second"));
    format!("{} {name}s", seconds / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_span_has_its_largest_fitting_unit() {
        let spans =
            [(0, "0 seconds"), (119, "119 seconds"), (120, "2 minutes"), (86_400, "24 hours"), (604_800, "7 days")];
        for (seconds, expected) in spans {
            assert_eq!(span(seconds), expected);
        }
    }

    #[test]
    fn each_future_has_its_words() {
        let words = |ahead| words(ahead).join("|");
        assert_eq!(words(Ahead::Filling { days: 3.5, per_day: 20.04 }), "20.0|3 days");
        assert_eq!(words(Ahead::Filling { days: 4000.0, per_day: 0.01 }), "0.0|over 10 years");
        assert_eq!((words(Ahead::Full), words(Ahead::Steady)), ("|full".to_owned(), "|not filling".to_owned()));
    }
}
