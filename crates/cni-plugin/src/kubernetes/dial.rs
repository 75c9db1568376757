//! Opens connections to an HTTP server, directly or through a proxy, and with or without TLS. Reads the trusted
//! certificate authorities and the credential files, and defines the error type of requests.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent::{CniError, Code};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::header::{HOST, HeaderValue, PROXY_AUTHORIZATION};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use nix::libc::O_NONBLOCK;
use nix::unistd::geteuid;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

/// An open connection to an HTTP server or proxy, with or without TLS.
pub(crate) trait ApiStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ApiStream for T {}

/// The parts of a server's URL that are needed to open a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiAddress {
    is_https: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// The host and port, as written in the server's URL.
    pub(super) authority: String,
}

impl ApiAddress {
    /// Parses the address of a server from its URL; returns `None` unless the scheme is `http` or `https`.
    pub(super) fn of(uri: &Uri) -> Option<Self> {
        let is_https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let written = uri.host()?;
        let host = written.trim_start_matches('[').trim_end_matches(']').to_owned();
        let authority = uri.port().map_or_else(|| written.to_owned(), |port| format!("{written}:{port}"));
        let port = uri.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        Some(Self { is_https, host, port, authority })
    }

    /// Returns the server's address as `host:port`, with brackets around an IPv6 address.
    pub(super) fn with_port(&self) -> String {
        let (host, port) = (&self.host, self.port);
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Returns the server's URL without its path.
    pub(super) fn url(&self) -> String {
        let scheme = if self.is_https { "https" } else { "http" };
        format!("{scheme}://{}", self.authority)
    }
}

/// Returns the header for Basic authentication with the user and the password in a URL.
pub(super) fn password(uri: &Uri) -> Option<HeaderValue> {
    let (user, _) = uri.authority()?.as_str().rsplit_once('@')?;
    let user: Vec<u8> = percent_decode_str(user).collect();
    let mut header = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(user))).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// An HTTP proxy to which the client connects without TLS.
pub(super) struct Proxy {
    address: ApiAddress,
    pub(super) authorization: Option<HeaderValue>,
}

impl Proxy {
    /// Parses the URL of an HTTP proxy.
    ///
    /// # Errors
    /// An error if the URL does not name an HTTP proxy without TLS. The error message does not repeat the URL, which
    /// may contain a password.
    pub(super) fn new(url: &str) -> Result<Self, ApiProblem> {
        let unsupported = || {
            ApiProblem::new(
                "the kubeconfig asks for a proxy-url that is not supported",
                "write it as http://host:port; proxies that are spoken to by https or socks5 are not supported",
            )
        };
        let uri: Uri = url.parse().map_err(|_| unsupported())?;
        let address = ApiAddress::of(&uri).filter(|address| !address.is_https).ok_or_else(unsupported)?;
        Ok(Self { address, authorization: password(&uri) })
    }
}

