//! Getting in: TLS, certificates of our own, users and passwords. No secret shows in any error.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use backend_etcd::{Credentials, EtcdStore, Options, Pem, Tls};
use etcd_client::{Client, Permission, PermissionType};
use futures::StreamExt;
use kv::{Auth, Error, ErrorKind, Outcome, Range, Store, StoreExt, WatchRequest};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use support::Etcd;
use tempfile::TempDir;

const PASSWORD: &str = "hidden-password";

/// An authority, and certificates from it for the server and for us, in files.
struct Certificates {
    folder: TempDir,
}

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Issuer {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl Certificates {
    fn make() -> Self {
        let certificates = Self { folder: tempfile::tempdir().unwrap() };
        certificates.issue();
        certificates
    }

    /// Everything anew, from another authority, in the same files.
    fn issue(&self) {
        let folder = &self.folder;
        let authority = authority();
        std::fs::write(folder.path().join("authority.pem"), authority.pem()).unwrap();
        std::fs::write(folder.path().join("stranger.pem"), self::authority().pem()).unwrap();
        for name in ["server", "client"] {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(["127.0.0.1".to_owned(), "etcd.example".to_owned()]).unwrap();
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let certificate = params.signed_by(&key, &authority).unwrap();
            std::fs::write(folder.path().join(format!("{name}.pem")), certificate.pem()).unwrap();
            std::fs::write(folder.path().join(format!("{name}.key")), key.serialize_pem()).unwrap();
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn file(&self, name: &str) -> Pem {
        Pem::File(self.path(name))
    }

    fn inline(&self, name: &str) -> Pem {
        Pem::Inline(std::fs::read(self.path(name)).unwrap())
    }

    /// An etcd with these certificates; `more` are arguments besides.
    fn etcd(&self, more: &[String]) -> Etcd {
        let with = |flag: &str, name: &str| format!("{flag}={}", self.path(name).display());
        let mut arguments = vec![with("--cert-file", "server.pem"), with("--key-file", "server.key")];
        arguments.extend_from_slice(more);
        Etcd::start_with("https", &arguments).unwrap()
    }

    /// One that lets in only who has a certificate.
    fn etcd_for_known(&self) -> Etcd {
        let authority = Path::new("authority.pem");
        let trusted = format!("--trusted-ca-file={}", self.folder.path().join(authority).display());
        self.etcd(&[trusted, "--client-cert-auth".to_owned()])
    }
}

fn open(url: impl Into<String>, tls: Option<Tls>) -> EtcdStore {
    let mut options = Options::new([url.into()]).with_call_timeout(Duration::from_secs(3));
    options.tls = tls;
    EtcdStore::open(&options).unwrap()
}

/// The error of a first write, which comes in time.
async fn refused(store: &EtcdStore) -> Error {
    let begun = Instant::now();
    let error = store.put("k", "v").await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}: {error}", begun.elapsed());
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains("hidden") && !shown.contains("PRIVATE"), "{shown}");
    error
}

#[tokio::test]
async fn only_the_chosen_authority_is_trusted() {
    let certificates = Certificates::make();
    let etcd = certificates.etcd(&[]);
    for authority in [certificates.file("authority.pem"), certificates.inline("authority.pem")] {
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
async fn the_servers_name_is_checked() {
    let certificates = Certificates::make();
    let etcd = certificates.etcd(&[]);
    let tls = |name: &str| Tls::new().with_authority(certificates.file("authority.pem")).with_server_name(name);
    open(etcd.url(), Some(tls("etcd.example"))).put("k", "v").await.unwrap();
    let error = refused(&open(etcd.url(), Some(tls("other.example")))).await;
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    assert!(error.to_string().contains("other.example"), "{error}");
}

#[tokio::test]
async fn a_certificate_of_our_own_opens_the_door() {
    let certificates = Certificates::make();
    let etcd = certificates.etcd_for_known();
    let trusting = || Tls::new().with_authority(certificates.file("authority.pem"));
    for (certificate, key) in [
        (certificates.file("client.pem"), certificates.file("client.key")),
        (certificates.inline("client.pem"), certificates.inline("client.key")),
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
async fn certificates_that_changed_are_read_again() {
    let certificates = Certificates::make();
    let mut etcd = certificates.etcd_for_known();
    let tls = Tls::new()
        .with_authority(certificates.file("authority.pem"))
        .with_identity(certificates.file("client.pem"), certificates.file("client.key"));
    let store = open(etcd.url(), Some(tls));
    store.put("k", "v").await.unwrap();
    certificates.issue();
    store.put("k", "the connection that is there goes on").await.unwrap();
    etcd.stop();
    etcd.run().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while let Err(error) = store.put("k", "w").await {
        assert!(Instant::now() < until, "{error}");
    }
    // Nonsense, as if somebody were writing the file: the certificate that is known stays.
    std::fs::write(certificates.path("client.pem"), "nonsense").unwrap();
    etcd.stop();
    etcd.run().unwrap();
    while let Err(error) = store.put("k", "x").await {
        assert!(Instant::now() < until, "{error}");
    }
}

#[tokio::test]
async fn with_and_without_tls_do_not_mix() {
    let certificates = Certificates::make();
    let (etcd, plain) = (certificates.etcd(&[]), Etcd::start().unwrap());
    let error = refused(&open(etcd.url().replace("https", "http"), None)).await;
    assert!(error.to_string().contains("may want TLS"), "{error}");
    let trusting = Tls::new().with_authority(certificates.file("authority.pem"));
    let error = refused(&open(plain.url().replace("http", "https"), Some(trusting))).await;
    assert_eq!(error.kind(), &ErrorKind::NotSent, "{error}");
    assert!(error.to_string().contains("be without TLS"), "{error}");
}

/// Adds a user who may do everything and one who may only read, and lets nobody else in from now on.
async fn guard(etcd: &Etcd) {
    let mut client = Client::connect([etcd.url()], None).await.unwrap();
    client.user_add("root", PASSWORD, None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.user_add("reader", PASSWORD, None).await.unwrap();
    client.role_add("reading").await.unwrap();
    let all = Permission::new(PermissionType::Read, "").with_all_keys();
    client.role_grant_permission("reading", all).await.unwrap();
    client.user_grant_role("reader", "reading").await.unwrap();
    client.auth_enable().await.unwrap();
}

/// A guarded etcd whose tokens live for a second unless used.
async fn guarded() -> Etcd {
    let etcd = Etcd::start_with("http", &["--auth-token-ttl=1".to_owned()]).unwrap();
    guard(&etcd).await;
    etcd
}

fn as_user(etcd: &Etcd, user: &str, password: &str) -> EtcdStore {
    let options = Options::new([etcd.url()]).with_credentials(Credentials::new(user, password));
    EtcdStore::open(&options).unwrap()
}

#[tokio::test]
async fn tokens_are_renewed() {
    let etcd = guarded().await;
    let store = as_user(&etcd, "root", PASSWORD);
    let first = store.put("k", "v").await.unwrap();
    let mut watch = store.watch(WatchRequest::new(Range::All, first)).await.unwrap();
    assert_eq!(watch.next().await.unwrap().unwrap().revision, first);
    let expire = || tokio::time::sleep(Duration::from_millis(3500));
    // A write, many calls at once, and a new watch: each finds that the token has run out.
    expire().await;
    let second = store.put("k", "w").await.unwrap();
    expire().await;
    let (one, two, three) = tokio::join!(store.get("k"), store.get("k"), store.get("k"));
    assert!(one.is_ok() && two.is_ok() && three.is_ok());
    expire().await;
    let mut late = store.watch(WatchRequest::new(Range::All, second)).await.unwrap();
    assert_eq!(late.next().await.unwrap().unwrap().revision, second);
    assert_eq!(watch.next().await.unwrap().unwrap().revision, second, "a watch outlives its token");
}

#[tokio::test]
async fn a_restart_forgets_tokens() {
    let mut etcd = guarded().await;
    let store = as_user(&etcd, "root", PASSWORD);
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
    let batch = tokio::time::timeout(Duration::from_secs(30), watch.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(batch.revision, second);
}

#[tokio::test]
async fn who_may_not_is_told_so() {
    let etcd = guarded().await;
    let wrong = refused(&as_user(&etcd, "root", "hidden-other")).await;
    assert_eq!(wrong.kind(), &ErrorKind::Auth(Auth::Unauthenticated), "{wrong}");
    let nobody = refused(&open(etcd.url(), None)).await;
    assert_eq!(nobody.kind(), &ErrorKind::Auth(Auth::Unauthenticated), "{nobody}");
    let reader = as_user(&etcd, "reader", PASSWORD);
    assert!(reader.get("k").await.unwrap().is_none());
    let error = refused(&reader).await;
    assert_eq!(error.kind(), &ErrorKind::Auth(Auth::Denied), "{error}");
    for error in [wrong, nobody, error] {
        assert_eq!(error.outcome(), Outcome::NotApplied, "{error}");
    }
    assert!(as_user(&etcd, "root", PASSWORD).get("k").await.unwrap().is_none(), "nothing was written");
}

#[tokio::test]
async fn a_login_that_nobody_asks_for_is_no_error() {
    let etcd = Etcd::start().unwrap();
    let store = as_user(&etcd, "root", PASSWORD);
    store.put("k", "v").await.unwrap();
    guard(&etcd).await;
    store.put("k", "once it is asked for").await.unwrap();
}
