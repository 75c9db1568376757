//! Tests readers that work like Calico's watchers: they list all keys, and then watch from the next revision. A
//! reader's connection can break at any point, even between two events of one revision, because etcd may split a large
//! watch response into fragments.

use std::collections::BTreeMap;
use std::sync::Arc;

use backend_etcd::{EtcdStore, Options};
use etcd_client::{Client, EventType, GetOptions, WatchOptions};
use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::NewPool;
use kv::{Store, StoreExt};

use crate::random::seed;
use crate::scene::{add, allocator, attachment, del, everything, prepare, soon};
use crate::turns::{Authors, Commits, Side, noting};
use testkit::server::Etcd;

const PREFIX: &str = "/calico/ipam/v2/";

type State = BTreeMap<String, Vec<u8>>;

/// What a reader does after its connection was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// The reader lists all keys again, and then watches from the next revision.
    List,
    /// The reader watches again from the last revision that it has seen, because it may have seen only some of this
    /// revision's events.
    Resume,
}

struct Reader {
    client: Client,
    random: fastrand::Rng,
    after: After,
    state: State,
    /// The keys that each watched revision changed, with their new values.
    changes: BTreeMap<i64, BTreeMap<String, Option<Vec<u8>>>>,
    cuts: usize,
    within: usize,
    /// Number of watch responses whose first events belong to the revision of the previous response.
    pieces: usize,
}

impl Reader {
    async fn new(server: &Etcd, seed: u64, after: After) -> Self {
        let client = Client::connect([server.url()], None).await.unwrap();
        let random = fastrand::Rng::with_seed(seed);
        Self { client, random, after, state: State::new(), changes: BTreeMap::new(), cuts: 0, within: 0, pieces: 0 }
    }

    /// Lists all keys and returns the revision from which to watch.
    async fn list(&mut self) -> i64 {
        let options = GetOptions::new().with_prefix();
        let listed = self.client.get(PREFIX, Some(options)).await.unwrap();
        let text = |kv: &etcd_client::KeyValue| (kv.key_str().unwrap().to_owned(), kv.value().to_vec());
        self.state = listed.kvs().iter().map(text).collect();
        listed.header().unwrap().revision() + 1
    }

    /// Reads the revisions from `from` to `to`, and breaks its own connection repeatedly.
    async fn follow(&mut self, mut from: i64, to: i64) {
        while from <= to {
            let left = self.random.usize(1..40);
            from = self.watch(from, to, left).await;
        }
    }

    /// Watches until `left` events have arrived or the revision `to` is reached. Returns the revision from which to
    /// watch next.
    async fn watch(&mut self, from: i64, to: i64, mut left: usize) -> i64 {
        let options = WatchOptions::new().with_prefix().with_start_revision(from).with_fragment();
        let mut stream = self.client.watch(PREFIX, Some(options)).await.unwrap();
        let mut last = from - 1;
        loop {
            let answer = stream.message().await.unwrap().unwrap();
            let events = answer.events();
            self.pieces += usize::from(events.first().is_some_and(|event| event.kv().unwrap().mod_revision() == last));
            for (number, event) in events.iter().enumerate() {
                let kv = event.kv().unwrap();
                let (key, revision) = (kv.key_str().unwrap().to_owned(), kv.mod_revision());
                let value = (event.event_type() == EventType::Put).then(|| kv.value().to_vec());
                match value.clone() {
                    Some(value) => drop(self.state.insert(key.clone(), value)),
                    None => drop(self.state.remove(&key)),
                }
                self.changes.entry(revision).or_default().insert(key, value);
                last = revision;
                left -= 1;
                if left > 0 {
                    continue;
                }
                self.cuts += 1;
                let next = events.get(number + 1).map(|event| event.kv().unwrap().mod_revision());
                self.within += usize::from(next == Some(revision));
                return match self.after {
                    After::List => self.list().await,
                    // The reader may have received only some events of the last revision.
                    After::Resume if revision < to => revision,
                    After::Resume if next == Some(revision) || self.random.bool() => revision,
                    After::Resume => revision + 1,
                };
            }
            if last >= to {
                return last + 1;
            }
        }
    }
}

