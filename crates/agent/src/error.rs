//! Defines the CNI error that a plugin prints for the runtime, and converts other errors into CNI errors.

use std::error::Error as StdError;
use std::fmt;

use ipam_core::{BridgeError, QuotaReached};
use serde::{Deserialize, Serialize};

/// A result whose error type is [`CniError`] unless another type is given.
pub type Result<T, E = CniError> = std::result::Result<T, E>;

/// The kind of a CNI error, in most cases a well-known error code of the CNI specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Code {
    /// CNI error code 1: the plugin does not support the configured CNI version, or that version does not have the
    /// verb.
    IncompatibleVersion,
    /// CNI error code 4: a CNI environment variable is missing or has an invalid value.
    InvalidEnvironment,
    /// CNI error code 5: the plugin could not read the network configuration from standard input.
    Io,
    /// CNI error code 6: the network configuration cannot be decoded.
    Decode,
    /// CNI error code 7: a setting in the network configuration is invalid or impossible.
    InvalidConfig,
    /// CNI error code 8: the network namespace in `CNI_NETNS` cannot belong to a container.
    InvalidNetns,
    /// CNI error code 11: the call changed nothing, and may succeed if the runtime repeats it a little later.
    TryAgain,
    /// CNI error code 50: STATUS has found that an ADD would fail now. Verbs other than STATUS never return the code
    /// 50.
    Unavailable,
    /// CNI error code 100: the datastore does not answer the test request of option `-t`.
    Unreachable,
    /// CNI error code 999: any error without a more specific code.
    Internal,
    /// Any other error code, taken over from the error of an IPAM plugin.
    Other(u32),
}

impl Code {
    /// Returns the error code for a number in the error of another plugin. The number 0 is not an error code and
    /// becomes [`Code::Internal`].
    pub fn of(number: u32) -> Self {
        if number == 0 { Self::Internal } else { Self::Other(number) }
    }

    /// Returns the numeric code that the JSON of the error contains.
    pub fn number(self) -> u32 {
        match self {
            Self::IncompatibleVersion => 1,
            Self::InvalidEnvironment => 4,
            Self::Io => 5,
            Self::Decode => 6,
            Self::InvalidConfig => 7,
            Self::InvalidNetns => 8,
            Self::TryAgain => 11,
            Self::Unavailable => 50,
            Self::Unreachable => 100,
            Self::Internal => 999,
            Self::Other(number) => number,
        }
    }
}

/// An error as the CNI specification defines it. The error never contains the whole network configuration, because the
/// configuration may contain secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CniError {
    code: Code,
    message: String,
    details: String,
}

impl CniError {
    /// Creates a CNI error without details.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: String::new() }
    }

    /// Creates a CNI error with code 999, the code of every plain error of Calico's plugin.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// Creates a CNI error with code 7, for an invalid or impossible setting in the network configuration.
    pub fn config(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidConfig, message)
    }

    /// Creates a CNI error with code 999. The message of the CNI error consists of the messages of `error` and of all
    /// its sources, joined with colons. A source is left out if the joined message already contains the source's
    /// message.
    pub fn from_error(error: &(dyn StdError + 'static)) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            source = cause.source();
        }
        Self::internal(message)
    }

    /// Replaces the code of this CNI error.
    #[must_use]
    pub fn with_code(mut self, code: Code) -> Self {
        self.code = code;
        self
    }

    /// Replaces the details of this CNI error: a remedy or the invalid value. The error's JSON omits empty details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Returns the code of this CNI error.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Returns the message of this CNI error, which says what is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the details of this CNI error: a remedy, the invalid value, or nothing.
    pub fn details(&self) -> &str {
        &self.details
    }
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, " ({})", self.details) }
    }
}

impl StdError for CniError {}

impl From<kv::Error> for CniError {
    /// Converts a store error into a CNI error. The CNI error code is 11 if the store is unchanged and the same plugin
    /// call may succeed a little later.
    fn from(error: kv::Error) -> Self {
        let transient = error.kind().is_transient() || matches!(error.kind(), kv::ErrorKind::Conflict { .. });
        let again = transient && error.outcome() == kv::Outcome::NotApplied;
        Self::from_error(&error).with_code(if again { Code::TryAgain } else { Code::Internal })
    }
}

/// Whether a network follows Calico's address rules and error messages, or Margay's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkRules {
    /// Addresses of the network are assigned by Calico's rules, and its errors have Calico's messages.
    Calico,
    /// The network has the rules of a secondary network, whose pools are subnets of a layer-2 segment.
    Bridged,
}

