//! The borrowed addresses.

use ipam_core::{Borrowed, BorrowedAddress};
use ipam_operator::Operator;
use kv::Deadline;

use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, Columns, Row, printable, table};

/// Shows the addresses that nodes have from the blocks of other nodes.
pub(super) async fn show(operator: &Operator, deadline: Deadline) -> Result<Answer> {
    answer(&operator.ipam().borrowed(deadline).await?)
}

impl Row for BorrowedAddress {
    fn columns() -> Columns<Self> {
        vec![
            (Column::Text("IP"), |row| row.ip.to_string()),
            (Column::Text("BORROWING-NODE"), |row| printable(&row.node)),
            (Column::Text("BLOCK"), |row| row.block.to_string()),
            (Column::Text("BLOCK OWNER"), |row| printable(&row.block_owner)),
            (Column::Text("TYPE"), |row| printable(&row.kind)),
            (Column::Text("ALLOCATED-TO"), |row| printable(&row.allocated_to)),
        ]
    }
}

fn answer(borrowed: &Borrowed) -> Result<Answer> {
    let answer = Answer::new(table(&borrowed.addresses), borrowed)?;
    Ok(match borrowed.without_node {
        0 => answer,
        count => answer.note(format!(
            "found {count} IP allocations without an explicit node association. Unable to determine if they are borrowed."
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Format;

    #[test]
    fn the_table_is_calicoctls() {
        let address = BorrowedAddress {
            ip: "10.0.0.2".parse().unwrap(),
            node: "b".into(),
            block: "10.0.0.0/28".parse().unwrap(),
            block_owner: "a".into(),
            kind: "pod".into(),
            allocated_to: "default/web".into(),
        };
        let borrowed = Borrowed { addresses: vec![address], without_node: 2 };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        answer(&borrowed).unwrap().print(Format::Table, &mut out, &mut err).unwrap();
        let expected = "\
+----------+----------------+-------------+-------------+------+--------------+
| IP       | BORROWING-NODE | BLOCK       | BLOCK OWNER | TYPE | ALLOCATED-TO |
+----------+----------------+-------------+-------------+------+--------------+
| 10.0.0.2 | b              | 10.0.0.0/28 | a           | pod  | default/web  |
+----------+----------------+-------------+-------------+------+--------------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        assert!(String::from_utf8(err).unwrap().starts_with("note: found 2 IP allocations without an explicit node"));
    }
}
