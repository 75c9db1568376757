//! Reads a store's addresses, reservations and pools without the plugin, and checks that the store's documents agree.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use datastore::Create;
use ipam_core::assign::AssignRequest;
use ipam_core::model::{
    Affinity, AffinityState, Block, Document, Handle, IpReservation, NewPool, StickyRecord, fitting_block_size, keys,
};
use ipam_core::sticky::{STICKY, waits_until};
use ipam_core::{Holding, Ipam, Nodes};
use ipnet::IpNet;
use kv::{Deadline, Range, StoreExt};

use crate::lab::Lab;

const WAIT: Duration = Duration::from_secs(60);

/// The addresses, reservations and pools that a store records.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// The addresses in use, each with the handle that holds it.
    pub held: BTreeMap<IpAddr, String>,
    /// The addresses of each reservation, by the name of the reservation.
    pub reservations: BTreeMap<String, Vec<String>>,
    /// The released sticky addresses, each with the workload that it is kept for.
    pub waiting: BTreeMap<IpAddr, String>,
    /// The number of addresses in use in each pool, by the pool's name.
    pub in_use: BTreeMap<String, String>,
}

impl Lab {
    /// Opens the store, runs `work` with an allocator on it, and closes the store.
    pub fn with_ipam<T>(&self, create: Create, work: impl AsyncFnOnce(&Ipam, Deadline) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let open = datastore::open(&self.location(), &create.with_wait(WAIT)).await.unwrap();
            let done = work(&Ipam::new(open.store(), Nodes::FirstSeen), Deadline::after(WAIT)).await;
            open.close().await.unwrap();
            done
        })
    }

    /// Creates a pool, and also the store if it is missing. A pool that is smaller than a normal block gets a single
    /// block of its own size.
    pub fn pool(&self, name: &str, cidr: &str) {
        let cidr: IpNet = cidr.parse().unwrap();
        let pool = NewPool::new(name, cidr).with_block_size(fitting_block_size(cidr, None));
        self.with_ipam(Create::IfMissing, async |ipam, deadline| {
            ipam.create_pool(&pool, None, deadline).await.unwrap();
        });
    }

    /// Assigns one address directly in the store, without running the plugin.
    pub fn assign(&self, request: &AssignRequest) -> IpAddr {
        self.with_ipam(Create::Never, async |ipam, deadline| ipam.assign(request, deadline).await.unwrap()[0].ip)
    }

    /// Returns the attribute `name` that is recorded with an address in use.
    pub fn attribute(&self, ip: IpAddr, name: &str) -> String {
        self.with_ipam(Create::Never, async |ipam, deadline| match ipam.holding(ip, deadline).await.unwrap() {
            Holding::Held(entry) => entry.get(name).unwrap().to_owned(),
            other => panic!("{ip}: {other:?}"),
        })
    }

    /// Runs `work` while this process has the store open and other processes queue for it.
    pub fn while_open(&self, work: impl FnOnce()) {
        self.with_ipam(Create::Never, async |_, _| work());
    }

    /// Reads the addresses, reservations and pools that the store records. Fails if the store's blocks, handles and
    /// affinities do not agree.
    pub fn books(&self) -> Books {
        self.with_ipam(Create::Never, async |ipam, deadline| {
            let (held, waiting) = consistent(ipam).await;
            let utilization = ipam.utilization(Deadline::after(Duration::from_secs(60))).await.unwrap();
            assert!(utilization.orphaned.is_empty(), "{utilization:?}");
            let in_use = utilization.pools.iter().map(|pool| (pool.name.clone(), pool.usage.in_use.to_string()));
            let inventory = ipam.inventory(deadline).await.unwrap();
            let texts = |reservation: &IpReservation| (reservation.name().to_owned(), reservation.texts());
            let reservations = inventory.reservations.iter().map(texts).collect();
            Books { held, waiting, reservations, in_use: in_use.collect() }
        })
    }

    /// Checks that no address is in use in the store.
    #[track_caller]
    pub fn nothing_is_left(&self) {
        let books = self.books();
        assert!(books.held.is_empty(), "{:?}", books.held);
        assert!(books.in_use.values().all(|count| count == "0"), "{:?}", books.in_use);
    }
}

impl Books {
    /// Returns the number of addresses that a handle holds.
    pub fn count_of(&self, handle: &str) -> usize {
        self.held.values().filter(|holder| *holder == handle).count()
    }
}

/// Returns the handle of each address in use, and the workload of each released sticky address. Fails unless handles
/// count exactly the addresses in blocks, affinities match the owners of blocks, and each released sticky address has
/// no handle and is in its workload's record.
async fn consistent(ipam: &Ipam) -> (BTreeMap<IpAddr, String>, BTreeMap<IpAddr, String>) {
    let all = ipam.store().list(Range::All).await.unwrap();
    let (mut held, mut waiting) = (BTreeMap::new(), BTreeMap::new());
    let mut counted: BTreeMap<String, BTreeMap<IpNet, i64>> = BTreeMap::new();
    let mut recorded: BTreeMap<String, BTreeMap<IpNet, i64>> = BTreeMap::new();
    let (mut owned, mut affine) = (Vec::new(), Vec::new());
    for kv in &all.kvs {
        if let Some(cidr) = keys::parse_block(&kv.key) {
            let block = Block::decode(&kv.key, kv.value.as_bytes()).unwrap();
            assert_eq!(block.cidr(), cidr);
            owned.extend(block.owner().map(|owner| keys::affinity(&owner, cidr).unwrap()));
            for (ip, entry) in block.allocated().filter(|(_, entry)| entry.released_at().is_none()) {
                if let Some(name) = entry.get(STICKY) {
                    let record = all.kvs.iter().find(|kv| kv.key == keys::sticky(name));
                    let record = StickyRecord::decode(&kv.key, record.unwrap().value.as_bytes()).unwrap();
                    assert!(record.addresses.iter().any(|one| one.address == ip), "{ip}, {name}: {record:?}");
                }
                if waits_until(entry).is_some() {
                    waiting.insert(ip, entry.get(STICKY).unwrap().to_owned());
                    continue;
                }
                let handle = entry.handle().unwrap().to_owned();
                *counted.entry(handle.clone()).or_default().entry(cidr).or_default() += 1;
                assert_eq!(held.insert(ip, handle), None, "{ip} is in two blocks");
            }
        } else if let Some(handle) = keys::parse_handle(&kv.key) {
            let document = Handle::decode(&kv.key, kv.value.as_bytes()).unwrap();
            recorded.insert(handle.to_owned(), document.blocks().collect());
        } else if keys::parse_affinity(&kv.key).is_some() {
            let affinity = Affinity::decode(&kv.key, kv.value.as_bytes()).unwrap();
            assert_eq!(affinity.state(), AffinityState::Confirmed, "{}", kv.key);
            affine.push(kv.key.clone());
        }
    }
    assert_eq!(counted, recorded, "blocks and handles differ");
    owned.sort();
    affine.sort();
    assert_eq!(owned, affine, "blocks and affinities differ");
    (held, waiting)
}
