//! The credentials for an etcd: certificates, and a login.

use std::fmt;
use std::path::PathBuf;

/// The credentials for an etcd. `Debug` shows no secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The authority that signed the servers' certificates; those that the system trusts if unset.
    pub authority: Option<Pem>,
    /// A certificate of our own and its key, for servers that want one.
    pub identity: Option<Identity>,
    /// A user and a password, for servers that want them.
    pub login: Option<Login>,
}

impl Access {
    /// This, and from `other` what is missing here.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self {
            authority: self.authority.or(other.authority),
            identity: self.identity.or(other.identity),
            login: self.login.or(other.login),
        }
    }

    /// True if something here is about TLS.
    pub fn names_certificates(&self) -> bool {
        self.authority.is_some() || self.identity.is_some()
    }
}

/// A certificate of our own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificate, and those between it and the authority.
    pub certificate: Pem,
    /// Its private key.
    pub key: Pem,
}

/// Something in PEM form.
#[derive(Clone, PartialEq, Eq)]
pub enum Pem {
    /// In this file.
    File(PathBuf),
    /// This text itself.
    Inline(String),
}

impl fmt::Debug for Pem {
    /// Where it is, never what it says.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Inline(_) => f.write_str("Inline(..)"),
        }
    }
}

/// The user who logs in.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The user's name.
    pub user: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for Login {
    /// The user, never the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_has_no_secret() {
        let access = Access {
            authority: Some(Pem::File("/ca.pem".into())),
            identity: Some(Identity { certificate: Pem::Inline("hidden".into()), key: Pem::Inline("hidden".into()) }),
            login: Some(Login { user: "root".into(), password: "hidden".into() }),
        };
        let shown = format!("{access:?}");
        assert!(shown.contains("/ca.pem") && shown.contains("root") && !shown.contains("hidden"), "{shown}");
    }
}
