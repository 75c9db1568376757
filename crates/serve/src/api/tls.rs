//! Mutual TLS: the server shows a certificate, and so must every client.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::options::Options;

/// The files that TLS takes, all in PEM form.
#[derive(Clone, Debug)]
pub(super) struct Files {
    cert: PathBuf,
    key: PathBuf,
    client_ca: PathBuf,
}

/// Size and time of change of each file; `None` for one that cannot be looked at.
type Stamp = [Option<(u64, SystemTime)>; 3];

/// The server's side of TLS. The files are read again when they have changed.
pub(super) struct Tls {
    files: Files,
    current: Mutex<(Stamp, Arc<ServerConfig>)>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Files {
    /// Those of the options; `None` unless all three are there.
    pub(super) fn of(options: &Options) -> Option<Self> {
        let Options { cert: Some(cert), key: Some(key), client_ca: Some(client_ca), .. } = options else { return None };
        Some(Self { cert: cert.clone(), key: key.clone(), client_ca: client_ca.clone() })
    }

    fn stamp(&self) -> Stamp {
        [&self.cert, &self.key, &self.client_ca]
            .map(|path| path.metadata().and_then(|found| Ok((found.len(), found.modified()?))).ok())
    }

    /// Reads the files. The errors name a file, and never what is in it.
    fn load(&self) -> Result<ServerConfig, String> {
        let unusable = |path: &Path, what: &str| format!("{} holds no usable {what}", path.display());
        let mut roots = RootCertStore::empty();
        for authority in certificates(&self.client_ca)? {
            roots.add(authority).map_err(|_| unusable(&self.client_ca, "authority"))?;
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|_| unusable(&self.client_ca, "authority"))?;
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(|_| unusable(&self.key, "key"))?;
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| error.to_string())?.with_client_cert_verifier(verifier);
        let config = builder.with_single_cert(certificates(&self.cert)?, key);
        let mut config =
            config.map_err(|_| format!("{} is not the key of {}", self.key.display(), self.cert.display()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(config)
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// The file that cannot be read or used.
    pub(super) fn load(files: Files) -> Result<Self, String> {
        // Before the files are read: a change between the two is noticed later.
        let stamp = files.stamp();
        let config = Arc::new(files.load()?);
        Ok(Self { files, current: Mutex::new((stamp, config)) })
    }

    /// For the next client. Files that have changed and cannot be used leave the certificate as it was.
    pub(super) fn acceptor(&self) -> TlsAcceptor {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = self.files.stamp();
        if stamp != current.0 {
            current.0 = stamp;
            match self.files.load() {
                Ok(config) => {
                    tracing::info!("the certificates of etcd's API were read again");
                    current.1 = Arc::new(config);
                }
                Err(why) => tracing::warn!(why, "the certificates of etcd's API have changed and stay as they were"),
            }
        }
        TlsAcceptor::from(Arc::clone(&current.1))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(format!("{} holds no certificate in PEM form", path.display())),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error: io::Error| format!("cannot read {}: {error}", path.display()))
}
