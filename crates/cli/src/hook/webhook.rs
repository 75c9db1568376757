//! A URL to which each event is posted, signed with a secret.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use datastore::{TextFault, text_fault};
use ring::hmac::{self, HMAC_SHA256, Key};
use tokio_rustls::rustls::crypto;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::digest::hex;
use crate::error::{Failure, Result};

/// The header with the signature: `sha256=`, and the HMAC-SHA256 of the body under the secret, in hexadecimal digits.
const SIGNATURE: &str = "Margay-Signature";

/// The advice for a secret that is none.
const MAKE_ONE: &str = "make one with: openssl rand -hex 32";

/// The URL.
#[derive(Debug)]
pub(super) struct Webhook {
    url: String,
    agent: Agent,
    /// The secret, which `Debug` does not print.
    key: Option<Key>,
}

impl Webhook {
    /// # Errors
    /// The URL is none of http or https; the secret or the certificates of the system cannot be read.
    pub(super) fn new(url: &str, secret: Option<&Path>, timeout: Duration) -> Result<Self> {
        let is_https = url.starts_with("https://");
        if !is_https && !url.starts_with("http://") {
            return Err(Failure::new("the URL of --webhook begins with neither http:// nor https://"));
        }
        let mut config = Agent::config_builder()
            .timeout_global(Some(timeout))
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("margay/", env!("CARGO_PKG_VERSION")));
        if is_https {
            config = config.tls_config(tls()?);
        }
        Ok(Self { url: url.to_owned(), agent: config.build().into(), key: secret.map(key).transpose()? })
    }

    /// The URL without a login and without what is behind the `?`: both may be secret.
    pub(super) fn name(&self) -> String {
        let (scheme, rest) = self.url.split_once("://").unwrap_or_default();
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let host = host.rsplit('@').next().unwrap_or_default();
        format!("{scheme}://{host}/{path}")
    }

    /// Posts an event. The answer must have a status of 200 to 299.
    pub(super) fn post(&self, json: &str) -> std::result::Result<(), String> {
        let mut request = self.agent.post(&self.url).header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header(SIGNATURE, format!("sha256={}", hex(hmac::sign(key, json.as_bytes()))));
        }
        match request.send(json) {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => Err(format!("its answer is {}", answer.status())),
            // The text could have the URL, and so a secret.
            Err(ureq::Error::BadUri(_)) => Err("it is no URL that can be reached".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The key from a file; white space at the end does not count.
fn key(path: &Path) -> Result<Key> {
    let failed = |why: String| Failure::new(format!("the secret {} {why}", path.display()));
    let secret = fs::read(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    let secret = secret.trim_ascii_end();
    // A secret of random bytes may begin like UTF-16.
    let is_text = str::from_utf8(secret).is_ok();
    match text_fault(secret) {
        Some(TextFault::Empty) => return Err(failed("is empty".to_owned()).hint(MAKE_ONE)),
        Some(fault @ TextFault::ZeroBytes) => return Err(failed(format!("is none: {fault}")).hint(MAKE_ONE)),
        Some(fault @ TextFault::ByteOrderMark) if is_text => {
            return Err(failed(format!("would not be the receiver's: {fault}")).hint("write it without the mark"));
        }
        _ => {}
    }
    Ok(Key::new(HMAC_SHA256, secret))
}

/// The certificates that the system trusts, or those of `SSL_CERT_FILE`.
fn tls() -> Result<TlsConfig> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        return Err(Failure::new("this system has no trusted certificates for https")
            .hint("install ca-certificates, or set SSL_CERT_FILE"));
    }
    let certs: Vec<_> = found.certs.iter().map(|cert| Certificate::from_der(cert).to_owned()).collect();
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(certs)))
        .unversioned_rustls_crypto_provider(Arc::new(crypto::ring::default_provider()))
        .build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_in_the_name() {
        let name = |url: &str| Webhook::new(url, None, Duration::from_secs(1)).unwrap().name();
        assert_eq!(name("http://user:secret@h.example:80/a/b?token=secret#x"), "http://h.example:80/a/b");
        assert_eq!(name("http://h.example?token=secret"), "http://h.example/");
        assert!(Webhook::new("ftp://user:secret@h/", None, Duration::from_secs(1)).is_err());
    }

    #[test]
    fn a_signature_is_the_one_of_rfc_4231() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, "Jefe\n").unwrap();
        let code = hmac::sign(&key(&path).unwrap(), b"what do ya want for nothing?");
        assert_eq!(code.as_ref()[..4], [0x5b, 0xdc, 0xc1, 0x46]);
        for wrong in [&b" \n"[..], b"\0\0\0\0", b"\xef\xbb\xbfJefe"] {
            fs::write(&path, wrong).unwrap();
            assert!(key(&path).is_err(), "{wrong:?}");
        }
        fs::write(&path, b"\xff\xfe\x01").unwrap();
        assert!(key(&path).is_ok(), "random bytes");
    }
}
