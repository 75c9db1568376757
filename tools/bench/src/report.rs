//! Computes medians and ratios of measurements, and prints tables.

use std::time::Duration;

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{CellAlignment, Table};

/// The measured durations of one contender's runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Appends the durations of `other` to `self`.
    pub(crate) fn append(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Returns the duration in milliseconds that a share (0 to 1) of the runs did not exceed.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index into a short list")]
        let index = (last as f64 * share).round() as usize;
        sorted.get(index).map_or(f64::NAN, |time| time.as_secs_f64() * 1000.0)
    }

    /// Returns the sum of all durations, in milliseconds.
    pub(crate) fn sum(&self) -> f64 {
        self.0.iter().sum::<Duration>().as_secs_f64() * 1000.0
    }

    pub(crate) fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

impl Extend<Duration> for Times {
    fn extend<T: IntoIterator<Item = Duration>>(&mut self, times: T) {
        self.0.extend(times);
    }
}

/// Returns the median of the numbers, or NaN for an empty slice.
pub(crate) fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Prints a table with a title, with text in the first column and numbers in the others.
#[expect(clippy::print_stdout, reason = "the program prints its report")]
pub(crate) fn print(title: &str, header: &[&str], rows: Vec<Vec<String>>) {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("\n{title}\n\n{table}");
}
