//! Formats the output of commands: tables, numbers and JSON, in calicoctl's layout. This module also writes files
//! atomically, and shows the progress of a command on a terminal. This module does not depend on a store.

mod yaml;

use std::cell;
use std::fmt::Display;
use std::fs::{self, File, Permissions};
use std::future::Future;
use std::io::{self, IsTerminal, Write, stdout};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use comfy_table::{Cell, CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ipam_operator::documents::field_order;
use serde::{Serialize, Serializer};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

pub(crate) use self::yaml::yaml;
use crate::error::{CommandFailure, CommandResult};

/// Serialises a value as the string that its `Display` implementation writes.
pub(crate) fn as_text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Formats a point in time in UTC, in whole seconds.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    time.replace_nanosecond(0).unwrap_or(time).format(&Rfc3339).unwrap_or_else(|_| "an unknown time".to_owned())
}

/// Escapes control characters in a string, so that a string from a store is safe to print on a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut safe, c| {
        if c.is_control() {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
        safe
    })
}

const TABLE_LINE: LineStyle = LineStyle::new('+', '-', '+', '+');
const TABLE_CONTENT: ContentLineStyle = ContentLineStyle::new('|', '|', '|');
const TABLE_STYLE: TableStyle = TableStyle::new()
    .top_border(TABLE_LINE)
    .header_lines(TABLE_CONTENT)
    .header_separator(TABLE_LINE)
    .content_lines(TABLE_CONTENT)
    .bottom_border(TABLE_LINE);

/// The heading of a table column, and how the column's cells are aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Column {
    /// A column with left-aligned cells.
    Text(&'static str),
    /// A column with right-aligned cells.
    Number(&'static str),
}

/// Renders a table as text that ends in a line break. All column headings are left-aligned. The table is as wide as its
/// content, even if the terminal is narrower.
pub(crate) fn render(columns: &[Column], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(TABLE_STYLE);
    table.set_header(columns.iter().map(|column| {
        let (Column::Text(title) | Column::Number(title)) = column;
        Cell::new(title).set_alignment(CellAlignment::Left)
    }));
    table.add_rows(rows);
    for (index, column) in columns.iter().enumerate() {
        if let (Column::Number(_), Some(column)) = (column, table.column_mut(index)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{table}\n")
}

/// The columns of a table, each with a function that returns the column's cell for a row.
pub(crate) type Columns<R> = Vec<(Column, fn(&R) -> String)>;

/// A row of a listing that can be printed as a table or as JSON. JSON has all fields of the row, while a table has only
/// the columns of [`TableRow::columns`].
pub(crate) trait TableRow: Serialize {
    fn columns() -> Columns<Self>;
}

pub(crate) fn table<R: TableRow>(rows: &[R]) -> String {
    let (columns, cells): (Vec<_>, Vec<_>) = R::columns().into_iter().unzip();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| cells.iter().map(|cell| cell(row)).collect()).collect();
    render(&columns, &rows)
}

/// The minimum width of a column, and the gap between two cells, in characters.
const MIN_COLUMN_WIDTH: usize = 5;
const COLUMN_GAP: usize = 3;

/// Renders rows as calicoctl does: all cells are padded to the width of their column, and an empty line ends the table.
/// The first row has the column headings.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let widest = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
        (widest.unwrap_or(0) + COLUMN_GAP).max(MIN_COLUMN_WIDTH)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (cell, width) in row.iter().zip(&widths) {
            text.push_str(cell);
            text.extend(std::iter::repeat_n(' ', width - cell.chars().count()));
        }
        text.push('\n');
    }
    text.push('\n');
    text
}

/// Formats a number with five significant digits, like C's `%.5g`.
pub(crate) fn format_five_digits(number: f64) -> String {
    const DIGITS: i32 = 5;
    if number == 0.0 || !number.is_finite() {
        return number.to_string();
    }
    // Rust rounds the mantissa before it chooses the exponent, so the exponent is correct even for 99999.5.
    let scientific = format!("{number:.4e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if !(-4..DIGITS).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", without_zeros(mantissa), exponent.abs());
    }
    let decimals = usize::try_from(DIGITS - 1 - exponent).unwrap_or_default();
    without_zeros(&format!("{number:.decimals$}")).to_owned()
}

fn without_zeros(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// Formats a part of a whole as the part's number and percentage, such as `10 (0%)`.
pub(crate) fn format_share(number: f64, whole: f64) -> String {
    let percent = if whole == 0.0 { 0.0 } else { 100.0 * number / whole };
    format!("{} ({percent:.0}%)", format_five_digits(number))
}

/// Serialises JSON objects at every depth with their fields in the order of [`field_order`]. Object fields that are not
/// in [`field_order`] follow in alphabetical order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SortedJson<'a>(pub(crate) &'a Value);

impl Serialize for SortedJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(fields) => {
                let place = |name: &str| field_order().position(|known| known == name).unwrap_or(usize::MAX);
                let mut sorted: Vec<_> = fields.iter().collect();
                sorted.sort_by_key(|(name, _)| (place(name), name.as_str()));
                serializer.collect_map(sorted.into_iter().map(|(name, value)| (name, SortedJson(value))))
            }
            Value::Array(items) => serializer.collect_seq(items.iter().map(SortedJson)),
            other => other.serialize(serializer),
        }
    }
}

