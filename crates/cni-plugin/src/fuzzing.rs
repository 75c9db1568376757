//! Exposes parsers of the plugins to the fuzzers of this source tree. The functions of this module are not a stable
//! interface.

use std::net::IpAddr;

use crate::env::{AddressForm, CniArgs};
use crate::{kubernetes, main_plugin};

/// The values of the keys in `CNI_ARGS`. If `CNI_ARGS` lacks a key, the field for the key is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedArgs {
    /// The value of the key `IP` in `CNI_ARGS`.
    pub ip: Option<IpAddr>,
    /// The value of the key `K8S_POD_NAME` in `CNI_ARGS`.
    pub pod: String,
    /// The value of the key `K8S_POD_NAMESPACE` in `CNI_ARGS`.
    pub pod_namespace: String,
}

/// Parses the value of `CNI_ARGS` as on a Calico network.
///
/// # Errors
/// The CNI error message that the runtime would get.
pub fn parse_args(text: &str) -> Result<ParsedArgs, String> {
    let args = CniArgs::parse(text, AddressForm::Bare).map_err(|error| error.message().to_owned())?;
    Ok(ParsedArgs { ip: args.ip, pod: args.pod, pod_namespace: args.pod_namespace })
}

/// Parses a network configuration as the main plugin does.
///
/// # Errors
/// The CNI error message that the runtime would get.
pub fn parse_main_conf(text: &[u8]) -> Result<(), String> {
    main_plugin::check_conf(text).map_err(|error| error.message().to_owned())
}

/// Parses the output of an IPAM plugin and returns the addresses in that output.
///
/// # Errors
/// The CNI error message that the runtime would get.
pub fn parse_ipam_result(text: &[u8]) -> Result<Vec<IpAddr>, String> {
    main_plugin::addresses_of_result(text).map_err(|error| error.message().to_owned())
}

/// Parses a kubeconfig.
///
/// # Errors
/// A description of the error in the kubeconfig. The returned description contains no text of the kubeconfig.
pub fn parse_kubeconfig(text: &[u8]) -> Result<(), String> {
    kubernetes::check_kubeconfig(text)
}
