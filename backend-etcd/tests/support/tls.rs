//! Converts test certificates into TLS options.

use std::io::Result;

use backend_etcd::{Pem, Tls};
use testkit::certificates::Certificates;

pub(crate) trait AsOptions {
    fn file(&self, name: &str) -> Pem;

    fn inline(&self, name: &str) -> Result<Pem>;

    /// TLS settings that trust no CA but the test CA.
    fn trusting(&self) -> Tls;

    /// TLS settings that trust no CA but the test CA, with a client certificate.
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
