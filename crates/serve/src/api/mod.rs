//! Offers etcd's API in front of the daemon's store to programs outside this project: etcdctl, calicoctl, Felix, or
//! lock clients in any language.
//!
//! This module has the API's options, the checks of the API's URLs, and the [`Backing`] of a shared store.

mod authority;
mod connections;

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io};

use async_trait::async_trait;
use datastore::Location;
use datastore::shared_store::SharedStore;
use etcd_api::{Api, Backing, MemberIdentity, StoreGeneration, StoreSizes};
use kv::{Error, ErrorKind, GrantOutcome, Key, Lease, LeaseId, Operation, Revision, Store};
use tokio::task::JoinSet;

use crate::daemon::Daemon;
use connections::{ApiListener, ReloadingTls, TlsFiles};

/// The reason why the daemon cannot offer etcd's API.
#[derive(Debug)]
pub struct ApiError(String);

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl ApiError {
    fn at(url: &str, why: impl fmt::Display) -> Self {
        Self(format!("cannot listen at {url}: {why}"))
    }
}

/// Listens at all URLs of the API. Returns the part of the daemon's startup line that lists the API's URLs, or an empty
/// text if the API has no URLs.
///
/// # Errors
/// An error that names the URL that cannot be used and says what to change.
pub(crate) async fn offer(
    daemon: &Arc<Daemon>,
    location: &Location,
    options: &ApiOptions,
    tasks: &mut JoinSet<()>,
) -> Result<String, ApiError> {
    let Some(first) = options.listen.first() else { return Ok(String::new()) };
    if location.path().is_none() {
        let local = location.drivers().local_names("", "");
        let why =
            &format!("the store is an etcd already, or gone with its process; --listen is for a store on {local}");
        return Err(ApiError::at(first, why));
    }
    let mut tls = None;
    let (mut offers, mut urls) = (Vec::new(), Vec::new());
    for url in &options.listen {
        let address = ListenAddress::parse(url).map_err(|why| ApiError::at(url, why))?;
        address.check(options).map_err(|why| ApiError::at(url, why))?;
        let tls = match (&address, &tls) {
            (ListenAddress::Tcp { tls: true, .. }, Some(loaded)) => Some(Arc::clone(loaded)),
            (ListenAddress::Tcp { tls: true, .. }, None) => {
                let files = TlsFiles::of(options).ok_or_else(|| ApiError::at(url, TLS_ADVICE))?;
                let loaded = Arc::new(ReloadingTls::load(files).map_err(|why| ApiError::at(url, why))?);
                tls = Some(Arc::clone(&loaded));
                Some(loaded)
            }
            _ => None,
        };
        let offer = ApiListener::bind(&address, tls).await.map_err(|why| ApiError::at(url, why))?;
        urls.push(offer.url().to_owned());
        offers.push(offer);
    }
    let said = format!(", and serving the etcd API at {}", urls.join(" and "));
    let advertised = if options.advertise.is_empty() { urls } else { options.advertise.clone() };
    let mut api = Api::new(Arc::new(ServedStore::new(daemon.shared_store.clone(), advertised)));
    if let Some(interval) = options.watch_progress_interval {
        api = api.with_report_interval(interval);
    }
    let connections = connections::accept_connections(offers, tasks);
    let leases = api.clone();
    tasks.spawn(async move { leases.end_leases().await });
    tasks.spawn(async move {
        if let Err(error) = api.server().serve_with_incoming(connections).await {
            tracing::error!(%error, "margay's server for the etcd API has stopped");
        }
    });
    Ok(said)
}

/// Options of etcd's API.
#[derive(Clone, Debug, Default)]
pub struct ApiOptions {
    /// URLs (`https://HOST:PORT`, `http://HOST:PORT` or `unix:PATH`) at which the API listens. If `listen` is empty,
    /// the API is off.
    pub listen: Vec<String>,
    /// URLs by which clients reach the API, if they differ from `listen`.
    pub advertise: Vec<String>,
    /// Path of the server's certificate file, in PEM form.
    pub cert: Option<PathBuf>,
    /// Path of the private key file of the server's certificate, in PEM form.
    pub key: Option<PathBuf>,
    /// Path of the file with the certificate authorities that sign client certificates, in PEM form.
    pub client_ca: Option<PathBuf>,
    /// Whether programs on this machine may connect without a certificate, through `http://` on a loopback address.
    pub insecure_loopback: bool,
    /// Interval of the progress reports of a watch; `None` for etcd's default of 10 minutes.
    pub watch_progress_interval: Option<Duration>,
}