/// Returns the current revision of the store and its IPAM keys.
async fn stored(store: &Arc<dyn Store>) -> (i64, State) {
    let (revision, kvs) = everything(store).await;
    let own = kvs.into_iter().filter(|kv| kv.key.to_string().starts_with(PREFIX));
    (revision.get(), own.map(|kv| (kv.key.to_string(), kv.value.as_bytes().to_vec())).collect())
}

/// Assigns and releases IPv4 and IPv6 addresses in blocks of 64, so that each revision has several keys and some
/// kilobytes.
async fn churn(store: Arc<dyn Store>, rounds: usize) {
    let ipam = allocator(store);
    for round in 0..rounds {
        let request = AssignRequest::new(attachment("a", &format!("c{round}")), RequestedAddresses::any(1, 1));
        ipam.assign(&request, soon()).await.unwrap();
        if round % 3 == 2 {
            del(&ipam, "a", &format!("c{}", round - 1)).await.unwrap();
        }
        if round % 10 == 9 {
            add(&ipam, "b", &format!("d{round}")).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_cut_anywhere_rebuild_commits() {
    let mut random = fastrand::Rng::with_seed(seed());
    // The low value of `--max-request-bytes` makes etcd split watch responses of more than half a megabyte into
    // fragments.
    let server = Etcd::start_with("http", &["--max-request-bytes=65536".to_owned()]).unwrap();
    let plain: Arc<dyn Store> = Arc::new(EtcdStore::open(&Options::new([server.url()])).unwrap());
    let (authors, commits) = (Authors::default(), Commits::default());
    let store = noting(&plain, Side::Ours, &authors, &commits);
    prepare(&plain, "10.0.0.0/24", 26).await;
    let pool = NewPool::new("v6", "fd00::/120".parse().unwrap()).with_block_size(122);
    allocator(Arc::clone(&plain)).create_pool(&pool, None, soon()).await.unwrap();

    let mut lister = Reader::new(&server, random.u64(..), After::List).await;
    let mut resumer = Reader::new(&server, random.u64(..), After::Resume).await;
    let (from_list, from) = (lister.list().await, resumer.list().await);
    // One reader follows the store while it is written; another one reads the same revisions afterwards.
    let work = tokio::spawn(churn(Arc::clone(&store), 160));
    let half = from_list + 60;
    lister.follow(from_list, half).await;
    work.await.unwrap();
    // The last revision changes only the key `last`, so a reader that has seen that key has seen the whole revision.
    plain.put(format!("{PREFIX}last"), "1").await.unwrap();
    let (to, expected) = stored(&plain).await;
    resumer.follow(from, to).await;
    let next = lister.list().await;
    lister.follow(next, to).await;

    for reader in [&lister, &resumer] {
        println!("{:?}: cut off {} times, {} of them within a revision", reader.after, reader.cuts, reader.within);
        assert!(reader.state == expected, "{:?}: what was followed is not what is stored", reader.after);
    }
    assert!(resumer.within > 0, "no cut was within a revision");
    let sent = commits.lock().unwrap().clone();
    assert!(sent.len() > 200, "{}", sent.len());
    for (revision, writes) in &sent {
        assert_eq!(resumer.changes.get(&revision.get()), Some(writes), "revision {revision}");
    }
    // A reader whose connection never breaks receives every watch response, complete or in fragments.
    let mut patient = Reader::new(&server, random.u64(..), After::Resume).await;
    patient.watch(from, to, usize::MAX).await;
    println!("pieces that began within a revision: {}", patient.pieces);
    for (revision, writes) in &sent {
        assert_eq!(patient.changes.get(&revision.get()), Some(writes), "revision {revision}");
    }
}
