//! Tests etcd stores with TLS, client certificates, users and passwords. The tests also check that no error contains a
//! secret.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use backend_etcd::{EtcdStore, Options, Tls};
use conformance::patient;
use futures::StreamExt;
use kv::{Error, ErrorKind, Outcome, Range, Store, StoreExt, WatchRequest};
use support::Etcd;
use support::tls::AsOptions;
use support::users::{PASSWORD, as_user, guard, guarded};
use testkit::certificates::Certificates;

fn open(url: impl Into<String>, tls: Option<Tls>) -> EtcdStore {
    let mut options = Options::new([url.into()]).with_call_timeout(Duration::from_secs(3));
    options.tls = tls;
    EtcdStore::open(&options).unwrap()
}

/// Makes a first write to the store, which must fail in time, and returns its error.
async fn refused(store: &EtcdStore) -> Error {
    let begun = Instant::now();
    let error = store.put("k", "v").await.unwrap_err();
    assert!(begun.elapsed() < patient(Duration::from_secs(5)), "{:?}: {error}", begun.elapsed());
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains("hidden") && !shown.contains("PRIVATE"), "{shown}");
    error
}

#[tokio::test]
async fn tls_trusts_only_chosen_authority() {
    let certificates = Certificates::make().unwrap();
    let etcd = certificates.etcd(&[]).unwrap();
    for authority in [certificates.file("authority.pem"), certificates.inline("authority.pem").unwrap()] {
        let store = open(etcd.url(), Some(Tls::new().with_authority(authority)));
        store.put("k", "v").await.unwrap();
    }
    let stranger = Tls::new().with_authority(certificates.file("stranger.pem"));
    for tls in [Some(stranger), None, Some(Tls::new())] {
        let store = open(etcd.url(), tls);
        let error = store.check().await.unwrap_err();
        assert!(error.to_string().contains("name the one that signed it"), "{error}");
        let error = refused(&store).await;
        assert_eq!((error.kind(), error.outcome()), (&ErrorKind::NotSent, Outcome::NotApplied), "{error}");
        assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    }
}

#[tokio::test]
async fn tls_checks_server_name() {
    let certificates = Certificates::make().unwrap();
    let etcd = certificates.etcd(&[]).unwrap();
    let tls = |name: &str| Tls::new().with_authority(certificates.file("authority.pem")).with_server_name(name);
    open(etcd.url(), Some(tls("etcd.example"))).put("k", "v").await.unwrap();
    let error = refused(&open(etcd.url(), Some(tls("other.example")))).await;
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    assert!(error.to_string().contains("other.example"), "{error}");
}

#[tokio::test]
async fn tls_client_certificate_is_accepted() {
    let certificates = Certificates::make().unwrap();
    let etcd = certificates.etcd_for_known().unwrap();
    let trusting = || Tls::new().with_authority(certificates.file("authority.pem"));
    for (certificate, key) in [
        (certificates.file("client.pem"), certificates.file("client.key")),
        (certificates.inline("client.pem").unwrap(), certificates.inline("client.key").unwrap()),
    ] {
        let store = open(etcd.url(), Some(trusting().with_identity(certificate, key)));
        let revision = store.put("k", "v").await.unwrap();
        let mut watch = store.watch(WatchRequest::new(Range::All, revision)).await.unwrap();
        assert_eq!(watch.next().await.unwrap().unwrap().revision, revision);
    }
    let error = refused(&open(etcd.url(), Some(trusting()))).await;
    assert!(error.to_string().contains("may want a certificate of ours"), "{error}");
}

#[tokio::test]
async fn tls_client_certificate_is_named_when_expired() {
    let certificates = Certificates::expired(&["client"]).unwrap();
    let etcd = certificates.etcd_for_known().unwrap();
    let trusting = || Tls::new().with_authority(certificates.file("authority.pem"));
    for (certificate, key, name) in [
        (certificates.file("client.pem"), certificates.file("client.key"), "client.pem"),
        (certificates.inline("client.pem").unwrap(), certificates.inline("client.key").unwrap(), "the text given"),
    ] {
        let store = open(etcd.url(), Some(trusting().with_identity(certificate, key)));
        for error in [store.check().await.unwrap_err(), refused(&store).await] {
            let said = error.to_string();
            assert!(said.contains("our certificate, ") && said.contains(name), "{said}");
            assert!(said.contains("has expired on 2001-01-01: renew it"), "{said}");
        }
    }
    // A server that requests no client certificate must not be affected by an expired client certificate.
    let open_to_all = certificates.etcd(&[]).unwrap();
    let ours = trusting().with_identity(certificates.file("client.pem"), certificates.file("client.key"));
    open(open_to_all.url(), Some(ours.clone())).put("k", "v").await.unwrap();
    let unreachable = open(format!("https://{}", support::dead_address().unwrap()), Some(ours));
    assert!(!refused(&unreachable).await.to_string().contains("our certificate"), "no server has seen the certificate");
    // If the client's and the server's certificates have both expired, the error of a store call must be about the
    // server's certificate.
    let both = Certificates::expired(&["client", "server"]).unwrap();
    let etcd = both.etcd_for_known().unwrap();
    let tls = Tls::new()
        .with_authority(both.file("authority.pem"))
        .with_identity(both.file("client.pem"), both.file("client.key"));
    let said = refused(&open(etcd.url(), Some(tls))).await.to_string();
    assert!(said.contains("its certificate has expired"), "{said}");
}

