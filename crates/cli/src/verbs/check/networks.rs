//! Networks of this machine that assign the same addresses from different stores: each store is in order by itself, but
//! two containers can get one address.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use datastore::Network;
use ipam_core::net::overlap;
use ipam_operator::inspect::{Code, Finding, Inspection, Subject};
use ipnet::IpNet;
use kv::Deadline;

use crate::error::Result;
use crate::store::StoreAt;

/// The longest time to read the pools of another store.
const PATIENCE: Duration = Duration::from_secs(10);

/// Addresses that are assigned from a store.
struct Place {
    store: String,
    net: IpNet,
    /// The pool or the network's configuration that has them.
    by: String,
}

/// The findings, and notes about stores that could not be read. Only stores on this machine are opened; of a cluster
/// only the configuration is read, unless it is the checked store.
pub(super) async fn overlapping(at: StoreAt<'_>, inspection: &Inspection) -> (Vec<Finding>, Vec<String>) {
    let (networks, mut notes) = datastore::networks(at.location.drivers(), at.conf_dir);
    let of_store = |store: &str, pools: &[(String, IpNet)]| -> Vec<Place> {
        let place =
            |(name, net): &(String, IpNet)| Place { store: store.to_owned(), net: *net, by: format!("pool {name}") };
        pools.iter().map(place).collect()
    };
    let own = at.to_string();
    let mut places = of_store(&own, &inspection.pools);
    let mut seen = BTreeSet::from([own]);
    for network in &networks {
        let store = network.store.to_string();
        places.extend(configured(network, &store));
        if network.store.path().is_some() && seen.insert(store.clone()) {
            match pools(at.other(&network.store).with_wait(PATIENCE)).await {
                Ok(pools) => places.extend(of_store(&store, &pools)),
                Err(failure) => notes.push(format!("the pools of {store} could not be read: {}", failure.message())),
            }
        }
    }
    (compare(&places), notes)
}

/// The addresses in a network's configuration.
fn configured<'n>(network: &'n Network, store: &'n str) -> impl Iterator<Item = Place> {
    let nets = network.subnets.iter().filter_map(|text| text.parse::<IpNet>().ok());
    nets.map(move |net| Place { store: store.to_owned(), net: net.trunc(), by: format!("network {}", network.name) })
}

/// The pools of a store; empty if there is no store.
async fn pools(at: StoreAt<'_>) -> Result<Vec<(String, IpNet)>> {
    let Some(open) = at.open_if_there().await? else { return Ok(Vec::new()) };
    let store = open.store();
    at.on_ipam_of(open, store, async |operator| {
        let pools = operator.ipam().inventory(Deadline::after(PATIENCE)).await?.pools;
        Ok(pools.iter().map(|pool| (pool.name().to_owned(), pool.cidr())).collect())
    })
    .await
}

/// Finds the networks that overlap, each pair once, even if several sources have it.
fn compare(places: &[Place]) -> Vec<Finding> {
    let mut found = BTreeMap::new();
    for (index, one) in places.iter().enumerate() {
        for other in places.iter().take(index) {
            if one.store != other.store && overlap(one.net, other.net) {
                let mut pair = [one, other];
                pair.sort_by_key(|place| (&place.store, place.net));
                let [first, second] = pair;
                let key = (&first.store, first.net, &second.store, second.net);
                found.entry(key).or_insert_with(|| {
                    let what = format!(
                        "{} ({} in {}) and {} ({} in {})",
                        first.by, first.net, first.store, second.by, second.net, second.store
                    );
                    Finding::new(Code::NetworksOverlap, Subject::Network(first.net.to_string()), what)
                });
            }
        }
    }
    found.into_values().collect()
}
