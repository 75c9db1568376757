//! When a certificate is valid: the only thing that is read of our own one, to say why a server refuses it.

use time::{Date, Month, OffsetDateTime, Time};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

/// The first and the last second in which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Validity {
    from: OffsetDateTime,
    until: OffsetDateTime,
}

impl Validity {
    /// Returns why the certificate is not valid at a time; `None` if it is.
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

/// Reads the first certificate of a text in PEM form; `None` if that is not possible.
pub(crate) fn of_pem(text: &[u8]) -> Option<Validity> {
    of_der(&CertificateDer::from_pem_slice(text).ok()?)
}

/// Reads a certificate (RFC 5280, section 4.1).
fn of_der(der: &[u8]) -> Option<Validity> {
    let (certificate, _) = element(der)?;
    let (mut fields, _) = element(certificate)?;
    // The version may be left out.
    if fields.first() == Some(&0xa0) {
        (_, fields) = element(fields)?;
    }
    // Serial number, algorithm, issuer.
    for _ in 0..3 {
        (_, fields) = element(fields)?;
    }
    let (validity, _) = element(fields)?;
    let (_, until) = element(validity)?;
    Some(Validity { from: moment(validity)?, until: moment(until)? })
}

/// The content of the first element, and what follows it.
fn element(der: &[u8]) -> Option<(&[u8], &[u8])> {
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

/// The time in the first element: `YYMMDDHHMMSSZ`, or with a year of four digits.
fn moment(der: &[u8]) -> Option<OffsetDateTime> {
    const UTC_TIME: u8 = 0x17;
    let text = str::from_utf8(element(der)?.0).ok()?.strip_suffix('Z')?;
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
    fn the_dates_of_a_certificate_are_read() {
        let key = KeyPair::generate().unwrap();
        let made = |from: OffsetDateTime, until: OffsetDateTime| {
            let mut params = CertificateParams::new(["etcd.example".to_owned()]).unwrap();
            (params.not_before, params.not_after) = (from, until);
            // A key before it, as in a file that has both.
            format!("{}{}", key.serialize_pem(), params.self_signed(&key).unwrap().pem())
        };
        for (from, until) in [
            (datetime!(1999-12-31 23:59:59 UTC), datetime!(2001-01-01 0:00 UTC)),
            // A year that has four digits in the certificate.
            (datetime!(2026-02-28 12:34:56 UTC), datetime!(4096-01-01 0:00 UTC)),
        ] {
            assert_eq!(of_pem(made(from, until).as_bytes()), Some(Validity { from, until }));
        }
        let validity = Validity { from: datetime!(2025-01-01 0:00 UTC), until: datetime!(2026-01-01 0:00 UTC) };
        assert_eq!(validity.fault(datetime!(2025-06-01 0:00 UTC)), None);
        assert_eq!(validity.fault(datetime!(2026-06-01 0:00 UTC)).unwrap(), "has expired on 2026-01-01: renew it");
        assert!(validity.fault(datetime!(2024-06-01 0:00 UTC)).unwrap().contains("valid from 2025-01-01"));
    }

    #[test]
    fn what_is_no_certificate_has_no_dates() {
        let pem = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["etcd.example".to_owned()]).unwrap();
        let der = params.self_signed(&pem).unwrap().der().to_vec();
        assert!(of_der(&der).is_some());
        for end in 0..der.len() {
            assert_eq!(of_der(&der[..end]), None, "cut at {end}");
        }
        for index in 0..der.len().min(300) {
            for value in [0, 0x7f, 0x80, 0x84, 0xff] {
                let mut broken = der.clone();
                broken[index] = value;
                let _ = of_der(&broken);
            }
        }
        assert_eq!(of_pem(b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"), None);
    }
}
