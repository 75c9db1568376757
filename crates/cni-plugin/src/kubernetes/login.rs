//! The login of a request.

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::HeaderValue;

use super::files;
use super::problem::Problem;

/// The login that a kubeconfig gives its user beside certificates.
pub(super) enum Login {
    /// Nothing.
    Unnamed,
    /// A token.
    Token(String),
    /// A file with a token, which may be replaced at any time.
    TokenFile(PathBuf),
    /// A user and a password.
    Password(String, String),
}

/// The value of a header, and the secret in it.
pub(super) struct Credential {
    pub(super) header: HeaderValue,
    pub(super) secret: String,
}

impl Login {
    /// The credential to send with the next request.
    pub(super) fn credential(&self) -> Result<Option<Credential>, Problem> {
        let (scheme, secret) = match self {
            Self::Unnamed => return Ok(None),
            Self::Token(token) => ("Bearer", token.clone()),
            Self::TokenFile(path) => {
                let token = String::from_utf8_lossy(&files::read(path)?).trim().to_owned();
                if token.is_empty() {
                    return Err(Problem::new(format!("{} is empty", path.display()), "it must have a token"));
                }
                ("Bearer", token)
            }
            Self::Password(user, password) => ("Basic", STANDARD.encode(format!("{user}:{password}"))),
        };
        let bad = |_| Problem::new("the token for the Kubernetes API has characters that none has", "check it");
        let mut header = HeaderValue::try_from(format!("{scheme} {secret}")).map_err(bad)?;
        header.set_sensitive(true);
        Ok(Some(Credential { header, secret }))
    }
}
