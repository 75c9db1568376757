//! The result of an earlier ADD, as CHECK and DEL get it.

use std::net::IpAddr;

use agent::{CniError, Code, Result};
use ipnet::IpNet;

use crate::args::{AddressForm, parse_address};
use crate::gojson::Json;

/// The addresses in a result of CNI 0.3.0 or later; none if there is no result or it has none.
///
/// # Errors
/// Code 6 for what is no result.
pub(crate) fn addresses(result: Option<&Json>) -> Result<Vec<IpAddr>> {
    let Some(result) = result else { return Ok(Vec::new()) };
    let decode = |reason: &str| CniError::new(Code::Decode, format!("could not parse prevResult: {reason}"));
    if !matches!(result, Json::Object(_)) {
        return Err(decode(&format!("it must be an object, not a JSON {}", result.kind())));
    }
    let wrong = || decode("ips must be a list of objects with an address");
    match result.member("ips") {
        None => Ok(Vec::new()),
        Some(Json::Array(ips)) => ips
            .iter()
            .map(|ip| {
                let text = ip.member("address").and_then(Json::as_str).ok_or_else(wrong)?;
                parse_address(text, AddressForm::BareOrCidr).map_err(|_| wrong())
            })
            .collect(),
        Some(_) => Err(wrong()),
    }
}

/// The prefixes in a result of the main plugin, which shows single addresses as /32 and /128. Runtimes pass on the members that
/// CNI knows, and no others.
pub(crate) fn prefixes(result: Option<&Json>) -> Vec<IpNet> {
    let Some(Json::Array(ips)) = result.and_then(|result| result.member("ips")) else { return Vec::new() };
    let networks = ips.iter().filter_map(|ip| ip.member("address")?.as_str()?.parse::<IpNet>().ok());
    networks.filter(|net| net.prefix_len() < net.max_prefix_len()).map(|net| net.trunc()).collect()
}
