//! Certificates as our options name them.

use std::io::Result;

use backend_etcd::{Pem, Tls};

use super::certificates::Certificates;

impl Certificates {
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
}
