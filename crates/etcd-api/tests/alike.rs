//! Sends equal requests from etcd's client library to a real etcd and to this API, and compares answers, error codes
//! and error texts.
//!
//! The compared revisions are relative to the revision at the start of a test case. The test cases leave out features
//! that the tested version of etcd lacks.

#[path = "alike/progress.rs"]
mod progress;
mod support;

use std::fmt::Debug;

use etcd_client::{
    Client, CompactionOptions, Compare, CompareOp, DeleteOptions, Error, EventType, GetOptions, KeyValue,
    LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnOpResponse,
    WatchFilterType, WatchOptions,
};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use kv_mvcc::MemoryTable;
use support::Server;
use testkit::server::Etcd;

/// One side of the comparison: etcd or this API.
struct Side {
    client: Client,
    /// The server's revision at the start of the test case.
    base: i64,
    said: Vec<String>,
}

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

impl Side {
    /// Records an answer of the server, or the code and the text of a refusal.
    fn note<T: Debug>(&mut self, about: &str, answer: Result<T, Error>) {
        let said = match answer {
            Ok(answer) => format!("{answer:?}"),
            Err(Error::GRpcStatus(status)) => format!("{:?}: {}", status.code(), status.message()),
            Err(error) => format!("another error: {error}"),
        };
        self.said.push(format!("{about}: {said}"));
    }

    fn since(&self, revision: i64) -> i64 {
        if revision == 0 { 0 } else { revision - self.base }
    }

    fn kv(&self, kv: &KeyValue) -> String {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        format!(
            "{}={} c{} m{} v{} l{}",
            text(kv.key()),
            text(kv.value()),
            self.since(kv.create_revision()),
            self.since(kv.mod_revision()),
            kv.version(),
            kv.lease()
        )
    }

    fn kvs(&self, kvs: &[KeyValue]) -> Vec<String> {
        kvs.iter().map(|kv| self.kv(kv)).collect()
    }

    async fn put(&mut self, key: &str, value: &str, options: PutOptions) {
        let answer = self.client.put(key, value, Some(options)).await;
        let answer = answer.map(|put| {
            (self.since(put.header().map_or(0, |header| header.revision())), put.prev_key().map(|kv| self.kv(kv)))
        });
        self.note(&format!("put {key}"), answer);
    }

    async fn get(&mut self, key: &str, options: GetOptions) {
        let answer = self.client.get(key, Some(options)).await;
        let answer = answer.map(|got| (self.kvs(got.kvs()), got.count(), got.more()));
        self.note(&format!("get {key}"), answer);
    }

    async fn delete(&mut self, key: &str, options: DeleteOptions) {
        let answer = self.client.delete(key, Some(options)).await;
        let answer = answer.map(|gone| (gone.deleted(), self.kvs(gone.prev_kvs())));
        self.note(&format!("delete {key}"), answer);
    }

    async fn txn(&mut self, about: &str, txn: Txn) {
        let answer = self.client.txn(txn).await;
        let answer = answer.map(|done| {
            let responses = done.op_responses().into_iter().map(|response| match response {
                TxnOpResponse::Put(put) => format!("put {:?}", put.prev_key().map(|kv| self.kv(kv))),
                TxnOpResponse::Get(got) => format!("get {:?} {} {}", self.kvs(got.kvs()), got.count(), got.more()),
                TxnOpResponse::Delete(gone) => format!("delete {} {:?}", gone.deleted(), self.kvs(gone.prev_kvs())),
                TxnOpResponse::Txn(_) => "txn".to_owned(),
            });
            (done.succeeded(), responses.collect::<Vec<_>>())
        });
        self.note(about, answer);
    }

    async fn compact(&mut self, about: &str, revision: i64) {
        let answer = self.client.compact(revision, Some(CompactionOptions::new())).await.map(|_| ());
        self.note(about, answer);
    }

