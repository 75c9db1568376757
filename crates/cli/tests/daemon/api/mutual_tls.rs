//! Tests mutual TLS: client and server present certificates.

use std::thread::sleep;
use std::time::Duration;

use super::Api;
use crate::certificates::Certificates;
use crate::lab::Lab;
use crate::programs::Ended;

fn offered(lab: &Lab, files: &Certificates) -> Api {
    let path = |name: &str| files.path(name).display().to_string();
    let (cert, key, authority) = (path("server.pem"), path("server.key"), path("authority.pem"));
    let tls = ["--cert-file", &cert, "--key-file", &key, "--client-ca-file", &authority];
    Api::start_with(lab, &[&["--listen", "https://127.0.0.1:0"][..], &tls].concat())
}

/// Calls etcdctl, which trusts the given certificate authority and, with `client`, presents a client certificate.
fn call(api: &Api, files: &Certificates, authority: &str, client: bool) -> Ended {
    let path = |name: &str| files.path(name).display().to_string();
    let mut args = format!("--endpoints=https://{} --cacert={}", api.address, path(authority));
    if client {
        args += &format!(" --cert={} --key={}", path("client.pem"), path("client.key"));
    }
    api.etcdctl(&format!("{args} --dial-timeout=2s --command-timeout=3s put /t/a 1"))
}

#[test]
fn mutual_tls_admits_only_clients_of_authority() {
    let lab = Lab::with_pool("redb", "10.78.0.0/24");
    let files = Certificates::make().unwrap();
    let api = offered(&lab, &files);
    assert_eq!(call(&api, &files, "authority.pem", true).ok().out, "OK\n");
    assert_ne!(call(&api, &files, "authority.pem", false).code, Some(0));
    assert_ne!(call(&api, &files, "stranger.pem", true).code, Some(0));
    let strangers = Certificates::make().unwrap();
    assert_ne!(call(&api, &strangers, "authority.pem", true).code, Some(0));
    let plain =
        api.etcdctl(&format!("--endpoints=http://{} --dial-timeout=2s --command-timeout=3s get /t/a", api.address));
    assert_ne!(plain.code, Some(0));
    assert_eq!(call(&api, &files, "authority.pem", true).ok().out, "OK\n");
    api.end();
}

#[test]
fn mutual_tls_reads_certificates_again_when_changed() {
    let lab = Lab::with_pool("redb", "10.78.0.0/24");
    let files = Certificates::make().unwrap();
    let api = offered(&lab, &files);
    call(&api, &files, "authority.pem", true).ok();
    files.issue().unwrap();
    call(&api, &files, "authority.pem", true).ok();
    // If the daemon cannot use the new certificate file, the old certificate stays in use.
    sleep(Duration::from_millis(20));
    std::fs::write(files.path("server.pem"), "no certificate").unwrap();
    call(&api, &files, "authority.pem", true).ok();
    assert!(api.daemon.log().contains("keeping the old certificates"), "{}", api.daemon.log());
    assert!(!api.daemon.log().contains("PRIVATE"), "{}", api.daemon.log());
    api.end();
}

#[test]
fn mutual_tls_half_handshake_keeps_no_client_out() {
    let lab = Lab::with_pool("redb", "10.78.0.0/24");
    let files = Certificates::make().unwrap();
    let api = offered(&lab, &files);
    let silent: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(&api.address).unwrap()).collect();
    call(&api, &files, "authority.pem", true).ok();
    drop(silent);
    api.end();
}
