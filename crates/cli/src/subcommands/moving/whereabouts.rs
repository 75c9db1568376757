//! Reads the addresses that the IPAM plugin whereabouts has assigned, from its IPPool objects in the Kubernetes API.
//!
//! An IPPool object of whereabouts has an address range, and the addresses assigned from this range. Each assigned
//! address is recorded as an offset from the first address of the range, with the sandbox id, the interface and the
//! pod. The IPPool object does not record an address's node, so the node is taken from the pod.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::Args;
use ipam_core::net::nth;
use ipnet::IpNet;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::take_over::{ForeignLease, ForeignLeases, LeaseTakeOver, SkippedLease, TakeOverArgs, read_input};
use crate::command::{Invocation, StandaloneCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;
use crate::subcommands::documents::parse_values;

pub(crate) const HELP: &str = "\
Examples:
  kubectl get ippools.whereabouts.cni.cncf.io,pods -A -o yaml >records.yaml
  margay import whereabouts records.yaml --network storage --dry-run
  margay import whereabouts records.yaml --network storage --range 10.9.0.0/16

The pods say on which node each address is. Addresses whose pod is gone are left
out. Without pods in the file all addresses are --node's.
The pools must be there: margay pool create NAME CIDR --manual.";

#[derive(Debug, Args)]
pub(crate) struct FromWhereabouts {
    /// File with the pods and the whereabouts plugin's IPPool resources, in kubectl's YAML or JSON, or - for stdin
    pub(crate) file: PathBuf,

    /// Take over only the addresses of this range: CIDR or FIRST-LAST/BITS; repeatable
    #[arg(long = "range", value_name = "RANGE", value_parser = address_range)]
    pub(crate) ranges: Vec<AddressRange>,

    #[command(flatten)]
    pub(crate) terms: TakeOverArgs,
}

/// An address range in the notation of whereabouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressRange {
    /// The CIDR that contains the address range, without host bits.
    pub(crate) net: IpNet,
    /// The first and the last address of the address range.
    pub(crate) bounds: (IpAddr, IpAddr),
}

impl AddressRange {
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        self.net.contains(&address) && self.bounds.0 <= address && address <= self.bounds.1
    }
}

/// Parses an address range: a network in CIDR notation, with or without host bits, or `FIRST-LAST/BITS`.
fn address_range(text: &str) -> Result<AddressRange, String> {
    let (first, rest) = match text.split_once('-') {
        Some((first, rest)) => (Some(first), rest),
        None => (None, text),
    };
    let wrong = || "not a range such as 10.9.0.0/16 or 10.9.0.10-10.9.0.99/16".to_owned();
    let written: IpNet = rest.trim().parse().map_err(|_| wrong())?;
    let net = written.trunc();
    let bounds = match first {
        None => (net.network(), net.broadcast()),
        Some(first) => (first.trim().parse().map_err(|_| wrong())?, written.addr()),
    };
    if !net.contains(&bounds.0) {
        return Err(format!("{} is not in {net}", bounds.0));
    }
    if bounds.0 > bounds.1 {
        return Err(format!("{} comes after {}", bounds.0, bounds.1));
    }
    Ok(AddressRange { net, bounds })
}

const WHEREABOUTS_HINT: &str = "pass the output of: kubectl get ippools.whereabouts.cni.cncf.io,pods -A -o yaml";
const ONE_POOL: &str = "pass the pods and only one of these IPPools at a time: kubectl get \
                        ippools.whereabouts.cni.cncf.io -n kube-system NAME -o yaml";
/// The interface that is assumed for an address record without an interface. Old versions of whereabouts did not record
/// the interface. `net1` is the name that Multus gives to the first interface that it adds.
const DEFAULT_INTERFACE: &str = "net1";

/// A Kubernetes object in JSON. Go writes an empty field, such as an empty list `items`, as `null`.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "struct Object")]
struct KubernetesObject {
    #[serde(deserialize_with = "or_default")]
    kind: String,
    #[serde(deserialize_with = "or_default")]
    metadata: ObjectMetadata,
    #[serde(deserialize_with = "or_default")]
    spec: ObjectSpec,
    #[serde(deserialize_with = "or_default")]
    items: Vec<KubernetesObject>,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "struct Metadata")]
struct ObjectMetadata {
    #[serde(deserialize_with = "or_default")]
    namespace: String,
    #[serde(deserialize_with = "or_default")]
    name: String,
}

