//! Where a member listens, and the lookup of members in DNS, as etcd's own client does it.

use std::cmp::Reverse;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;
use kv::{Error, ErrorKind, Operation, Result};

use crate::error::NAME;
use crate::options::{Discovery, refused};

/// How a member is talked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Plain,
    Tls,
    /// A unix socket, without TLS.
    Unix,
}

/// Whether TLS is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TlsUse {
    Configured,
    NotConfigured,
}

/// Where one member listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// `http://host:port`, `https://host:port`, or `unix://` and the path of a socket.
    pub(crate) url: String,
    pub(crate) transport: Transport,
}

impl Address {
    /// Reads an endpoint. Without a scheme it is `https` if TLS is configured.
    ///
    /// # Errors
    /// `Unsupported` for one of another scheme, for one without TLS where TLS is configured, for what is no address,
    /// and for one with a user or password in it (which is not shown).
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

    /// The port that is used because the endpoint names none.
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

    /// One whose host and port come from DNS.
    fn of_host(host: &str, port: u16, transport: Transport) -> Result<Self> {
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

/// The text after an IPv6 address in brackets; all of it if there is none.
fn after_host(authority: &str) -> &str {
    authority.rsplit(']').next().unwrap_or_default()
}

/// The members that the SRV records of a domain name: those with TLS if there are any, else, unless TLS is configured,
/// those without. By priority and weight.
///
/// # Errors
/// `NotSent` if there are none, or nobody answers.
pub(crate) async fn resolve_members(discovery: &Discovery, tls: TlsUse) -> Result<Vec<Address>> {
    let domain = discovery.domain.trim_end_matches('.');
    let resolver = resolver(discovery).map_err(|error| lookup_failed("DNS cannot be asked").with_source(error))?;
    let with_tls = lookup_service(&resolver, "_etcd-client-ssl", domain, Transport::Tls).await;
    match (with_tls, tls) {
        (Ok(found), _) if !found.is_empty() => Ok(found),
        (with_tls, TlsUse::Configured) => {
            let none = lookup_failed(format!("there is no record _etcd-client-ssl._tcp.{domain}; check the domain"));
            Err(with_tls.err().unwrap_or(none))
        }
        (with_tls, TlsUse::NotConfigured) => {
            let plain = lookup_service(&resolver, "_etcd-client", domain, Transport::Plain).await;
            match (plain, with_tls) {
                // An answer that did not come is no reason to do without TLS.
                (_, Err(error)) | (Err(error), _) => Err(error),
                (Ok(found), Ok(_)) if found.is_empty() => Err(lookup_failed(format!(
                    "there is neither a record _etcd-client-ssl._tcp.{domain} nor _etcd-client._tcp.{domain}; check the domain"
                ))),
                (found, _) => found,
            }
        }
    }
}

fn resolver(discovery: &Discovery) -> Result<TokioResolver, NetError> {
    match discovery.name_server {
        None => TokioResolver::builder_tokio()?.build(),
        Some(address) => {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            for connection in &mut server.connections {
                connection.port = address.port();
            }
            let config = ResolverConfig::from_name_servers(vec![server]);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default()).build()
        }
    }
}

/// The members that one kind of records names; none if there are no such records.
async fn lookup_service(
    resolver: &TokioResolver,
    service: &str,
    domain: &str,
    transport: Transport,
) -> Result<Vec<Address>> {
    let name = format!("{service}._tcp.{domain}.");
    let answer = match resolver.srv_lookup(name.clone()).await {
        Ok(answer) => answer,
        Err(error) if error.is_no_records_found() => return Ok(Vec::new()),
        Err(error) => return Err(lookup_failed(format!("no answer about {name}")).with_source(error)),
    };
    let mut records: Vec<_> = answer
        .answers()
        .iter()
        .filter_map(|record| match &record.data {
            RData::SRV(record) => Some(record),
            _ => None,
        })
        // The root as a target says that there is no such service.
        .filter(|record| !record.target.is_root())
        .collect();
    records.sort_by_key(|record| (record.priority, Reverse(record.weight)));
    let address = |host: String, port| Address::of_host(host.trim_end_matches('.'), port, transport);
    records.into_iter().map(|record| address(record.target.to_utf8(), record.port)).collect()
}

fn lookup_failed(detail: impl AsRef<str>) -> Error {
    let detail = format!("failed to discover etcd endpoints through SRV discovery: {}", detail.as_ref());
    Error::new(ErrorKind::NotSent, Operation::Open, NAME).with_detail(detail)
}

#[cfg(test)]
mod tests {
    use kv::ErrorKind;

    use super::*;

    fn parse(endpoint: &str) -> Result<Address> {
        Address::parse(endpoint, TlsUse::NotConfigured)
    }

    #[test]
    fn endpoints_get_a_scheme() {
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
            // As etcd 3.4 has it: a file of this name in the folder where it runs.
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
    fn others_are_refused_and_secrets_not_shown() {
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
