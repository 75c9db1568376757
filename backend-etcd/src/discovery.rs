//! Members that are looked up in DNS, as etcd's own client does it.

use std::cmp::Reverse;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;
use kv::{Error, ErrorKind, Operation, Result};

use crate::address::{Address, TlsUse, Transport};
use crate::error::NAME;
use crate::options::Discovery;

/// The members that the SRV records of a domain name: those with TLS if there are any, else, unless TLS is configured,
/// those without. By priority and weight.
///
/// # Errors
/// `NotSent` if there are none, or nobody answers.
pub(crate) async fn resolve(discovery: &Discovery, tls: TlsUse) -> Result<Vec<Address>> {
    let domain = discovery.domain.trim_end_matches('.');
    let resolver = resolver(discovery).map_err(|error| failed("DNS cannot be asked").with_source(error))?;
    let with_tls = members(&resolver, "_etcd-client-ssl", domain, Transport::Tls).await;
    match (with_tls, tls) {
        (Ok(found), _) if !found.is_empty() => Ok(found),
        (with_tls, TlsUse::Configured) => {
            let none = failed(format!("there is no record _etcd-client-ssl._tcp.{domain}; check the domain"));
            Err(with_tls.err().unwrap_or(none))
        }
        (with_tls, TlsUse::NotConfigured) => {
            let plain = members(&resolver, "_etcd-client", domain, Transport::Plain).await;
            match (plain, with_tls) {
                // An answer that did not come is no reason to do without TLS.
                (_, Err(error)) | (Err(error), _) => Err(error),
                (Ok(found), Ok(_)) if found.is_empty() => Err(failed(format!(
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
async fn members(resolver: &TokioResolver, service: &str, domain: &str, transport: Transport) -> Result<Vec<Address>> {
    let name = format!("{service}._tcp.{domain}.");
    let answer = match resolver.srv_lookup(name.clone()).await {
        Ok(answer) => answer,
        Err(error) if error.is_no_records_found() => return Ok(Vec::new()),
        Err(error) => return Err(failed(format!("no answer about {name}")).with_source(error)),
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

fn failed(detail: impl AsRef<str>) -> Error {
    let detail = format!("failed to discover etcd endpoints through SRV discovery: {}", detail.as_ref());
    Error::new(ErrorKind::NotSent, Operation::Open, NAME).with_detail(detail)
}
