//! Parses the address at which a member of an etcd cluster listens.

use kv::Result;

use crate::options::refused;

/// The transport of a connection to an etcd member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Plain,
    Tls,
    /// The connection to the etcd member uses a unix socket, without TLS.
    Unix,
}

/// Says whether TLS is configured for the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsUse {
    Configured,
    NotConfigured,
}

/// The address at which a member of an etcd cluster listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// The member's URL, for example `http://host:port`, `https://host:port` or `unix:///path`.
    pub(crate) url: String,
    pub(crate) transport: Transport,
}

impl Address {
    /// Parses an endpoint. An endpoint without a scheme uses `https` if TLS is configured, and otherwise `http`.
    ///
    /// # Errors
    /// The error `Unsupported` for an unknown scheme, an invalid address, an endpoint without TLS although TLS is
    /// configured, or an endpoint that contains a user or password. The error for an endpoint with a user or password
    /// does not show the endpoint.
    pub(crate) fn parse(endpoint: &str, tls: TlsUse) -> Result<Self> {
        let endpoint = endpoint.trim();
        if let Some(path) = endpoint.strip_prefix("unix:") {
            return Self::unix(path.strip_prefix("//").unwrap_or(path));
        }
        let (scheme, authority) = match (endpoint.split_once("://"), tls) {
            (Some((scheme, authority)), _) => (scheme.to_ascii_lowercase(), authority),
            (None, TlsUse::Configured) => ("https".to_owned(), endpoint),
            (None, TlsUse::NotConfigured) => ("http".to_owned(), endpoint),
        };
        let authority = authority.trim_end_matches('/');
        if authority.contains('@') {
            return Err(refused("an endpoint has a user or password in it; give them apart from it"));
        }
        let transport = match (scheme.as_str(), tls) {
            ("http", TlsUse::Configured) => {
                return Err(refused(format!(
                    "endpoint {endpoint} is without TLS, but TLS is configured; use https://"
                )));
            }
            ("http", TlsUse::NotConfigured) => Transport::Plain,
            ("https", _) => Transport::Tls,
            ("unixs", _) => {
                return Err(refused(format!(
                    "endpoint {endpoint}: TLS over a unix socket is not supported; use unix:"
                )));
            }
            _ => {
                return Err(refused(format!(
                    "endpoint {endpoint} is neither http://host:port, https://host:port nor unix:///path"
                )));
            }
        };
        Self::host(&scheme, authority, transport)
    }

    /// Returns the default port of the endpoint's scheme if the endpoint has no port; otherwise `None`.
    pub(crate) fn default_port(&self) -> Option<u16> {
        let port = match self.transport {
            Transport::Plain => 80,
            Transport::Tls => 443,
            Transport::Unix => return None,
        };
        let authority = self.url.split_once("://").map_or("", |(_, authority)| authority);
        (!after_host(authority).contains(':')).then_some(port)
    }

    pub(crate) fn needs_tls(&self) -> bool {
        self.transport == Transport::Tls
    }

    /// Creates the address of a member from the host and port in a DNS SRV record.
    pub(crate) fn of_host(host: &str, port: u16, transport: Transport) -> Result<Self> {
        let scheme = if transport == Transport::Tls { "https" } else { "http" };
        Self::host(scheme, &format!("{host}:{port}"), transport)
    }

    fn host(scheme: &str, authority: &str, transport: Transport) -> Result<Self> {
        let url = format!("{scheme}://{authority}");
        let endpoint = tonic::transport::Endpoint::from_shared(url.clone())
            .map_err(|error| refused(format!("endpoint {url} is no address")).with_source(error))?;
        if after_host(authority).contains(':') && endpoint.uri().port_u16().is_none() {
            return Err(refused(format!("endpoint {url} has no port number after the colon")));
        }
        if authority.contains(['/', '?', '#']) {
            return Err(refused(format!("endpoint {url} has more in it than a host and a port")));
        }
        Ok(Self { url, transport })
    }

    fn unix(path: &str) -> Result<Self> {
        if path.is_empty() || path.contains(['?', '#', '\0']) {
            return Err(refused("a unix: endpoint needs the path of a socket, as in unix:///run/etcd/etcd.sock"));
        }
        Ok(Self { url: format!("unix://{path}"), transport: Transport::Unix })
    }
}

/// Returns the part of a URL's authority after an IPv6 address in brackets, or the whole authority if it has no
/// brackets.
fn after_host(authority: &str) -> &str {
    authority.rsplit(']').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use kv::ErrorKind;

    use super::*;

    fn parse(endpoint: &str) -> Result<Address> {
        Address::parse(endpoint, TlsUse::NotConfigured)
    }

    #[test]
    fn endpoints_get_default_scheme() {
        for (endpoint, expected, transport) in [
            ("a:1", "http://a:1", Transport::Plain),
            ("http://b:2/", "http://b:2", Transport::Plain),
            (" https://c:3", "https://c:3", Transport::Tls),
            ("http://[::1]:2379", "http://[::1]:2379", Transport::Plain),
            ("https://[fe80::1]", "https://[fe80::1]", Transport::Tls),
            ("http://etcd.example", "http://etcd.example", Transport::Plain),
            ("HTTP://b:2", "http://b:2", Transport::Plain),
            ("Https://c:3/", "https://c:3", Transport::Tls),
            ("unix:///run/etcd.sock", "unix:///run/etcd.sock", Transport::Unix),
            ("unix:/run/etcd.sock", "unix:///run/etcd.sock", Transport::Unix),
            // In etcd 3.4, the endpoint `unix://localhost:2379` means a socket file named `localhost:2379` in etcd's
            // working directory.
            ("unix://localhost:2379", "unix://localhost:2379", Transport::Unix),
        ] {
            let address = parse(endpoint).unwrap();
            assert_eq!((address.url.as_str(), address.transport), (expected, transport), "{endpoint}");
        }
        assert_eq!(Address::parse("a:1", TlsUse::Configured).unwrap().url, "https://a:1");
        for (endpoint, port) in [
            ("http://a:1", None),
            ("http://[::1]:1", None),
            ("unix:///a", None),
            ("a", Some(80)),
            ("http://[::1]", Some(80)),
            ("https://a", Some(443)),
        ] {
            assert_eq!(parse(endpoint).unwrap().default_port(), port, "{endpoint}");
        }
    }

    #[test]
    fn endpoints_are_refused_without_showing_secrets() {
        for endpoint in [
            "ftp://a:1",
            "unixs:///x",
            "unix://",
            "http://",
            "http://a b:1",
            "http://a:x",
            "http://a:1/calico",
            "http://user:hidden@a:1",
            "HTTP://user:hidden@a:1",
            "user:hidden@a:1",
        ] {
            let error = parse(endpoint).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::Unsupported, "{endpoint}");
            assert!(!error.to_string().contains("hidden"), "{error}");
        }
        let error = Address::parse("http://a:1", TlsUse::Configured).unwrap_err();
        assert!(error.to_string().contains("use https://"), "{error}");
    }
}
