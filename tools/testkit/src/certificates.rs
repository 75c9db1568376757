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
    /// The names and addresses in the certificates.
    names: Vec<String>,
}

type Issuer = CertifiedIssuer<'static, KeyPair>;

/// An authority that replaces the authority of [`Certificates`].
pub struct NextAuthority(Issuer);

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
        Self::named([], expired)
    }

    /// Issues certificates that are valid for more addresses than those of the loopback interface.
    pub fn for_addresses(addresses: impl IntoIterator<Item = std::net::IpAddr>) -> Result<Self> {
        Self::named(addresses, &[])
    }

    fn named(addresses: impl IntoIterator<Item = std::net::IpAddr>, expired: &[&str]) -> Result<Self> {
        let mut names = ["127.0.0.1", "localhost", "etcd.example"].map(str::to_owned).to_vec();
        names.extend(addresses.into_iter().map(|address| address.to_string()));
        let certificates = Self { folder: tempfile::tempdir()?, names };
        certificates.write(expired)?;
        Ok(certificates)
    }

    /// Replaces the authority and all certificates in the files by new ones.
    pub fn issue(&self) -> Result<()> {
        self.write(&[])
    }

    /// Creates a new authority, and adds it to the trusted authorities in `authority.pem`.
    pub fn trust_next(&self) -> Result<NextAuthority> {
        let next = authority().map_err(Error::other)?;
        let known = std::fs::read_to_string(self.path("authority.pem"))?;
        self.replace("authority.pem", &format!("{known}{}", next.pem()))?;
        Ok(NextAuthority(next))
    }

    /// Replaces the certificates of the servers and of the clients by certificates of the new authority.
    pub fn issue_by(&self, next: &NextAuthority) -> Result<()> {
        self.write_certificates(&next.0, &[])
    }

    /// Makes the new authority the only one that is trusted.
    pub fn trust_only(&self, next: &NextAuthority) -> Result<()> {
        self.replace("authority.pem", &next.0.pem())
    }

    fn write(&self, expired: &[&str]) -> Result<()> {
        let authority = authority().map_err(Error::other)?;
        self.replace("authority.pem", &authority.pem())?;
        self.replace("stranger.pem", &self::authority().map_err(Error::other)?.pem())?;
        self.write_certificates(&authority, expired)
    }

    fn write_certificates(&self, authority: &Issuer, expired: &[&str]) -> Result<()> {
        for name in ["server", "client"] {
            let key = KeyPair::generate().map_err(Error::other)?;
            let mut params = CertificateParams::new(self.names.clone()).map_err(Error::other)?;
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
            if expired.contains(&name) {
                params.not_after = rcgen::date_time_ymd(2001, 1, 1);
            }
            let certificate = params.signed_by(&key, authority).map_err(Error::other)?;
            self.replace(&format!("{name}.pem"), &certificate.pem())?;
            self.replace(&format!("{name}.key"), &key.serialize_pem())?;
        }
        Ok(())
    }

    /// Replaces a file as a whole, so that no reader sees a part of its text.
    fn replace(&self, name: &str, text: &str) -> Result<()> {
        let new = self.path("new");
        std::fs::write(&new, text)?;
        std::fs::rename(&new, self.path(name))
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
