//! Keeps the list of a cluster's members, the order in which requests try them, and the connection to each of them.
//!
//! Each member has its own login token, and its own connection, which is established on first use. If the certificate
//! and key files have changed, the next request to a member establishes a new connection. When a member's connection is
//! replaced, store calls that already use the old connection may finish on it.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use etcd_client::{Channel, Client, ConnectOptions, KvClient, WatchClient};
use hyper_util::client::legacy::connect::HttpConnector;
use kv::{Error, ErrorKind, Operation, Result};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use crate::address::{Address, TlsUse, Transport};
use crate::discovery::resolve_members;
use crate::error::{STORE_NAME, says_no_login_needed};
use crate::options::{Credentials, Discovery, Options};
use crate::quota::read_quota;
use crate::tls::{FileStamps, LoadedTls, Tls};

/// The known members of a cluster, and the settings for finding them.
pub(crate) struct Members {
    connect_settings: Arc<ConnectSettings>,
    discovery: Option<(Discovery, TlsUse)>,
    known: RwLock<Arc<MemberList>>,
}

/// A snapshot of the cluster's known members.
pub(crate) struct MemberList {
    endpoints: Vec<Arc<Endpoint>>,
    /// The index of the preferred member, to which requests are sent first.
    preferred: AtomicUsize,
    /// The number of failed attempts to reach any member since a member last answered.
    failures: AtomicUsize,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.known().endpoints.fmt(f)
    }
}

impl Members {
    /// Checks the options and reads the certificate files, without sending a request.
    ///
    /// # Errors
    /// An error about the first invalid option.
    pub(crate) fn new(options: &Options) -> Result<Self> {
        let addresses = options.addresses()?;
        let needs_tls = options.discovery.is_some() || addresses.iter().any(Address::needs_tls);
        // Check the certificates even if no endpoint uses TLS: an operator who configures certificates expects them to
        // be used.
        let tls = options.tls.clone().or_else(|| needs_tls.then(Tls::new));
        let connect_settings = Arc::new(ConnectSettings::new(options, tls)?);
        let known = MemberList::new(
            addresses.into_iter().map(|address| Endpoint::new(address, connect_settings.clone()).into()),
        );
        let discovery = options.discovery.clone().map(|discovery| (discovery, options.tls_use()));
        Ok(Self { connect_settings, discovery, known: RwLock::new(Arc::new(known)) })
    }

    fn known(&self) -> Arc<MemberList> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the known members of the cluster. If no members are known, or if all known members have failed, looks
    /// them up in DNS.
    ///
    /// # Errors
    /// Any error of looking up the members in DNS.
    pub(crate) async fn current(&self, operation: Operation, deadline: Instant) -> Result<Arc<MemberList>> {
        let known = self.known();
        let Some((discovery, tls)) = self.discovery.as_ref().filter(|_| known.are_lost()) else { return Ok(known) };
        let late = || Error::new(ErrorKind::NotSent, operation, STORE_NAME).with_detail("no answer from DNS in time");
        let found = timeout_at(deadline, resolve_members(discovery, *tls)).await.unwrap_or_else(|_| Err(late()));
        match found {
            Ok(addresses) => Ok(self.replace(addresses)),
            Err(error) if known.endpoints.is_empty() => Err(error),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "cannot look up the etcd members in DNS; keeping the addresses from the previous lookup"
                );
                known.failures.store(0, Ordering::Relaxed);
                Ok(known)
            }
        }
    }

    /// Replaces the list of members by the members at the given addresses; members that are already known keep their
    /// connections.
    fn replace(&self, addresses: Vec<Address>) -> Arc<MemberList> {
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let endpoint = |address: Address| {
            let before = known.endpoints.iter().find(|endpoint| endpoint.address == address);
            before.cloned().unwrap_or_else(|| Endpoint::new(address, self.connect_settings.clone()).into())
        };
        let found = Arc::new(MemberList::new(addresses.into_iter().map(endpoint)));
        *known = found.clone();
        found
    }
}

