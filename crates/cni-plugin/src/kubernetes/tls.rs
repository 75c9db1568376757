//! The authorities to trust, and the proof of our own identity.

use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use super::problem::Problem;

/// Which servers are the right ones.
pub(super) enum Trust {
    /// Those whom the authorities of this system vouch for.
    System,
    /// Those whom these authorities vouch for, in PEM form.
    Authority(Vec<u8>),
    /// Every one (`insecure-skip-tls-verify`).
    Everyone,
}

/// A certificate of ours and its key, in PEM form.
pub(super) struct Identity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

pub(super) fn config(trust: &Trust, identity: Option<&Identity>) -> Result<ClientConfig, Problem> {
    let unusable =
        |what: &str| Problem::new(format!("{what} for the Kubernetes API cannot be used"), "check the kubeconfig");
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|_| unusable("TLS"))?;
    let builder = match trust {
        Trust::Everyone => {
            tracing::warn!("the Kubernetes API may be anybody's: the kubeconfig has insecure-skip-tls-verify");
            builder.dangerous().with_custom_certificate_verifier(Arc::new(Unverified(provider)))
        }
        Trust::System => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            builder.with_root_certificates(roots)
        }
        Trust::Authority(pem) => {
            builder.with_root_certificates(authorities(pem).ok_or_else(|| unusable("the authority"))?)
        }
    };
    let Some(Identity { certificate, key }) = identity else { return Ok(builder.with_no_client_auth()) };
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
    let certificates = certificates.map_err(|_| unusable("the client certificate"))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| unusable("the client key"))?;
    builder.with_client_auth_cert(certificates, key).map_err(|_| unusable("the client certificate"))
}

/// `None` if there is none, or one that is none.
fn authorities(pem: &[u8]) -> Option<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.ok()?).ok()?;
    }
    (!roots.is_empty()).then_some(roots)
}

/// Takes every certificate, but only from a server that has its key.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