/// The reason why a CNI verb failed.
#[derive(Debug)]
pub enum VerbFailure {
    /// Any store error.
    Store(kv::Error),
    /// A pool's selector needs the labels of the pod's namespace, and the request does not contain these labels.
    NamespaceWanted,
    /// No address is free for an ADD. The ADD may still succeed after leftover addresses of earlier boots have been
    /// released.
    NoRoom(CniError),
    /// Any other error.
    Cni(CniError),
}

impl From<CniError> for VerbFailure {
    fn from(error: CniError) -> Self {
        Self::Cni(error)
    }
}

impl From<kv::Error> for VerbFailure {
    fn from(error: kv::Error) -> Self {
        Self::Store(error)
    }
}

impl From<VerbFailure> for CniError {
    fn from(failure: VerbFailure) -> Self {
        match failure {
            VerbFailure::Store(error) => error.into(),
            VerbFailure::NamespaceWanted => Self::from_error(&ipam_core::Error::NamespaceWanted),
            VerbFailure::NoRoom(error) | VerbFailure::Cni(error) => error,
        }
    }
}

/// Converts an IPAM error into the CNI error for the runtime. The CNI error code is 7 if the user can avoid the error
/// by changing the configuration of a secondary network. On a Calico network, the CNI error code is 999, as in Calico.
pub fn explain(error: ipam_core::Error, rules: NetworkRules) -> VerbFailure {
    match error {
        ipam_core::Error::Store(error) => error.into(),
        ipam_core::Error::NamespaceWanted => VerbFailure::NamespaceWanted,
        ipam_core::Error::Bridge(error @ BridgeError::GatewayInUse { .. }) => {
            CniError::internal(error.to_string()).into()
        }
        // An import locks the store, so the call has changed nothing, and the code 11 tells the runtime to repeat the
        // call later.
        ipam_core::Error::ImportLocked(filling) => CniError::new(Code::TryAgain, filling.to_string()).into(),
        ipam_core::Error::Bridge(error) => CniError::config(error.to_string()).into(),
        error => {
            let advice = advice(&error).filter(|_| rules == NetworkRules::Bridged);
            let told = CniError::from_error(&error).with_details(advice.unwrap_or_default());
            let is_quota = matches!(error, ipam_core::Error::Quota(QuotaReached { over_leftovers: false, .. }));
            if error.is_exhaustion() && !is_quota { VerbFailure::NoRoom(told) } else { told.into() }
        }
    }
}

/// Returns advice for the user on an IPAM error whose own message contains no advice.
pub(crate) fn advice(error: &ipam_core::Error) -> Option<String> {
    Some(match error {
        ipam_core::Error::Exhausted { .. } => {
            "see how full it is with: margay ipam show --show-blocks; then make a larger pool, or widen its range"
                .into()
        }
        ipam_core::Error::BlockLimit | ipam_core::Error::NoNewBlocks => {
            "see what stands in the way with: margay ipam explain --node NODE".into()
        }
        ipam_core::Error::Pool(_) => "list the pools with: margay pool list".into(),
        ipam_core::Error::AlreadyAssigned(ip) => format!("see who has it with: margay ipam show --ip {ip}"),
        ipam_core::Error::Reserved(ip) => format!("see by what with: margay ipam show --ip {ip}"),
        ipam_core::Error::UnknownNode(_) => {
            "nodes are registered in this store, and this one is not among them; register it with: margay node register"
                .into()
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_code_says_when_to_try_again() {
        let code = |kind, operation| CniError::from(kv::Error::new(kind, operation, "a store")).code();
        assert_eq!(code(kv::ErrorKind::Locked, kv::Operation::Open), Code::TryAgain);
        assert_eq!(code(kv::ErrorKind::Conflict { attempts: 100 }, kv::Operation::Transact), Code::TryAgain);
        assert_eq!(code(kv::ErrorKind::Corrupt, kv::Operation::Open), Code::Internal);
        // The timed-out transaction may still have been carried out, so the code must not be `TryAgain`.
        assert_eq!(code(kv::ErrorKind::Timeout, kv::Operation::Transact), Code::Internal);
    }

    #[test]
    fn error_causes_are_told_once() {
        #[derive(Debug)]
        struct Outer(std::io::Error);
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("cannot open the store")
            }
        }
        impl StdError for Outer {
            fn source(&self) -> Option<&(dyn StdError + 'static)> {
                Some(&self.0)
            }
        }
        let error = CniError::from_error(&Outer(std::io::Error::other("disk on fire")));
        assert_eq!(error.message(), "cannot open the store: disk on fire");
        assert_eq!(error.code().number(), 999);
    }
}