impl MemberList {
    fn new(endpoints: impl Iterator<Item = Arc<Endpoint>>) -> Self {
        Self { endpoints: endpoints.collect(), preferred: AtomicUsize::new(0), failures: AtomicUsize::new(0) }
    }

    fn are_lost(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= self.endpoints.len()
    }

    pub(crate) fn count(&self) -> usize {
        self.endpoints.len()
    }

    pub(crate) fn first(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }

    /// Returns the member at index `place` modulo the number of members.
    pub(crate) fn get(&self, place: usize) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(place % self.endpoints.len().max(1))
    }

    /// Makes the member at index `place` the preferred member, because it has answered.
    pub(crate) fn prefer(&self, place: usize) {
        self.failures.store(0, Ordering::Relaxed);
        self.preferred.store(place % self.endpoints.len().max(1), Ordering::Relaxed);
    }

    /// Prefers the member after index `place`, because the member at `place` has failed.
    pub(crate) fn avoid(&self, place: usize) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let (place, next) = (place % self.endpoints.len().max(1), (place + 1) % self.endpoints.len().max(1));
        // If another store call has already changed the preferred member, keep the newer choice.
        let _ = self.preferred.compare_exchange(place, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Maximum size of an answer in bytes: unlimited, because etcd itself limits the size of its answers.
const MAX_ANSWER_BYTES: usize = usize::MAX;
/// The interval at which the certificate and key files are checked for changes. After a failed store call, the
/// certificate and key files are checked again before the next store call.
const TLS_RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The clients with which requests are sent to one member; cheap to clone.
#[derive(Clone)]
pub(crate) struct Connection(Arc<MemberClients>);

struct MemberClients {
    client: Client,
    kv: KvClient,
    watch: WatchClient,
}

impl Connection {
    pub(crate) fn kv(&self) -> KvClient {
        self.0.kv.clone()
    }

    pub(crate) fn watch(&self) -> WatchClient {
        self.0.watch.clone()
    }

    pub(crate) fn client(&self) -> Client {
        self.0.client.clone()
    }
}

pub(crate) struct ConnectSettings {
    credentials: Option<Credentials>,
    connect_timeout: Duration,
    keepalive_interval: Duration,
    keepalive_timeout: Duration,
    tls: Option<Tls>,
    /// The contents of the certificate and key files in `tls`, as read when the store was opened.
    loaded: Option<LoadedTls>,
}

impl ConnectSettings {
    /// Reads the certificate and key files that the TLS settings name.
    ///
    /// # Errors
    /// An error about the first invalid certificate or key file.
    pub(crate) fn new(options: &Options, tls: Option<Tls>) -> Result<Self> {
        Ok(Self {
            credentials: options.credentials.clone(),
            connect_timeout: options.connect_timeout,
            keepalive_interval: options.keepalive_interval,
            keepalive_timeout: options.keepalive_timeout,
            loaded: tls.as_ref().map(Tls::load).transpose()?,
            tls,
        })
    }

    /// Creates a gRPC channel to a member, which connects on first use and whenever it has lost its connection.
    fn channel(&self, address: &Address, tls: Option<&LoadedTls>) -> Result<Channel, etcd_client::Error> {
        let endpoint = tonic::transport::Endpoint::from_shared(address.url.clone())?
            .keep_alive_while_idle(true)
            .http2_keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_timeout);
        let endpoint = match tls {
            Some(tls) if address.transport == Transport::Tls => endpoint.tls_config(tls.options.clone())?,
            _ => endpoint,
        };
        if address.transport == Transport::Unix {
            return Ok(Channel::Tonic(endpoint.connect_timeout(self.connect_timeout).connect_lazy()));
        }
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(self.connect_timeout));
        Ok(Channel::Tonic(endpoint.connect_with_connector_lazy(connector)))
    }
}

pub(crate) struct Endpoint {
    pub(crate) address: Address,
    connect_settings: Arc<ConnectSettings>,
    made: RwLock<Option<EstablishedConnection>>,
    /// The lock that allows only one task at a time to establish a connection.
    making: Mutex<()>,
    /// True once the member has answered a request.
    answered: AtomicBool,
    /// True if the certificate and key files must be checked for changes before the next request.
    suspicious: AtomicBool,
    /// The number of times that the login token was renewed; the mutex also prevents two calls from renewing it at the
    /// same time.
    renewals: Mutex<u64>,
}

