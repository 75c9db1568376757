//! Opening a store on etcd.

use std::time::Instant;

use backend_etcd::{Credentials, Discovery, EtcdStore, Options, Tls};
use kv::Result;

use crate::access::{Access, Pem};
use crate::location::Etcd;

/// The store on the cluster that `etcd` names. Nothing is sent yet; files are read. All calls together are over at `end`,
/// if it is given.
///
/// # Errors
/// The fault of the endpoints, or of certificates and keys.
pub(crate) fn open(etcd: &Etcd, end: Option<Instant>) -> Result<EtcdStore> {
    let options = options(etcd);
    EtcdStore::open(&match end {
        Some(end) => options.with_end(end),
        None => options,
    })
}

fn options(etcd: &Etcd) -> Options {
    let mut options = Options::new(etcd.endpoints.iter().cloned());
    if !etcd.discovery_srv.is_empty() {
        options = options.with_discovery(Discovery::new(&etcd.discovery_srv));
    }
    if etcd.access.names_certificates() {
        if etcd.all_without_tls() {
            tracing::warn!(store = %etcd, "etcd is reached without TLS, though certificates are configured");
        } else {
            options = options.with_tls(tls(&etcd.access));
        }
    }
    match &etcd.access.login {
        Some(login) => options.with_credentials(Credentials::new(&login.user, &login.password)),
        None => options,
    }
}

fn tls(access: &Access) -> Tls {
    let tls = match &access.authority {
        Some(authority) => Tls::new().with_authority(pem(authority)),
        None => Tls::new(),
    };
    match &access.identity {
        Some(identity) => tls.with_identity(pem(&identity.certificate), pem(&identity.key)),
        None => tls,
    }
}

fn pem(pem: &Pem) -> backend_etcd::Pem {
    match pem {
        Pem::File(path) => backend_etcd::Pem::File(path.clone()),
        Pem::Inline(text) => backend_etcd::Pem::Inline(text.clone().into_bytes()),
    }
}
