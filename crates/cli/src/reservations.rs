//! Reservations as `reservation list` shows them.

use serde::Serialize;

use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, render};

/// A reservation as a row.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ReservationRow {
    /// Its name.
    pub(crate) name: String,
    /// The reserved networks, as they were written.
    pub(crate) cidrs: Vec<String>,
}

#[derive(Serialize)]
struct Reservations<'a> {
    reservations: &'a [ReservationRow],
}

/// The answer of `reservation list`.
pub(crate) fn listing(reservations: &[ReservationRow]) -> Result<Answer> {
    let columns = [Column::Text("NAME"), Column::Text("CIDRS")];
    let rows: Vec<Vec<String>> =
        reservations.iter().map(|reservation| vec![reservation.name.clone(), reservation.cidrs.join("\n")]).collect();
    Answer::new(render(&columns, &rows), &Reservations { reservations })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Format;

    #[test]
    fn a_listing() {
        let row = ReservationRow { name: "infra".into(), cidrs: vec!["10.0.0.0/30".into(), "10.0.0.255".into()] };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        listing(&[row]).unwrap().print(Format::Table, &mut out, &mut err).unwrap();
        let expected = "\
+-------+-------------+
| NAME  | CIDRS       |
+-------+-------------+
| infra | 10.0.0.0/30 |
|       | 10.0.0.255  |
+-------+-------------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
