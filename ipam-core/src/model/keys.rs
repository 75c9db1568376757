//! Builds and parses the keys of all documents, mainly Calico's etcd keys.
//!
//! Names are inserted into keys unescaped, except in the keys of quota counters. Parse functions return `None` for a
//! key of another kind than expected. When Calico lists documents, it likewise skips keys of an unexpected kind.

use ipnet::IpNet;
use kv::Key;

use super::{Owner, QuotaKind, QuotaSubject, is_of_prefixes};
use crate::net::Family;

const IPAM: &str = "/calico/ipam/v2/";
const RESOURCES: &str = "/calico/resources/v3/projectcalico.org/";
const WORKLOAD_ENDPOINTS: &str = "workloadendpoints";
const PREFIXES: &str = "prefixes";
const PROFILES: &str = "profiles";

/// The key under which an embedded store records the name of its only node.
pub const PINNED_NODE: &str = "/margay/v1/node";
/// The prefix that the keys of the quotas document and of all quota counters share.
pub const QUOTAS_PREFIX: &str = "/margay/v1/quota";
const QUOTAS: &str = "/margay/v1/quotas";
const QUOTA_USE: &str = "/margay/v1/quota-use/";
const STICKY: &str = "/margay/v1/sticky/";

/// The kinds of Calico resources for which this crate defines a document type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResourceKind {
    /// A pool of addresses.
    IpPool,
    /// A reservation: a set of addresses that are never assigned.
    IpReservation,
    /// A node of the cluster.
    Node,
}

impl ResourceKind {
    /// Returns the resource kind's name as written in documents.
    pub fn kind(self) -> &'static str {
        match self {
            Self::IpPool => "IPPool",
            Self::IpReservation => "IPReservation",
            Self::Node => "Node",
        }
    }

    /// Returns the resource kind's plural name as written in keys.
    pub fn plural(self) -> &'static str {
        match self {
            Self::IpPool => "ippools",
            Self::IpReservation => "ipreservations",
            Self::Node => "nodes",
        }
    }
}

/// Formats a CIDR as in keys, for example `10.0.0.0-26`.
fn net_segment(net: IpNet) -> String {
    format!("{}-{}", net.network(), net.prefix_len())
}

/// Parses the CIDR in a key's last segment. Returns `None` if the CIDR's address family differs from the key's, or if
/// the CIDR is not written as [`net_segment`] writes it. Keys accept only the CIDR spelling that [`net_segment`]
/// writes, so each block has only one key.
fn parse_net(family: &str, segment: &str) -> Option<IpNet> {
    let (address, prefix) = segment.split_once('-')?;
    let address = address.parse().ok()?;
    let of = Family::of(address);
    if of.key_segment() != family {
        return None;
    }
    of.network(address, prefix.parse().ok()?).filter(|net| net_segment(*net) == segment)
}

fn text(key: &Key) -> Option<&str> {
    std::str::from_utf8(key.as_bytes()).ok()
}

/// Returns the prefix of the keys of all blocks, affinities and handles.
pub fn ipam_prefix() -> Key {
    IPAM.into()
}

/// Returns the key of a block. Calico skips the keys of blocks of prefixes, because it does not recognize them.
pub fn block(cidr: IpNet) -> Key {
    let family = Family::of_net(cidr).key_segment();
    format!("{IPAM}assignment/{family}/{}/{}", kind_of_block(cidr), net_segment(cidr)).into()
}

/// Returns the key segment that distinguishes blocks of addresses from blocks of prefixes.
fn kind_of_block(cidr: IpNet) -> &'static str {
    if is_of_prefixes(cidr) { PREFIXES } else { "block" }
}

/// Parses the key of a block, and returns the block's CIDR.
pub fn parse_block(key: &Key) -> Option<IpNet> {
    let rest = text(key)?.strip_prefix(IPAM)?.strip_prefix("assignment/")?;
    let (family, rest) = rest.split_once('/')?;
    let (kind, segment) = rest.split_once('/')?;
    parse_net(family, segment).filter(|cidr| kind == kind_of_block(*cidr))
}

/// Returns the prefix of the keys of all blocks, or of all blocks of one address family.
pub fn blocks_prefix(family: Option<Family>) -> Key {
    match family {
        None => format!("{IPAM}assignment/").into(),
        Some(family) => format!("{IPAM}assignment/{}/", family.key_segment()).into(),
    }
}

