//! Tests of the Kubernetes client against HTTP servers on the loopback address with configurable replies.

mod client;
pub(super) mod trust;
mod ways_in;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use agent::CniError;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

use super::{KubeClient, Kubernetes};
use crate::env::Environment;
use crate::gojson::GoJson;
use crate::netconf::NetConf;

const TOKEN: &str = "hidden-token";

/// Returns the Kubernetes API settings of a network configuration, for a process outside of a cluster.
fn kubernetes(conf: &Value) -> Kubernetes {
    let conf = NetConf::decode(&GoJson::parse(conf.to_string().as_bytes()).unwrap()).unwrap();
    Kubernetes::from_conf(&conf, &Environment::default())
}

/// Writes a kubeconfig with the given cluster and user. The kubeconfig is written in JSON, which is also valid YAML.
fn kubeconfig(folder: &TempDir, cluster: &Value, user: &Value) -> Kubernetes {
    let text = json!({
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "local", "user": "plugin"}}],
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "plugin", "user": user}],
    });
    write(&folder.path().join("kubeconfig"), text.to_string());
    kubernetes(&json!({"kubernetes": {"kubeconfig": folder.path().join("kubeconfig")}}))
}

/// Writes a file that all users may read, whatever the umask is.
fn write(path: &Path, text: impl AsRef<[u8]>) {
    std::fs::write(path, text).unwrap();
    set_mode(path, 0o644);
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns a client that sends a bearer token to a server without TLS.
fn client(server: &Server) -> KubeClient {
    let policy = json!({"k8s_auth_token": TOKEN});
    kubernetes(&json!({"kubernetes": {"k8s_api_root": server.url()}, "policy": policy})).client().unwrap()
}

/// Checks that a CNI error contains no secret, and returns the code and message of the error.
#[track_caller]
fn reported(error: CniError) -> (u32, String) {
    let all = format!("{error:?} {error} {}", crate::invocation::to_json(&error));
    assert!(!all.contains("hidden"), "{all}");
    (error.code().number(), error.message().to_owned())
}

#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// An HTTP response with this status line, these additional header lines and this body.
    Say(String, String, String),
    /// Bytes that the test server sends before it closes the connection.
    Bytes(Vec<u8>),
    /// Bytes that the test server sends slowly, one every 100 ms.
    Drip(Vec<u8>),
    Nothing,
    /// The test server opens a tunnel to the host of the CONNECT request, as a proxy does.
    Tunnel,
}

impl Reply {
    pub(crate) fn ok(body: &str) -> Self {
        Self::status("200 OK", body)
    }

    pub(crate) fn status(status: &str, body: &str) -> Self {
        Self::Say(status.to_owned(), String::new(), body.to_owned())
    }

    /// Returns an error response of the Kubernetes API.
    pub(crate) fn refusal(status: &str, message: &str) -> Self {
        let body = serde_json::json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message});
        Self::status(status, &body.to_string())
    }
}

/// A test HTTP server that answers until it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    scheme: &'static str,
    seen: Arc<Seen>,
    runtime: Option<Runtime>,
}

#[derive(Default)]
struct Seen {
    heads: Mutex<Vec<String>>,
    connections: AtomicUsize,
}

type Answers = Arc<dyn Fn(usize, &str) -> Reply + Send + Sync>;

impl Server {
    /// Starts a server. The closure `answers` gets the index of the request and the request's head, and returns the
    /// server's reply.
    pub(crate) fn start(answers: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> Self {
        Self::with(None, Arc::new(answers))
    }

    fn with_tls(config: ServerConfig, answers: impl Fn(usize, &str) -> Reply + Send + Sync + 'static) -> Self {
        Self::with(Some(TlsAcceptor::from(Arc::new(config))), Arc::new(answers))
    }

    /// Starts a server that sends this reply to every request.
    pub(crate) fn saying(reply: Reply) -> Self {
        Self::start(move |_, _| reply.clone())
    }

    fn with(tls: Option<TlsAcceptor>, answers: Answers) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, scheme) = (Arc::<Seen>::default(), if tls.is_some() { "https" } else { "http" });
        let all = Arc::clone(&seen);
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            while let Ok((socket, _)) = listener.accept().await {
                let (tls, answers, seen) = (tls.clone(), Arc::clone(&answers), Arc::clone(&all));
                tokio::spawn(async move {
                    match tls {
                        None => serve(socket, &answers, &seen).await,
                        // The TLS handshake fails if the client has no required certificate, or does not trust this
                        // server.
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(socket).await {
                                serve(stream, &answers, &seen).await;
                            }
                        }
                    }
                });
            }
        });
        Self { address, scheme, seen, runtime: Some(runtime) }
    }

    pub(crate) fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    pub(crate) fn heads(&self) -> Vec<String> {
        self.seen.heads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the head of the only HTTP request that the server has received.
    #[track_caller]
    pub(crate) fn only_head(&self) -> String {
        let heads = self.heads();
        assert_eq!(heads.len(), 1, "{heads:?}");
        heads[0].clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A test may run inside its own tokio runtime, where waiting for this server's runtime to stop would panic.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send>(mut stream: S, answers: &Answers, seen: &Seen) {
    seen.connections.fetch_add(1, Ordering::SeqCst);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let Ok(byte) = stream.read_u8().await else { return };
            head.push(byte);
        }
        let head = String::from_utf8(head).unwrap();
        let number = {
            let mut heads = seen.heads.lock().unwrap_or_else(PoisonError::into_inner);
            heads.push(head.clone());
            heads.len() - 1
        };
        // A failed write is fine, because it means that the client has disconnected.
        match answers(number, &head) {
            Reply::Say(status, lines, body) => {
                let length = body.len();
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{lines}\r\n{body}");
                if stream.write_all(answer.as_bytes()).await.is_err() || lines.contains("connection: close") {
                    let _ = stream.shutdown().await;
                    return;
                }
            }
            Reply::Bytes(bytes) => {
                let _ = stream.write_all(&bytes).await;
                let _ = stream.shutdown().await;
                return;
            }
            Reply::Drip(bytes) => {
                for byte in bytes {
                    if stream.write_u8(byte).await.is_err() || stream.flush().await.is_err() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
            Reply::Nothing => tokio::time::sleep(Duration::from_secs(600)).await,
            Reply::Tunnel => return tunnel(&mut stream, &head).await,
        }
    }
}

async fn tunnel<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, head: &str) {
    let to = head.split(' ').nth(1).unwrap();
    let Ok(mut there) = TcpStream::connect(to).await else { return };
    stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.unwrap();
    let _ = tokio::io::copy_bidirectional(stream, &mut there).await;
}
