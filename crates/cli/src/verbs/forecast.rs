//! `margay ipam show --forecast`.

use std::time::Duration;

use async_trait::async_trait;
use ipam_core::census::Census;
use ipam_operator::forecast::{Ahead, Forecast, PoolForecast, SHORTEST};
use kv::Deadline;

use crate::answer::Answer;
use crate::command::{OnStore, READING};
use crate::error::Result;
use crate::output::{Column, Columns, Row, five_digits, table};
use crate::store::{Need, StoreAt};

/// A longer time is not shown as a number.
const LONG: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// When each pool will be full.
pub(crate) struct Show;

#[async_trait(?Send)]
impl OnStore for Show {
    fn doing(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAt<'_>) -> Result<Answer> {
        let census = at
            .on_ipam(Need::ReadAll, async |operator| Ok(operator.ipam().census(Deadline::after(READING)).await?))
            .await?;
        let forecast = of_census(at, &census).await?;
        let answer = Answer::new(table(&forecast.pools), &forecast)?;
        if forecast.pools.is_empty() {
            return Ok(answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"));
        }
        // The table says if the history is too short.
        match forecast.history_seconds < SHORTEST.as_secs() {
            true => Ok(answer),
            false => Ok(answer.note(format!("from {} of history", span(forecast.history_seconds)))),
        }
    }
}

/// The forecast of the pools of a census. It watches the past, for which an embedded store must stay open.
pub(super) async fn of_census(at: StoreAt<'_>, census: &Census) -> Result<Forecast> {
    at.on_ipam(Need::Read, async |operator| Ok(operator.forecast(census, Deadline::after(READING)).await?)).await
}

impl Row for PoolForecast {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("POOL"), |pool| pool.name.clone()),
            (Column::Text("CIDR"), |pool| pool.cidr.to_string()),
            (Column::Number("IPS FREE"), |pool| five_digits(pool.free.to_f64())),
            (Column::Number("MORE PER DAY"), |pool| words(pool.ahead).0),
            (Column::Text("FULL IN"), |pool| words(pool.ahead).1),
        ]
    }
}

/// The growth and the time until a pool is full.
fn words(ahead: Ahead) -> (String, String) {
    match ahead {
        Ahead::Full => (String::new(), "full".to_owned()),
        Ahead::Filling { days, per_day } => {
            let time = Duration::try_from_secs_f64(days * 86_400.0).ok().filter(|time| *time < LONG);
            let full_in = time.map_or_else(|| "over 10 years".to_owned(), |time| span(time.as_secs()));
            (format!("{per_day:.1}"), full_in)
        }
        Ahead::Steady => (String::new(), "not filling".to_owned()),
        Ahead::Short => (String::new(), "unknown: less than 10 minutes of history".to_owned()),
        Ahead::Unknown => (String::new(), "unknown: the store keeps no times".to_owned()),
    }
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
        let words = |ahead| {
            let (per_day, full_in) = words(ahead);
            format!("{per_day}|{full_in}")
        };
        assert_eq!(words(Ahead::Filling { days: 3.5, per_day: 20.04 }), "20.0|3 days");
        assert_eq!(words(Ahead::Filling { days: 4000.0, per_day: 0.01 }), "0.0|over 10 years");
        assert_eq!((words(Ahead::Full), words(Ahead::Steady)), ("|full".to_owned(), "|not filling".to_owned()));
    }
}
