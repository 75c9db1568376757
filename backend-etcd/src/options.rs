//! Defines the settings of the connection to an etcd cluster: addresses, credentials and timeouts.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Result};

use crate::address::{Address, TlsUse};
use crate::error::STORE_NAME;
use crate::tls::Tls;

/// The settings of the connection to an etcd cluster.
///
/// Create etcd options with [`new`](Self::new) and the `with_*` methods. The `Debug` output of `Options` shows no
/// secret.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The endpoint of each etcd member, as `http://host:port`, `https://host:port` or `unix:///path`. An endpoint
    /// without a scheme uses `https` if `tls` is set. The list of endpoints is empty if `discovery` is set.
    pub endpoints: Vec<String>,
    /// The DNS lookup of the cluster's members, which replaces `endpoints`.
    pub discovery: Option<Discovery>,
    /// The TLS settings for `https` endpoints. Without TLS settings, `https` endpoints are checked against the system's
    /// CAs.
    pub tls: Option<Tls>,
    /// The user and password for the login to etcd; `None` for no login.
    pub credentials: Option<Credentials>,
    /// Maximum duration of one store call, including retries; 10 s by default.
    pub call_timeout: Duration,
    /// The deadline that all calls of the store share. Each call may take at most two thirds of the time until the
    /// shared deadline. The last third of the time until the shared deadline is reserved for finding out the outcome of
    /// an unanswered write.
    pub end: Option<Instant>,
    /// Maximum duration of establishing one connection to a member; 2 s by default.
    pub connect_timeout: Duration,
    /// How long a watch that has lost its connection tries to resume before it ends with `Disconnected`; 30 s by
    /// default.
    pub watch_patience: Duration,
    /// Interval of HTTP/2 keepalive pings, 10 s by default; it should be at least 5 s, the minimum that etcd accepts.
    pub keepalive_interval: Duration,
    /// Maximum time that a member may take to answer a keepalive ping; 5 s by default.
    pub keepalive_timeout: Duration,
}

impl Options {
    /// Creates store options for the given endpoints, without TLS settings or a login, and with the default timeouts.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            discovery: None,
            tls: None,
            credentials: None,
            call_timeout: Duration::from_secs(10),
            end: None,
            connect_timeout: Duration::from_secs(2),
            watch_patience: Duration::from_secs(30),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(5),
        }
    }

    /// Sets the DNS lookup that finds the cluster's members.
    #[must_use]
    pub fn with_discovery(mut self, discovery: Discovery) -> Self {
        self.discovery = Some(discovery);
        self
    }

    /// Sets the TLS settings for `https` endpoints.
    #[must_use]
    pub fn with_tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets the user and password for the login.
    #[must_use]
    pub fn with_credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// Sets the maximum duration of one store call, including retries.
    #[must_use]
    pub fn with_call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// Sets the deadline that all calls of the store share.
    #[must_use]
    pub fn with_end(mut self, end: Instant) -> Self {
        self.end = Some(end);
        self
    }

    /// Sets the maximum duration of establishing one connection to a member.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Sets how long a watch that has lost its connection tries to resume before it ends.
    #[must_use]
    pub fn with_watch_patience(mut self, patience: Duration) -> Self {
        self.watch_patience = patience;
        self
    }

    /// Sets the interval of keepalive pings, and the time within which a member must answer them.
    #[must_use]
    pub fn with_keepalive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.keepalive_interval = interval;
        self.keepalive_timeout = timeout;
        self
    }

    /// Parses the endpoints in the options.
    ///
    /// # Errors
    /// `Unsupported` if an endpoint is invalid, or if both or neither of `endpoints` and `discovery` are set.
    pub(crate) fn addresses(&self) -> Result<Vec<Address>> {
        match (self.endpoints.is_empty(), &self.discovery) {
            (true, None) => Err(refused("no endpoint is given")),
            (false, Some(_)) => Err(refused("both endpoints and a domain to look them up in are given; remove one")),
            _ => self.endpoints.iter().map(|endpoint| Address::parse(endpoint, self.tls_use())).collect(),
        }
    }

    pub(crate) fn tls_use(&self) -> TlsUse {
        if self.tls.is_some() { TlsUse::Configured } else { TlsUse::NotConfigured }
    }
}

/// Finds a cluster's members in DNS SRV records. The DNS lookup of members runs at the first store call, and again when
/// no member can be reached.
///
/// If the domain has SRV records for members with TLS (`_etcd-client-ssl._tcp`), records for members without TLS
/// (`_etcd-client._tcp`) are not used. If TLS is configured, SRV records for members without TLS are never used.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Discovery {
    /// The domain whose SRV records list the members.
    pub domain: String,
    /// The name server that is queried instead of the system's name servers.
    pub name_server: Option<SocketAddr>,
}

impl Discovery {
    /// Creates a DNS lookup of the SRV records of this domain.
    pub fn new(domain: impl Into<String>) -> Self {
        Self { domain: domain.into(), name_server: None }
    }

    /// Sets the name server that is queried instead of the system's name servers.
    #[must_use]
    pub fn with_name_server(mut self, address: SocketAddr) -> Self {
        self.name_server = Some(address);
        self
    }
}

/// The name and password of an etcd user.
#[derive(Clone)]
#[non_exhaustive]
pub struct Credentials {
    /// The name of an etcd user.
    pub user: String,
    /// The password of an etcd user.
    pub password: String,
}

impl Credentials {
    /// Creates credentials from a user's name and password.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: user.into(), password: password.into() }
    }
}

impl fmt::Debug for Credentials {
    /// Shows the user name of the credentials, but never the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

pub(crate) fn refused(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, Operation::Open, STORE_NAME).with_detail(detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::Pem;

    #[test]
    fn options_take_endpoints_or_domain() {
        let refused = |options: Options| options.addresses().unwrap_err().to_string();
        assert!(refused(Options::new([""; 0])).contains("no endpoint"));
        assert!(refused(Options::new(["a:1"]).with_discovery(Discovery::new("example.org"))).contains("remove one"));
        assert!(Options::new([""; 0]).with_discovery(Discovery::new("example.org")).addresses().unwrap().is_empty());
    }

    #[test]
    fn options_debug_has_no_secret() {
        let tls = Tls::new().with_identity(Pem::Inline(b"certificate".to_vec()), Pem::Inline(b"hidden".to_vec()));
        let options = Options::new(["a:1"]).with_tls(tls).with_credentials(Credentials::new("root", "hidden"));
        let shown = format!("{options:?}");
        assert!(shown.contains("root") && !shown.contains("hidden"), "{shown}");
    }
}
