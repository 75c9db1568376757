//! Certificates for a server and its clients.

use std::io::{Error, Result};
use std::path::PathBuf;

use backend_etcd::{Pem, Tls};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

use super::Etcd;

/// An authority, and certificates from it for the server and for us, in files.
#[derive(Debug)]
pub(crate) struct Certificates {
    folder: TempDir,
}

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn authority() -> std::result::Result<Issuer, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

impl Certificates {
    pub(crate) fn make() -> Result<Self> {
        let certificates = Self { folder: tempfile::tempdir()? };
        certificates.issue()?;
        Ok(certificates)
    }

    /// Everything anew, from another authority, in the same files.
    pub(crate) fn issue(&self) -> Result<()> {
        let write = |name: &str, text: String| std::fs::write(self.path(name), text);
        let authority = authority().map_err(Error::other)?;
        write("authority.pem", authority.pem())?;
        write("stranger.pem", self::authority().map_err(Error::other)?.pem())?;
        for name in ["server", "client"] {
            let key = KeyPair::generate().map_err(Error::other)?;
            let names = ["127.0.0.1".to_owned(), "etcd.example".to_owned()];
            let mut params = CertificateParams::new(names).map_err(Error::other)?;
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            let certificate = params.signed_by(&key, &authority).map_err(Error::other)?;
            write(&format!("{name}.pem"), certificate.pem())?;
            write(&format!("{name}.key"), key.serialize_pem())?;
        }
        Ok(())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn file(&self, name: &str) -> Pem {
        Pem::File(self.path(name))
    }

    pub(crate) fn inline(&self, name: &str) -> Result<Pem> {
        Ok(Pem::Inline(std::fs::read(self.path(name))?))
    }

    /// Trusting only the server's authority.
    pub(crate) fn trusting(&self) -> Tls {
        Tls::new().with_authority(self.file("authority.pem"))
    }

    /// With a certificate of ours besides.
    pub(crate) fn known(&self) -> Tls {
        self.trusting().with_identity(self.file("client.pem"), self.file("client.key"))
    }

    /// An etcd with these certificates; `more` are arguments besides.
    pub(crate) fn etcd(&self, more: &[String]) -> Result<Etcd> {
        let with = |flag: &str, name: &str| format!("{flag}={}", self.path(name).display());
        let mut arguments = vec![with("--cert-file", "server.pem"), with("--key-file", "server.key")];
        arguments.extend_from_slice(more);
        Etcd::start_with("https", &arguments)
    }

    /// One that lets in only who has a certificate.
    pub(crate) fn etcd_for_known(&self) -> Result<Etcd> {
        let trusted = format!("--trusted-ca-file={}", self.path("authority.pem").display());
        self.etcd(&[trusted, "--client-cert-auth".to_owned()])
    }
}