    /// Watches keys until `most` events have arrived or the watch has ended, and records the events.
    async fn watch(&mut self, key: &str, options: WatchOptions, most: usize) -> Outcome {
        let mut stream = self.client.watch(key, Some(options)).await?;
        let mut seen = 0;
        while seen < most {
            let Some(message) = stream.next().await else { break };
            match message {
                Ok(message) => {
                    // Events are recorded one by one, because each server decides how many events are in a message.
                    for event in message.events() {
                        let kind = if event.event_type() == EventType::Put { "put" } else { "delete" };
                        let (kv, prev) = (event.kv().map(|kv| self.kv(kv)), event.prev_kv().map(|kv| self.kv(kv)));
                        self.said.push(format!("watch {key}: {kind} {kv:?} {prev:?}"));
                        seen += 1;
                    }
                    if message.events().is_empty() {
                        let compacted = match message.compact_revision() {
                            0 => 0,
                            revision => self.since(revision),
                        };
                        let end = (message.canceled(), compacted, message.cancel_reason());
                        self.said.push(format!("watch {key}: {end:?}"));
                    }
                    if message.canceled() {
                        break;
                    }
                }
                Err(error) => {
                    self.note("watch", Err::<(), _>(error));
                    break;
                }
            }
        }
        Ok(())
    }
}

type Case = for<'s> fn(&'s mut Side) -> BoxFuture<'s, Outcome>;

/// Puts the keys `a` to `d`, and then overwrites `b`.
async fn some_keys(side: &mut Side) {
    for (key, value) in [("a", "3"), ("b", "1"), ("c", "2"), ("d", "2"), ("b", "9")] {
        side.put(key, value, PutOptions::new()).await;
    }
}

fn reads(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        some_keys(side).await;
        let all = || GetOptions::new().with_all_keys();
        for target in [SortTarget::Key, SortTarget::Version, SortTarget::Create, SortTarget::Mod, SortTarget::Value] {
            for order in [SortOrder::None, SortOrder::Ascend, SortOrder::Descend] {
                side.get("", all().with_sort(target, order).with_limit(3)).await;
            }
        }
        let base = side.base;
        side.get("", all().with_min_mod_revision(base + 3).with_limit(1)).await;
        side.get("", all().with_max_mod_revision(base + 3).with_min_create_revision(base + 2)).await;
        side.get("", all().with_keys_only()).await;
        side.get("", all().with_count_only()).await;
        side.get("", all().with_count_only().with_limit(2)).await;
        side.get("b", GetOptions::new().with_serializable()).await;
        side.get("b", GetOptions::new().with_from_key().with_revision(base + 3)).await;
        side.get("b", GetOptions::new().with_range("d")).await;
        side.get("d", GetOptions::new().with_range("b")).await;
        side.get("none", GetOptions::new()).await;
        side.get("a", GetOptions::new().with_revision(base + 100)).await;
        side.get("", GetOptions::new()).await;
        Ok(())
    }
    .boxed()
}

fn writes(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        some_keys(side).await;
        side.put("b", "x", PutOptions::new().with_prev_key()).await;
        side.put("new", "x", PutOptions::new().with_prev_key()).await;
        side.put("b", "", PutOptions::new().with_ignore_value().with_prev_key()).await;
        side.put("none", "", PutOptions::new().with_ignore_value()).await;
        side.put("none", "v", PutOptions::new().with_ignore_lease()).await;
        side.put("b", "v", PutOptions::new().with_ignore_value()).await;
        side.put("b", "v", PutOptions::new().with_ignore_lease().with_lease(7)).await;
        side.put("b", "v", PutOptions::new().with_lease(7)).await;
        side.put("", "v", PutOptions::new()).await;
        side.put("large", &"v".repeat(1_600_000), PutOptions::new()).await;
        side.delete("", DeleteOptions::new()).await;
        side.delete("none", DeleteOptions::new()).await;
        side.delete("a", DeleteOptions::new().with_range("c").with_prev_key()).await;
        side.get("", GetOptions::new().with_all_keys()).await;
        Ok(())
    }
    .boxed()
}

