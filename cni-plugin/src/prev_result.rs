//! The result of an earlier ADD, as CHECK and DEL get it.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::args::{AddressForm, parse_address};
use crate::error::{CniError, Code, Result};
use crate::gojson::Json;
use crate::result::PREFIXES;

/// The addresses in a result of CNI 0.3.0 or later; none if there is no result or it has none.
///
/// # Errors
/// Code 6 for what is no result.
pub(crate) fn addresses(result: Option<&Json>) -> Result<Vec<IpAddr>> {
    let Some(result) = result else { return Ok(Vec::new()) };
    let wrong =
        || CniError::new(Code::Decode, "could not parse prevResult: ips must be a list of objects with an address");
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

/// The prefixes that a result names; none in a result of another program.
pub(crate) fn prefixes(result: Option<&Json>) -> Vec<IpNet> {
    let Some(Json::Array(prefixes)) = result.and_then(|result| result.member(PREFIXES)) else { return Vec::new() };
    prefixes.iter().filter_map(|prefix| prefix.as_str()?.parse().ok()).collect()
}
