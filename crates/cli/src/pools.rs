//! Pools as `pool list` and `pool create` show them, and the block size of a new pool.

use ipnet::IpNet;
use serde::Serialize;

use crate::answer::Answer;
use crate::error::{Failure, Result};
use crate::output::{Column, as_text, render};

/// A pool as a row.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolRow {
    /// Its name.
    pub(crate) name: String,
    /// Its range.
    #[serde(serialize_with = "as_text")]
    pub(crate) cidr: IpNet,
    /// The prefix length of its blocks.
    pub(crate) block_size: u8,
    /// The length of the prefixes that are assigned from it; `None` if it has addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prefix_length: Option<u8>,
    /// The selector of the nodes that may use it.
    pub(crate) node_selector: String,
    /// The selector of the namespaces that may use it; empty means all.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) namespace_selector: String,
    /// `Automatic`, or `Manual` if only networks that name the pool get addresses from it.
    pub(crate) assignment_mode: String,
    /// True if it is disabled.
    pub(crate) disabled: bool,
    /// The gateway, if it is the pool of a bridged network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gateway: Option<String>,
}

#[derive(Serialize)]
struct Pools<'a> {
    pools: &'a [PoolRow],
}

/// The answer of `pool list`.
pub(crate) fn listing(pools: &[PoolRow]) -> Result<Answer> {
    let columns = [
        Column::Text("NAME"),
        Column::Text("CIDR"),
        Column::Text("BLOCKS"),
        Column::Text("GATEWAY"),
        Column::Text("NODES"),
        Column::Text("STATE"),
    ];
    let rows: Vec<Vec<String>> = pools.iter().map(row).collect();
    let answer = Answer::new(render(&columns, &rows), &Pools { pools })?;
    Ok(if pools.is_empty() {
        answer.note("there is no pool yet; make one with: margay pool create NAME CIDR")
    } else {
        answer
    })
}

fn row(pool: &PoolRow) -> Vec<String> {
    let state = match (pool.disabled, pool.assignment_mode.as_str()) {
        (true, _) => "disabled",
        (false, "Manual") => "by name only",
        (false, _) => "enabled",
    };
    vec![
        pool.name.clone(),
        pool.cidr.to_string(),
        match pool.prefix_length {
            Some(length) => format!("/{} of /{length}", pool.block_size),
            None => format!("/{}", pool.block_size),
        },
        pool.gateway.clone().unwrap_or_default(),
        pool.node_selector.clone(),
        state.to_owned(),
    ]
}

/// The block size of a new pool, with a note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlockSize {
    /// The prefix length.
    pub(crate) bits: u8,
    /// The reason if it is not the usual size.
    pub(crate) note: Option<String>,
}

/// The block size for a pool: the wanted one, else /26 or /122, or the whole pool if it is smaller than that.
///
/// # Errors
/// No block can have the wanted size, or it is larger than the pool.
pub(crate) fn block_size(cidr: IpNet, wanted: Option<u8>) -> Result<BlockSize> {
    let (smallest, largest, usual) = if cidr.addr().is_ipv4() { (32, 20, 26) } else { (128, 116, 122) };
    let pool = cidr.prefix_len();
    match wanted {
        Some(bits) if !(largest..=smallest).contains(&bits) => {
            Err(Failure::new(format!("--block-size {bits} is not between {largest} and {smallest}")))
        }
        Some(bits) if bits < pool => Err(Failure::new(format!("a block of /{bits} does not fit into pool {cidr}"))
            .hint(format!("leave --block-size away, or give one between {pool} and {smallest}"))),
        Some(bits) => Ok(BlockSize { bits, note: None }),
        None if pool > usual => {
            let note = format!("the block size is /{pool}, the whole pool, since the usual /{usual} does not fit in");
            Ok(BlockSize { bits: pool, note: Some(note) })
        }
        None => Ok(BlockSize { bits: usual, note: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Format;

    fn size(cidr: &str, wanted: Option<u8>) -> Result<BlockSize> {
        block_size(cidr.parse().unwrap(), wanted)
    }

    #[test]
    fn the_block_size_fits_the_pool() {
        let usual = |bits| BlockSize { bits, note: None };
        assert_eq!(size("10.0.0.0/16", None).unwrap(), usual(26));
        assert_eq!(size("10.0.0.0/26", None).unwrap(), usual(26));
        assert_eq!(size("fd00::/64", None).unwrap(), usual(122));
        assert_eq!(size("10.0.0.0/16", Some(20)).unwrap(), usual(20));
        assert_eq!(size("10.0.0.0/28", Some(32)).unwrap(), usual(32));
        let small = size("10.0.0.0/28", None).unwrap();
        assert_eq!(small.bits, 28);
        assert!(small.note.unwrap().contains("/28"));
        assert_eq!(size("fd00::/126", None).unwrap().bits, 126);
        assert_eq!(size("10.0.0.0/32", None).unwrap().bits, 32);
    }

    #[test]
    fn a_block_size_that_cannot_be_is_refused() {
        for (cidr, wanted) in [("10.0.0.0/16", 19), ("10.0.0.0/16", 33), ("fd00::/64", 26), ("10.0.0.0/28", 26)] {
            assert!(size(cidr, Some(wanted)).is_err(), "{cidr} {wanted}");
        }
    }

    #[test]
    fn a_listing() {
        let pool = PoolRow {
            name: "lab".into(),
            cidr: "10.70.0.0/24".parse().unwrap(),
            block_size: 26,
            prefix_length: None,
            node_selector: "all()".into(),
            namespace_selector: String::new(),
            assignment_mode: "Automatic".into(),
            disabled: false,
            gateway: Some("10.70.0.1".into()),
        };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        listing(std::slice::from_ref(&pool)).unwrap().print(Format::Table, &mut out, &mut err).unwrap();
        let expected = "\
+------+--------------+--------+-----------+-------+---------+
| NAME | CIDR         | BLOCKS | GATEWAY   | NODES | STATE   |
+------+--------------+--------+-----------+-------+---------+
| lab  | 10.70.0.0/24 | /26    | 10.70.0.1 | all() | enabled |
+------+--------------+--------+-----------+-------+---------+
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        listing(&[pool]).unwrap().print(Format::Json, &mut out, &mut err).unwrap();
        let found: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let expected = serde_json::json!({"pools": [{
            "name": "lab", "cidr": "10.70.0.0/24", "block_size": 26, "node_selector": "all()",
            "assignment_mode": "Automatic", "disabled": false, "gateway": "10.70.0.1",
        }]});
        assert_eq!(found, expected);
        assert!(err.is_empty());
    }
}
