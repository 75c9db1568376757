//! The borrowed addresses.

use ipam_core::{Borrowed, BorrowedAddress};
use ipam_operator::Operator;
use kv::Deadline;

use super::READING;
use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, printable, render};

/// Shows the addresses that nodes have from the blocks of other nodes.
pub(super) async fn show(ipam: &Operator) -> Result<Answer> {
    answer(&ipam.borrowed(Deadline::after(READING)).await?)
}

fn answer(borrowed: &Borrowed) -> Result<Answer> {
    let columns = [
        Column::Text("IP"),
        Column::Text("BORROWING-NODE"),
        Column::Text("BLOCK"),
        Column::Text("BLOCK OWNER"),
        Column::Text("TYPE"),
        Column::Text("ALLOCATED-TO"),
    ];
    let row = |address: &BorrowedAddress| {
        let (ip, block) = (address.ip.to_string(), address.block.to_string());
        let texts = [&ip, &address.node, &block, &address.block_owner, &address.kind, &address.allocated_to];
        texts.map(|text| printable(text)).to_vec()
    };
    let rows: Vec<Vec<String>> = borrowed.addresses.iter().map(row).collect();
    let answer = Answer::new(render(&columns, &rows), borrowed)?;
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
    use crate::args::Format;

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