/// The field `spec` of an IPPool object or a pod.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "struct Spec")]
struct ObjectSpec {
    range: Option<String>,
    allocations: Option<BTreeMap<String, Option<WhereaboutsAllocation>>>,
    #[serde(rename = "nodeName")]
    node_name: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "struct Allocation")]
struct WhereaboutsAllocation {
    #[serde(deserialize_with = "or_default")]
    id: String,
    #[serde(deserialize_with = "or_default")]
    podref: String,
    #[serde(deserialize_with = "or_default")]
    ifname: String,
}

/// An IPPool object of whereabouts. The keys of `allocations` are offsets from the first address of `range`.
struct WhereaboutsPool {
    name: String,
    range: IpNet,
    allocations: BTreeMap<String, Option<WhereaboutsAllocation>>,
}

/// The IPPool objects and pods in the input file.
#[derive(Default)]
struct WhereaboutsRecords {
    pools: Vec<WhereaboutsPool>,
    /// The node on which each pod runs. Pods are identified by `namespace/name`.
    pods: BTreeMap<String, Option<String>>,
}

impl StandaloneCommand for FromWhereabouts {
    fn run(&self, invocation: &mut Invocation<'_>) -> CommandResult<u8> {
        let found = read_whereabouts(&self.file, &self.ranges)?;
        invocation.run_on_store(&LeaseTakeOver::new(found, &self.terms))
    }
}

/// Reads IPPool objects and pods from a file or from stdin. If `ranges` is not empty, only the addresses in `ranges`
/// are returned.
fn read_whereabouts(file: &Path, ranges: &[AddressRange]) -> CommandResult<ForeignLeases> {
    let name = file.display().to_string();
    let wrong = |why: String| CommandFailure::new(format!("{name}: {why}")).hint(WHEREABOUTS_HINT);
    let mut records = WhereaboutsRecords::default();
    for value in parse_values(&name, &read_input(file, WHEREABOUTS_HINT)?, WHEREABOUTS_HINT)? {
        if value != Value::Null {
            let object = KubernetesObject::deserialize(value).map_err(|error| wrong(printable(&error.to_string())))?;
            records.add_object(object).map_err(wrong)?;
        }
    }
    if records.pools.is_empty() {
        return Err(wrong("it has no IPPool of the whereabouts plugin".to_owned()));
    }
    if let Some(range) = ranges.iter().find(|range| records.pools.iter().all(|pool| pool.range != range.net)) {
        let found: Vec<String> = records.pools.iter().map(|pool| pool.range.to_string()).collect();
        return Err(wrong(format!("it has no IPPool of the range {}; it has {}", range.net, found.join(", "))));
    }
    records.pools.retain(|pool| ranges.is_empty() || ranges.iter().any(|range| range.net == pool.range));
    records.require_one_network().map_err(|why| wrong(why).hint(ONE_POOL))?;
    Ok(records.leases(ranges))
}

impl WhereaboutsRecords {
    /// Adds an IPPool object, a pod, or each item of a Kubernetes list to the records. Ignores Kubernetes objects that
    /// are neither IPPools, pods nor lists.
    fn add_object(&mut self, object: KubernetesObject) -> Result<(), String> {
        match object.kind.as_str() {
            "IPPool" => {
                let text = object.spec.range.unwrap_or_default();
                let range: IpNet = text.parse().map_err(|_| {
                    format!(
                        "the range {} of IPPool {} is not a CIDR",
                        printable(&text),
                        printable(&object.metadata.name)
                    )
                })?;
                let (name, allocations) = (object.metadata.name, object.spec.allocations.unwrap_or_default());
                self.pools.push(WhereaboutsPool { name, range: range.trunc(), allocations });
            }
            "Pod" => {
                let name = format!("{}/{}", object.metadata.namespace, object.metadata.name);
                self.pods.insert(name, object.spec.node_name.filter(|node| !node.is_empty()));
            }
            _ => object.items.into_iter().try_for_each(|item| self.add_object(item))?,
        }
        Ok(())
    }

    /// Fails if several IPPool objects have the same address range. Two IPPool objects with the same range belong to
    /// networks with different `network_name`s, so both networks may assign the same address. A `network_name` of
    /// whereabouts is recorded only in the names of its IPPool objects.
    fn require_one_network(&self) -> Result<(), String> {
        for pool in &self.pools {
            let same = self.pools.iter().find(|other| other.range == pool.range && other.name != pool.name);
            if let Some(other) = same {
                let names = format!("{} and {}", printable(&pool.name), printable(&other.name));
                return Err(format!(
                    "its IPPools {names} have the same range {}: their networks have different network_names",
                    pool.range
                ));
            }
        }
        Ok(())
    }