/// How to connect to a server: its address, and the proxy and TLS settings for it.
pub(super) struct ApiRoute {
    pub(super) address: ApiAddress,
    pub(super) proxy: Option<Proxy>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl ApiRoute {
    /// Combines the settings for connections to a server; returns `None` if the server's name is invalid. The closure
    /// `tls` is called only for an HTTPS server. The server's certificate must contain the name `server_name` if it is
    /// set, or else the host in the server's address.
    pub(super) fn new(
        address: ApiAddress,
        proxy: Option<Proxy>,
        server_name: Option<String>,
        tls: impl FnOnce() -> Result<ClientConfig, ApiProblem>,
    ) -> Result<Option<Self>, ApiProblem> {
        let mut way = Self { address, proxy, tls: None };
        if way.address.is_https {
            let name = server_name.unwrap_or_else(|| way.address.host.clone());
            let Ok(name) = ServerName::try_from(name) else { return Ok(None) };
            way.tls = Some((TlsConnector::from(Arc::new(tls()?)), name));
        }
        Ok(Some(way))
    }

    /// True if a proxy reads and forwards the requests, because the server uses no TLS. A request that a proxy forwards
    /// must contain the server's full URL.
    pub(super) fn is_read_by_proxy(&self) -> bool {
        self.proxy.is_some() && !self.address.is_https
    }

    /// Returns the address to connect to: the proxy's address if there is a proxy, or else the server's address.
    pub(super) fn first(&self) -> &ApiAddress {
        self.proxy.as_ref().map_or(&self.address, |proxy| &proxy.address)
    }

    /// Opens a connection to the server, through the proxy if there is one.
    pub(super) async fn open(&self) -> Result<Box<dyn ApiStream>, ApiFailure> {
        let ApiAddress { host, port, .. } = self.first();
        let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(ApiFailure::Unreachable)?;
        // Disable Nagle's algorithm, which may delay a small request.
        let _ = stream.set_nodelay(true);
        let stream: Box<dyn ApiStream> = match &self.proxy {
            Some(proxy) if self.address.is_https => self.connect_through(proxy, stream).await?,
            _ => Box::new(stream),
        };
        let Some((connector, name)) = &self.tls else { return Ok(stream) };
        let refused = |error: io::Error| {
            ApiProblem::new(
                format!("{} is not trusted, or does not speak TLS: {error}", self.address.url()),
                "check the authority in the kubeconfig, and the address",
            )
        };
        Ok(Box::new(connector.connect(name.clone(), stream).await.map_err(refused)?))
    }

    /// Opens a tunnel to the server through a proxy, with the HTTP method CONNECT.
    async fn connect_through(&self, proxy: &Proxy, stream: TcpStream) -> Result<Box<dyn ApiStream>, ApiProblem> {
        let shown = proxy.address.url();
        let advice = "check proxy-url in the kubeconfig, and what the proxy allows";
        let broken = |error: hyper::Error| {
            ApiProblem::transient(format!("the connection to the proxy {shown} broke: {error}"), advice)
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection.with_upgrades());
        let server = self.address.with_port();
        let mut request = Request::builder().method(Method::CONNECT).uri(&server).header(HOST, &server);
        if let Some(authorization) = &proxy.authorization {
            request = request.header(PROXY_AUTHORIZATION, authorization);
        }
        let request = request.body(Empty::<Bytes>::new());
        let request = request.map_err(|error| ApiProblem::new(format!("cannot ask the proxy: {error}"), advice))?;
        let answer = sender.send_request(request).await.map_err(broken)?;
        let status = answer.status();
        if !status.is_success() {
            let what = format!("the proxy {shown} refused a connection to {server}: {status}");
            return Err(if status.is_server_error() {
                ApiProblem::transient(what, advice)
            } else {
                ApiProblem::new(what, advice)
            });
        }
        let upgraded = hyper::upgrade::on(answer).await.map_err(broken)?;
        Ok(Box::new(TokioIo::new(upgraded)))
    }
}

/// Which server certificates a TLS client trusts.
pub(super) enum TlsTrust {
    /// The client trusts the certificate authorities that the machine's system trusts.
    System,
    /// The client trusts only the given certificate authorities, in PEM format.
    Authority(Vec<u8>),
    /// The client trusts every server certificate (`insecure-skip-tls-verify`).
    Everyone,
}

/// The client certificate and key with which the plugin authenticates itself, in PEM format.
pub(super) struct ClientIdentity {
    pub(super) certificate: Vec<u8>,
    pub(super) key: Vec<u8>,
}

pub(super) fn tls_config(trust: &TlsTrust, identity: Option<&ClientIdentity>) -> Result<ClientConfig, ApiProblem> {
    let unusable =
        |what: &str| ApiProblem::new(format!("{what} for the Kubernetes API cannot be used"), "check the kubeconfig");
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|_| unusable("TLS"))?;
    let builder = match trust {
        TlsTrust::Everyone => {
            tracing::warn!(
                "the certificate of the Kubernetes API is not checked: the kubeconfig has insecure-skip-tls-verify"
            );
            builder.dangerous().with_custom_certificate_verifier(Arc::new(UncheckedVerifier(provider)))
        }
        TlsTrust::System => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            builder.with_root_certificates(roots)
        }
        TlsTrust::Authority(pem) => {
            builder.with_root_certificates(authorities(pem).ok_or_else(|| unusable("the authority"))?)
        }
    };
    let Some(ClientIdentity { certificate, key }) = identity else { return Ok(builder.with_no_client_auth()) };
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
    let certificates = certificates.map_err(|_| unusable("the client certificate"))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| unusable("the client key"))?;
    builder.with_client_auth_cert(certificates, key).map_err(|_| unusable("the client certificate"))
}

/// Parses the certificates of certificate authorities; returns `None` if the text contains no certificate, or an
/// invalid certificate.
fn authorities(pem: &[u8]) -> Option<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.ok()?).ok()?;
    }
    (!roots.is_empty()).then_some(roots)
}

