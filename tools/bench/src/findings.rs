//! The findings of a benchmark run: tables of measurements, plots, and measured values with their bounds. Findings are
//! printed as soon as they are measured, and saved to a file, from which `bench report` updates pages of the book.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::report::print;

/// The findings of a benchmark run, or of one part of it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Findings {
    /// The tables, by the names that the pages of the book use for them.
    pub(crate) tables: BTreeMap<String, Table>,
    /// The plots, by the names of the SVG files.
    pub(crate) plots: BTreeMap<String, Plot>,
    pub(crate) goals: Vec<Goal>,
}

/// A table of measurements, with text in the first column and numbers in the others.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// A measured value, and the bound that it must not exceed or fall below.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) measured: f64,
    pub(crate) bound: Bound,
}

/// The bound of a measured value: a maximum or a minimum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// A plot of several lines over the same x axis.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    /// The labels of the points on the x axis.
    pub(crate) points: Vec<String>,
    pub(crate) lines: Vec<Line>,
}

/// One line of a plot, with one value for each point on the x axis.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) values: Vec<f64>,
}

impl Findings {
    pub(crate) fn table(&mut self, name: &str, title: String, header: &[&str], rows: Vec<Vec<String>>) {
        print(&title, header, rows.clone());
        let header = header.iter().map(|text| (*text).to_owned()).collect();
        self.tables.insert(name.to_owned(), Table { title, header, rows });
    }

    pub(crate) fn goal(&mut self, what: &str, measured: f64, bound: Bound) {
        self.goals.push(Goal { what: what.to_owned(), measured, bound });
    }

    pub(crate) fn plot(&mut self, name: &str, plot: Plot) {
        self.plots.insert(name.to_owned(), plot);
    }

    /// Adds the findings of one further part of the benchmark.
    pub(crate) fn take(&mut self, other: Self) {
        self.tables.extend(other.tables);
        self.plots.extend(other.plots);
        self.goals.extend(other.goals);
    }

    /// Prints the measured values with their bounds, and adds them to the findings as the table `name`.
    pub(crate) fn conclude(&mut self, name: &str) {
        let goals = std::mem::take(&mut self.goals);
        if goals.is_empty() {
            return;
        }
        let rows = goals.iter().map(Goal::row).collect();
        self.table(name, "Bounds".into(), &["", "measured", "bound", "reached"], rows);
    }

    pub(crate) fn read(path: &Path) -> Outcome<Self> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    pub(crate) fn write(&self, path: &Path) -> Outcome<()> {
        Ok(fs::write(path, serde_json::to_vec_pretty(self)?)?)
    }
}

impl Goal {
    fn row(&self) -> Vec<String> {
        let number = |value: f64| if value < 20.0 { format!("{value:.2}") } else { format!("{value:.0}") };
        let (bound, reached) = match self.bound {
            Bound::AtMost(most) => (format!("at most {}", number(most)), self.measured <= most),
            Bound::AtLeast(least) => (format!("at least {}", number(least)), self.measured >= least),
        };
        let reached = if reached { "yes" } else { "no" };
        vec![self.what.clone(), number(self.measured), bound, reached.to_owned()]
    }
}

impl Table {
    /// Returns the table in Markdown, as the pages of the book contain it.
    pub(crate) fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule: String = (0..self.header.len()).map(|column| if column == 0 { "|---" } else { "|---:" }).collect();
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!("{}:\n\n{}{rule}|\n{rows}", self.title, line(&self.header))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goal_is_reached_on_bound_and_missed_beyond() {
        let row = |measured, bound| Goal { what: "x".into(), measured, bound }.row().join(" ");
        assert_eq!(row(1.4, Bound::AtMost(1.4)), "x 1.40 at most 1.40 yes");
        assert_eq!(row(1.41, Bound::AtMost(1.4)), "x 1.41 at most 1.40 no");
        assert_eq!(row(300.0, Bound::AtLeast(300.0)), "x 300 at least 300 yes");
        assert_eq!(row(299.0, Bound::AtLeast(300.0)), "x 299 at least 300 no");
        assert_eq!(row(f64::NAN, Bound::AtMost(1.0)), "x NaN at most 1.00 no");
    }

    #[test]
    fn table_becomes_markdown_with_numbers_to_right() {
        let table = Table {
            title: "Times".into(),
            header: vec!["".into(), "ms".into()],
            rows: vec![vec!["ADD".into(), "3".into()]],
        };
        assert_eq!(table.markdown(), "Times:\n\n|  | ms |\n|---|---:|\n| ADD | 3 |\n");
    }
}