    /// Returns the leases with addresses in `ranges`, or all leases if `ranges` is empty. If the input has pods, a
    /// lease whose pod is not in the input is skipped, because its pod does not exist any more.
    fn leases(self, ranges: &[AddressRange]) -> ForeignLeases {
        let mut leases: BTreeMap<(String, String), ForeignLease> = BTreeMap::new();
        let mut left_out = Vec::new();
        for WhereaboutsPool { range, allocations, .. } in self.pools {
            for (place, allocation) in allocations {
                let WhereaboutsAllocation { id, podref, ifname } = allocation.unwrap_or_default();
                let Some(address) = address_at(range, &place) else {
                    left_out
                        .push(SkippedLease::new(format!("{} in {range}", printable(&place)), "it is not in the range"));
                    continue;
                };
                if !ranges.is_empty() && !ranges.iter().any(|range| range.contains(address)) {
                    continue;
                }
                let leave_out =
                    |why: String| SkippedLease::new(format!("{address} of container {}", printable(&id)), why);
                let node = match self.pods.get(&podref) {
                    Some(node @ Some(_)) => node.clone(),
                    None if self.pods.is_empty() => None,
                    None if podref.is_empty() => {
                        left_out.push(leave_out("its pod is not recorded".to_owned()));
                        continue;
                    }
                    None => {
                        left_out.push(leave_out(format!("its pod {} is not there any more", printable(&podref))));
                        continue;
                    }
                    Some(None) => {
                        left_out.push(leave_out(format!("its pod {} is on no node", printable(&podref))));
                        continue;
                    }
                };
                if id.is_empty() {
                    left_out.push(SkippedLease::new(address.to_string(), "its container is not recorded"));
                    continue;
                }
                let interface = if ifname.is_empty() { DEFAULT_INTERFACE.to_owned() } else { ifname };
                let pod = podref.split_once('/').map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
                let lease = leases.entry((id.clone(), interface.clone())).or_insert_with(|| ForeignLease {
                    container: id,
                    interface,
                    pod,
                    node,
                    ..ForeignLease::default()
                });
                lease.addresses.push(address);
            }
        }
        ForeignLeases { leases: leases.into_values().collect(), left_out }
    }
}

/// Deserialises a field that may be `null`.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(value: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// Returns the address whose offset from the first address of the range is `place`.
fn address_at(range: IpNet, place: &str) -> Option<IpAddr> {
    nth(range, place.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whereabouts_place_is_distance_within_range() {
        let at =
            |range: &str, place: &str| address_at(range.parse().unwrap(), place).map(|address| address.to_string());
        assert_eq!(at("10.0.0.0/24", "7").as_deref(), Some("10.0.0.7"));
        assert_eq!(at("fd00::/64", "18446744073709551615").as_deref(), Some("fd00::ffff:ffff:ffff:ffff"));
        for place in ["256", "-1", "x", "", "340282366920938463463374607431768211456"] {
            assert_eq!(at("10.0.0.0/24", place), None, "{place}");
        }
    }

    #[test]
    fn whereabouts_range_is_read_as_written() {
        for (text, net, first, last) in [
            ("10.9.0.0/16", "10.9.0.0/16", "10.9.0.0", "10.9.255.255"),
            ("10.9.0.77/16", "10.9.0.0/16", "10.9.0.0", "10.9.255.255"),
            ("10.9.0.10-10.9.0.99/16", "10.9.0.0/16", "10.9.0.10", "10.9.0.99"),
            ("10.9.0.10 - 10.9.0.99/16", "10.9.0.0/16", "10.9.0.10", "10.9.0.99"),
            ("fd09::5-fd09::9/64", "fd09::/64", "fd09::5", "fd09::9"),
            ("fd09::5/120", "fd09::/120", "fd09::", "fd09::ff"),
        ] {
            let range = address_range(text).unwrap();
            assert_eq!(range.net, net.parse().unwrap(), "{text}");
            assert_eq!(range.bounds, (first.parse().unwrap(), last.parse().unwrap()), "{text}");
        }
        for text in
            ["", "x", "10.9.0.0", "10.9.0.5-10.9.0.9", "-10.9.0.9/16", "10.8.0.1-10.9.0.9/16", "10.9.0.9-10.9.0.5/16"]
        {
            assert!(address_range(text).is_err(), "{text}");
        }
        assert!(address_range("fd09::5-10.9.0.9/16").is_err(), "of two families");
    }
}
