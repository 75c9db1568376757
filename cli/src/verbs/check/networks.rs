//! Networks of this machine that give out the same addresses from different stores: each store is in order by itself,
//! and two containers get one address all the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use datastore::{Create, Location, Network};
use ipam_core::Ipam;
use ipam_core::inspect::{Code, Finding, Inspection, Subject};
use ipam_core::net::overlap;
use ipnet::IpNet;
use kv::{Deadline, ErrorKind};

use crate::error::Result;
use crate::store;
use crate::verbs::nodes;

/// How long another store may take to tell its pools.
const PATIENCE: Duration = Duration::from_secs(10);

/// Addresses that are given out from a store.
struct Place {
    store: String,
    net: IpNet,
    /// The source.
    by: String,
}

/// The findings, and notes about stores that could not be looked into. Only stores on this machine are opened; of a
/// cluster counts what the configuration says, unless it is the one that is checked.
pub(super) async fn overlapping(
    location: &Location,
    inspection: &Inspection,
    conf_dir: &Path,
) -> (Vec<Finding>, Vec<String>) {
    let (networks, mut notes) = datastore::networks(conf_dir);
    let of_store = |store: &str, pools: &[(String, IpNet)]| -> Vec<Place> {
        let place =
            |(name, net): &(String, IpNet)| Place { store: store.to_owned(), net: *net, by: format!("pool {name}") };
        pools.iter().map(place).collect()
    };
    let own = location.to_string();
    let mut places = of_store(&own, &inspection.pools);
    let mut seen = BTreeSet::from([own]);
    for network in &networks {
        let store = network.store.to_string();
        places.extend(configured(network, &store));
        if network.store.path().is_some() && seen.insert(store.clone()) {
            match pools(&network.store).await {
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

/// The pools of a store; none if there is no store.
async fn pools(location: &Location) -> Result<Vec<(String, IpNet)>> {
    let open = match datastore::reach(location, Create::Never, PATIENCE).await {
        Err(error) if *error.kind() == ErrorKind::Missing => return Ok(Vec::new()),
        opened => opened.map_err(|error| store::explain(location, error))?,
    };
    let ipam = Ipam::new(open.store(), nodes(location));
    let inventory = ipam.inventory(Deadline::after(PATIENCE)).await;
    drop(ipam);
    let closed = open.close().await.map_err(|error| store::explain(location, error));
    let pools = inventory?.pools;
    closed?;
    Ok(pools.iter().map(|pool| (pool.name().to_owned(), pool.cidr())).collect())
}

/// Finds the networks that overlap, each pair once, however many say so.
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