/// A TLS verifier that accepts every certificate, provided that the server has the private key of the certificate.
#[derive(Debug)]
struct UncheckedVerifier(Arc<CryptoProvider>);

impl ServerCertVerifier for UncheckedVerifier {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Maximum size of a credential file, in bytes; far larger than any real one.
const MAX_CREDENTIAL_BYTES: u64 = 1 << 20;
const WHY_KUBERNETES: &str =
    "the plugin logs in to the Kubernetes API or verifies that API with this file: only its owner may write to it";
const WHY_ETCD: &str = "the plugin logs in to etcd or verifies etcd with this file: only its owner may write to it";
/// The mode bits by which users other than a file's owner may write to the file.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Reads a file that contains credentials or certificates. A credential file is refused if users other than its owner
/// may write to it, because these users could replace the plugin's credentials or make the plugin trust another server.
pub(super) fn read_credentials(path: &Path) -> Result<Vec<u8>, ApiProblem> {
    let shown = path.display();
    let unreadable = |error: io::Error| {
        ApiProblem::new(
            format!("cannot read {shown}: {error}"),
            "check kubernetes.kubeconfig, and that the file is there",
        )
    };
    // Without O_NONBLOCK, opening a path that is a named pipe would block.
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path).map_err(unreadable)?;
    check_file(path, &file, WHY_KUBERNETES).map_err(unreadable)??;
    let mut bytes = Vec::new();
    file.take(MAX_CREDENTIAL_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MAX_CREDENTIAL_BYTES {
        return Err(ApiProblem::new(
            format!("{shown} has more than {MAX_CREDENTIAL_BYTES} bytes"),
            "check that it is the right file",
        ));
    }
    Ok(bytes)
}

/// Checks the owner and mode of a file with etcd's key or certificates, as [`read_credentials`] does. A credential file
/// that cannot be opened is no error here, because etcd's client reports this problem later.
pub(crate) fn check_owner(path: &Path) -> agent::Result<()> {
    let opened = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path);
    match opened.and_then(|file| check_file(path, &file, WHY_ETCD)) {
        Ok(Err(ApiProblem { code, what, advice })) => Err(CniError::new(code, what).with_details(advice)),
        Ok(Ok(())) | Err(_) => Ok(()),
    }
}

fn check_file(path: &Path, file: &File, why: &str) -> io::Result<Result<(), ApiProblem>> {
    let about = file.metadata()?;
    let (shown, owner) = (path.display(), about.uid());
    if !about.is_file() {
        return Err(io::Error::other("this is no file"));
    }
    let remedy = format!("chown root {shown} && chmod go-w {shown}");
    Ok(if about.mode() & WRITABLE_BY_OTHERS != 0 {
        Err(ApiProblem::new(format!("others than its owner may write to {shown}; run: chmod go-w {shown}"), why))
    } else if owner != 0 && owner != geteuid().as_raw() {
        Err(ApiProblem::new(format!("{shown} belongs to the user {owner}; run: {remedy}"), why))
    } else {
        Ok(())
    })
}

/// A problem with the Kubernetes API or its configuration, and advice for the user. Neither the problem's description
/// nor the advice contains a secret.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ApiProblem {
    pub(super) code: Code,
    pub(super) what: String,
    pub(super) advice: String,
}

impl ApiProblem {
    /// Creates a permanent error, which persists until a user changes the configuration or the cluster.
    pub(super) fn new(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: Code::Internal, what: what.into(), advice: advice.into() }
    }

    /// Creates a temporary error, which may disappear when the request is repeated later.
    pub(super) fn transient(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { code: Code::TryAgain, ..Self::new(what, advice) }
    }
}

/// The reason why a request to a server failed. The main plugin and the IPAM plugin report `Unreachable` and `Late` in
/// different words.
#[derive(Debug)]
pub(super) enum ApiFailure {
    /// The connection to the server or proxy could not be opened.
    Unreachable(io::Error),
    /// The server did not respond within the given time limit.
    Late(Duration),
    /// Any problem of the request that is neither an unreachable server nor a timeout.
    Reported(ApiProblem),
}

impl From<ApiProblem> for ApiFailure {
    fn from(problem: ApiProblem) -> Self {
        Self::Reported(problem)
    }
}

impl fmt::Display for ApiFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(error) => error.fmt(f),
            Self::Late(left) => write!(f, "there was no answer in {:.1} s", left.as_secs_f32()),
            Self::Reported(problem) => f.write_str(&problem.what),
        }
    }
}