fn transactions(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        some_keys(side).await;
        let base = side.base;
        let (equal, less, greater, other) =
            (CompareOp::Equal, CompareOp::Less, CompareOp::Greater, CompareOp::NotEqual);
        for (about, compare) in [
            ("value", Compare::value("a", equal, "3")),
            ("value of none", Compare::value("none", other, "3")),
            ("version", Compare::version("b", greater, 1)),
            ("create", Compare::create_revision("b", less, base + 3)),
            ("mod", Compare::mod_revision("b", equal, base + 5)),
            ("lease", Compare::lease("b", equal, 0)),
            ("lease of none", Compare::lease("none", greater, 0)),
            ("prefix", Compare::version("", greater, 0).with_range([0])),
            ("all of a range", Compare::version("a", equal, 1).with_range("c")),
        ] {
            side.txn(about, Txn::new().when([compare]).and_then([TxnOp::get("a", None)])).await;
        }
        let everything = || Some(GetOptions::new().with_all_keys().with_sort(SortTarget::Value, SortOrder::Descend));
        let ops = [
            TxnOp::put("e", "5", Some(PutOptions::new().with_prev_key())),
            TxnOp::get("", everything()),
            TxnOp::delete("a", Some(DeleteOptions::new().with_prev_key())),
            TxnOp::get("a", None),
        ];
        side.txn("all kinds", Txn::new().and_then(ops)).await;
        side.txn("nothing", Txn::new()).await;
        side.txn("twice", Txn::new().and_then([TxnOp::put("k", "1", None), TxnOp::put("k", "2", None)])).await;
        side.txn("put and delete", Txn::new().and_then([TxnOp::delete("k", None), TxnOp::put("k", "2", None)])).await;
        let puts = |count: usize| (0..count).map(|i| TxnOp::put(format!("k{i}"), "v", None)).collect::<Vec<_>>();
        side.txn("too many", Txn::new().and_then(puts(129))).await;
        side.txn("as many as possible", Txn::new().and_then(puts(128))).await;
        side.txn("an empty key", Txn::new().and_then([TxnOp::put("", "v", None)])).await;
        side.txn("an empty compare", Txn::new().when([Compare::version("", equal, 1)])).await;
        let leased = TxnOp::put("k", "v", Some(PutOptions::new().with_lease(7)));
        side.txn("an unknown lease", Txn::new().and_then([TxnOp::put("before", "v", None), leased.clone()])).await;
        side.txn("in the other branch", Txn::new().or_else([leased])).await;
        side.get("before", GetOptions::new()).await;
        Ok(())
    }
    .boxed()
}

fn leases(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        for (id, ttl) in [(7, 600), (7, 600), (8, 1), (9, 0), (10, -5), (11, 9_000_000_001), (-3, 60)] {
            let granted = side.client.lease_grant(ttl, Some(LeaseGrantOptions::new().with_id(id))).await;
            side.note(&format!("grant {id} {ttl}"), granted.map(|lease| (lease.id(), lease.ttl())));
        }
        for key in ["k", "l", "m"] {
            side.put(key, "v", PutOptions::new().with_lease(7)).await;
        }
        side.put("l", "w", PutOptions::new().with_lease(-3)).await;
        side.put("m", "w", PutOptions::new().with_ignore_lease().with_prev_key()).await;
        for id in [7, -3, 99] {
            let reported = side.client.lease_time_to_live(id, Some(LeaseTimeToLiveOptions::new().with_keys())).await;
            let reported = reported.map(|lease| {
                // The keys are sorted, because etcd keeps a lease's keys in a map with a varying order.
                let mut keys = lease.keys().to_vec();
                keys.sort_unstable();
                (lease.ttl() > 0, lease.granted_ttl(), keys)
            });
            side.note(&format!("time to live {id}"), reported);
        }
        for id in [7, 99] {
            let renewed = match side.client.lease_keep_alive(id).await {
                Ok((mut keeper, mut stream)) => match keeper.keep_alive().await {
                    Ok(()) => stream.message().await.map(|answer| answer.map(|lease| (lease.id(), lease.ttl()))),
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            };
            side.note(&format!("keep alive {id}"), renewed);
        }
        for id in [7, 7, 0] {
            let revoked = side.client.lease_revoke(id).await.map(|_| ());
            side.note(&format!("revoke {id}"), revoked);
        }
        side.get("", GetOptions::new().with_all_keys()).await;
        let base = side.base;
        side.watch("", WatchOptions::new().with_all_keys().with_start_revision(base + 1).with_prev_key(), 7).await
    }
    .boxed()
}

