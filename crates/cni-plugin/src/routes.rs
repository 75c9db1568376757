//! The routes that a configuration names.

use std::net::IpAddr;

use agent::{CniError, Result};
use ipnet::IpNet;
use serde::Serialize;

use crate::gojson::{Json, quoted};
use crate::ranges::address_at;

/// A route of a result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Route {
    pub(crate) dst: IpNet,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gw: Option<IpAddr>,
    #[serde(flatten)]
    pub(crate) options: RouteOptions,
}

/// The members of a route beside its destination and gateway; printed from CNI 0.3.0 on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct RouteOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mtu: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) advmss: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) table: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scope: Option<i64>,
}

impl Route {
    pub(crate) fn to(dst: IpNet) -> Self {
        Self { dst, gw: None, options: RouteOptions::default() }
    }
}

/// The routes of `ipam.routes`.
///
/// # Errors
/// Code 7 for a value that is no list of routes.
pub(crate) fn read_routes(value: Option<&Json>) -> Result<Vec<Route>> {
    match value {
        None => Ok(Vec::new()),
        Some(Json::Array(elements)) => elements.iter().map(read_route).collect(),
        Some(_) => Err(CniError::config("ipam.routes must be a list of objects with a dst and, if wanted, a gw")),
    }
}

fn read_route(element: &Json) -> Result<Route> {
    let dst = element
        .member("dst")
        .and_then(Json::as_str)
        .ok_or_else(|| CniError::config("a route in ipam.routes has no dst"))?;
    let dst = dst.parse().map_err(|_| CniError::config(format!("ipam.routes: dst {} is not a CIDR", quoted(dst))))?;
    let gw = match element.member("gw") {
        None => None,
        Some(Json::String(text)) if text.is_empty() => None,
        Some(gw) => Some(address_at(gw, "ipam.routes: gw", "")?),
    };
    let number = |name: &str| match element.member(name) {
        None => Ok(None),
        Some(Json::Number(number)) if number.is_i64() => Ok(number.as_i64()),
        Some(_) => Err(CniError::config(format!("ipam.routes: {name} is not a whole number"))),
    };
    // 0 is no value for the first three, but one for a table and a scope.
    let positive = |name: &str| number(name).map(|number| number.filter(|number| *number != 0));
    let options = RouteOptions {
        mtu: positive("mtu")?,
        advmss: positive("advmss")?,
        priority: positive("priority")?,
        table: number("table")?,
        scope: number("scope")?,
    };
    Ok(Route { dst, gw, options })
}