/// Writes a file atomically, with a mode that lets other users read the file. Replaces an existing file at `path`.
///
/// # Errors
/// The file cannot be written. If writing fails, an existing file at `path` stays unchanged.
pub(crate) fn write_whole_file(path: &Path, text: &str) -> CommandResult<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(format!(".{}.part", std::process::id()));
    let aside = PathBuf::from(aside);
    let written = write_file(&aside, text).and_then(|()| fs::rename(&aside, path));
    written.map_err(|error| {
        _ = fs::remove_file(&aside);
        CommandFailure::new(format!("cannot write {}: {error}", path.display()))
            .hint("name a file in a folder that you can write to")
    })
}

fn write_file(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// The width of the output in columns when stdout is not a terminal.
const DEFAULT_SCREEN_WIDTH: usize = 100;

/// The width of standard output, and whether it supports colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Screen {
    /// The width of standard output in columns.
    pub(crate) width: usize,
    /// True if standard output is a terminal, unless `NO_COLOR` (<https://no-color.org>) is set or `TERM` is `dumb`.
    pub(crate) colours: bool,
}

impl Screen {
    pub(crate) fn of_stdout() -> Self {
        let columns = rustix::termios::tcgetwinsize(stdout()).map(|size| usize::from(size.ws_col));
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            width: columns.ok().filter(|columns| *columns > 0).unwrap_or(DEFAULT_SCREEN_WIDTH),
            colours: stdout().is_terminal() && !plain && !dumb,
        }
    }
}

/// How long a command runs before the command shows its progress.
const PROGRESS_DELAY: Duration = Duration::from_secs(1);

/// A progress bar that appears on stderr, if stderr is a terminal, when a command has run for a second.
#[derive(Debug)]
pub(crate) struct KeyProgress {
    bar: ProgressBar,
    began: Instant,
    /// True until the progress bar appears on the terminal.
    hidden: cell::Cell<bool>,
}

impl KeyProgress {
    /// Creates a progress bar that is labelled with `what`. `keys` is the total number of keys to process, if it is
    /// known.
    pub(crate) fn new(what: &'static str, keys: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(keys, ProgressDrawTarget::hidden()).with_message(what);
        let template = match keys {
            Some(_) => "{msg} {human_pos}/{human_len} keys [{bar:24}] {per_sec} {elapsed}",
            None => "{spinner} {msg} {human_pos} keys {per_sec} {elapsed}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self { bar, began: Instant::now(), hidden: cell::Cell::new(io::stderr().is_terminal()) }
    }

    /// Updates the progress display to `keys` processed keys.
    pub(crate) fn at(&self, keys: u64) {
        if self.hidden.get() && self.began.elapsed() >= PROGRESS_DELAY {
            self.hidden.set(false);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
        self.bar.set_position(keys);
    }
}

impl Drop for KeyProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Runs `work` and returns its result. If `work` takes longer than a second, a spinner appears on the terminal.
pub(crate) async fn run_with_progress<T>(what: &str, work: impl Future<Output = T>) -> T {
    if !io::stderr().is_terminal() {
        return work.await;
    }
    let mut work = std::pin::pin!(work);
    if let Ok(done) = tokio::time::timeout(PROGRESS_DELAY, &mut work).await {
        return done;
    }
    let spinner = ProgressBar::new_spinner().with_message(what.to_owned()).with_elapsed(PROGRESS_DELAY);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
        spinner.set_style(style);
    }
    spinner.enable_steady_tick(Duration::from_millis(200));
    let done = work.await;
    spinner.finish_and_clear();
    done
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn terminal_gets_no_control_characters() {
        assert_eq!(printable("a\u{1b}[2Jb\n'\u{e9}"), "a\\u{1b}[2Jb\\n'\u{e9}");
    }

    #[test]
    fn table_cells_are_three_blanks_apart_and_five_wide() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let text =
            aligned(&[row(["NAME", "N", "SELECTOR"]), row(["a", "", "all()"]), row(["sch\u{f6}n", "x", "!has(a)"])]);
        assert_eq!(text, "NAME    N    SELECTOR   \na            all()      \nsch\u{f6}n   x    !has(a)    \n\n");
        assert_eq!(aligned(&[]), "\n");
    }

    #[test]
    fn numbers_are_printed_with_five_digits_as_in_c() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (64.0, "64"),
            (65536.0, "65536"),
            (99999.0, "99999"),
            (99999.5, "1e+05"),
            (100_000.0, "1e+05"),
            (1_048_576.0, "1.0486e+06"),
            (16_777_216.0, "1.6777e+07"),
            (2_f64.powi(64), "1.8447e+19"),
            (2_f64.powi(80), "1.2089e+24"),
            (2_f64.powi(128), "3.4028e+38"),
            (0.25, "0.25"),
        ];
        for (number, expected) in cases {
            assert_eq!(format_five_digits(number), expected);
        }
    }

    #[test]
    fn shares_are_printed_as_count_and_percent() {
        assert_eq!(format_share(10.0, 65536.0), "10 (0%)");
        assert_eq!(format_share(65526.0, 65536.0), "65526 (100%)");
        assert_eq!(format_share(3.0, 8.0), "3 (38%)");
        assert_eq!(format_share(0.0, 0.0), "0 (0%)");
    }

    #[test]
    fn table_fields_stand_where_calicoctl_has_them() {
        let value = json!({"spec": {"allowedUses": ["a"], "cidr": "c", "zzz": 1, "aaa": 1}, "metadata": {"uid": "u",
            "name": "n"}, "kind": "K", "apiVersion": "v"});
        let text = serde_json::to_string(&SortedJson(&value)).unwrap();
        assert_eq!(
            text,
            r#"{"kind":"K","apiVersion":"v","metadata":{"name":"n","uid":"u"},"spec":{"cidr":"c","allowedUses":["a"],"aaa":1,"zzz":1}}"#
        );
    }
}
