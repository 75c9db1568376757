//! `CNI_ARGS`, for the fuzzers of this source tree. Not an interface: it changes as they need it.

use std::net::IpAddr;

use crate::args::{AddressForm, Args};

/// What the text says; what is absent is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArgsSaid {
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
pub fn parse_args(text: &str) -> Result<ArgsSaid, String> {
    let args = Args::parse(text, AddressForm::Bare).map_err(|error| error.message().to_owned())?;
    Ok(ArgsSaid { ip: args.ip, pod: args.pod, pod_namespace: args.pod_namespace })
}
