//! Reads certificate and key files, and detects changes of these files.
//!
//! The validity period of the client certificate is parsed, so that errors can say why a server rejects the
//! certificate.

use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

use etcd_client::{Certificate, Identity, TlsOptions};
use kv::{Error, ErrorKind, Operation, Result};
use time::{Date, Month, OffsetDateTime, Time};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tonic::transport::Endpoint;

use crate::error::STORE_NAME;
use crate::options::refused;

/// TLS settings: the trusted CAs, the client certificate, and the expected server name.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Tls {
    /// The CAs that the client trusts instead of the system's CAs; if unset, the system's CAs are trusted.
    pub authority: Option<Pem>,
    /// The client certificate and its key, for servers that require a client certificate.
    pub identity: Option<(Pem, Pem)>,
    /// The name that the server's certificate must have; if unset, the host name in the endpoint.
    pub server_name: Option<String>,
}

impl Tls {
    /// Creates TLS settings that trust the system's CAs and have no client certificate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the CAs that the client trusts instead of the system's CAs.
    #[must_use]
    pub fn with_authority(mut self, authority: Pem) -> Self {
        self.authority = Some(authority);
        self
    }

    /// Sets the client certificate and its private key.
    #[must_use]
    pub fn with_identity(mut self, certificate: Pem, key: Pem) -> Self {
        self.identity = Some((certificate, key));
        self
    }

    /// Sets the name that the server's certificate must have.
    #[must_use]
    pub fn with_server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// Reads the certificate and key files, and checks that TLS can use their contents.
    ///
    /// # Errors
    /// `Io` if a certificate or key file cannot be read; `Unsupported` if its text is not a certificate or key.
    pub(crate) fn load(&self) -> Result<LoadedTls> {
        // Record the file stamps before reading the files, so that a change during the reading is noticed later.
        let stamp = self.stamp();
        let mut options = TlsOptions::new();
        let mut identity = None;
        options = match &self.authority {
            Some(authority) => options.ca_certificate(Certificate::from_pem(authority.load("CERTIFICATE")?)),
            None => options.with_enabled_roots(),
        };
        if let Some((certificate, key)) = &self.identity {
            let text = certificate.load("CERTIFICATE")?;
            identity = validity_of_pem(&text).map(|validity| (format!("{certificate:?}"), validity));
            options = options.identity(Identity::from_pem(text, key.load("PRIVATE KEY")?));
        }
        if let Some(name) = &self.server_name {
            options = options.domain_name(name.clone());
        }
        // Build the TLS configuration now, because the client library would report faults in the configuration only at
        // the first request.
        match Endpoint::from_static("https://localhost").tls_config(options.clone()) {
            Ok(_) => Ok(LoadedTls { options, stamp, identity }),
            Err(error) => {
                Err(refused("a certificate or key cannot be used, or the key is not the certificate's")
                    .with_source(error))
            }
        }
    }

    /// Returns the current sizes and modification times of the certificate and key files.
    pub(crate) fn stamp(&self) -> FileStamps {
        let identity = self.identity.iter().flat_map(|(certificate, key)| [certificate, key]);
        FileStamps(self.authority.iter().chain(identity).filter_map(Pem::stamp).collect())
    }
}

/// The contents of certificate and key files, with the stamps of the files.
#[derive(Clone, Debug)]
pub(crate) struct LoadedTls {
    pub(crate) options: TlsOptions,
    pub(crate) stamp: FileStamps,
    /// The name of the client certificate (its file or setting), and the certificate's validity period.
    identity: Option<(String, Validity)>,
}

impl LoadedTls {
    /// Returns why the client certificate is not valid now; `None` if it is valid, cannot be parsed, or is not set.
    pub(crate) fn identity_fault(&self) -> Option<String> {
        let (name, validity) = self.identity.as_ref()?;
        Some(format!("our certificate, {name}, {}", validity.fault(OffsetDateTime::now_utc())?))
    }
}

/// The size and modification time of each certificate or key file; `None` for a file that cannot be accessed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileStamps(Vec<Option<(u64, SystemTime)>>);

