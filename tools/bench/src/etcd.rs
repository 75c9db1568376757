//! Compares Margay's store on etcd with bare calls of etcd's client library, alternating between them on one etcd
//! server.

use std::future::Future;
use std::time::Instant;

use backend_etcd::{EtcdStore, Options};
use etcd_client::{Client, Compare, CompareOp, ConnectOptions, Txn, TxnOp};
use kv::{Op, StoreExt};

use crate::Outcome;
use crate::report::{Times, print};
use testkit::server::{Etcd, dead_address};

/// Number of measurements of each kind of call to etcd.
const ROUNDS: u32 = 3000;
/// Number of warm-up calls before the measurement begins.
const WARM_UP: u32 = 200;
/// Number of measured calls while one of the etcd members is dead.
const CALLS: u32 = 1000;
/// A value of about the size of a block document.
const VALUE: [u8; 2048] = [b'v'; 2048];
/// Maximum ratio of the duration of a call to Margay's etcd store to the duration of a call by a plain etcd client.
const LIMIT: &str = "1.10";

/// Measures the latency of calls to etcd, and puts while one of the etcd members is dead.
pub(crate) fn run() -> Outcome<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let etcd = Etcd::start()?;
    runtime.block_on(async {
        latency(&etcd).await?;
        dead_member(&etcd).await
    })
}

/// The compared clients: Margay's store on etcd, and an etcd client without Margay. Each client has its own key, and
/// remembers the revision of the last write of this key.
struct Pair {
    client: Client,
    store: EtcdStore,
    of_client: i64,
    of_store: kv::Revision,
}

impl Pair {
    async fn connect(etcd: &Etcd) -> Outcome<Self> {
        let store = EtcdStore::open(&Options::new([etcd.url()]))?;
        let of_store = store.put("bench/store", VALUE.to_vec()).await?;
        let mut client = Client::connect([etcd.url()], Some(ConnectOptions::new())).await?;
        let written = client.put("bench/bare", VALUE, None).await?;
        let of_client = written.header().map_or(0, etcd_client::ResponseHeader::revision);
        Ok(Self { client, store, of_client, of_store })
    }

    async fn bare_get(&mut self) -> Outcome<()> {
        let found = self.client.get("bench/bare", None).await?;
        if found.count() == 1 { Ok(()) } else { Err("the key is gone".into()) }
    }

    async fn get(&mut self) -> Outcome<()> {
        self.store.get("bench/store").await?.map(|_| ()).ok_or_else(|| "the key is gone".into())
    }

    async fn bare_txn(&mut self) -> Outcome<()> {
        let txn = Txn::new()
            .when([Compare::mod_revision("bench/bare", CompareOp::Equal, self.of_client)])
            .and_then([TxnOp::put("bench/bare", VALUE, None)]);
        let answer = self.client.txn(txn).await?;
        self.of_client = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        if answer.succeeded() { Ok(()) } else { Err("another client wrote".into()) }
    }

    async fn txn(&mut self) -> Outcome<()> {
        let txn = kv::Txn::new()
            .with_compares([kv::Compare::unchanged("bench/store", self.of_store)])
            .with_success([Op::put("bench/store", VALUE.to_vec())]);
        let answer = kv::Store::txn(&self.store, txn).await?;
        self.of_store = answer.revision;
        if answer.succeeded { Ok(()) } else { Err("another client wrote".into()) }
    }
}

async fn timed(times: &mut Times, call: impl Future<Output = Outcome<()>>) -> Outcome<()> {
    let begun = Instant::now();
    call.await?;
    times.push(begun.elapsed());
    Ok(())
}

async fn latency(etcd: &Etcd) -> Outcome<()> {
    let mut pair = Pair::connect(etcd).await?;
    let mut times: [Times; 4] = Default::default();
    for round in 0..WARM_UP + ROUNDS {
        if round == WARM_UP {
            times = Default::default();
        }
        let [bare_get, get, bare_txn, txn] = &mut times;
        // Every second round calls Margay's store and the plain etcd client in reverse order, so that neither always
        // follows the other.
        if round % 2 == 0 {
            timed(bare_get, pair.bare_get()).await?;
            timed(get, pair.get()).await?;
            timed(bare_txn, pair.bare_txn()).await?;
            timed(txn, pair.txn()).await?;
        } else {
            timed(get, pair.get()).await?;
            timed(bare_get, pair.bare_get()).await?;
            timed(txn, pair.txn()).await?;
            timed(bare_txn, pair.bare_txn()).await?;
        }
    }
    let row = |name: &str, bare: &Times, ours: &Times| {
        let ms = |value: f64| format!("{value:.3}");
        let ratio = format!("{:.2}", ours.median() / bare.median());
        vec![name.to_owned(), ms(bare.median()), ms(ours.median()), ratio, LIMIT.into(), ms(ours.quantile(0.9))]
    };
    print(
        &format!("One call to an etcd on this machine, {ROUNDS} each in turns (ms)"),
        &["", "etcd-client p50", "margay p50", "ratio", "at most", "margay p90"],
        vec![row("get", &times[0], &times[1]), row("guarded put", &times[2], &times[3])],
    );
    Ok(())
}

/// Measures puts while one of three etcd members is dead and the client tries the dead one first.
async fn dead_member(etcd: &Etcd) -> Outcome<()> {
    let dead = format!("http://{}", dead_address()?);
    let by_name = etcd.url().replace("127.0.0.1", "localhost");
    let store = EtcdStore::open(&Options::new([dead, etcd.url(), by_name]))?;
    let (mut lost, mut first, mut others) = (0, Times::default(), Times::default());
    for call in 0..CALLS {
        let begun = Instant::now();
        if store.put("bench/dead", format!("{call}")).await.is_err() {
            lost += 1;
        }
        let times = if call == 0 { &mut first } else { &mut others };
        times.push(begun.elapsed());
    }
    print(
        &format!("{CALLS} puts with one of three members dead (ms)"),
        &["", "lost", "at most", "first", "others p50"],
        vec![vec![
            "margay".into(),
            format!("{lost}"),
            "0".into(),
            format!("{:.2}", first.median()),
            format!("{:.2}", others.median()),
        ]],
    );
    Ok(())
}
