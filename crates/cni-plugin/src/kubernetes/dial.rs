//! Connections to a server of HTTP: through a proxy or not, with TLS or without.

use std::io;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::header::{HOST, HeaderValue, PROXY_AUTHORIZATION};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::problem::{Failure, Problem};

/// A connection of whatever kind.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// The address of a server: what of a URL is about connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) is_https: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// Host and port as they are written.
    pub(super) authority: String,
}

impl Address {
    /// `None` if it is no URL of HTTP.
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

    /// Host and port.
    pub(super) fn with_port(&self) -> String {
        let (host, port) = (&self.host, self.port);
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// The beginning of a URL.
    pub(super) fn url(&self) -> String {
        let scheme = if self.is_https { "https" } else { "http" };
        format!("{scheme}://{}", self.authority)
    }
}

/// The header for the user and the password in a URL.
pub(super) fn password(uri: &Uri) -> Option<HeaderValue> {
    let (user, _) = uri.authority()?.as_str().rsplit_once('@')?;
    let user: Vec<u8> = percent_decode_str(user).collect();
    let mut header = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(user))).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// A proxy of HTTP that is spoken to without TLS.
pub(super) struct Proxy {
    address: Address,
    pub(super) authorization: Option<HeaderValue>,
}

impl Proxy {
    /// # Errors
    /// The URL is that of another kind of proxy. It is not repeated: a password may be in it.
    pub(super) fn new(url: &str) -> Result<Self, Problem> {
        let unsupported = || {
            Problem::new(
                "the kubeconfig asks for a proxy-url that is not supported",
                "write it as http://host:port; proxies that are spoken to by https or socks5 are not supported",
            )
        };
        let uri: Uri = url.parse().map_err(|_| unsupported())?;
        let address = Address::of(&uri).filter(|address| !address.is_https).ok_or_else(unsupported)?;
        Ok(Self { address, authorization: password(&uri) })
    }
}

/// How to get a connection to a server.
pub(super) struct Route {
    pub(super) address: Address,
    pub(super) proxy: Option<Proxy>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Route {
    /// `tls` is called for an address of https alone. `server_name` is the name in the server's certificate, if not its
    /// host's. `None` if that is no name.
    pub(super) fn new(
        address: Address,
        proxy: Option<Proxy>,
        server_name: Option<String>,
        tls: impl FnOnce() -> Result<ClientConfig, Problem>,
    ) -> Result<Option<Self>, Problem> {
        let mut way = Self { address, proxy, tls: None };
        if way.address.is_https {
            let name = server_name.unwrap_or_else(|| way.address.host.clone());
            let Ok(name) = ServerName::try_from(name) else { return Ok(None) };
            way.tls = Some((TlsConnector::from(Arc::new(tls()?)), name));
        }
        Ok(Some(way))
    }

    /// True if requests name the server, because a proxy reads them.
    pub(super) fn is_read_by_proxy(&self) -> bool {
        self.proxy.is_some() && !self.address.is_https
    }

    /// The address of the first peer: the proxy or the server itself.
    pub(super) fn first(&self) -> &Address {
        self.proxy.as_ref().map_or(&self.address, |proxy| &proxy.address)
    }

    /// A connection.
    pub(super) async fn open(&self) -> Result<Box<dyn Connection>, Failure> {
        let Address { host, port, .. } = self.first();
        let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(Failure::Unreachable)?;
        // A request is one packet, and its answer is waited for.
        let _ = stream.set_nodelay(true);
        let stream: Box<dyn Connection> = match &self.proxy {
            Some(proxy) if self.address.is_https => self.through(proxy, stream).await?,
            _ => Box::new(stream),
        };
        let Some((connector, name)) = &self.tls else { return Ok(stream) };
        let refused = |error: io::Error| {
            Problem::new(
                format!("{} is not trusted, or does not speak TLS: {error}", self.address.url()),
                "check the authority in the kubeconfig, and the address",
            )
        };
        Ok(Box::new(connector.connect(name.clone(), stream).await.map_err(refused)?))
    }

    /// A connection that a proxy makes to the server.
    async fn through(&self, proxy: &Proxy, stream: TcpStream) -> Result<Box<dyn Connection>, Problem> {
        let shown = proxy.address.url();
        let advice = "check proxy-url in the kubeconfig, and what the proxy allows";
        let broken = |error: hyper::Error| {
            Problem::passing(format!("the connection to the proxy {shown} broke: {error}"), advice)
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
        let request = request.map_err(|error| Problem::new(format!("cannot ask the proxy: {error}"), advice))?;
        let answer = sender.send_request(request).await.map_err(broken)?;
        let status = answer.status();
        if !status.is_success() {
            let what = format!("the proxy {shown} refused a connection to {server}: {status}");
            return Err(if status.is_server_error() {
                Problem::passing(what, advice)
            } else {
                Problem::new(what, advice)
            });
        }
        let upgraded = hyper::upgrade::on(answer).await.map_err(broken)?;
        Ok(Box::new(TokioIo::new(upgraded)))
    }
}