impl FileStamps {
    /// Returns true if all certificates and keys were passed as text, not as files.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A certificate or private key in PEM form.
#[derive(Clone)]
pub enum Pem {
    /// The path of a file that contains the PEM text.
    File(PathBuf),
    /// The text of the certificate or key in PEM form.
    Inline(Vec<u8>),
}

impl Pem {
    /// Returns the PEM text if it has a section whose label ends in `label`.
    fn load(&self, label: &str) -> Result<Vec<u8>> {
        let text = match self {
            // A missing certificate file must not be reported as `Missing`, which means that there is no store.
            Self::File(path) => std::fs::read(path).map_err(|error| {
                Error::new(ErrorKind::Io, Operation::Open, STORE_NAME)
                    .with_detail(format!("cannot read {}", path.display()))
                    .with_source(error)
            })?,
            Self::Inline(text) => text.clone(),
        };
        if text.trim_ascii().is_empty() {
            return Err(refused(format!("{self:?} is empty, and should have a {label} in PEM form")));
        }
        // Refuse a byte order mark, because the PEM parser would then overlook the first section.
        if text.starts_with(b"\xef\xbb\xbf") || text.starts_with(b"\xff\xfe") {
            return Err(refused(format!(
                "{self:?} begins with a byte order mark, and should have a {label} in PEM form"
            )));
        }
        let wanted = format!("{label}-----");
        if String::from_utf8_lossy(&text).contains(&wanted) {
            return Ok(text);
        }
        Err(refused(format!("{self:?} has no {label} in PEM form")))
    }

