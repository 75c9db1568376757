//! Converts test certificates into TLS options.

use std::io::Result;

use backend_etcd::{Pem, Tls};
use testkit::certificates::Certificates;

pub(crate) trait AsOptions {
    fn file(&self, name: &str) -> Pem;

    fn inline(&self, name: &str) -> Result<Pem>;

    /// TLS settings whose only trusted CA is the test CA.
    fn trusting(&self) -> Tls;

    /// TLS settings with a client certificate, and the test CA as the only trusted CA.
    fn known(&self) -> Tls;
}

impl AsOptions for Certificates {
    fn file(&self, name: &str) -> Pem {
        Pem::File(self.path(name))
    }

    fn inline(&self, name: &str) -> Result<Pem> {
        Ok(Pem::Inline(std::fs::read(self.path(name))?))
    }

    fn trusting(&self) -> Tls {
        Tls::new().with_authority(self.file("authority.pem"))
    }

    fn known(&self) -> Tls {
        self.trusting().with_identity(self.file("client.pem"), self.file("client.key"))
    }
}
