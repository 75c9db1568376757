//! Parsers of the plugins, for the fuzzers of this source tree. Not an interface: it changes as they need it.

use std::net::IpAddr;

use crate::env::{AddressForm, CniArgs};
use crate::{kubernetes, main_plugin};

/// The values in the text; an absent one is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParsedArgs {
    /// `IP`.
    pub ip: Option<IpAddr>,
    /// `K8S_POD_NAME`.
    pub pod: String,
    /// `K8S_POD_NAMESPACE`.
    pub pod_namespace: String,
}

/// Reads the text as a network of Calico's has it read.
///
/// # Errors
/// The message for the runtime.
pub fn parse_args(text: &str) -> Result<ParsedArgs, String> {
    let args = CniArgs::parse(text, AddressForm::Bare).map_err(|error| error.message().to_owned())?;
    Ok(ParsedArgs { ip: args.ip, pod: args.pod, pod_namespace: args.pod_namespace })
}

/// Reads the text as the main plugin reads the configuration of a network.
///
/// # Errors
/// The message for the runtime.
pub fn parse_main_conf(text: &[u8]) -> Result<(), String> {
    main_plugin::check_conf(text).map_err(|error| error.message().to_owned())
}

/// The addresses in the output of an IPAM plugin.
///
/// # Errors
/// The message for the runtime.
pub fn parse_ipam_result(text: &[u8]) -> Result<Vec<IpAddr>, String> {
    main_plugin::addresses_of_result(text).map_err(|error| error.message().to_owned())
}

/// Reads the text as a kubeconfig.
///
/// # Errors
/// The problem, without a part of the text.
pub fn parse_kubeconfig(text: &[u8]) -> Result<(), String> {
    kubernetes::check_kubeconfig(text)
}
