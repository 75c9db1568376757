//! Tests opening etcd stores by their location. If a store location is bad, opening the store must fail in time with a
//! one-line error that explains the fault and contains no secret.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use conformance::patient;
use datastore::{Access, ClientCertificate, ConfigError, Create, Location, Login, Pem, open};
use kv::{Auth, Error, ErrorKind, StoreExt};
use testkit::certificates::Certificates;
use testkit::server::Etcd;

const HIDDEN: &str = "hidden-password";

fn location(url: &str, access: Access) -> Location {
    stores::at(url).unwrap().with_access(|_| Ok::<_, ConfigError>(access)).unwrap()
}

/// Converts a server's `http` or `https` URL into a store URL.
fn store_url(url: &str) -> String {
    url.replace("http://", "etcd://").replace("https://", "etcd+https://")
}

/// Opens the store at `location`, which must fail in time with a one-line error without secrets, and returns the error.
async fn refused(location: &Location) -> Error {
    let begun = Instant::now();
    let error = open(location, &Create::Never.with_wait(Duration::from_secs(30))).await.unwrap_err();
    assert!(begun.elapsed() < patient(Duration::from_secs(20)), "{:?}: {error}", begun.elapsed());
    let said = error.to_string();
    assert!(!said.contains('\n') && !said.contains("hidden") && !said.contains("BEGIN"), "{said}");
    assert!(!format!("{error:?} {location} {location:?}").contains("hidden"), "{error:?}");
    error
}

async fn refused_with(url: &str, access: Access, words: &[&str]) -> Error {
    let error = refused(&location(url, access)).await;
    let said = error.to_string();
    assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
    error
}

/// Converts test certificates to the type [`Pem`] of store settings.
trait AsPem {
    fn file(&self, name: &str) -> Pem;

    fn inline(&self, name: &str) -> Pem;
}

impl AsPem for Certificates {
    fn file(&self, name: &str) -> Pem {
        Pem::File(self.path(name))
    }

    fn inline(&self, name: &str) -> Pem {
        Pem::Inline(std::fs::read_to_string(self.path(name)).unwrap())
    }
}

fn with_certificates(authority: Pem, certificate: Pem, key: Pem) -> Access {
    Access { authority: Some(authority), identity: Some(ClientCertificate { certificate, key }), login: None }
}

async fn works(location: &Location) {
    let opened = open(location, &Create::Never.with_wait(Duration::from_secs(30))).await.unwrap();
    opened.store().put("k", "v").await.unwrap();
    let straggler = opened.store();
    opened.close().await.unwrap();
    assert_eq!(*straggler.get("k").await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn etcd_opens_with_and_without_tls() {
    let (plain, certificates) = (Etcd::start().unwrap(), Certificates::make().unwrap());
    works(&location(&store_url(&plain.url()), Access::default())).await;
    // As in Calico, an http:// endpoint is used without TLS even if certificates are set.
    let unused = Access { authority: Some(certificates.file("authority.pem")), ..Access::default() };
    works(&location(&store_url(&plain.url()), unused)).await;
    let etcd = certificates.etcd_for_known().unwrap();
    for pem in [Certificates::file, Certificates::inline] {
        let pem = |name| pem(&certificates, name);
        works(&location(
            &store_url(&etcd.url()),
            with_certificates(pem("authority.pem"), pem("client.pem"), pem("client.key")),
        ))
        .await;
    }
}

#[tokio::test]
async fn etcd_login_is_needed_and_checked() {
    let etcd = Etcd::start().unwrap();
    let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
    client.user_add("root", HIDDEN, None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
    let login = |password: &str| Login { user: "root".into(), password: password.into() };
    let access = |password: &str| Access { login: Some(login(password)), ..Access::default() };
    let url = store_url(&etcd.url());
    works(&location(&url, access(HIDDEN))).await;
    let error = refused_with(&url, access("hidden-other"), &["not authenticated", "check user and password"]).await;
    assert_eq!(*error.kind(), ErrorKind::Auth(Auth::Unauthenticated));
    let without_login =
        open(&location(&url, Access::default()), &Create::Never.with_wait(Duration::ZERO)).await.unwrap();
    let error = without_login.store().get("k").await.unwrap_err();
    assert!(error.to_string().contains("it wants a user and a password"), "{error}");
}

#[tokio::test]
async fn etcd_certificates_are_refused_when_wrong() {
    let (certificates, strange) = (Certificates::make().unwrap(), Certificates::make().unwrap());
    let (etcd, plain) = (certificates.etcd_for_known().unwrap(), Etcd::start().unwrap());
    let url = store_url(&etcd.url());
    let identity = || (certificates.file("client.pem"), certificates.file("client.key"));
    let (certificate, key) = identity();
    let access = with_certificates(strange.file("authority.pem"), certificate, key);
    refused_with(&url, access, &["no connection", "name the one that signed it", "invalid peer certificate"]).await;
    refused_with(&url, Access::default(), &["name the one that signed it"]).await;
    let alone = || Access { authority: Some(certificates.file("authority.pem")), ..Access::default() };
    refused_with(&url, alone(), &["it may want a certificate of ours"]).await;
    // The test connects without TLS to a server that requires TLS, and with TLS to a server that has no TLS.
    refused_with(&url.replace("etcd+https", "etcd"), Access::default(), &["it may want TLS (https://)"]).await;
    refused_with(&store_url(&plain.url()).replace("etcd:", "etcd+https:"), alone(), &["be without TLS (http://)"])
        .await;
}

#[tokio::test]
async fn etcd_certificate_files_are_checked_before_sending() {
    let certificates = Certificates::make().unwrap();
    let url = "etcd+https://127.0.0.1:1";
    let nonsense = || Pem::Inline("hidden nonsense".into());
    let authority = |pem| Access { authority: Some(pem), ..Access::default() };
    let error = refused_with(
        url,
        authority(Pem::File("/nowhere/authority.pem".into())),
        &["cannot read /nowhere/authority.pem"],
    )
    .await;
    assert_eq!(*error.kind(), ErrorKind::Io);
    let folder = certificates.path("");
    refused_with(url, authority(Pem::File(folder.clone())), &["cannot read", folder.to_str().unwrap()]).await;
    refused_with(url, authority(nonsense()), &["has no CERTIFICATE in PEM form"]).await;
    let key = with_certificates(certificates.file("authority.pem"), certificates.file("client.pem"), nonsense());
    refused_with(url, key, &["has no PRIVATE KEY in PEM form"]).await;
    let other = with_certificates(
        certificates.file("authority.pem"),
        certificates.file("client.pem"),
        certificates.file("server.key"),
    );
    refused_with(url, other, &["the key is not the certificate's"]).await;
}

#[tokio::test]
async fn etcd_error_when_no_server_listens() {
    let dead = format!("etcd://{}", testkit::server::dead_address().unwrap());
    let error =
        refused_with(&dead, Access::default(), &["no connection", "check the address, and that etcd runs"]).await;
    assert_eq!(*error.kind(), ErrorKind::NotSent);
    refused_with("etcd://no-such-host.invalid:2379", Access::default(), &["the name is not known"]).await;
    refused_with("etcd+unix:///nowhere/etcd.sock", Access::default(), &["check the address"]).await;
}

/// Starts a server that sends `says` on each connection and then closes the connection. Returns the store URL of the
/// server.
fn stranger(says: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            // Writing to the connection fails if the client has disconnected already.
            let _ = connection.unwrap().write_all(says);
        }
    });
    format!("etcd://{address}")
}