/// A connection to a member, and the TLS file contents with which it was established.
#[derive(Clone)]
struct EstablishedConnection {
    connection: Connection,
    tls: Option<Arc<LoadedTls>>,
    /// The time of the last check of the certificate and key files for changes.
    checked: Instant,
}

impl EstablishedConnection {
    fn stamp(&self) -> FileStamps {
        self.tls.as_ref().map(|tls| tls.stamp.clone()).unwrap_or_default()
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.url.fmt(f)
    }
}

impl Endpoint {
    pub(crate) fn new(address: Address, connect_settings: Arc<ConnectSettings>) -> Self {
        Self {
            address,
            connect_settings,
            made: RwLock::new(None),
            making: Mutex::new(()),
            answered: AtomicBool::new(false),
            suspicious: AtomicBool::new(false),
            renewals: Mutex::new(0),
        }
    }

    pub(crate) fn note_answer(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Records that the member has failed, perhaps because of an outdated certificate.
    pub(crate) fn note_failure(&self) {
        self.suspicious.store(true, Ordering::Relaxed);
    }

    /// Returns the likely reason why the connection to a member broke; `None` if the member has answered before.
    pub(crate) fn hint(&self) -> Option<Cow<'static, str>> {
        if self.answered.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(port) = self.port_hint() {
            return Some(port.into());
        }
        let hint = match self.address.transport {
            Transport::Tls => {
                "it never answered; it may want a certificate of ours, be without TLS (http://), or be no etcd"
            }
            Transport::Plain => "it never answered; it may want TLS (https://), or be no etcd",
            Transport::Unix => "it never answered; it may be no etcd",
        };
        Some(hint.into())
    }

    /// If the endpoint has no port, returns advice for the case that no server answers at its default port.
    pub(crate) fn port_hint(&self) -> Option<String> {
        let port = self.address.default_port()?;
        Some(format!("the endpoint names no port, so it is {port}; etcd's usual one is 2379"))
    }

    /// Returns why the client certificate is not valid now; `None` if the certificate is valid or not set.
    pub(crate) fn identity_fault(&self) -> Option<String> {
        if self.address.transport != Transport::Tls {
            return None;
        }
        match self.made() {
            Some(made) => made.tls?.identity_fault(),
            None => self.connect_settings.loaded.as_ref()?.identity_fault(),
        }
    }

