//! The use of pools: the answer of `ipam show`.

use ipam_core::utilization::{BlockUsage, Usage, Utilization};
use ipnet::IpNet;

use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, five_digits, part, render};

/// The detail of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Pools only.
    Pools,
    /// Blocks too.
    Blocks,
}

/// The use of all pools as an answer. JSON always has the blocks, and has numbers as strings.
pub(crate) fn answer(utilization: &Utilization, detail: Detail) -> Result<Answer> {
    let answer = Answer::new(table(utilization, detail), utilization)?;
    Ok(match (utilization.pools.is_empty(), utilization.orphaned.len(), detail) {
        (true, 0, _) => answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"),
        (_, 0, _) | (_, _, Detail::Blocks) => answer,
        (_, orphans, Detail::Pools) => {
            let blocks = if orphans == 1 { "block lies" } else { "blocks lie" };
            answer.note(format!("{orphans} {blocks} in no pool; see with: margay ipam show --show-blocks"))
        }
    })
}

fn table(utilization: &Utilization, detail: Detail) -> String {
    let columns = [
        Column::Text("GROUPING"),
        Column::Text("CIDR"),
        Column::Number("IPS TOTAL"),
        Column::Number("IPS IN USE"),
        Column::Number("IPS RESERVED"),
        Column::Number("IPS FREE"),
    ];
    let blocks = |blocks: &[BlockUsage]| -> Vec<Vec<String>> {
        let shown = if detail == Detail::Blocks { blocks } else { &[] };
        shown.iter().map(|block| row("Block", block.cidr, &block.usage)).collect()
    };
    let mut rows = Vec::new();
    for pool in &utilization.pools {
        let grouping = pool.prefix_length.map_or_else(|| "IP Pool".to_owned(), |length| format!("Pool of /{length}"));
        rows.push(row(&grouping, pool.cidr, &pool.usage));
        rows.extend(blocks(&pool.blocks));
    }
    rows.extend(blocks(&utilization.orphaned));
    render(&columns, &rows)
}

/// A row of the table. Rounding to five digits is for the eye; JSON is exact.
fn row(grouping: &str, cidr: IpNet, usage: &Usage) -> Vec<String> {
    let whole = usage.capacity.to_f64();
    let parts = [usage.in_use, usage.reserved, usage.available].map(|count| part(count.to_f64(), whole));
    [grouping.to_owned(), cidr.to_string(), five_digits(whole)].into_iter().chain(parts).collect()
}

#[cfg(test)]
mod tests {
    use ipam_core::net::Count;
    use ipam_core::utilization::PoolUsage;
    use serde_json::{Value, json};

    use super::*;
    use crate::options::Format;

    fn usage(capacity: u128, in_use: u128, reserved: u128, available: u128) -> Usage {
        let [capacity, in_use, reserved, available] = [capacity, in_use, reserved, available].map(Count::new);
        Usage { capacity, in_use, reserved, available }
    }

    fn report() -> Utilization {
        let block = |cidr: &str, usage| BlockUsage { cidr: cidr.parse().unwrap(), usage };
        Utilization {
            pools: vec![
                PoolUsage {
                    name: "main".into(),
                    cidr: "10.65.0.0/24".parse().unwrap(),
                    prefix_length: None,
                    usage: usage(256, 233, 4, 20),
                    blocks: vec![block("10.65.0.0/28", usage(16, 13, 4, 0))],
                },
                PoolUsage {
                    name: "wide".into(),
                    cidr: "fd00::/16".parse().unwrap(),
                    prefix_length: None,
                    usage: usage(1 << 112, 1, 0, (1 << 112) - 1),
                    blocks: vec![],
                },
            ],
            orphaned: vec![block("10.99.0.0/30", usage(4, 4, 0, 0))],
        }
    }

    fn printed(report: &Utilization, detail: Detail, format: Format) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        answer(report, detail).unwrap().print(format, &mut out, &mut err).unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn a_table_of_pools() {
        let expected = "\
+----------+--------------+------------+------------+--------------+-------------------+
| GROUPING | CIDR         | IPS TOTAL  | IPS IN USE | IPS RESERVED | IPS FREE          |
+----------+--------------+------------+------------+--------------+-------------------+
| IP Pool  | 10.65.0.0/24 |        256 |  233 (91%) |       4 (2%) |           20 (8%) |
| IP Pool  | fd00::/16    | 5.1923e+33 |     1 (0%) |       0 (0%) | 5.1923e+33 (100%) |
+----------+--------------+------------+------------+--------------+-------------------+
";
        let note = "note: 1 block lies in no pool; see with: margay ipam show --show-blocks\n";
        assert_eq!(printed(&report(), Detail::Pools, Format::Table), (expected.to_owned(), note.to_owned()));
    }

    #[test]
    fn blocks_follow_their_pool_and_orphans_come_last() {
        let (table, _) = printed(&report(), Detail::Blocks, Format::Table);
        let first: Vec<&str> =
            table.lines().filter_map(|line| line.strip_prefix("| ")?.split('|').next().map(str::trim)).collect();
        assert_eq!(first, ["GROUPING", "IP Pool", "Block", "IP Pool", "Block"]);
        assert!(table.contains("10.99.0.0/30"), "{table}");
    }

    #[test]
    fn json_is_exact_and_has_the_blocks() {
        let (text, _) = printed(&report(), Detail::Pools, Format::Json);
        let found: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "pools": [
                {
                    "name": "main", "cidr": "10.65.0.0/24",
                    "capacity": "256", "in_use": "233", "reserved": "4", "available": "20",
                    "blocks": [
                        {"cidr": "10.65.0.0/28", "capacity": "16", "in_use": "13", "reserved": "4", "available": "0"}
                    ],
                },
                {
                    "name": "wide", "cidr": "fd00::/16",
                    "capacity": "5192296858534827628530496329220096", "in_use": "1", "reserved": "0",
                    "available": "5192296858534827628530496329220095",
                    "blocks": [],
                },
            ],
            "orphaned": [
                {"cidr": "10.99.0.0/30", "capacity": "4", "in_use": "4", "reserved": "0", "available": "0"}
            ],
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn an_empty_store_says_what_to_do() {
        let (table, notes) = printed(&Utilization::default(), Detail::Pools, Format::Table);
        assert!(table.contains("GROUPING"));
        assert_eq!(notes, "note: there is no pool yet; make one with: margay pool create NAME CIDR\n");
        let (text, _) = printed(&Utilization::default(), Detail::Pools, Format::Json);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"pools": [], "orphaned": []}));
    }
}