#[tokio::test]
async fn etcd_error_when_server_is_no_etcd() {
    for says in [&b""[..], b"SSH-2.0-OpenSSH_9.2p1\r\n", b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"] {
        refused_with(&stranger(says), Access::default(), &["or be no etcd"]).await;
    }
    // The test server accepts connections and never answers a request.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("etcd://{}", silent.local_addr().unwrap());
    refused_with(&url, Access::default(), &["or be no etcd"]).await;
}

/// Starts a gRPC server that answers each call with the HTTP status code `http` and, if there is one, with the message
/// `message`.
async fn fake(http: u16, message: Option<Vec<u8>>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let message = message.clone();
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(socket).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let mut head = http::Response::builder().status(http);
                    if message.is_some() {
                        head = head.header("content-type", "application/grpc");
                    }
                    let mut body = respond.send_response(head.body(()).unwrap(), message.is_none()).unwrap();
                    if let Some(message) = &message {
                        body.send_data(message.clone().into(), false).unwrap();
                        let mut end = http::HeaderMap::new();
                        end.insert("grpc-status", "0".parse().unwrap());
                        body.send_trailers(end).unwrap();
                    }
                }
            });
        }
    });
    format!("etcd://{address}")
}

/// Encodes the status response of an etcd server whose version is `version`.
fn status(version: &str) -> Vec<u8> {
    // In etcd's status response, field 1 is a header with cluster id 1 and revision 1, and field 2 is the version.
    let mut status = vec![0x0a, 4, 0x08, 1, 0x18, 1, 0x12, u8::try_from(version.len()).unwrap()];
    status.extend(version.as_bytes());
    let mut framed = vec![0, 0, 0, 0, u8::try_from(status.len()).unwrap()];
    framed.extend(status);
    framed
}

#[tokio::test]
async fn etcd_error_when_server_is_too_old_or_another() {
    let error =
        refused_with(&fake(200, Some(status("3.2.32"))).await, Access::default(), &["etcd 3.2.32", "3.4 or newer"])
            .await;
    assert_eq!(*error.kind(), ErrorKind::Unsupported);
    refused_with(&fake(404, None).await, Access::default(), &["this is no etcd v3: check the address"]).await;
    let new = location(&fake(200, Some(status("3.6.1"))).await, Access::default());
    assert!(open(&new, &Create::Never.with_wait(Duration::ZERO)).await.is_ok());
}
