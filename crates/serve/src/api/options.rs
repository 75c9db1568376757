//! The options of the API, as the command line has them.

use std::path::PathBuf;
use std::time::Duration;

/// The options of the API.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The URLs to listen at: `https://HOST:PORT`, `http://HOST:PORT`, `unix:PATH`. None: the API is not offered.
    pub listen: Vec<String>,
    /// The URLs by which clients reach it, where they are others.
    pub advertise: Vec<String>,
    /// The server's certificate, in PEM form.
    pub cert: Option<PathBuf>,
    /// The key of the certificate.
    pub key: Option<PathBuf>,
    /// The authorities whose clients may connect.
    pub client_ca: Option<PathBuf>,
    /// True if programs of this machine may connect without a certificate, over `http://` and loopback.
    pub insecure_loopback: bool,
    /// How often a watch reports its progress without a request; `None` for etcd's 10 minutes.
    pub watch_progress_interval: Option<Duration>,
}