    fn stamp(&self) -> Option<Option<(u64, SystemTime)>> {
        let Self::File(path) = self else { return None };
        let stat = || path.metadata().and_then(|metadata| Ok((metadata.len(), metadata.modified()?)));
        Some(stat().ok())
    }
}

impl fmt::Debug for Pem {
    /// Shows the path of a PEM file, but never PEM text, which may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "the file {}", path.display()),
            Self::Inline(_) => f.write_str("the text given"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Validity {
    from: OffsetDateTime,
    until: OffsetDateTime,
}

impl Validity {
    /// Returns why a certificate is not valid at the time `now`; `None` if the certificate is valid.
    pub(crate) fn fault(&self, now: OffsetDateTime) -> Option<String> {
        if now > self.until {
            Some(format!("has expired on {}: renew it", self.until.date()))
        } else if now < self.from {
            Some(format!("is valid from {} on: see whether a clock is wrong", self.from.date()))
        } else {
            None
        }
    }
}

/// Parses the validity period of the first certificate in a PEM text; `None` if this fails.
fn validity_of_pem(text: &[u8]) -> Option<Validity> {
    validity_of_der(&CertificateDer::from_pem_slice(text).ok()?)
}

/// Parses the validity period of a DER certificate (RFC 5280, section 4.1).
fn validity_of_der(der: &[u8]) -> Option<Validity> {
    let (certificate, _) = der_element(der)?;
    let (mut fields, _) = der_element(certificate)?;
    // Skip the certificate's version, which is optional.
    if fields.first() == Some(&0xa0) {
        (_, fields) = der_element(fields)?;
    }
    // Skip the certificate's serial number, algorithm and issuer.
    for _ in 0..3 {
        (_, fields) = der_element(fields)?;
    }
    let (validity, _) = der_element(fields)?;
    let (_, until) = der_element(validity)?;
    Some(Validity { from: der_time(validity)?, until: der_time(until)? })
}

/// Returns the content of the first DER element, and the bytes after this element.
fn der_element(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = der.get(1..)?.split_first()?;
    let (length, rest) = match length {
        0..=0x7f => (usize::from(*length), rest),
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(length - 0x80))?;
            (bytes.iter().fold(0, |length, byte| (length << 8) | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

/// Parses the time in the first DER element; the format is `YYMMDDHHMMSSZ`, or the same with a four-digit year.
fn der_time(der: &[u8]) -> Option<OffsetDateTime> {
    const UTC_TIME: u8 = 0x17;
    let text = str::from_utf8(der_element(der)?.0).ok()?.strip_suffix('Z')?;
    let (year, rest) = match der.first()? {
        &UTC_TIME => {
            let (year, rest) = text.split_at_checked(2)?;
            let year: i32 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, rest)
        }
        _ => {
            let (year, rest) = text.split_at_checked(4)?;
            (year.parse().ok()?, rest)
        }
    };
    let number = |at: usize| rest.get(at..at + 2)?.parse::<u8>().ok();
    let date = Date::from_calendar_date(year, Month::try_from(number(0)?).ok()?, number(2)?).ok()?;
    Some(date.with_time(Time::from_hms(number(4)?, number(6)?, number(8)?).ok()?).assume_utc())
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};
    use time::macros::datetime;

    use super::*;

    #[test]
    fn pem_is_refused_when_malformed() {
        let file = Tls::new().with_authority(Pem::File("/nowhere/ca.pem".into()));
        let error = file.load().unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Io);
        assert!(error.to_string().contains("cannot read /nowhere/ca.pem"), "{error}");
        for (text, words) in [
            (&b""[..], "is empty"),
            (b"\n", "is empty"),
            (b"\0\0", "no CERTIFICATE"),
            (b"\xef\xbb\xbf-----BEGIN CERTIFICATE-----", "begins with a byte order mark"),
            (b"\xff\xfe-\0-\0", "begins with a byte order mark"),
        ] {
            let error = Tls::new().with_authority(Pem::Inline(text.to_vec())).load().unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        let text = Tls::new().with_authority(Pem::Inline(b"hidden".to_vec()));
        let error = text.load().unwrap_err();
        assert!(error.to_string().contains("no CERTIFICATE") && !error.to_string().contains("hidden"), "{error}");
    }

    #[test]
    fn tls_files_are_refused_before_any_call() {
        let hollow = b"-----BEGIN CERTIFICATE-----\n!hidden!\n-----END CERTIFICATE-----\n".to_vec();
        let error = Tls::new().with_authority(Pem::Inline(hollow)).load().unwrap_err();
        assert_eq!(error.kind(), &ErrorKind::Unsupported, "{error}");
        assert!(!error.to_string().contains("hidden"), "{error}");
    }

    #[test]
    fn file_stamp_changes_with_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let tls = Tls::new().with_authority(Pem::File(file.path().to_owned()));
        let before = tls.stamp();
        assert!(!before.is_empty() && before == tls.stamp());
        std::fs::write(file.path(), "more").unwrap();
        assert_ne!(tls.stamp(), before);
        assert!(Tls::new().with_authority(Pem::Inline(Vec::new())).stamp().is_empty());
    }

    #[test]
    fn certificate_dates_are_read() {
        let key = KeyPair::generate().unwrap();
        let made = |from: OffsetDateTime, until: OffsetDateTime| {
            let mut params = CertificateParams::new(["etcd.example".to_owned()]).unwrap();
            (params.not_before, params.not_after) = (from, until);
            // Write the private key before the certificate, as in PEM files that contain both.
            format!("{}{}", key.serialize_pem(), params.self_signed(&key).unwrap().pem())
        };
        for (from, until) in [
            (datetime!(1999-12-31 23:59:59 UTC), datetime!(2001-01-01 0:00 UTC)),
            // X.509 certificates write years from 2050 on with four digits instead of two.
            (datetime!(2026-02-28 12:34:56 UTC), datetime!(4096-01-01 0:00 UTC)),
        ] {
            assert_eq!(validity_of_pem(made(from, until).as_bytes()), Some(Validity { from, until }));
        }
        let validity = Validity { from: datetime!(2025-01-01 0:00 UTC), until: datetime!(2026-01-01 0:00 UTC) };
        assert_eq!(validity.fault(datetime!(2025-06-01 0:00 UTC)), None);
        assert_eq!(validity.fault(datetime!(2026-06-01 0:00 UTC)).unwrap(), "has expired on 2026-01-01: renew it");
        assert!(validity.fault(datetime!(2024-06-01 0:00 UTC)).unwrap().contains("valid from 2025-01-01"));
    }

    #[test]
    fn certificate_dates_are_none_when_malformed() {
        let pem = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["etcd.example".to_owned()]).unwrap();
        let der = params.self_signed(&pem).unwrap().der().to_vec();
        assert!(validity_of_der(&der).is_some());
        for end in 0..der.len() {
            assert_eq!(validity_of_der(&der[..end]), None, "cut at {end}");
        }
        for index in 0..der.len().min(300) {
            for value in [0, 0x7f, 0x80, 0x84, 0xff] {
                let mut broken = der.clone();
                broken[index] = value;
                let _ = validity_of_der(&broken);
            }
        }
        assert_eq!(validity_of_pem(b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"), None);
    }
}
