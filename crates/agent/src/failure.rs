//! The errors of calls on a store, as runtimes get them.

use ipam_core::{BridgeError, QuotaReached};

use crate::error::{CniError, Code};

/// The rules that a network follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// Calico's, with its errors.
    Calico,
    /// The rules of subnets on a wire.
    Bridged,
}

/// The reason for which a call came to nothing.
#[derive(Debug)]
pub enum Failure {
    /// The store's error.
    Store(kv::Error),
    /// The namespace of the pod must be looked up first.
    NamespaceWanted,
    /// No address is free, unless leftovers of earlier boots can be released.
    NoRoom(CniError),
    /// Everything else.
    Cni(CniError),
}

impl From<CniError> for Failure {
    fn from(error: CniError) -> Self {
        Self::Cni(error)
    }
}

impl From<kv::Error> for Failure {
    fn from(error: kv::Error) -> Self {
        Self::Store(error)
    }
}

impl From<Failure> for CniError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Store(error) => error.into(),
            Failure::NamespaceWanted => Self::from_error(&ipam_core::Error::NamespaceWanted),
            Failure::NoRoom(error) | Failure::Cni(error) => error,
        }
    }
}

/// The error of the allocator as the runtime gets it. An error that the configuration of a secondary network can mend has code 7; on a
/// network of Calico's the allocator's errors are plain ones, as Calico's are.
pub fn explain(error: ipam_core::Error, rules: Rules) -> Failure {
    match error {
        ipam_core::Error::Store(error) => error.into(),
        ipam_core::Error::NamespaceWanted => Failure::NamespaceWanted,
        ipam_core::Error::Bridge(error @ BridgeError::GatewayInUse { .. }) => {
            CniError::internal(error.to_string()).into()
        }
        // Nothing was done, and the runtime calls again.
        ipam_core::Error::Filling(filling) => CniError::new(Code::TryAgain, filling.to_string()).into(),
        ipam_core::Error::Bridge(error) => CniError::config(error.to_string()).into(),
        error => {
            let advice = advice(&error).filter(|_| rules == Rules::Bridged);
            let told = CniError::from_error(&error).with_details(advice.unwrap_or_default());
            let is_quota = matches!(error, ipam_core::Error::Quota(QuotaReached { over_leftovers: false, .. }));
            if error.is_exhaustion() && !is_quota { Failure::NoRoom(told) } else { told.into() }
        }
    }
}

/// Advice on an error of the allocator whose text has none.
pub(crate) fn advice(error: &ipam_core::Error) -> Option<String> {
    Some(match error {
        ipam_core::Error::Exhausted { .. } => {
            "see how full it is with: margay ipam show --show-blocks; then make a larger pool, or widen its range"
                .into()
        }
        ipam_core::Error::BlockLimit | ipam_core::Error::NoNewBlocks => {
            "see what stands in the way with: margay ipam explain --node NODE".into()
        }
        ipam_core::Error::Pool(_) => "see which pools there are with: margay pool list".into(),
        ipam_core::Error::AlreadyAssigned(ip) => format!("see who has it with: margay ipam show --ip {ip}"),
        ipam_core::Error::Reserved(ip) => format!("see by what with: margay ipam show --ip {ip}"),
        ipam_core::Error::UnknownNode(_) => "nodes are registered in this store, and this one is not among them".into(),
        _ => return None,
    })
}