fn watches(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        some_keys(side).await;
        side.delete("c", DeleteOptions::new()).await;
        let base = side.base;
        let all = || WatchOptions::new().with_all_keys().with_start_revision(base + 1);
        side.watch("", all(), 6).await?;
        side.watch("", all().with_prev_key(), 6).await?;
        side.watch("", all().with_filters([WatchFilterType::NoPut]), 1).await?;
        side.watch("b", WatchOptions::new().with_start_revision(base + 1), 2).await?;
        side.compact("compact", base + 4).await;
        side.watch("", all(), 6).await?;
        // The previous entries of events at the compact revision cannot be read.
        side.compact("compact", base + 5).await;
        side.watch("", WatchOptions::new().with_all_keys().with_start_revision(base + 5).with_prev_key(), 2).await?;
        Ok(())
    }
    .boxed()
}

fn compactions(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        some_keys(side).await;
        let base = side.base;
        for (about, revision) in [("now", base + 5), ("again", base + 5), ("before", base + 2), ("ahead", base + 50)] {
            side.compact(about, revision).await;
        }
        side.compact("nothing", 0).await;
        side.get("a", GetOptions::new().with_revision(base + 4)).await;
        side.get("a", GetOptions::new().with_revision(base + 5)).await;
        side.get("a", GetOptions::new()).await;
        Ok(())
    }
    .boxed()
}

/// Deletes an unknown user: neither server has users, so etcd and this API must both answer with an error.
fn users(side: &mut Side) -> BoxFuture<'_, Outcome> {
    async move {
        let removed = side.client.user_delete("unknown").await.map(|_| ());
        side.said.push(format!("user delete fails: {}", removed.is_err()));
        Ok(())
    }
    .boxed()
}

const CASES: &[(&str, Case)] = &[
    ("reads", reads),
    ("writes", writes),
    ("transactions", transactions),
    ("leases", leases),
    ("watches", watches),
    ("compactions", compactions),
    ("users", users),
];

async fn run(url: &str, case: Case) -> Outcome<Vec<String>> {
    let mut client = Client::connect([url], None).await?;
    client.delete("", Some(DeleteOptions::new().with_all_keys())).await?;
    let base = client.get("none", None).await?.header().map_or(0, |header| header.revision());
    let mut side = Side { client, base, said: Vec::new() };
    case(&mut side).await?;
    Ok(side.said)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_and_refusals_match_etcd() -> Outcome {
    let etcd = Etcd::start()?;
    for (name, case) in CASES {
        let server = Server::start(&MemoryTable::new()).await?;
        let expected = run(&etcd.url(), *case).await?;
        let got = run(&server.url(), *case).await?;
        assert_eq!(expected.len(), got.len(), "{name}: {expected:#?} {got:#?}");
        for (expected, got) in expected.iter().zip(&got) {
            assert_eq!(got, expected, "{name}: on the left the API, on the right etcd");
        }
        server.stop().await?;
    }
    Ok(())
}
