//! Where an etcd is, how to get in, and how long to wait.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use etcd_client::{Certificate, Identity, TlsOptions};
use kv::{Error, ErrorKind, Operation, Result};
use tonic::transport::Endpoint;

use crate::NAME;

/// How to reach an etcd cluster.
///
/// Made by [`new`](Self::new) and `with_*`. `Debug` shows no secret.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// `http://host:port` or `https://host:port`, one for each member; without a scheme, `https` if there is TLS.
    pub endpoints: Vec<String>,
    /// Used with `https` endpoints; with none of it set, the system's certificate authorities are trusted.
    pub tls: Option<Tls>,
    /// Who logs in; nobody if unset.
    pub credentials: Option<Credentials>,
    /// How long one call may take in all, with every retry. 10 s unless told.
    pub call_timeout: Duration,
    /// How long making one connection may take. 2 s unless told.
    pub connect_timeout: Duration,
    /// How long a watch that was cut off tries to go on before it ends with `Disconnected`. 30 s unless told.
    pub watch_patience: Duration,
    /// How often a connection is checked for life (not below etcd's minimum of 5 s). 10 s unless told.
    pub keepalive_interval: Duration,
    /// How long the answer to such a check may take. 5 s unless told.
    pub keepalive_timeout: Duration,
}

impl Options {
    /// These endpoints, without TLS or login, and with the usual patience.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            tls: None,
            credentials: None,
            call_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(2),
            watch_patience: Duration::from_secs(30),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(5),
        }
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

    /// The endpoints with their schemes.
    ///
    /// # Errors
    /// `Unsupported` if there is none, for one of another scheme, and for one with a user or password in it (which is
    /// not shown).
    pub(crate) fn urls(&self) -> Result<Vec<String>> {
        if self.endpoints.is_empty() {
            return Err(refused("no endpoint is given"));
        }
        self.endpoints.iter().map(|endpoint| self.url(endpoint.trim())).collect()
    }

    fn url(&self, endpoint: &str) -> Result<String> {
        let (scheme, authority) = match endpoint.split_once("://") {
            Some(parts) => parts,
            None if self.tls.is_some() => ("https", endpoint),
            None => ("http", endpoint),
        };
        let authority = authority.trim_end_matches('/');
        if authority.contains('@') {
            return Err(refused("an endpoint has a user or password in it; give them apart from it"));
        }
        match scheme {
            "http" if self.tls.is_some() => {
                Err(refused(format!("endpoint {endpoint} is without TLS, but TLS is configured; use https://")))
            }
            "http" | "https" if !authority.is_empty() => Ok(format!("{scheme}://{authority}")),
            "unix" | "unixs" => Err(refused(format!("endpoint {endpoint}: unix sockets are not supported"))),
            _ => Err(refused(format!("endpoint {endpoint} is neither http://host:port nor https://host:port"))),
        }
    }

    /// The TLS configuration, its files read; `None` if no endpoint needs one.
    ///
    /// # Errors
    /// `Missing` or `Io` for a file, `Unsupported` for what is no address, certificate or key.
    pub(crate) fn tls_options(&self, urls: &[String]) -> Result<Option<TlsOptions>> {
        let needed = urls.iter().any(|url| url.starts_with("https://"));
        let tls = match &self.tls {
            Some(tls) => Some(tls.load()?),
            None if needed => Some(Tls::new().load()?),
            None => None,
        };
        for url in urls {
            try_out(url, tls.as_ref())?;
        }
        Ok(tls)
    }
}

/// Certificates, and what is expected of the server's.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Tls {
    /// The only authorities that are trusted; the system's if unset.
    pub authority: Option<Pem>,
    /// Our certificate and its key, if the server wants one.
    pub identity: Option<(Pem, Pem)>,
    /// The name that the server's certificate must carry, if not that of the endpoint.
    pub server_name: Option<String>,
}

impl Tls {
    /// The system's authorities, no certificate of our own.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trust only these authorities.
    #[must_use]
    pub fn with_authority(mut self, authority: Pem) -> Self {
        self.authority = Some(authority);
        self
    }

    /// Show this certificate, of which this is the key.
    #[must_use]
    pub fn with_identity(mut self, certificate: Pem, key: Pem) -> Self {
        self.identity = Some((certificate, key));
        self
    }

    /// Expect this name in the server's certificate.
    #[must_use]
    pub fn with_server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    fn load(&self) -> Result<TlsOptions> {
        let mut options = TlsOptions::new();
        options = match &self.authority {
            Some(authority) => options.ca_certificate(Certificate::from_pem(authority.load("CERTIFICATE")?)),
            None => options.with_enabled_roots(),
        };
        if let Some((certificate, key)) = &self.identity {
            options = options.identity(Identity::from_pem(certificate.load("CERTIFICATE")?, key.load("PRIVATE KEY")?));
        }
        Ok(match &self.server_name {
            Some(name) => options.domain_name(name.clone()),
            None => options,
        })
    }
}

/// Something in PEM form.
#[derive(Clone)]
pub enum Pem {
    /// In this file.
    File(PathBuf),
    /// This text itself.
    Inline(Vec<u8>),
}

