//! The path in a URL.

use std::path::PathBuf;

use crate::error::{ConfigError, Result};

/// The path in a URL, taken as it stands, without percent-decoding.
///
/// # Errors
/// A path that is not absolute, more than a path, a user or password.
pub(crate) fn absolute(scheme: &str, rest: &str) -> Result<PathBuf> {
    if rest.contains('@') && !rest.starts_with('/') {
        return Err(ConfigError::SecretInAddress);
    }
    if rest.contains(['?', '#', '\0']) {
        return Err(ConfigError::UrlOptions(scheme.to_owned()));
    }
    if !rest.starts_with('/') || rest.trim_end_matches('/').is_empty() {
        return Err(ConfigError::UrlPath(scheme.to_owned()));
    }
    Ok(rest.into())
}
