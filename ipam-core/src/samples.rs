//! Collects metrics of a store, and formats them in Prometheus's text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use kv::{ErrorKind, Key, Range, RangeRequest, Revision, Store};
use serde::Serialize;

use crate::census::{AddressUse, Census, NodeShare, PoolCensus, QuotaUse};

#[derive(Debug, Serialize)]
struct Sample {
    name: &'static str,
    #[serde(skip)]
    help: &'static str,
    labels: Vec<(&'static str, String)>,
    value: f64,
}

/// A list of metric values with their labels.
#[derive(Debug, Default, Serialize)]
pub struct Samples(Vec<Sample>);

/// Returns the number of addresses that were assigned in boots other than `boot`.
fn of_earlier_boots(boots: &BTreeMap<String, usize>, boot: Option<&str>) -> usize {
    let Some(boot) = boot else { return 0 };
    boots.iter().filter(|(other, _)| *other != boot).map(|(_, count)| count).sum()
}

impl Samples {
    fn add(&mut self, name: &'static str, help: &'static str, labels: Vec<(&'static str, String)>, value: f64) {
        self.0.push(Sample { name, help, labels, value });
    }

    /// Adds the metrics of all pools, nodes and quotas. `node` is the name of this machine, and `boot` its current
    /// boot.
    pub fn of_all(&mut self, census: &Census, node: &str, boot: Option<&str>) {
        for pool in &census.pools {
            self.of_pool(pool);
        }
        self.add("margay_blocks_without_pool", "Blocks that lie in no pool.", vec![], census.orphaned.len() as f64);
        self.add("margay_nodes", "Nodes that have blocks or addresses.", vec![], census.nodes.len() as f64);
        self.leaked("node-gone", census.of_gone_nodes());
        self.of_quotas(&census.quotas);
        let boots = census.nodes.get(node).map(|its| of_earlier_boots(&its.boots, boot));
        self.leaked("earlier-boot", boots.unwrap_or_default());
    }

    /// Adds a metric for the number of days until a pool is full.
    pub fn of_days_until_full(&mut self, pool: &str, cidr: IpNet, days: f64) {
        let labels = vec![("pool", pool.to_owned()), ("cidr", cidr.to_string())];
        let help = "Days until a pool is full, if it goes on filling as in the history of at most a week.";
        self.add("margay_pool_days_until_full", help, labels, days);
    }

    /// Adds the metrics of one node's shares of the pools. `boot` is the current boot of this machine.
    pub fn of_node(&mut self, share: &NodeShare, boot: Option<&str>) {
        for (name, (cidr, its)) in &share.pools {
            let labels = || vec![("pool", name.clone()), ("cidr", cidr.to_string())];
            self.add("margay_node_blocks", "Blocks of a pool that are this node's.", labels(), its.blocks as f64);
            for (state, value) in [
                ("in-use", its.used),
                ("borrowed", its.borrowed),
                ("lent", its.lent),
                ("resting", its.in_cooldown),
                ("free", its.free),
            ] {
                let labels = labels().into_iter().chain([("state", state.to_owned())]).collect();
                let help = "Addresses of a pool by what they are to this node.";
                self.add("margay_node_addresses", help, labels, value as f64);
            }
        }
        self.add("margay_blocks_without_pool", "Blocks that lie in no pool.", vec![], share.orphaned as f64);
        self.leaked("earlier-boot", of_earlier_boots(&share.boots, boot));
        self.of_quotas(&share.quotas);
    }

    fn of_quotas(&mut self, quotas: &[QuotaUse]) {
        for QuotaUse { subject, limit, used } in quotas {
            let labels = || vec![("kind", subject.kind.as_str().to_owned()), ("name", subject.name.clone())];
            let help = "Addresses that a namespace, a network or a node may have.";
            self.add("margay_quota_limit", help, labels(), *limit as f64);
            self.add("margay_quota_used", "Addresses that count against a quota.", labels(), *used as f64);
        }
    }

    fn leaked(&mut self, reason: &str, count: usize) {
        let help = "Addresses of nodes that are not registered any more, or of an earlier boot of this node.";
        self.add("margay_leaked_addresses", help, vec![("reason", reason.to_owned())], count as f64);
    }

    /// Adds the metrics for the newest store revision, the oldest readable revision, and the current time.
    pub fn of_store(&mut self, revision: Revision, oldest: Revision) {
        self.add("margay_store_revision", "The revision that was read.", vec![], revision.get() as f64);
        self.add("margay_store_oldest_revision", "The oldest revision that can be read.", vec![], oldest.get() as f64);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.add("margay_read_timestamp_seconds", "When this was read.", vec![], now.as_secs() as f64);
    }

    /// Adds the metrics for an embedded store's history: the commit time of its oldest revision, its size and its
    /// maximum size in bytes.
    pub fn of_history(&mut self, oldest: Option<SystemTime>, bytes: u64, max_bytes: Option<u64>) {
        if let Some(since) = oldest.and_then(|time| time.duration_since(UNIX_EPOCH).ok()) {
            let help = "When the oldest revision that can be read was committed.";
            self.add("margay_store_oldest_timestamp_seconds", help, vec![], since.as_secs() as f64);
        }
        self.add("margay_store_history_bytes", "Bytes of the history that is kept.", vec![], bytes as f64);
        if let Some(max_bytes) = max_bytes {
            let help = "Bytes beyond which the oldest history is given up.";
            self.add("margay_store_history_max_bytes", help, vec![], max_bytes as f64);
        }
    }

    /// Adds metrics of one cluster member: the size of its database, the bytes in use, its quota and its number of
    /// alarms.
    pub fn of_member(&mut self, endpoint: &str, bytes: u64, bytes_in_use: u64, quota_bytes: u64, alarms: usize) {
        for (name, help, value) in [
            ("margay_member_database_bytes", "Size of a cluster member's database file in bytes.", bytes as f64),
            (
                "margay_member_database_in_use_bytes",
                "Bytes in use in a cluster member's database.",
                bytes_in_use as f64,
            ),
            (
                "margay_member_database_quota_bytes",
                "Size at which a cluster member refuses writes.",
                quota_bytes as f64,
            ),
            ("margay_member_alarms", "Number of alarms that a cluster member reports.", alarms as f64),
        ] {
            self.add(name, help, vec![("member", endpoint.to_owned())], value);
        }
    }

    fn of_pool(&mut self, pool: &PoolCensus) {
        let labels = || vec![("pool", pool.pool.name().to_owned()), ("cidr", pool.pool.cidr().to_string())];
        let count = |wanted| pool.blocks.iter().map(|block| block.count(wanted)).sum::<usize>() as f64;
        let size = pool.usage.capacity.to_f64();
        self.add("margay_pool_size_addresses", "Addresses of a pool.", labels(), size);
        let borrowed = count(AddressUse::Borrowed);
        for (state, value) in [
            ("in-use", count(AddressUse::Used) + borrowed),
            ("resting", count(AddressUse::InCooldown)),
            ("reserved", pool.usage.reserved.to_f64()),
            ("free", pool.usage.available.to_f64()),
        ] {
            let labels = labels().into_iter().chain([("state", state.to_owned())]).collect();
            self.add("margay_pool_addresses", "Addresses of a pool by what is with them.", labels, value);
        }
        let help = "Addresses that another node has than their block's.";
        self.add("margay_pool_borrowed_addresses", help, labels(), borrowed);
        self.add("margay_pool_blocks", "Blocks of a pool that are there.", labels(), pool.blocks.len() as f64);
        let full = pool.blocks.iter().filter(|block| block.count(AddressUse::Free) == 0).count();
        self.add("margay_pool_full_blocks", "Blocks of a pool without a free address.", labels(), full as f64);
    }

    /// Formats all samples as text, grouped by metric.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut names: Vec<(&str, &str)> = Vec::new();
        for sample in &self.0 {
            if !names.iter().any(|(name, _)| *name == sample.name) {
                names.push((sample.name, sample.help));
            }
        }
        for (name, help) in names {
            _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
            for sample in self.0.iter().filter(|sample| sample.name == name) {
                _ = writeln!(text, "{name}{} {}", labels(&sample.labels), sample.value);
            }
        }
        text
    }
}

fn labels(labels: &[(&str, String)]) -> String {
    if labels.is_empty() {
        return String::new();
    }
    let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let reported: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    format!("{{{}}}", reported.join(","))
}

/// Finds the oldest readable revision of a store. If the store's `Compacted` errors do not name the oldest revision,
/// the function finds it by binary search.
///
/// # Errors
/// Any error of [`Store::range`].
pub async fn oldest_revision(store: &dyn Store, newest: Revision) -> kv::Result<Revision> {
    let (mut gone, mut there) = (0, newest.get());
    while gone + 1 < there {
        let middle = if gone == 0 { 1 } else { gone + (there - gone) / 2 };
        let request = RangeRequest::new(Range::Key(Key::from("/calico/"))).with_at(Revision::new(middle));
        match store.range(request).await {
            Ok(_) => there = middle,
            Err(error) => match error.kind() {
                ErrorKind::Compacted { compact_revision } if compact_revision.is_set() => return Ok(*compact_revision),
                ErrorKind::Compacted { .. } => gone = middle,
                _ => return Err(error),
            },
        }
        if middle == 1 && there == 1 {
            break;
        }
    }
    Ok(Revision::new(there))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_text_has_one_heading_per_name_and_escapes() {
        let mut samples = Samples::default();
        for pool in ["a", "b\"\n"] {
            samples.add("margay_x", "What it is.", vec![("pool", pool.to_owned())], 1.5);
        }
        samples.add("margay_y", "Another.", vec![], 3.0);
        let expected = "\
# HELP margay_x What it is.
# TYPE margay_x gauge
margay_x{pool=\"a\"} 1.5
margay_x{pool=\"b\\\"\\n\"} 1.5
# HELP margay_y Another.
# TYPE margay_y gauge
margay_y 3
";
        assert_eq!(samples.text(), expected);
    }

    #[tokio::test]
    async fn samples_oldest_revision_is_found() {
        let store = kv_mvcc::memory();
        for number in 0..20 {
            kv::StoreExt::put(&store, "/k", number.to_string()).await.unwrap();
        }
        assert_eq!(oldest_revision(&store, Revision::new(20)).await.unwrap().get(), 1);
        store.compact(Revision::new(13)).await.unwrap();
        assert_eq!(oldest_revision(&store, Revision::new(20)).await.unwrap().get(), 13);
    }
}
