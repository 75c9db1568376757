//! One request to the Kubernetes API.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::Problem;

/// More than a namespace, a pod or a virtual machine has, in bytes.
const MAX_BYTES: usize = 4 << 20;

const CHECK_ADDRESS: &str = "check that the Kubernetes API runs, and that this host can reach it";

/// A certificate of ours and its key, in PEM form.
pub(super) struct Identity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

/// Where the API is, and how it lets us in.
pub(super) struct Api {
    host: String,
    port: u16,
    /// What stands before the path of a request.
    prefix: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    authorization: Option<HeaderValue>,
}

impl Api {
    /// `authority` is in PEM form; without one those of the system are trusted.
    pub(super) fn new(
        server: &str,
        authority: Option<&[u8]>,
        identity: Option<Identity>,
        token: Option<&str>,
        server_name: Option<String>,
    ) -> Result<Self, Problem> {
        let unusable = || Problem::new("the address of the Kubernetes API is no URL", "write it as https://host:port");
        let uri: Uri = server.trim_end_matches('/').parse().map_err(|_| unusable())?;
        let host = uri.host().ok_or_else(unusable)?.trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = match uri.scheme_str() {
            Some("https") => {
                let name = ServerName::try_from(server_name.unwrap_or_else(|| host.clone())).map_err(|_| unusable())?;
                Some((TlsConnector::from(Arc::new(tls_config(authority, identity)?)), name))
            }
            Some("http") => None,
            _ => return Err(unusable()),
        };
        let authorization = match token {
            Some(token) => {
                let bad = |_| Problem::new("the token for the Kubernetes API has characters that none has", "check it");
                let mut header = HeaderValue::try_from(format!("Bearer {token}")).map_err(bad)?;
                header.set_sensitive(true);
                Some(header)
            }
            None => None,
        };
        let port = uri.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
        Ok(Self { host, port, prefix: uri.path().trim_end_matches('/').to_owned(), tls, authorization })
    }

    /// Its host and port.
    pub(super) fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{host}:{}", self.port)
    }

    /// Its address, for messages.
    pub(super) fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}{}", self.authority(), self.prefix)
    }

    /// The body of what is at a path.
    pub(super) async fn get(&self, path: &str) -> Result<Bytes, Problem> {
        let unreachable = |error| Problem::passing(format!("{} cannot be reached: {error}", self.url()), CHECK_ADDRESS);
        let stream = self.dial().await.map_err(unreachable)?;
        let (status, body) = self.ask(stream, path).await?;
        self.judge(status, body)
    }

    /// A connection to it.
    pub(super) async fn dial(&self) -> io::Result<TcpStream> {
        TcpStream::connect((self.host.as_str(), self.port)).await
    }

    /// Its answer on a connection to a request for a path.
    pub(super) async fn ask(&self, stream: TcpStream, path: &str) -> Result<(StatusCode, Bytes), Problem> {
        match &self.tls {
            None => self.exchange(stream, path).await,
            Some((connector, name)) => {
                let refused = |error| {
                    Problem::new(
                        format!("{} is not trusted, or does not speak TLS: {error}", self.url()),
                        "check the authority in the kubeconfig, and the address",
                    )
                };
                let stream = connector.connect(name.clone(), stream).await.map_err(refused)?;
                self.exchange(stream, path).await
            }
        }
    }

    async fn exchange<S>(&self, stream: S, path: &str) -> Result<(StatusCode, Bytes), Problem>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let broken = |error: hyper::Error| {
            Problem::passing(format!("the connection to {} broke: {error}", self.url()), CHECK_ADDRESS)
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection);
        let mut request = Request::get(format!("{}{path}", self.prefix))
            .header(HOST, self.authority())
            .header(ACCEPT, "application/json")
            .header(USER_AGENT, concat!("margay-ipam/", env!("CARGO_PKG_VERSION")));
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|error| Problem::new(format!("cannot ask for it: {error}"), CHECK_ADDRESS))?;
        let answer = sender.send_request(request).await.map_err(broken)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await;
        let cut =
            |_| Problem::passing(format!("the answer of {} was cut off, or has no end", self.url()), CHECK_ADDRESS);
        Ok((status, body.map_err(cut)?.to_bytes()))
    }

    fn judge(&self, status: StatusCode, body: Bytes) -> Result<Bytes, Problem> {
        let url = self.url();
        Err(match status {
            StatusCode::OK => return Ok(body),
            StatusCode::UNAUTHORIZED => Problem::new(
                format!("{url} does not know who asks"),
                "check the token or the client certificate in the kubeconfig; it may have run out",
            ),
            StatusCode::FORBIDDEN => Problem::new(
                format!("{url} does not allow it"),
                "give the user of the kubeconfig a role with the verb get on namespaces",
            ),
            StatusCode::NOT_FOUND => {
                Problem::new(format!("{url} knows no such namespace"), "check that this is the right cluster")
            }
            status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Problem::passing(format!("{url} answered {status}"), "see the log of the Kubernetes API")
            }
            status => Problem::new(format!("{url} answered {status}"), "check that this is a Kubernetes API"),
        })
    }
}

fn tls_config(authority: Option<&[u8]>, identity: Option<Identity>) -> Result<ClientConfig, Problem> {
    let unusable =
        |what: &str| Problem::new(format!("{what} for the Kubernetes API cannot be used"), "check the kubeconfig");
    let mut roots = RootCertStore::empty();
    match authority {
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem) {
                let certificate = certificate.map_err(|_| unusable("the authority"))?;
                roots.add(certificate).map_err(|_| unusable("the authority"))?;
            }
            if roots.is_empty() {
                return Err(unusable("the authority"));
            }
        }
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|_| unusable("TLS"))?
        .with_root_certificates(roots);
    let Some(Identity { certificate, key }) = identity else { return Ok(builder.with_no_client_auth()) };
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&certificate).collect();
    let certificates = certificates.map_err(|_| unusable("the client certificate"))?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|_| unusable("the client key"))?;
    builder.with_client_auth_cert(certificates, key).map_err(|_| unusable("the client certificate"))
}
