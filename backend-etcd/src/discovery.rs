//! Members that are looked up in DNS, as etcd's own client does it.

use std::cmp::Reverse;

use kv::{Error, ErrorKind, Operation, Result};

use crate::address::{Address, TlsUse, Transport};
use crate::dns::Resolver;
use crate::error::NAME;
use crate::options::Discovery;

/// The members that the SRV records of a domain name: those with TLS if there are any, else, unless TLS is configured,
/// those without. By priority and weight.
///
/// # Errors
/// `NotSent` if there are none, or nobody answers.
pub(crate) async fn resolve(discovery: &Discovery, tls: TlsUse) -> Result<Vec<Address>> {
    let domain = discovery.domain.trim_end_matches('.');
    let resolver = match discovery.name_server {
        Some(address) => Resolver::of(address),
        None => Resolver::of_system().map_err(|error| failed("DNS cannot be asked").with_source(error))?,
    };
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

/// The members that one kind of records names; none if there are no such records.
async fn members(resolver: &Resolver, service: &str, domain: &str, transport: Transport) -> Result<Vec<Address>> {
    let name = format!("{service}._tcp.{domain}");
    let answer = resolver.srv(&name).await;
    let mut records = answer.map_err(|error| failed(format!("no answer about {name}")).with_source(error))?;
    // The root as a target says that there is no such service.
    records.retain(|record| !record.target.is_empty());
    records.sort_by_key(|record| (record.priority, Reverse(record.weight)));
    records.into_iter().map(|record| Address::of_host(&record.target, record.port, transport)).collect()
}

fn failed(detail: impl AsRef<str>) -> Error {
    let detail = format!("failed to discover etcd endpoints through SRV discovery: {}", detail.as_ref());
    Error::new(ErrorKind::NotSent, Operation::Open, NAME).with_detail(detail)
}