    /// Returns the likely reason why the member did not answer in time; `None` if the member has answered before. The
    /// reason is never that the server speaks another protocol than gRPC, because such a server would have closed the
    /// connection.
    pub(crate) fn silence(&self) -> Option<Cow<'static, str>> {
        if self.answered.load(Ordering::Relaxed) {
            return None;
        }
        let hint = "it never answered; it may hang, be out of reach, or be no etcd";
        Some(self.port_hint().map_or(hint.into(), Cow::from))
    }

    /// Returns the connection to the member, which it establishes if there is none, and the number of login token
    /// renewals so far.
    ///
    /// An error of `connection` means that no store request was sent to the member.
    pub(crate) async fn connection(&self) -> Result<(Connection, u64), etcd_client::Error> {
        let connection = match self.current() {
            Some(connection) => connection,
            None => self.make().await?,
        };
        let renewals = if self.can_renew() { *self.renewals.lock().await } else { 0 };
        Ok((connection, renewals))
    }

    fn made(&self) -> Option<EstablishedConnection> {
        self.made.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn keep(&self, made: EstablishedConnection) {
        *self.made.write().unwrap_or_else(PoisonError::into_inner) = Some(made);
    }

    /// Returns the established connection; `None` if there is none, or if the certificate and key files must first be
    /// checked.
    fn current(&self) -> Option<Connection> {
        let made = self.made.read().unwrap_or_else(PoisonError::into_inner);
        let made = made.as_ref()?;
        let has_files = made.tls.as_ref().is_some_and(|tls| !tls.stamp.is_empty());
        let due =
            has_files && (made.checked.elapsed() >= TLS_RECHECK_INTERVAL || self.suspicious.load(Ordering::Relaxed));
        (!due).then(|| made.connection.clone())
    }

    /// Connects to the member, or reconnects if the certificate and key files have changed.
    async fn make(&self) -> Result<Connection, etcd_client::Error> {
        let _alone = self.making.lock().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        self.suspicious.store(false, Ordering::Relaxed);
        let (made, checked) = (self.made(), Instant::now());
        let tls = match (made, self.connect_settings.loaded.as_ref()) {
            (Some(made), _) => match self.changed_since(made.stamp()).await {
                Some(changed) => Some(changed),
                None => {
                    self.keep(EstablishedConnection { checked, ..made.clone() });
                    return Ok(made.connection);
                }
            },
            (None, Some(loaded)) => {
                Some(self.changed_since(loaded.stamp.clone()).await.unwrap_or_else(|| loaded.clone()))
            }
            (None, None) => None,
        };
        // Box the future of `connect`: otherwise every request's future would be as large as this one, although only
        // the first request to a member connects.
        let connection = Box::pin(self.connect(tls.as_ref())).await?;
        self.keep(EstablishedConnection { connection: connection.clone(), tls: tls.map(Arc::new), checked });
        Ok(connection)
    }

    /// Reads the certificate and key files again if they have changed. Invalid files count as unchanged, because they
    /// may be incomplete while another program writes them.
    async fn changed_since(&self, before: FileStamps) -> Option<LoadedTls> {
        if before.is_empty() {
            return None;
        }
        let tls = self.connect_settings.tls.clone()?;
        let url = self.address.url.clone();
        let stat = move || {
            (tls.stamp() != before).then(|| tls.load()).transpose().unwrap_or_else(|error| {
                tracing::warn!(
                    endpoint = url,
                    %error,
                    "cannot load the changed TLS certificates for etcd; keeping the loaded certificates"
                );
                None
            })
        };
        tokio::task::spawn_blocking(stat).await.ok().flatten()
    }

    async fn connect(&self, tls: Option<&LoadedTls>) -> Result<Connection, etcd_client::Error> {
        let options = ConnectOptions::new().with_require_leader(true);
        let login = self.connect_settings.credentials.as_ref();
        let with_login = match login {
            Some(known) => options.clone().with_user(known.user.clone(), known.password.clone()),
            None => options.clone(),
        };
        let channel = self.connect_settings.channel(&self.address, tls)?;
        let mut client = Client::from_channel(channel.clone(), Some(with_login)).await;
        if login.is_some() && client.as_ref().is_err_and(says_no_login_needed) {
            client = Client::from_channel(channel, Some(options)).await;
        }
        let client = client?;
        let kv = client.kv_client().max_decoding_message_size(MAX_ANSWER_BYTES);
        let watch = client.watch_client().max_decoding_message_size(MAX_ANSWER_BYTES);
        Ok(Connection(Arc::new(MemberClients { client, kv, watch })))
    }

    /// Returns the quota of the member in bytes, as its metrics report it.
    pub(crate) async fn quota(&self) -> Option<u64> {
        let channel = self.connect_settings.channel(&self.address, self.connect_settings.loaded.as_ref()).ok()?;
        read_quota(&self.address, channel).await
    }

    /// Returns true if a user and a password are configured, with which the login token can be renewed.
    pub(crate) fn can_renew(&self) -> bool {
        self.connect_settings.credentials.is_some()
    }

    /// Gets a new login token, unless another call has already renewed the token since `renewals` was read.
    pub(crate) async fn renew(&self, connection: &Connection, renewals: u64) -> Result<(), etcd_client::Error> {
        let mut done = self.renewals.lock().await;
        if *done != renewals {
            return Ok(());
        }
        if let Some(known) = &self.connect_settings.credentials {
            // Pass the user and password again: if authentication was disabled when the connection was established, the
            // client does not log in with them.
            let login = (known.user.clone(), known.password.clone());
            connection.client().update_user(Some(login)).await?;
            *done += 1;
        }
        Ok(())
    }
}
