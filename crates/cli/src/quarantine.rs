//! Addresses in quarantine, as commands show them.

use ipam_core::quarantine::{QuarantineRow, Quarantined};

use crate::output::{Column, Columns, Row, printable};

impl Row for QuarantineRow {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("ADDRESS"), |row| row.address.to_string()),
            (Column::Text("SINCE"), |row| printable(&row.why.since)),
            (Column::Text("REASON"), |row| printable(&row.why.reason)),
            (Column::Text("NODE"), |row| printable(&row.why.node)),
        ]
    }
}

/// An address with the reason, as a sentence.
pub(crate) fn sentence(row: &QuarantineRow) -> String {
    let Quarantined { since, reason, node } = &row.why;
    printable(&format!("{} is in quarantine since {since}: {reason} (node {node})", row.address))
}

/// The note about the quarantine in the answers of commands about the whole store.
pub(crate) fn note(count: usize) -> Option<String> {
    let addresses = if count == 1 { "address is" } else { "addresses are" };
    (count > 0).then(|| format!("{count} {addresses} in quarantine; see with: margay ipam quarantine list"))
}