#[tokio::test]
async fn tls_files_are_named_when_missing() {
    let certificates = Certificates::make().unwrap();
    let file = |name: &str| certificates.file(name);
    std::fs::create_dir(certificates.path("folder")).unwrap();
    for (tls, name) in [
        (Tls::new().with_authority(file("none.pem")), "none.pem"),
        (Tls::new().with_identity(file("none.pem"), file("client.key")), "none.pem"),
        (Tls::new().with_identity(file("client.pem"), file("none.key")), "none.key"),
        (Tls::new().with_authority(file("folder")), "folder"),
    ] {
        let error = EtcdStore::open(&Options::new(["https://127.0.0.1:1"]).with_tls(tls)).unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Io, "{error}");
        let said = format!("cannot read {}", certificates.path(name).display());
        assert!(error.to_string().contains(&said) && !error.to_string().contains("no store"), "{error}");
    }
}

#[tokio::test]
async fn tls_files_are_read_again_when_changed() {
    let certificates = Certificates::make().unwrap();
    let mut etcd = certificates.etcd_for_known().unwrap();
    let tls = Tls::new()
        .with_authority(certificates.file("authority.pem"))
        .with_identity(certificates.file("client.pem"), certificates.file("client.key"));
    let store = open(etcd.url(), Some(tls));
    store.put("k", "v").await.unwrap();
    certificates.issue().unwrap();
    store.put("k", "the connection that is there goes on").await.unwrap();
    etcd.stop();
    etcd.run().unwrap();
    let until = Instant::now() + patient(Duration::from_secs(30));
    while let Err(error) = store.put("k", "w").await {
        assert!(Instant::now() < until, "{error}");
    }
    // While the certificate file is invalid, as if a program were still writing it, the store must keep using the
    // previous certificate.
    std::fs::write(certificates.path("client.pem"), "nonsense").unwrap();
    etcd.stop();
    etcd.run().unwrap();
    while let Err(error) = store.put("k", "x").await {
        assert!(Instant::now() < until, "{error}");
    }
}

#[tokio::test]
async fn tls_mismatch_is_told_in_both_directions() {
    let certificates = Certificates::make().unwrap();
    let (etcd, plain) = (certificates.etcd(&[]).unwrap(), Etcd::start().unwrap());
    let error = refused(&open(etcd.url().replace("https", "http"), None)).await;
    assert!(error.to_string().contains("may want TLS"), "{error}");
    let trusting = Tls::new().with_authority(certificates.file("authority.pem"));
    let error = refused(&open(plain.url().replace("http", "https"), Some(trusting))).await;
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    assert!(error.to_string().contains("be without TLS"), "{error}");
}

#[tokio::test]
async fn login_is_repeated_after_server_restart() {
    let mut etcd = guarded().await.unwrap();
    let store = as_user(&etcd, "root", PASSWORD).unwrap();
    let first = store.put("k", "v").await.unwrap();
    let mut watch = store.watch(WatchRequest::new(Range::All, first.next())).await.unwrap();
    etcd.stop();
    etcd.run().unwrap();
    let second = loop {
        if let Ok(revision) = store.put("k", "w").await {
            break revision;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let batch = tokio::time::timeout(patient(Duration::from_secs(30)), watch.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(batch.revision, second);
}

#[tokio::test]
async fn login_is_no_error_when_auth_is_off() {
    let etcd = Etcd::start().unwrap();
    let store = as_user(&etcd, "root", PASSWORD).unwrap();
    store.put("k", "v").await.unwrap();
    guard(&etcd).await.unwrap();
    store.put("k", "once it is asked for").await.unwrap();
}

/// If a server accepts connections but never answers, the error of a store call must say that the server may hang.
#[tokio::test]
async fn open_error_says_server_hangs_when_it_is_silent() {
    let server = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = server.local_addr().unwrap();
    let authority = Certificates::make().unwrap();
    for url in [format!("http://{address}"), format!("https://{address}")] {
        let tls = url.starts_with("https").then(|| Tls::new().with_authority(authority.file("authority.pem")));
        let error = refused(&open(url, tls)).await.to_string();
        assert!(error.contains("it may hang") && !error.contains("TLS"), "{error}");
    }
}
