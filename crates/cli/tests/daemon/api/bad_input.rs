//! Tests clients and options that the daemon's etcd API refuses.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use backend_etcd::{EtcdStore, Options};
use conformance::patient;
use futures::StreamExt;
use kv::{Range, Revision, Store, WatchRequest};

use super::Api;
use crate::lab::{Lab, block_on};
use crate::programs::{Running, margay, run};

const POOL: &str = "10.77.0.0/24";

#[test]
fn api_refuses_unsafe_listen_address_with_remedy() {
    let lab = Lab::with_pool("redb", POOL);
    let store = lab.url();
    for (options, text) in [
        ("--listen http://127.0.0.1:0", "--insecure-loopback"),
        ("--listen http://0.0.0.0:0 --insecure-loopback", "--advertise"),
        ("--listen http://192.0.2.1:2379 --insecure-loopback", "https://"),
        ("--listen https://127.0.0.1:0", "--cert-file"),
        ("--listen https://127.0.0.1:0 --cert-file /a --key-file /b --client-ca-file /c", "cannot read /c"),
        ("--listen 127.0.0.1:2379", "https://"),
        ("--listen unix:relative.sock", "absolute"),
    ] {
        let words = ["--store", &store, "serve"].into_iter().chain(options.split(' '));
        let refused = run(margay(words)).failed();
        assert!(refused.err.contains("cannot listen at") && refused.err.contains(text), "{options}: {refused:?}");
    }
    let unasked = run(margay(["--store", &store, "serve", "--insecure-loopback"]));
    assert!(unasked.code != Some(0) && unasked.err.contains("--listen"), "{unasked:?}");
    let cluster =
        run(margay(["--store", "etcd://127.0.0.1:1", "serve", "--listen", "unix:/tmp/no-such.sock"])).failed();
    assert!(cluster.err.contains("an etcd already"), "{cluster:?}");
}

#[test]
fn api_names_port_in_use() {
    let lab = Lab::with_pool("redb", POOL);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", taken.local_addr().unwrap());
    let refused = run(margay(["--store", &lab.url(), "serve", "--listen", &url, "--insecure-loopback"])).failed();
    assert!(refused.err.contains(&url) && refused.err.contains("in use"), "{refused:?}");
}

#[test]
fn api_survives_garbage_and_large_requests() {
    let lab = Lab::with_pool("redb", POOL);
    let api = Api::start(&lab);
    api.etcdctl("put /t/a 1").ok();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], &[255; 100]] {
        let mut stream = TcpStream::connect(&api.address).unwrap();
        stream.set_read_timeout(Some(patient(Duration::from_secs(30)))).unwrap();
        // The server may close the connection before the client has sent all bytes.
        let _ = stream.write_all(garbage);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // Clients that send nothing do not prevent other clients from connecting.
    let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(&api.address).unwrap()).collect();
    for bytes in [1_600_000, 1_900_000, 4_000_000] {
        let put = Running::start(api.etcdctl_command("put /t/large"), &"x".repeat(bytes)).end();
        assert_ne!(put.code, Some(0), "{bytes}");
        let known = ["request is too large", "larger than max", "too large"];
        assert!(known.iter().any(|text| put.err.contains(text)), "{bytes}: {}", put.err);
    }
    assert_eq!(api.etcdctl("get --prefix /t/ --print-value-only").ok().out, "1\n");
    drop(silent);
    api.end();
}

#[test]
fn api_survives_many_watches_and_client_that_never_reads() {
    const WATCHES: usize = 3_000;
    let lab = Lab::with_pool("redb", POOL);
    let api = Api::start(&lab);
    let url = format!("http://{}", api.address);
    block_on(async {
        let store = EtcdStore::open(&Options::new([url.clone()])).unwrap();
        let mut watches = Vec::new();
        for number in 0..WATCHES {
            let range = Range::key(format!("/t/{number}"));
            watches.push(store.watch(WatchRequest::new(range, Revision::new(1))).await.unwrap());
        }
        let unread = EtcdStore::open(&Options::new([url.clone()])).unwrap();
        let _unread = unread.watch(WatchRequest::new(Range::All, Revision::new(1))).await.unwrap();
        let writer = EtcdStore::open(&Options::new([url.clone()])).unwrap();
        let value = "x".repeat(100_000);
        for number in 0..100 {
            let put = kv::Op::put(format!("/t/{number}"), value.clone());
            writer.txn(kv::Txn::new().with_success([put])).await.unwrap();
        }
        for (number, watch) in watches.iter_mut().take(100).enumerate() {
            let batch = watch.next().await.unwrap().unwrap();
            assert_eq!(batch.events[0].kv.key.as_bytes(), format!("/t/{number}").as_bytes());
        }
    });
    lab.add("meanwhile").ok();
    api.end();
}
