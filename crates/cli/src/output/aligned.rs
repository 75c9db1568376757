//! Tables without lines, in the look of `calicoctl get`.

/// The least width of a column, and the gap between two cells.
const LEAST: usize = 5;
const GAP: usize = 3;

/// Rows with aligned cells, with blanks after the last cell too, and an empty line at the end. The first row has the
/// headings.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let widest = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
        (widest.unwrap_or(0) + GAP).max(LEAST)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_three_blanks_apart_and_a_column_is_five_wide() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let text =
            aligned(&[row(["NAME", "N", "SELECTOR"]), row(["a", "", "all()"]), row(["sch\u{f6}n", "x", "!has(a)"])]);
        assert_eq!(text, "NAME    N    SELECTOR   \na            all()      \nsch\u{f6}n   x    !has(a)    \n\n");
        assert_eq!(aligned(&[]), "\n");
    }
}
