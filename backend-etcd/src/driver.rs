//! etcd as the programs see it.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use driver::{Access, ClusterAddress, ClusterStore, ConfigError, Driver, Facts, Opened, Place, Scope, Settings};
use kv::{Error, ErrorKind, Operation, Result, Store};
use kv_local::OpenOptions;
use kv_mvcc::Blocking;

use crate::error::NAME;
use crate::{Credentials, Discovery, EtcdStore, Options, Pem, Tls};

/// The `datastore_type` of etcd in Calico's configuration.
const DATASTORE_TYPE: &str = "etcdv3";

/// The number of large transactions that are worth having under way at once.
const WRITES_IN_FLIGHT: usize = 32;

/// The driver of `etcd://`, a cluster of etcd.
pub static DRIVER: EtcdDriver = EtcdDriver;

/// See [`DRIVER`].
#[derive(Clone, Copy, Debug)]
pub struct EtcdDriver;

#[async_trait]
impl Driver for EtcdDriver {
    fn facts(&self) -> Facts {
        Facts::new(NAME, Scope::Cluster).with_datastore_type(DATASTORE_TYPE).with_writes_in_flight(WRITES_IN_FLIGHT)
    }

    fn url_form(&self) -> Option<String> {
        Some("etcd://host:port and, with TLS, etcd+https://host:port".to_owned())
    }

    fn place_of_url(&self, scheme: &str, rest: &str) -> Result<Place, ConfigError> {
        ClusterAddress::of_url(NAME, scheme, rest).map(Place::Cluster)
    }

    fn place_of_settings(&self, settings: &Settings) -> Result<Place, ConfigError> {
        ClusterAddress::of_settings(settings).map(Place::Cluster)
    }

    fn url(&self, place: &Place) -> String {
        match place {
            Place::Cluster(address) => address.url(NAME),
            _ => format!("no cluster of {NAME}"),
        }
    }

    async fn open(&self, place: &Place, options: &OpenOptions) -> Result<Box<dyn Opened>> {
        let Place::Cluster(address) = place else {
            return Err(Error::new(ErrorKind::Unsupported, Operation::Open, NAME));
        };
        match options.blocking {
            Blocking::InPlace => Ok(Box::new(connect(address, Some(Instant::now() + options.wait))?)),
            Blocking::OnThreads => {
                let address = address.clone();
                // Certificates are read from files.
                let opening = tokio::task::spawn_blocking(move || connect(&address, None));
                let store = opening
                    .await
                    .unwrap_or_else(|panic| Err(Error::new(ErrorKind::Io, Operation::Open, NAME).with_source(panic)))?;
                store.check().await?;
                Ok(Box::new(store))
            }
        }
    }
}

#[async_trait]
impl Opened for EtcdStore {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn cluster(&self) -> Option<Arc<dyn ClusterStore>> {
        Some(Arc::new(self.clone()))
    }

    async fn check_room(&self) -> Result<()> {
        self.check_alarms().await
    }

    async fn close(&self) -> Result<()> {
        Self::close(self);
        Ok(())
    }
}

/// The store at these endpoints. Nothing is sent yet; files are read. All calls together are over at `end`, if it is given.
///
/// # Errors
/// The fault of the endpoints, or of certificates and keys.
fn connect(address: &ClusterAddress, end: Option<Instant>) -> Result<EtcdStore> {
    let options = options(address);
    EtcdStore::open(&match end {
        Some(end) => options.with_end(end),
        None => options,
    })
}

fn options(address: &ClusterAddress) -> Options {
    let mut options = Options::new(address.endpoints.iter().cloned());
    if !address.discovery_srv.is_empty() {
        options = options.with_discovery(Discovery::new(&address.discovery_srv));
    }
    if address.access.names_certificates() {
        if address.all_without_tls() {
            tracing::warn!(
                store = %address.url(NAME),
                "etcd is reached without TLS, though certificates are configured"
            );
        } else {
            options = options.with_tls(tls(&address.access));
        }
    }
    match &address.access.login {
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

fn pem(pem: &driver::Pem) -> Pem {
    match pem {
        driver::Pem::File(path) => Pem::File(path.clone()),
        driver::Pem::Inline(text) => Pem::Inline(text.clone().into_bytes()),
    }
}
