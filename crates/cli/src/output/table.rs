//! Tables in the look of calicoctl.

use comfy_table::{Cell, CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};
use serde::Serialize;

const LINE: LineStyle = LineStyle::new('+', '-', '+', '+');
const CONTENT: ContentLineStyle = ContentLineStyle::new('|', '|', '|');
const STYLE: TableStyle = TableStyle::new()
    .top_border(LINE)
    .header_lines(CONTENT)
    .header_separator(LINE)
    .content_lines(CONTENT)
    .bottom_border(LINE);

/// The heading of a column and the alignment of its cells.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Column {
    /// Text, on the left.
    Text(&'static str),
    /// A number, on the right.
    Number(&'static str),
}

/// A table with headings on the left, also those of numbers, ending in a line break. It is as wide as its content, whatever
/// the terminal.
pub(crate) fn render(columns: &[Column], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(STYLE);
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

/// The columns of a listing, each with the cell that a row has in it.
pub(crate) type Columns<R> = Vec<(Column, fn(&R) -> String)>;

/// A row of a listing. As JSON it has all of its fields, as a row of the table the cells of its columns.
pub(crate) trait Row: Serialize {
    /// The columns.
    fn columns() -> Columns<Self>;
}

/// The table of some rows.
pub(crate) fn table<R: Row>(rows: &[R]) -> String {
    let (columns, cells): (Vec<_>, Vec<_>) = R::columns().into_iter().unzip();
    let rows: Vec<Vec<String>> = rows.iter().map(|row| cells.iter().map(|cell| cell(row)).collect()).collect();
    render(&columns, &rows)
}
