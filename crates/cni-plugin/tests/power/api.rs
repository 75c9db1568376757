//! Each client has its own keys and leases, and sends one request after another. At the power cut, only the client's
//! last request can be unanswered. The disk after the power cut must contain either the client's last acknowledged
//! state, or the state after the unanswered request.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::process::Command;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::power::{Cut, Disk, Folders, Image, Syncs};
use conformance::patient;
use datastore::Create;
use etcd_client::{Client, Error, LeaseGrantOptions, PutOptions, Txn, TxnOp};
use kv::{LeaseId, Range, StoreExt};
use tokio::time::{sleep, timeout};

use crate::cuts::{SEED, Tally, count};
use crate::lab::{Engine, Lab};
use crate::random::{Random, setting};
use crate::served::Daemon;
use testkit::programs::command;

const ROUNDS: u64 = 60;
const CLIENTS: usize = 3;
/// Maximum number of requests that a client sends in a test round.
const REQUESTS: u64 = 12;
/// Number of keys that each client uses.
const KEYS: u64 = 4;
/// Time to live of a lease, in seconds. A lease time of this length ensures that no lease expires during a test.
const TTL: i64 = 3600;
/// Approximate numbers of disk operations: for opening the store, and for all requests of a test round.
const OPENING: u64 = 120;
const WORKING: u64 = 80;
/// Time limit of a client's request before the power cut.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The state of a client: the value and the lease of each of its keys (0 for no lease), and its leases.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    keys: BTreeMap<String, (String, i64)>,
    leases: BTreeSet<i64>,
}

#[derive(Clone, Debug)]
enum Request {
    Put {
        key: String,
        value: String,
        lease: i64,
    },
    /// A transaction that deletes one key and puts another key.
    Replace {
        old: String,
        new: String,
        value: String,
    },
    Grant(i64),
    Revoke(i64),
}

/// A client of the etcd API, its last acknowledged state, and its unanswered request.
#[derive(Clone, Debug)]
struct Ledger {
    number: usize,
    acknowledged: State,
    pending: Option<Request>,
    next: i64,
}

impl State {
    fn after(&self, request: &Request) -> Self {
        let mut after = self.clone();
        match request {
            Request::Put { key, value, lease } => _ = after.keys.insert(key.clone(), (value.clone(), *lease)),
            Request::Replace { old, new, value } => {
                after.keys.remove(old);
                after.keys.insert(new.clone(), (value.clone(), 0));
            }
            Request::Grant(lease) => _ = after.leases.insert(*lease),
            Request::Revoke(lease) => {
                after.leases.remove(lease);
                after.keys.retain(|_, (_, of)| of != lease);
            }
        }
        after
    }
}

impl Ledger {
    fn new(number: usize) -> Self {
        Self { number, acknowledged: State::default(), pending: None, next: 1 }
    }

    fn prefix(&self) -> String {
        format!("/client{}/", self.number)
    }

    /// Returns the smallest lease id that the client uses.
    fn first_lease(&self) -> i64 {
        1_000_000 * (i64::try_from(self.number).unwrap() + 1)
    }

    /// Draws the client's next random request, and records the request as unanswered.
    fn begin(&mut self, random: &mut Random) -> Request {
        self.next += 1;
        let value = format!("{}-{}", self.next, "x".repeat(usize::try_from(random.below(2000)).unwrap()));
        let key = |random: &mut Random| format!("{}{}", self.prefix(), random.below(KEYS));
        let leases: Vec<i64> = self.acknowledged.leases.iter().copied().collect();
        let request = match random.below(8) {
            0 | 1 => Request::Grant(self.first_lease() + self.next),
            2 if !leases.is_empty() => Request::Revoke(*random.pick(&leases)),
            3 | 4 if !leases.is_empty() => Request::Put { key: key(random), value, lease: *random.pick(&leases) },
            5 => match (key(random), key(random)) {
                (old, new) if old != new => Request::Replace { old, new, value },
                (_, key) => Request::Put { key, value, lease: 0 },
            },
            _ => Request::Put { key: key(random), value, lease: 0 },
        };
        self.pending = Some(request.clone());
        request
    }

    fn end(&mut self) {
        if let Some(request) = self.pending.take() {
            self.acknowledged = self.acknowledged.after(&request);
        }
    }

    /// Compares what the server acknowledged to the client with what is on disk after the power cut, and continues from
    /// the state on disk. Returns true if the unanswered request was carried out before the power cut.
    fn settle(&mut self, left: State) -> Result<bool, String> {
        let after = self.pending.take().map(|request| self.acknowledged.after(&request));
        let happened = after.as_ref() == Some(&left);
        if !happened && left != self.acknowledged {
            return Err(format!(
                "{}: left {left:?}\nacknowledged {:?}\nor {after:?}",
                self.prefix(),
                self.acknowledged
            ));
        }
        self.acknowledged = left;
        Ok(happened)
    }
}

async fn send(client: &mut Client, request: Request) -> Result<(), Error> {
    match request {
        Request::Put { key, value, lease } => {
            client.put(key, value, Some(PutOptions::new().with_lease(lease))).await.map(drop)
        }
        Request::Replace { old, new, value } => {
            let ops = [TxnOp::delete(old, None), TxnOp::put(new, value, None)];
            client.txn(Txn::new().and_then(ops)).await.map(drop)
        }
        Request::Grant(lease) => client.lease_grant(TTL, Some(LeaseGrantOptions::new().with_id(lease))).await.map(drop),
        Request::Revoke(lease) => client.lease_revoke(lease).await.map(drop),
    }
}

