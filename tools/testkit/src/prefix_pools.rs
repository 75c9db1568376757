//! Creates pools of prefixes, and reads the assigned prefixes from results, with any kind of store.

use datastore::Create;
use ipam_core::model::NewPool;
use ipnet::IpNet;

use crate::lab::Lab;
use crate::process::Outcome;

/// Creates a pool of prefixes, and also the store if it is missing.
pub fn pool(lab: &Lab, name: &str, cidr: &str, length: u8) {
    let pool = NewPool::new(name, cidr.parse().unwrap()).with_prefix_length(length);
    lab.with_ipam(Create::IfMissing, async |ipam, deadline| {
        ipam.create_pool(&pool, None, deadline).await.unwrap();
    });
}

/// Returns the first assigned prefix in a plugin's result. Fails unless one of the result's addresses has this
/// prefix as its network.
pub fn prefix(outcome: &Outcome) -> IpNet {
    let prefixes = &outcome.json()["margay.io/prefixes"];
    let prefix: IpNet = prefixes[0].as_str().unwrap_or_else(|| panic!("{outcome:?}")).parse().unwrap();
    assert!(outcome.cidrs().iter().any(|cidr| cidr.parse::<IpNet>().unwrap().trunc() == prefix), "{outcome:?}");
    prefix
}
