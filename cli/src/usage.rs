//! How full pools are: the answer of `ipam show`.

use ipnet::IpNet;
use serde::Serialize;

use crate::answer::Answer;
use crate::error::Result;
use crate::output::{Column, as_text, five_digits, part, render};

/// How many addresses a pool or a block has. In JSON the counts are strings: those of IPv6 exceed what a double holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    /// All of them.
    #[serde(serialize_with = "as_text")]
    pub(crate) capacity: u128,
    /// Those that somebody has.
    #[serde(serialize_with = "as_text")]
    pub(crate) in_use: u128,
    /// Those that are never handed out; some may be in use all the same.
    #[serde(serialize_with = "as_text")]
    pub(crate) reserved: u128,
    /// Those that can be handed out.
    #[serde(serialize_with = "as_text")]
    pub(crate) available: u128,
}

/// A block and how full it is.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BlockUsage {
    /// The block.
    #[serde(serialize_with = "as_text")]
    pub(crate) cidr: IpNet,
    /// Its addresses.
    #[serde(flatten)]
    pub(crate) usage: Usage,
}

/// A pool and how full it is.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolUsage {
    /// The pool's name.
    pub(crate) name: String,
    /// Its range.
    #[serde(serialize_with = "as_text")]
    pub(crate) cidr: IpNet,
    /// Its addresses.
    #[serde(flatten)]
    pub(crate) usage: Usage,
    /// The blocks that nodes have taken from it.
    pub(crate) blocks: Vec<BlockUsage>,
}

/// How full everything is.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The pools, by name.
    pub(crate) pools: Vec<PoolUsage>,
    /// Blocks that lie in no pool: what a deleted pool has left behind.
    #[serde(rename = "orphaned_blocks", skip_serializing_if = "Vec::is_empty")]
    pub(crate) orphans: Vec<BlockUsage>,
}

/// Whether blocks are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Pools only.
    Pools,
    /// Blocks too.
    Blocks,
}

impl Report {
    /// The report as an answer. JSON always has the blocks.
    pub(crate) fn answer(&self, detail: Detail) -> Result<Answer> {
        let answer = Answer::new(self.table(detail), self)?;
        if self.pools.is_empty() {
            return Ok(answer.note("there is no pool yet; make one with: margay pool create NAME CIDR"));
        }
        Ok(answer)
    }

    fn table(&self, detail: Detail) -> String {
        let columns = [
            Column::Text("GROUPING"),
            Column::Text("CIDR"),
            Column::Number("IPS TOTAL"),
            Column::Number("IPS IN USE"),
            Column::Number("IPS RESERVED"),
            Column::Number("IPS FREE"),
        ];
        let mut rows = Vec::new();
        for pool in &self.pools {
            rows.push(row("IP Pool", pool.cidr, &pool.usage));
            if detail == Detail::Blocks {
                rows.extend(pool.blocks.iter().map(|block| row("Block", block.cidr, &block.usage)));
            }
        }
        if detail == Detail::Blocks {
            rows.extend(self.orphans.iter().map(|block| row("Block", block.cidr, &block.usage)));
        }
        render(&columns, &rows)
    }
}

/// A row of the table. Rounding to five digits is for the eye; JSON is exact.
#[expect(clippy::cast_precision_loss, reason = "five digits are printed")]
fn row(grouping: &str, cidr: IpNet, usage: &Usage) -> Vec<String> {
    let whole = usage.capacity as f64;
    vec![
        grouping.to_owned(),
        cidr.to_string(),
        five_digits(whole),
        part(usage.in_use as f64, whole),
        part(usage.reserved as f64, whole),
        part(usage.available as f64, whole),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::args::Format;

    fn usage(capacity: u128, in_use: u128, reserved: u128, available: u128) -> Usage {
        Usage { capacity, in_use, reserved, available }
    }

    fn report() -> Report {
        let block = |cidr: &str, usage| BlockUsage { cidr: cidr.parse().unwrap(), usage };
        Report {
            pools: vec![
                PoolUsage {
                    name: "main".into(),
                    cidr: "10.65.0.0/24".parse().unwrap(),
                    usage: usage(256, 233, 4, 20),
                    blocks: vec![block("10.65.0.0/28", usage(16, 13, 4, 0))],
                },
                PoolUsage {
                    name: "wide".into(),
                    cidr: "fd00::/16".parse().unwrap(),
                    usage: usage(1 << 112, 1, 0, (1 << 112) - 1),
                    blocks: vec![],
                },
            ],
            orphans: vec![block("10.99.0.0/30", usage(4, 4, 0, 0))],
        }
    }

    fn printed(report: &Report, detail: Detail, format: Format) -> (String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        report.answer(detail).unwrap().print(format, &mut out, &mut err).unwrap();
        (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    #[test]
    fn a_table_of_pools() {
        let expected = "\
+----------+--------------+------------+------------+--------------+-------------------+
| GROUPING |     CIDR     |  IPS TOTAL | IPS IN USE | IPS RESERVED |      IPS FREE     |
+----------+--------------+------------+------------+--------------+-------------------+
| IP Pool  | 10.65.0.0/24 |        256 |  233 (91%) |       4 (2%) |           20 (8%) |
| IP Pool  | fd00::/16    | 5.1923e+33 |     1 (0%) |       0 (0%) | 5.1923e+33 (100%) |
+----------+--------------+------------+------------+--------------+-------------------+
";
        assert_eq!(printed(&report(), Detail::Pools, Format::Table), (expected.to_owned(), String::new()));
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
            "orphaned_blocks": [
                {"cidr": "10.99.0.0/30", "capacity": "4", "in_use": "4", "reserved": "0", "available": "0"}
            ],
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn an_empty_store_says_what_to_do() {
        let (table, notes) = printed(&Report::default(), Detail::Pools, Format::Table);
        assert!(table.contains("GROUPING"));
        assert_eq!(notes, "note: there is no pool yet; make one with: margay pool create NAME CIDR\n");
        assert_eq!(printed(&Report::default(), Detail::Pools, Format::Json).0.trim(), "{\n  \"pools\": []\n}");
    }
}
