//! Tests stores that find the members of a cluster in the SRV records of a domain.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use backend_etcd::{Discovery, EtcdStore, Options, Tls};
use conformance::patient;
use kv::{Error, ErrorKind, StoreExt};
use support::{Etcd, dead_address};
use testkit::dns::Dns;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

const PLAIN: &str = "_etcd-client._tcp.example.test";
const WITH_TLS: &str = "_etcd-client-ssl._tcp.example.test";
/// Time limit for one wait in a test on a fast machine; [`patient`] extends it on a slow one.
const LONG: Duration = Duration::from_secs(30);

fn options(dns: &Dns) -> Options {
    let discovery = Discovery::new("example.test").with_name_server(dns.address);
    Options::new([""; 0])
        .with_discovery(discovery)
        .with_call_timeout(Duration::from_secs(5))
        .with_connect_timeout(Duration::from_millis(500))
}

fn store(dns: &Dns) -> EtcdStore {
    EtcdStore::open(&options(dns)).unwrap()
}

async fn refused(store: &EtcdStore) -> Error {
    let begun = Instant::now();
    let error = store.put("k", "v").await.unwrap_err();
    assert!(begun.elapsed() < patient(Duration::from_secs(8)), "{:?}: {error}", begun.elapsed());
    error
}

fn port(etcd: &Etcd) -> u16 {
    etcd.url().rsplit(':').next().unwrap().parse().unwrap()
}

fn dead_port() -> u16 {
    dead_address().unwrap().port()
}

#[tokio::test]
async fn srv_members_are_looked_up_and_asked_in_order() {
    let (dns, etcd, other) = (Dns::start().unwrap(), Etcd::start().unwrap(), Etcd::start().unwrap());
    // The member `other` has the lowest priority. The server `other` belongs to a different cluster than `etcd`, so the
    // test fails if a write reaches it.
    dns.set(PLAIN, &[(7, 0, port(&other)), (3, 1, dead_port()), (3, 9, port(&etcd))]);
    let store = store(&dns);
    for _ in 0..3 {
        store.put("k", "v").await.unwrap();
    }
    let direct = EtcdStore::open(&Options::new([etcd.url()])).unwrap();
    assert!(direct.get("k").await.unwrap().is_some());
}

#[tokio::test]
async fn srv_record_is_found_when_added_later() {
    let (dns, etcd) = (Dns::start().unwrap(), Etcd::start().unwrap());
    let store = store(&dns);
    let error = refused(&store).await;
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    let said = error.to_string();
    assert!(said.contains("failed to discover etcd endpoints through SRV discovery"), "{said}");
    assert!(said.contains(WITH_TLS) && said.contains(PLAIN) && said.contains("check the domain"), "{said}");
    dns.set(PLAIN, &[(0, 0, port(&etcd))]);
    store.put("k", "v").await.unwrap();
}

/// Listens on a free port and forwards its connections to `target`. Returns the port, and the task that forwards until
/// the `JoinSet` is dropped.
async fn forwarder(target: SocketAddr) -> (u16, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut from, _)) = listener.accept().await {
            let mut to = TcpStream::connect(target).await.unwrap();
            connections.spawn(async move { tokio::io::copy_bidirectional(&mut from, &mut to).await.map(|_| ()) });
        }
    });
    (port, tasks)
}

#[tokio::test]
async fn srv_members_are_looked_up_again_when_all_are_lost() {
    let (dns, etcd) = (Dns::start().unwrap(), Etcd::start().unwrap());
    let (first, forwarding) = forwarder(SocketAddr::from(([127, 0, 0, 1], port(&etcd)))).await;
    dns.set(PLAIN, &[(0, 0, first)]);
    let store = store(&dns);
    store.put("k", "v").await.unwrap();
    dns.set(PLAIN, &[(0, 0, port(&etcd))]);
    drop(forwarding);
    // A read may be sent again, so `get` survives the move of the member: it fails at the old address, looks up the SRV
    // records again, and succeeds at the new address.
    assert!(store.get("k").await.unwrap().is_some());
    store.put("k", "w").await.unwrap();
}

#[tokio::test]
async fn srv_members_stay_known_when_name_server_is_gone() {
    let (dns, mut etcd) = (Dns::start().unwrap(), Etcd::start().unwrap());
    dns.set(PLAIN, &[(0, 0, port(&etcd))]);
    let store = store(&dns);
    store.put("k", "v").await.unwrap();
    etcd.stop();
    assert!(store.get("k").await.is_err());
    dns.set(PLAIN, &[]);
    etcd.run().unwrap();
    let until = Instant::now() + patient(LONG);
    while let Err(error) = store.get("k").await {
        assert!(Instant::now() < until, "{error}");
    }
}

#[tokio::test]
async fn srv_lookup_keeps_tls_when_offered() {
    let (dns, etcd) = (Dns::start().unwrap(), Etcd::start().unwrap());
    dns.set(PLAIN, &[(0, 0, port(&etcd))]);
    let wanting = EtcdStore::open(&options(&dns).with_tls(Tls::new())).unwrap();
    let error = refused(&wanting).await;
    assert!(error.to_string().contains("no record _etcd-client-ssl._tcp.example.test"), "{error}");
    // If the domain has SRV records for members with and without TLS, members without TLS must not be used, even if no
    // member with TLS answers.
    dns.set(WITH_TLS, &[(0, 0, dead_port())]);
    let error = refused(&store(&dns)).await;
    assert!(error.to_string().contains("etcd https://localhost:"), "{error}");
    assert!(EtcdStore::open(&Options::new([etcd.url()])).unwrap().get("k").await.unwrap().is_none());
}

#[tokio::test]
async fn srv_lookup_times_out_when_name_server_is_silent() {
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let discovery = Discovery::new("example.test").with_name_server(silent.local_addr().unwrap());
    let options = Options::new([""; 0]).with_discovery(discovery).with_call_timeout(Duration::from_secs(1));
    let error = refused(&EtcdStore::open(&options).unwrap()).await;
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    assert!(error.to_string().contains("DNS"), "{error}");
}