const TLS_ADVICE: &str =
    "https:// takes --cert-file, --key-file and --client-ca-file; on loopback http:// and --insecure-loopback will do";

/// A parsed listen URL of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ListenAddress {
    /// A TCP port, with or without mutual TLS.
    Tcp { addresses: Vec<SocketAddr>, tls: bool },
    /// A unix socket to which only the daemon's user can connect.
    Unix(PathBuf),
}

impl ListenAddress {
    /// Parses a listen URL.
    ///
    /// # Errors
    /// Returns the reason why the URL cannot be used.
    fn parse(url: &str) -> Result<Self, String> {
        if let Some(path) = url.strip_prefix("unix:") {
            let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
            return if path.is_absolute() { Ok(Self::Unix(path)) } else { Err("unix: takes an absolute path".into()) };
        }
        let (tls, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err("it must begin with https://, http:// or unix:".into()),
        };
        let place = rest.strip_suffix('/').unwrap_or(rest);
        if !place.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
            return Err("it must name a host and a port, such as https://10.0.0.1:2379".into());
        }
        let addresses = place.to_socket_addrs().map_err(|error| error.to_string())?;
        Ok(Self::Tcp { addresses: addresses.collect(), tls })
    }

    /// Checks that clients can reach the address and that other users of this machine cannot write to the store.
    ///
    /// # Errors
    /// Returns advice on how to change the options.
    fn check(&self, options: &ApiOptions) -> Result<(), &'static str> {
        let Self::Tcp { addresses, tls } = self else { return Ok(()) };
        if options.advertise.is_empty() && addresses.iter().any(|address| address.ip().is_unspecified()) {
            return Err("clients need an address that they can reach: add --advertise URL");
        }
        if *tls {
            return Ok(());
        }
        if !addresses.iter().all(|address| is_loopback(address.ip())) {
            return Err(
                "without TLS every client that reaches it could change the store: use https://, or http:// on loopback",
            );
        }
        if !options.insecure_loopback {
            return Err(
                "every user of this machine could change the store: add --insecure-loopback if that is right, \
                        or use unix:PATH or https://",
            );
        }
        Ok(())
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// A shared store and the URLs by which clients reach its API.
#[derive(Debug)]
pub(crate) struct ServedStore {
    shared_store: SharedStore,
    urls: Vec<String>,
}

impl ServedStore {
    pub(crate) fn new(shared_store: SharedStore, urls: Vec<String>) -> Self {
        Self { shared_store, urls }
    }
}