/// Returns the prefix of the keys of all blocks of addresses in one address family.
pub fn blocks_of_addresses_prefix(family: Family) -> Key {
    format!("{IPAM}assignment/{}/block/", family.key_segment()).into()
}

/// Returns the prefix of the keys of all blocks of prefixes in one address family.
pub fn blocks_of_prefixes_prefix(family: Family) -> Key {
    format!("{IPAM}assignment/{}/{PREFIXES}/", family.key_segment()).into()
}

/// Returns the key of the record that lists a workload's sticky addresses. The workload's name is inserted into the key
/// unescaped, including slashes.
pub fn sticky(name: &str) -> Key {
    format!("{STICKY}{name}").into()
}

/// Parses the key of a workload's sticky-address record, and returns the workload's name.
pub fn parse_sticky(key: &Key) -> Option<&str> {
    text(key)?.strip_prefix(STICKY)
}

/// Returns the prefix of the keys of all workloads' sticky-address records.
pub fn sticky_prefix() -> Key {
    STICKY.into()
}

/// Returns the key of an owner's affinity to a block. Returns `None` if the owner's name is empty, or if the owner is
/// neither a host nor virtual.
pub fn affinity(owner: &Owner, cidr: IpNet) -> Option<Key> {
    let prefix = owner_segment(owner)?;
    Some(format!("{prefix}/{}/block/{}", Family::of_net(cidr).key_segment(), net_segment(cidr)).into())
}

/// Parses the key of an affinity, and returns the owner and the block.
pub fn parse_affinity(key: &Key) -> Option<(Owner, IpNet)> {
    let mut parts = text(key)?.strip_prefix(IPAM)?.split('/');
    let (kind, name, family) = (parts.next()?, parts.next()?, parts.next()?);
    if name.is_empty() || parts.next() != Some("block") {
        return None;
    }
    let cidr = parse_net(family, parts.next()?)?;
    let owner = match kind {
        "host" => Owner::Host(name.to_owned()),
        "virtual" => Owner::Virtual(name.to_owned()),
        _ => return None,
    };
    parts.next().is_none().then_some((owner, cidr))
}

/// Returns the prefix of the keys of an owner's affinities, in the given family or in both families. Returns `None` for
/// an owner that cannot have affinities; see [`affinity`].
pub fn affinities_prefix(owner: &Owner, family: Option<Family>) -> Option<Key> {
    let prefix = owner_segment(owner)?;
    Some(match family {
        None => format!("{prefix}/").into(),
        Some(family) => format!("{prefix}/{}/block/", family.key_segment()).into(),
    })
}

/// Returns the prefix of the keys of all hosts' affinities.
pub fn host_affinities_prefix() -> Key {
    format!("{IPAM}host/").into()
}

/// Returns the prefix of the keys of all virtual owners' affinities.
pub fn virtual_affinities_prefix() -> Key {
    format!("{IPAM}virtual/").into()
}

/// Returns the key that old versions of Calico stored for a host, and that Margay deletes when the host is removed.
pub fn legacy_host(name: &str) -> Key {
    format!("{IPAM}host/{name}").into()
}

fn owner_segment(owner: &Owner) -> Option<String> {
    let (kind, name) = match owner {
        Owner::Host(name) => ("host", name),
        Owner::Virtual(name) => ("virtual", name),
        Owner::Other(_) => return None,
    };
    (!name.is_empty()).then(|| format!("{IPAM}{kind}/{name}"))
}

/// Returns the key of a handle.
pub fn handle(id: &str) -> Key {
    format!("{IPAM}handle/{id}").into()
}

/// Parses the key of a handle, and returns the handle's id.
pub fn parse_handle(key: &Key) -> Option<&str> {
    one_segment(text(key)?.strip_prefix(IPAM)?.strip_prefix("handle/")?)
}

/// Returns the prefix of the keys of all resources of a Calico kind for which [`ResourceKind`] has no variant. `plural`
/// is the plural name of the resource kind, as written in keys.
pub fn other_resources_prefix(plural: &str) -> Key {
    format!("{RESOURCES}{plural}/").into()
}

/// Returns the key of the IPAM settings.
pub fn config() -> Key {
    format!("{IPAM}config").into()
}

/// Parses a key that [`legacy_host`] has built, and returns the host's name.
pub fn parse_legacy_host(key: &Key) -> Option<&str> {
    one_segment(text(key)?.strip_prefix(IPAM)?.strip_prefix("host/")?)
}