impl Pem {
    /// The text, if it has a section whose label ends in `label`.
    fn load(&self, label: &str) -> Result<Vec<u8>> {
        let text = match self {
            Self::File(path) => std::fs::read(path).map_err(|error| {
                let kind = match error.kind() {
                    std::io::ErrorKind::NotFound => ErrorKind::Missing,
                    _ => ErrorKind::Io,
                };
                Error::new(kind, Operation::Open, NAME)
                    .with_detail(format!("cannot read {}", path.display()))
                    .with_source(error)
            })?,
            Self::Inline(text) => text.clone(),
        };
        let wanted = format!("{label}-----");
        if String::from_utf8_lossy(&text).contains(&wanted) {
            return Ok(text);
        }
        Err(refused(format!("{self:?} has no {label} in PEM form")))
    }
}

impl fmt::Debug for Pem {
    /// Where it is, never what it says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "the file {}", path.display()),
            Self::Inline(_) => f.write_str("the text given"),
        }
    }
}

/// Who logs in.
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

/// What the client library would say of this only in the first call.
fn try_out(url: &str, tls: Option<&TlsOptions>) -> Result<()> {
    let endpoint = Endpoint::from_shared(url.to_owned())
        .map_err(|error| refused(format!("endpoint {url} is no address")).with_source(error))?;
    // What follows the host, which may be an IPv6 address in brackets.
    let after_host = url.trim_start_matches("https:").trim_start_matches("http:").rsplit(']').next();
    if after_host.is_some_and(|rest| rest.contains(':')) && endpoint.uri().port_u16().is_none() {
        return Err(refused(format!("endpoint {url} has no port number after the colon")));
    }
    match tls {
        Some(tls) if url.starts_with("https://") => match endpoint.tls_config(tls.clone()) {
            Ok(_) => Ok(()),
            Err(error) => Err(refused("a certificate or key cannot be used").with_source(error)),
        },
        _ => Ok(()),
    }
}

fn refused(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unsupported, Operation::Open, NAME).with_detail(detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(endpoints: &[&str]) -> Result<Vec<String>> {
        Options::new(endpoints.iter().copied()).urls()
    }

    #[test]
    fn endpoints_get_a_scheme() {
        assert_eq!(urls(&["a:1", "http://b:2/", " https://c:3"]).unwrap(), ["http://a:1", "http://b:2", "https://c:3"]);
        let tls = Options::new(["a:1"]).with_tls(Tls::new());
        assert_eq!(tls.urls().unwrap(), ["https://a:1"]);
    }

    #[test]
    fn addresses_of_every_kind_are_taken() {
        for url in ["http://[::1]:2379", "https://[fe80::1]", "http://10.0.0.1:2379", "http://etcd.example"] {
            let options = Options::new([url]);
            assert!(options.urls().and_then(|urls| options.tls_options(&urls)).is_ok(), "{url}");
        }
    }

    #[test]
    fn other_endpoints_are_refused_and_secrets_not_shown() {
        for endpoints in [&[][..], &["ftp://a:1"], &["unix:///x"], &["http://"], &["http://user:hidden@a:1"]] {
            let error = urls(endpoints).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::Unsupported, "{endpoints:?}");
            assert!(!error.to_string().contains("hidden"), "{error}");
        }
        let mixed = Options::new(["http://a:1"]).with_tls(Tls::new());
        assert!(mixed.urls().unwrap_err().to_string().contains("use https://"));
    }

    #[test]
    fn debug_has_no_secret() {
        let tls = Tls::new().with_identity(Pem::Inline(b"certificate".to_vec()), Pem::Inline(b"hidden".to_vec()));
        let options = Options::new(["a:1"]).with_tls(tls).with_credentials(Credentials::new("root", "hidden"));
        let shown = format!("{options:?}");
        assert!(shown.contains("root") && !shown.contains("hidden"), "{shown}");
    }

    #[test]
    fn what_cannot_be_used_is_refused_before_any_call() {
        let hollow = b"-----BEGIN CERTIFICATE-----\n!hidden!\n-----END CERTIFICATE-----\n".to_vec();
        let tls = Options::new(["a:1"]).with_tls(Tls::new().with_authority(Pem::Inline(hollow)));
        for options in [tls, Options::new(["http://a b:1"]), Options::new(["http://a:x"])] {
            let refused = options.urls().and_then(|urls| options.tls_options(&urls).map(|_| ()));
            let Err(error) = refused else { panic!("{options:?}") };
            assert_eq!(error.kind(), &ErrorKind::Unsupported, "{error}");
            assert!(!error.to_string().contains("hidden"), "{error}");
        }
    }

    #[test]
    fn what_is_no_pem_is_refused() {
        let file = Tls::new().with_authority(Pem::File("/nowhere/ca.pem".into()));
        assert_eq!(file.load().unwrap_err().kind(), &ErrorKind::Missing);
        let text = Tls::new().with_authority(Pem::Inline(b"hidden".to_vec()));
        let error = text.load().unwrap_err();
        assert!(error.to_string().contains("no CERTIFICATE") && !error.to_string().contains("hidden"), "{error}");
    }
}
