//! Tests how the store reports writes that etcd refuses under load. Refused writes are reported as certainly not
//! applied, so the store must contain none of their keys afterwards.
//!
//! The error for a request that the client never sent is tested by the conformance cases that kill servers. The error
//! "too many requests" is not tested: 15,000 concurrent writes to a server that was busy for seconds did not cause it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options};
use conformance::patient;
use etcd_client::{Client, ConnectOptions, Permission, PermissionType, RoleRevokePermissionOptions};
use futures::future::join_all;
use kv::{Auth, ErrorKind, InvalidArgument, Op, Outcome, Range, Store, StoreExt, Txn};
use nix::sys::signal::Signal;
use support::Etcd;
use support::users::{PASSWORD, as_user, guarded};

/// Time limit for one wait in a test on a fast machine; [`patient`] extends it on a slow one.
const LONG: Duration = Duration::from_secs(60);

type Said = BTreeMap<String, Result<(), (ErrorKind, Outcome)>>;

/// Runs a transaction that puts `key`, and returns `key` with the transaction's result.
async fn write(store: &EtcdStore, key: String, txn: Txn) -> (String, Result<(), (ErrorKind, Outcome)>) {
    let said = store.txn(txn).await.map(|_| ()).map_err(|error| (error.kind().clone(), error.outcome()));
    (key, said)
}

/// Checks that the store has the keys of all acknowledged writes, and no keys of writes that were certainly not
/// applied. Returns how many writes failed with an error of the kind `wanted`.
async fn true_and_seen(store: &EtcdStore, said: &Said, wanted: impl Fn(&ErrorKind) -> bool) -> usize {
    let mut seen = 0;
    let found = store.list(Range::prefix("open/")).await.unwrap();
    for (key, said) in said {
        let version = found.kvs.iter().find(|kv| kv.key.to_string() == *key).map_or(0, |kv| kv.version);
        match said {
            Ok(()) => assert_eq!(version, 1, "{key} was acknowledged"),
            Err((kind, Outcome::NotApplied)) => assert_eq!(version, 0, "{key} was refused: {kind:?}"),
            Err((_, Outcome::Unknown)) => assert!(version <= 1, "{key} was written {version} times"),
        }
        seen += usize::from(said.as_ref().is_err_and(|(kind, _)| wanted(kind)));
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_true_over_server_limits() {
    let limits = ["--max-txn-ops=16".to_owned(), "--max-request-bytes=20000".to_owned()];
    let etcd = Etcd::start_with("http", &limits).unwrap();
    let store = EtcdStore::open(&Options::new([etcd.url()])).unwrap();
    let writes = (0..300).map(|i| {
        let key = format!("open/{i}");
        let put = Op::put(key.as_str(), vec![b'v'; if i % 3 == 1 { 30_000 } else { 10 }]);
        let more = (0..if i % 3 == 2 { 20 } else { 0 }).map(|more| Op::put(format!("more/{i}/{more}"), "v"));
        write(&store, key, Txn::new().with_success([put].into_iter().chain(more)))
    });
    let said: Said = join_all(writes).await.into_iter().collect();
    let too_large = true_and_seen(&store, &said, |kind| matches!(kind, ErrorKind::TooLarge { .. })).await;
    let too_many = |kind: &ErrorKind| matches!(kind, ErrorKind::InvalidArgument(InvalidArgument::TooManyOps { .. }));
    assert_eq!((too_large, true_and_seen(&store, &said, too_many).await), (100, 100));
    assert_eq!(store.count(Range::prefix("more/")).await.unwrap(), 0);
}

/// Revokes and grants the permission of the user `guest` repeatedly, `times` times.
async fn waver(etcd: &Etcd, times: usize) {
    let login = ConnectOptions::new().with_user("root", PASSWORD);
    let mut root = Client::connect([etcd.url()], Some(login)).await.unwrap();
    for _ in 0..times {
        let options = RoleRevokePermissionOptions::new().with_prefix();
        root.role_revoke_permission("guest", "open/", Some(options)).await.unwrap();
        let open = Permission::new(PermissionType::Readwrite, "open/").with_prefix();
        root.role_grant_permission("guest", open).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_true_while_permission_changes() {
    let etcd = guarded().await.unwrap();
    let guests: Vec<EtcdStore> = (0..8).map(|_| as_user(&etcd, "guest", PASSWORD).unwrap()).collect();
    let over = tokio::sync::watch::Sender::new(false);
    let writes = guests.iter().enumerate().map(|(number, guest)| {
        let over = over.subscribe();
        async move {
            let mut said = Said::new();
            for i in 0.. {
                if *over.borrow() {
                    break;
                }
                let key = format!("open/{number}-{i}");
                let (key, what) = write(guest, key.clone(), Txn::new().with_success([Op::put(key, "v")])).await;
                said.insert(key, what);
            }
            said
        }
    });
    let (said, ()) = tokio::join!(join_all(writes), async {
        waver(&etcd, 60).await;
        over.send_replace(true);
    });
    let said: Said = said.into_iter().flatten().collect();
    let root = as_user(&etcd, "root", PASSWORD).unwrap();
    let denied = true_and_seen(&root, &said, |kind| *kind == ErrorKind::Auth(Auth::Denied)).await;
    assert!(denied > 0, "no call was denied");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_are_true_without_leader() {
    let [one, two, three] = Etcd::start_three().unwrap();
    let options = Options::new([three.url()]).with_call_timeout(Duration::from_secs(2));
    let store = EtcdStore::open(&options).unwrap();
    store.get("k").await.unwrap();
    for etcd in [&one, &two] {
        etcd.signal(Signal::SIGSTOP).unwrap();
    }
    let (mut said, until) = (Said::new(), Instant::now() + patient(LONG));
    // After two of three members have stopped, the third member at first does not answer writes. Once the third member
    // notices that the cluster has no leader, it refuses writes.
    let mut refused = 0;
    while refused < 20 && Instant::now() < until {
        let writes = (0..10).map(|i| {
            let key = format!("open/{}-{i}", said.len());
            write(&store, key.clone(), Txn::new().with_success([Op::put(key, "v")]))
        });
        for (key, what) in join_all(writes).await {
            refused += usize::from(what.as_ref().is_err_and(|(kind, _)| *kind == ErrorKind::NoLeader));
            said.insert(key, what);
        }
    }
    for etcd in [&one, &two] {
        etcd.signal(Signal::SIGCONT).unwrap();
    }
    while store.put("after", "v").await.is_err() {
        assert!(Instant::now() < until + LONG, "it does not come back");
    }
    assert!(true_and_seen(&store, &said, |kind| *kind == ErrorKind::NoLeader).await >= 20);
}