/// Returns the key of the cluster's only ClusterInformation document, which Calico or `margay cluster init` writes.
pub fn cluster_information() -> Key {
    format!("{RESOURCES}clusterinformations/default").into()
}

/// Returns the key of a workload endpoint. If `name` is only the beginning of a name, returns the common prefix of the
/// keys of all endpoints whose names begin with `name`.
pub fn workload_endpoint(namespace: &str, name: &str) -> Key {
    format!("{RESOURCES}{WORKLOAD_ENDPOINTS}/{namespace}/{name}").into()
}

/// Parses the key of a workload endpoint, and returns the endpoint's namespace and name.
pub fn parse_workload_endpoint(key: &Key) -> Option<(&str, &str)> {
    let rest = text(key)?.strip_prefix(RESOURCES)?.strip_prefix(WORKLOAD_ENDPOINTS)?.strip_prefix('/')?;
    let (namespace, name) = rest.split_once('/')?;
    Some((one_segment(namespace)?, one_segment(name)?))
}

/// Returns the prefix of the keys of all workload endpoints.
pub fn workload_endpoints_prefix() -> Key {
    format!("{RESOURCES}{WORKLOAD_ENDPOINTS}/").into()
}

/// Returns the key of a profile.
pub fn profile(name: &str) -> Key {
    format!("{RESOURCES}{PROFILES}/{name}").into()
}

/// Parses the key of a profile, and returns the profile's name.
pub fn parse_profile(key: &Key) -> Option<&str> {
    one_segment(text(key)?.strip_prefix(RESOURCES)?.strip_prefix(PROFILES)?.strip_prefix('/')?)
}

/// Returns the prefix of the keys of all profiles.
pub fn profiles_prefix() -> Key {
    format!("{RESOURCES}{PROFILES}/").into()
}

/// Returns the key of a cluster-wide resource.
pub fn resource(kind: ResourceKind, name: &str) -> Key {
    format!("{RESOURCES}{}/{name}", kind.plural()).into()
}

/// Parses the key of a resource of the given kind, and returns the resource's name.
pub fn parse_resource(kind: ResourceKind, key: &Key) -> Option<&str> {
    one_segment(text(key)?.strip_prefix(RESOURCES)?.strip_prefix(kind.plural())?.strip_prefix('/')?)
}

/// Returns the prefix of the keys of all resources of a kind.
pub fn resources_prefix(kind: ResourceKind) -> Key {
    format!("{RESOURCES}{}/", kind.plural()).into()
}

/// Returns the key of the quotas document.
pub fn quotas() -> Key {
    QUOTAS.into()
}

/// Returns the key of a subject's quota counter. All bytes of the subject's name except ASCII letters, digits and `-_.`
/// are percent-encoded.
pub fn quota_use(kind: QuotaKind, name: &str) -> Key {
    let mut key = format!("{QUOTA_USE}{}/", kind.as_str());
    for byte in name.bytes() {
        match byte {
            b'-' | b'_' | b'.' => key.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => key.push(char::from(byte)),
            _ => key += &format!("%{byte:02X}"),
        }
    }
    key.into()
}

/// Parses the key of a quota counter, and returns the subject whose addresses are counted.
pub fn parse_quota_use(key: &Key) -> Option<QuotaSubject> {
    let (kind, encoded) = text(key)?.strip_prefix(QUOTA_USE)?.split_once('/')?;
    let kind = QuotaKind::ALL.into_iter().find(|one| one.as_str() == kind)?;
    let mut parts = encoded.split('%');
    let mut name = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (byte, rest) = part.split_at_checked(2)?;
        name.push(u8::from_str_radix(byte, 16).ok()?);
        name.extend(rest.bytes());
    }
    Some(QuotaSubject::new(kind, String::from_utf8(name).ok()?))
        .filter(|subject| quota_use(kind, &subject.name) == *key)
}

