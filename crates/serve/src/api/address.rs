//! The URLs at which the API is offered, and which of them are safe.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use super::options::Options;

/// The advice about TLS.
pub(super) const TLS: &str =
    "https:// takes --cert-file, --key-file and --client-ca-file; on loopback http:// and --insecure-loopback will do";

/// A place to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// A port, with mutual TLS or without.
    Tcp { addresses: Vec<SocketAddr>, tls: bool },
    /// A unix socket, for the daemon's user alone.
    Unix(PathBuf),
}

impl Address {
    /// From a URL.
    ///
    /// # Errors
    /// The reason why it cannot be used.
    pub(super) fn parse(url: &str) -> Result<Self, String> {
        if let Some(path) = url.strip_prefix("unix:") {
            let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
            return if path.is_absolute() { Ok(Self::Unix(path)) } else { Err("unix: takes an absolute path".into()) };
        }
        let (tls, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (_, Some(rest)) => (false, rest),
            _ => return Err("it must begin with https://, http:// or unix:".into()),
        };
        let place = rest.strip_suffix('/').unwrap_or(rest);
        if !place.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
            return Err("it must name a host and a port, such as https://10.0.0.1:2379".into());
        }
        let addresses = place.to_socket_addrs().map_err(|error| error.to_string())?;
        Ok(Self::Tcp { addresses: addresses.collect(), tls })
    }

    /// Checks that clients can reach it, and that nobody else can.
    ///
    /// # Errors
    /// The advice about what to change.
    pub(super) fn check(&self, options: &Options) -> Result<(), &'static str> {
        let Self::Tcp { addresses, tls } = self else { return Ok(()) };
        if options.advertise.is_empty() && addresses.iter().any(|address| address.ip().is_unspecified()) {
            return Err("clients need an address that they can reach: add --advertise URL");
        }
        if *tls {
            return Ok(());
        }
        if !addresses.iter().all(|address| is_loopback(address.ip())) {
            return Err(
                "without TLS everybody who reaches it could change the store: use https://, or http:// on loopback",
            );
        }
        if !options.insecure_loopback {
            return Err(
                "every user of this machine could change the store: add --insecure-loopback if that is right, \
                        or use unix:PATH or https://",
            );
        }
        Ok(())
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(url: &str, options: &Options) -> Result<(), String> {
        Address::parse(url)?.check(options).map_err(str::to_owned)
    }

    #[test]
    fn urls_are_read() {
        let tcp = |address: &str, tls| Address::Tcp { addresses: vec![address.parse().unwrap()], tls };
        assert_eq!(Address::parse("http://127.0.0.1:2379"), Ok(tcp("127.0.0.1:2379", false)));
        assert_eq!(Address::parse("https://[::1]:2379/"), Ok(tcp("[::1]:2379", true)));
        assert_eq!(Address::parse("unix:/run/lab.sock"), Ok(Address::Unix("/run/lab.sock".into())));
        assert_eq!(Address::parse("unix:///run/lab.sock"), Ok(Address::Unix("/run/lab.sock".into())));
        for wrong in
            ["127.0.0.1:2379", "http://127.0.0.1", "http://:2379", "ftp://x:1", "unix:lab.sock", "http://h:99999"]
        {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_others_could_write_to_is_refused() {
        let none = Options::default();
        let insecure = Options { insecure_loopback: true, ..Options::default() };
        let advertised = Options { advertise: vec!["https://node1:2379".to_owned()], ..Options::default() };
        assert!(checked("http://127.0.0.1:0", &none).unwrap_err().contains("--insecure-loopback"));
        assert!(checked("http://127.0.0.1:0", &insecure).is_ok());
        assert!(checked("http://[::1]:0", &insecure).is_ok());
        assert!(checked("http://192.0.2.1:0", &insecure).unwrap_err().contains("https://"));
        assert!(checked("http://0.0.0.0:0", &insecure).unwrap_err().contains("--advertise"));
        assert!(checked("https://0.0.0.0:0", &none).unwrap_err().contains("--advertise"));
        assert!(checked("https://[::]:0", &advertised).is_ok());
        assert!(checked("unix:/run/lab.sock", &none).is_ok());
    }
}