#[async_trait]
impl Backing for ServedStore {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.shared_store.clone())
    }

    fn store_to_release(&self) -> Arc<dyn Store> {
        Arc::new(self.shared_store.to_release())
    }

    fn identity(&self) -> MemberIdentity {
        MemberIdentity { name: "margay".to_owned(), urls: self.urls.clone() }
    }

    /// After a restore, the store has a new cluster id and a new member id.
    fn place(&self) -> StoreGeneration {
        let ((cluster, member), generation) = self.shared_store.place();
        StoreGeneration { cluster, member, generation }
    }

    async fn sizes(&self) -> kv::Result<StoreSizes> {
        let folder = self.shared_store.location().path().map(Path::to_owned);
        let measured = tokio::task::spawn_blocking(move || folder.map_or(Ok(0), |folder| folder_bytes(&folder))).await;
        let total = measured.map_err(io::Error::other).and_then(|bytes| bytes).map_err(|error| {
            Error::new(ErrorKind::Io, Operation::Range, self.shared_store.location().to_string()).with_source(error)
        })?;
        Ok(StoreSizes { total, used: total })
    }

    async fn check_room(&self) -> kv::Result<()> {
        self.shared_store.check_room().await
    }

    async fn compact(&self, to: Revision) -> kv::Result<()> {
        self.shared_store.with_embedded(move |store, _| async move { store.compact_for_clients(to).await }).await
    }

    fn oldest(&self) -> Revision {
        self.shared_store.oldest_for_clients()
    }

    async fn grant(&self, lease: Lease) -> kv::Result<GrantOutcome> {
        let granted = self.shared_store.with_embedded(move |store, _| async move { store.grant(lease).await }).await;
        granted.map_err(|error| match error.kind() {
            ErrorKind::Unsupported => {
                let raise =
                    format!("raise its format with: margay --store {} store upgrade", self.shared_store.location());
                let why = error.detail().unwrap_or_default().to_owned();
                error.with_detail(format!("{why}; {raise}"))
            }
            _ => error,
        })
    }

    async fn revoke(&self, id: LeaseId, of: StoreGeneration) -> kv::Result<Revision> {
        let replaced = self.shared_store.replaced(Operation::Txn);
        self.shared_store
            .with_embedded(move |store, generation| async move {
                if generation == of.generation { store.revoke(id).await } else { Err(replaced) }
            })
            .await
    }

    async fn leases(&self) -> kv::Result<Vec<Lease>> {
        self.shared_store.with_embedded(|store, _| async move { store.leases().await }).await
    }

    async fn leased(&self, id: LeaseId) -> kv::Result<Vec<Key>> {
        self.shared_store.with_embedded(move |store, _| async move { store.leased(id).await }).await
    }

    async fn defragment(&self) -> kv::Result<()> {
        self.shared_store.defragment().await
    }
}

/// Sums the sizes of all files in a folder, in bytes. A file that is removed while the folder's size is being computed
/// counts as 0 bytes.
fn folder_bytes(path: &Path) -> io::Result<u64> {
    let found = match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        found => found?,
    };
    if !found.is_dir() {
        return Ok(found.len());
    }
    fs::read_dir(path)?.map(|entry| folder_bytes(&entry?.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(url: &str, options: &ApiOptions) -> Result<(), String> {
        ListenAddress::parse(url)?.check(options).map_err(str::to_owned)
    }

    #[test]
    fn listen_urls_are_read() {
        let tcp = |address: &str, tls| ListenAddress::Tcp { addresses: vec![address.parse().unwrap()], tls };
        assert_eq!(ListenAddress::parse("http://127.0.0.1:2379"), Ok(tcp("127.0.0.1:2379", false)));
        assert_eq!(ListenAddress::parse("https://[::1]:2379/"), Ok(tcp("[::1]:2379", true)));
        assert_eq!(ListenAddress::parse("unix:/run/lab.sock"), Ok(ListenAddress::Unix("/run/lab.sock".into())));
        assert_eq!(ListenAddress::parse("unix:///run/lab.sock"), Ok(ListenAddress::Unix("/run/lab.sock".into())));
        for wrong in
            ["127.0.0.1:2379", "http://127.0.0.1", "http://:2379", "ftp://x:1", "unix:lab.sock", "http://h:99999"]
        {
            assert!(ListenAddress::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn listen_url_is_refused_when_others_could_write() {
        let none = ApiOptions::default();
        let insecure = ApiOptions { insecure_loopback: true, ..ApiOptions::default() };
        let advertised = ApiOptions { advertise: vec!["https://node1:2379".to_owned()], ..ApiOptions::default() };
        assert!(checked("http://127.0.0.1:0", &none).unwrap_err().contains("--insecure-loopback"));
        assert!(checked("http://127.0.0.1:0", &insecure).is_ok());
        assert!(checked("http://[::1]:0", &insecure).is_ok());
        assert!(checked("http://192.0.2.1:0", &insecure).unwrap_err().contains("https://"));
        assert!(checked("http://0.0.0.0:0", &insecure).unwrap_err().contains("--advertise"));
        assert!(checked("https://0.0.0.0:0", &none).unwrap_err().contains("--advertise"));
        assert!(checked("https://[::]:0", &advertised).is_ok());
        assert!(checked("unix:/run/lab.sock", &none).is_ok());
    }
}
