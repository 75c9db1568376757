//! Issues certificates for an etcd server and for its clients.

use std::io::{Error, Result};
use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use tempfile::TempDir;

use crate::server::Etcd;

/// The files of a certificate authority, and of a server's and a client's certificate.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn authority() -> std::result::Result<Issuer, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate()?)
}

impl Certificates {
    pub fn make() -> Result<Self> {
        Self::expired(&[])
    }

    /// Issues certificates. The certificates named in `expired` ("server", "client") have been expired since 2001.
    pub fn expired(expired: &[&str]) -> Result<Self> {
        let certificates = Self { folder: tempfile::tempdir()? };
        certificates.write(expired)?;
        Ok(certificates)
    }

    /// Replaces the authority and all certificates in the files by new ones.
    pub fn issue(&self) -> Result<()> {
        self.write(&[])
    }

    fn write(&self, expired: &[&str]) -> Result<()> {
        let write = |name: &str, text: String| std::fs::write(self.path(name), text);
        let authority = authority().map_err(Error::other)?;
        write("authority.pem", authority.pem())?;
        write("stranger.pem", self::authority().map_err(Error::other)?.pem())?;
        for name in ["server", "client"] {
            let key = KeyPair::generate().map_err(Error::other)?;
            let names = ["127.0.0.1", "localhost", "etcd.example"].map(str::to_owned);
            let mut params = CertificateParams::new(names).map_err(Error::other)?;
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            if expired.contains(&name) {
                params.not_after = rcgen::date_time_ymd(2001, 1, 1);
            }
            let certificate = params.signed_by(&key, &authority).map_err(Error::other)?;
            write(&format!("{name}.pem"), certificate.pem())?;
            write(&format!("{name}.key"), key.serialize_pem())?;
        }
        Ok(())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts an etcd server that uses the issued certificates. The list `more` contains additional command-line
    /// arguments of etcd.
    pub fn etcd(&self, more: &[String]) -> Result<Etcd> {
        let with = |flag: &str, name: &str| format!("{flag}={}", self.path(name).display());
        let mut arguments = vec![with("--cert-file", "server.pem"), with("--key-file", "server.key")];
        arguments.extend_from_slice(more);
        Etcd::start_with("https", &arguments)
    }

    /// Starts an etcd server that accepts only clients with a certificate of this authority.
    pub fn etcd_for_known(&self) -> Result<Etcd> {
        let trusted = format!("--trusted-ca-file={}", self.path("authority.pem").display());
        self.etcd(&[trusted, "--client-cert-auth".to_owned()])
    }
}
