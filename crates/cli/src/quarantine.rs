//! Addresses in quarantine, as commands show them.

use std::net::IpAddr;

use ipam_core::quarantine::{Quarantine, Quarantined};
use serde::Serialize;

use crate::output::{Column, Columns, Row, printable};

/// An address in quarantine as a row.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct QuarantineRow {
    address: IpAddr,
    #[serde(flatten)]
    why: Quarantined,
}

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

impl QuarantineRow {
    pub(crate) fn new(address: IpAddr, why: Quarantined) -> Self {
        Self { address, why }
    }

    /// The address with the reason, as a sentence.
    pub(crate) fn text(&self) -> String {
        let Quarantined { since, reason, node } = &self.why;
        printable(&format!("{} is in quarantine since {since}: {reason} (node {node})", self.address))
    }
}

/// The rows of a quarantine.
pub(crate) fn rows(quarantine: Quarantine) -> Vec<QuarantineRow> {
    quarantine.into_iter().map(|(address, why)| QuarantineRow::new(address, why)).collect()
}

/// The note about the quarantine in the answers of commands about the whole store.
pub(crate) fn note(count: usize) -> Option<String> {
    let addresses = if count == 1 { "address is" } else { "addresses are" };
    (count > 0).then(|| format!("{count} {addresses} in quarantine; see with: margay ipam quarantine list"))
}