/// Sends requests until the client has sent its maximum number of requests, or until the power is cut.
async fn work(url: &str, disk: &Disk, ledger: &Mutex<Ledger>, random: &mut Random, connected: impl Fn()) {
    let begun = Instant::now();
    let mut client = Client::connect([url], None).await.unwrap();
    // The daemon's private socket accepts connections a little before the etcd API does, so retry.
    loop {
        match client.status().await {
            Ok(_) => break,
            Err(_) if disk.is_cut() => return,
            Err(error) => assert!(begun.elapsed() < patient(TEST_TIMEOUT), "{error}"),
        }
        sleep(Duration::from_millis(2)).await;
    }
    connected();
    let locked = || ledger.lock().unwrap_or_else(PoisonError::into_inner);
    for _ in 0..random.below(REQUESTS) {
        let request = locked().begin(random);
        let cut = async {
            while !disk.is_cut() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let sent = tokio::select! {
            sent = timeout(patient(TEST_TIMEOUT), send(&mut client, request)) => sent,
            () = cut => return,
        };
        match sent {
            Ok(Ok(())) => {}
            // A client's request may fail only if the power was cut.
            failed => {
                assert!(disk.is_cut(), "{failed:?}");
                return;
            }
        }
        if disk.before_cut(|| locked().end()).is_none() {
            return;
        }
    }
}

/// Reads the keys and leases of each client from a copy of the disk after a power cut.
fn left(engine: Engine, image: &Image) -> Vec<State> {
    let lab = Lab::new(engine);
    let disk = lab.root.path().join("disk");
    image.copy_to(&disk).unwrap();
    let lab = Lab { store: disk.join("store"), ..lab };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let open = datastore::open(&lab.location(), &Create::Never.with_wait(TEST_TIMEOUT)).await.unwrap();
        let store = open.embedded().unwrap();
        store.verify().await.unwrap();
        let leases: Vec<i64> = store.leases().await.unwrap().into_iter().map(|lease| lease.id.get()).collect();
        let mut found = Vec::new();
        for number in 0..CLIENTS {
            let ledger = Ledger::new(number);
            let keys = store.list(Range::prefix(ledger.prefix())).await.unwrap().kvs.into_iter().map(|kv| {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                (text(kv.key.as_bytes()), (text(kv.value.as_bytes()), LeaseId::number(kv.lease)))
            });
            let own = ledger.first_lease()..Ledger::new(number + 1).first_lease();
            let leases = leases.iter().copied().filter(|lease| own.contains(lease));
            found.push(State { keys: keys.collect(), leases: leases.collect() });
        }
        open.close().await.unwrap();
        found
    })
}

/// Tests that a power cut loses no acknowledged request of an etcd API client, and leaves no request half done.
pub(crate) fn rounds(engine: Engine) {
    let (seed, rounds) = (setting("MARGAY_POWER_SEED", SEED), setting("MARGAY_POWER_ROUNDS", ROUNDS));
    println!("{engine:?}: MARGAY_POWER_SEED={seed} MARGAY_POWER_ROUNDS={rounds}");
    let lab = Lab::new(engine);
    let mut create = Command::new(command());
    create.args(["--store", &lab.location().to_string(), "store", "create", "--format", "2"]).env_clear();
    assert!(create.status().unwrap().success());
    let mut image = Image::of_folder(lab.root.path()).unwrap();
    let mut ledgers: Vec<_> = (0..CLIENTS).map(Ledger::new).collect();
    let mut tally = Tally::new();
    for round in 0..rounds {
        let mut random = Random::new(seed, round);
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::new(image, Syncs::Kept);
        let mounted = disk.mount(folder.path()).unwrap();
        let location = engine.at(&folder.path().join("store"));
        // Cut the power either while the store is being opened, or while the clients send requests.
        let later = match random.below(5) {
            0 => {
                disk.cut_after(random.below(OPENING));
                None
            }
            _ => Some(random.below(WORKING)),
        };
        let armed = Once::new();
        let arm = || armed.call_once(|| later.into_iter().for_each(|operations| disk.cut_after(operations)));
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let url = format!("http://{port}");
        let daemon = Daemon::start_with(&location, &disk, &["--listen", &url, "--insecure-loopback"]);
        let shared: Vec<_> = ledgers.drain(..).map(Mutex::new).collect();
        thread::scope(|scope| {
            for (number, ledger) in shared.iter().enumerate() {
                let mut random = Random::new(random.next(), number as u64);
                let (url, disk, arm) = (&url, &disk, &arm);
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(work(url, disk, ledger, &mut random, arm));
                });
            }
        });
        count(&mut tally, if disk.is_cut() { "cut while there was work" } else { "cut after all work" });
        disk.cut();
        drop((daemon, mounted));
        let folders = if random.once_in(2) { Folders::Strict } else { Folders::Prefix };
        image = disk.after_cut(Cut { seed: random.next(), folders });
        ledgers = shared.into_iter().map(|ledger| ledger.into_inner().unwrap()).collect();
        for (ledger, left) in ledgers.iter_mut().zip(left(engine, &image)) {
            let is_pending = ledger.pending.is_some();
            match ledger.settle(left) {
                Err(what) => panic!("{engine:?}, seed {seed}, round {round}: {what}"),
                Ok(true) => count(&mut tally, "cut off: all had happened"),
                Ok(false) if is_pending => count(&mut tally, "cut off: nothing had happened"),
                Ok(false) => {}
            }
        }
    }
    let made: i64 = ledgers.iter().map(|ledger| ledger.next - 1).sum();
    println!("{engine:?}: {rounds} cuts, {made} requests");
    for (what, times) in &tally {
        println!("{times:>8}  {what}");
    }
    assert!(made > 2 * i64::try_from(rounds).unwrap(), "only {made} requests");
    assert!(tally.contains_key("cut while there was work"));
}
