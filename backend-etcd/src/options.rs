//! Where an etcd is, how to get in, and how long to wait.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kv::{Error, ErrorKind, Operation, Result};

use crate::address::{Address, TlsUse};
use crate::error::STORE_NAME;
use crate::tls::Tls;

/// How to reach an etcd cluster.
///
/// Made by [`new`](Self::new) and `with_*`. `Debug` shows no secret.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// `http://host:port`, `https://host:port` or `unix:///path`, one for each member; without a scheme, `https` if
    /// there is TLS. Empty if there is a domain to look them up in.
    pub endpoints: Vec<String>,
    /// Where the members are looked up instead.
    pub discovery: Option<Discovery>,
    /// Used with `https` endpoints; with none of it set, the system's certificate authorities are trusted.
    pub tls: Option<Tls>,
    /// The login; none if unset.
    pub credentials: Option<Credentials>,
    /// How long one call may take in all, with every retry. 10 s by default.
    pub call_timeout: Duration,
    /// When all calls together have to be over, if ever. No call then takes more than two thirds of the time that is
    /// left: the rest is for finding out what became of a write that was not answered.
    pub end: Option<Instant>,
    /// How long making one connection may take. 2 s by default.
    pub connect_timeout: Duration,
    /// How long a watch that was cut off tries to go on before it ends with `Disconnected`. 30 s by default.
    pub watch_patience: Duration,
    /// How often a connection is checked for life (not below etcd's minimum of 5 s). 10 s by default.
    pub keepalive_interval: Duration,
    /// How long the answer to such a check may take. 5 s by default.
    pub keepalive_timeout: Duration,
}

impl Options {
    /// These endpoints, without TLS or login, and with the usual patience.
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

    /// With members that are looked up.
    #[must_use]
    pub fn with_discovery(mut self, discovery: Discovery) -> Self {
        self.discovery = Some(discovery);
        self
    }

    /// With TLS.
    #[must_use]
    pub fn with_tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// With a login.
    #[must_use]
    pub fn with_credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = Some(credentials);
        self
    }

    /// How long one call may take in all.
    #[must_use]
    pub fn with_call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// When all calls together have to be over.
    #[must_use]
    pub fn with_end(mut self, end: Instant) -> Self {
        self.end = Some(end);
        self
    }

    /// How long making one connection may take.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long a watch that was cut off tries to go on.
    #[must_use]
    pub fn with_watch_patience(mut self, patience: Duration) -> Self {
        self.watch_patience = patience;
        self
    }

    /// How often a connection is checked for life, and how long the answer may take.
    #[must_use]
    pub fn with_keepalive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.keepalive_interval = interval;
        self.keepalive_timeout = timeout;
        self
    }

    /// Where the members listen.
    ///
    /// # Errors
    /// The fault of an endpoint; neither an endpoint nor a domain; both.
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

/// Where the members of a cluster are looked up: at first, and again when none of them can be reached any more.
///
/// If there are records for members with TLS (`_etcd-client-ssl._tcp`), those without it (`_etcd-client._tcp`) are not
/// used, and if TLS is configured they never are.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Discovery {
    /// The domain that has the SRV records.
    pub domain: String,
    /// The name server that is queried instead of the system's.
    pub name_server: Option<SocketAddr>,
}

impl Discovery {
    /// In the SRV records of this domain.
    pub fn new(domain: impl Into<String>) -> Self {
        Self { domain: domain.into(), name_server: None }
    }

    /// Ask this name server instead of the system's.
    #[must_use]
    pub fn with_name_server(mut self, address: SocketAddr) -> Self {
        self.name_server = Some(address);
        self
    }
}

/// The user who logs in.
#[derive(Clone)]
#[non_exhaustive]
pub struct Credentials {
    /// The user's name.
    pub user: String,
    /// The password.
    pub password: String,
}

impl Credentials {
    /// This user with this password.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { user: user.into(), password: password.into() }
    }
}

impl fmt::Debug for Credentials {
    /// The user, never the password.
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