fn one_segment(rest: &str) -> Option<&str> {
    (!rest.is_empty() && !rest.contains('/')).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn keys_match_calico() {
        assert_eq!(block(net("10.65.166.128/26")), "/calico/ipam/v2/assignment/ipv4/block/10.65.166.128-26".into());
        assert_eq!(
            block(net("fd80:24e2:f998:72d6:c11:b42f:f17e:a680/122")),
            "/calico/ipam/v2/assignment/ipv6/block/fd80:24e2:f998:72d6:c11:b42f:f17e:a680-122".into()
        );
        assert_eq!(block(net("2001:db8::/58")), "/calico/ipam/v2/assignment/ipv6/prefixes/2001:db8::-58".into());
        assert_eq!(
            affinity(&Owner::Host("n".into()), net("10.0.0.0/26")),
            Some("/calico/ipam/v2/host/n/ipv4/block/10.0.0.0-26".into())
        );
        assert_eq!(
            affinity(&Owner::Virtual("load-balancer".into()), net("fd80::/122")),
            Some("/calico/ipam/v2/virtual/load-balancer/ipv6/block/fd80::-122".into())
        );
        assert_eq!(affinity(&Owner::Host(String::new()), net("10.0.0.0/26")), None);
        assert_eq!(affinity(&Owner::Other("x".into()), net("10.0.0.0/26")), None);
        assert_eq!(handle("net1.c1"), "/calico/ipam/v2/handle/net1.c1".into());
        assert_eq!(
            resource(ResourceKind::IpPool, "main"),
            "/calico/resources/v3/projectcalico.org/ippools/main".into()
        );
    }

    #[test]
    fn key_prefix_covers_its_host_alone() {
        let a = affinities_prefix(&Owner::Host("a".into()), None).unwrap();
        let ab = affinity(&Owner::Host("ab".into()), net("10.0.0.0/26")).unwrap();
        assert!(!ab.as_bytes().starts_with(a.as_bytes()));
        let own = affinity(&Owner::Host("a".into()), net("10.0.0.0/26")).unwrap();
        assert!(own.as_bytes().starts_with(a.as_bytes()));
    }

    #[test]
    fn key_of_counter_exists_for_any_name() {
        for name in ["shop", "a/b", "%2F", "grün", "", "*", "a b"] {
            let key = quota_use(QuotaKind::Network, name);
            assert_eq!(parse_quota_use(&key), Some(QuotaSubject::new(QuotaKind::Network, name)), "{key}");
        }
        assert_eq!(quota_use(QuotaKind::Network, "a/b"), "/margay/v1/quota-use/network/a%2Fb".into());
        for key in ["/margay/v1/quotas", "/margay/v1/quota-use/planet/a", "/margay/v1/quota-use/node/a%2", "/x"] {
            assert_eq!(parse_quota_use(&key.into()), None, "{key}");
        }
    }

    #[test]
    fn key_is_not_parsed_when_malformed() {
        for key in [
            "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0",
            "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-33",
            "/calico/ipam/v2/assignment/ipv6/block/10.0.0.0-26",
            "/calico/ipam/v2/assignment/ipv4/block/x/10.0.0.0-26",
            "/calico/ipam/v2/assignment/ipv4/prefixes/10.0.0.0-26",
            "/calico/ipam/v2/assignment/ipv6/block/2001:db8::-58",
            "/calico/ipam/v2/assignment/ipv4/10.0.0.0-26",
            "/calico/ipam/v2/assignment/ipv4/block/10.0.0.1-26",
            "/calico/ipam/v2/assignment/ipv4/block/10.0.0.0-+26",
            "/calico/ipam/v2/assignment/ipv6/block/FD80::-122",
            "",
        ] {
            assert_eq!(parse_block(&key.into()), None, "{key}");
        }
        for key in [
            "/calico/ipam/v2/host/a",
            "/calico/ipam/v2/host//ipv4/block/10.0.0.0-26",
            "/calico/ipam/v2/host/a/b/ipv4/block/10.0.0.0-26",
            "/calico/ipam/v2/host/a/ipv4/block/10.0.0.0-26/x",
            "/calico/ipam/v2/other/a/ipv4/block/10.0.0.0-26",
        ] {
            assert_eq!(parse_affinity(&key.into()), None, "{key}");
        }
        assert_eq!(parse_handle(&"/calico/ipam/v2/handle/a/b".into()), None);
        assert_eq!(parse_handle(&"/calico/ipam/v2/handle/".into()), None);
        let pools = ResourceKind::IpPool;
        assert_eq!(parse_resource(pools, &"/calico/resources/v3/projectcalico.org/ippoolsx/a".into()), None);
        assert_eq!(parse_resource(pools, &resource(pools, "a")), Some("a"));
        assert_eq!(parse_block(&Key::from(&[0xff_u8, 0xfe][..])), None);
    }
}
