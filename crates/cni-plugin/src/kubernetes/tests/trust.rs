//! Tests of the certificate authorities that the Kubernetes client trusts, and of the client's own certificate.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use agent::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

use super::{Reply, Server, kubeconfig, kubernetes, reported, write};
use crate::kubernetes::Kubernetes;

const LONG: Duration = Duration::from_secs(20);

/// A test certificate authority and the certificates that it issued, in PEM format.
pub(crate) struct Certificates {
    authority: String,
    /// The server's certificate and key, for the host 127.0.0.1 or `api.example`.
    server: (String, String),
    client: (String, String),
}

impl Certificates {
    pub(crate) fn make() -> Self {
        Self::for_host("127.0.0.1")
    }

    fn for_host(host: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let issue = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
            (certificate.pem(), key.serialize_pem())
        };
        Self { authority: authority.pem(), server: issue(host), client: issue("plugin") }
    }

    pub(crate) fn authority_data(&self) -> String {
        STANDARD.encode(&self.authority)
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.as_bytes()).unwrap()).unwrap();
        roots
    }

    /// Returns the TLS configuration of a server that accepts clients without a certificate.
    pub(crate) fn server(&self) -> ServerConfig {
        self.config(None)
    }

    /// Returns the TLS configuration of a server that requires a client certificate.
    fn server_for_known(&self) -> ServerConfig {
        self.config(Some(Arc::new(self.roots())))
    }

    fn config(&self, clients: Option<Arc<RootCertStore>>) -> ServerConfig {
        let provider = Arc::new(ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions().unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(roots) => builder.with_client_cert_verifier(
                WebPkiClientVerifier::builder_with_provider(roots, provider).build().unwrap(),
            ),
        };
        let (certificate, key) = &self.server;
        let certificate = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        builder.with_single_cert(vec![certificate], PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
    }

    pub(crate) fn start(&self) -> Server {
        Server::with_tls(self.server(), |_, _| Reply::ok(r#"{"metadata":{}}"#))
    }
}

async fn ask(kubernetes: &Kubernetes) -> Result<()> {
    kubernetes.client()?.namespace("shop", LONG).await.map(drop)
}

#[tokio::test]
async fn authority_comes_from_file_or_inline() {
    let (folder, certificates) = (TempDir::new().unwrap(), Certificates::make());
    let server = certificates.start();
    write(&folder.path().join("ca.pem"), &certificates.authority);
    let stranger = Certificates::make().authority_data();
    let (url, data) = (server.url(), certificates.authority_data());
    for cluster in [
        json!({"server": url, "certificate-authority": "ca.pem"}),
        json!({"server": url, "certificate-authority-data": data}),
        json!({"server": url, "certificate-authority-data": data, "certificate-authority": "nowhere"}),
    ] {
        ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap();
    }
    // The certificate authority in the network configuration replaces the kubeconfig's authority, even if the
    // kubeconfig has `insecure-skip-tls-verify`.
    let overruled = |cluster: &Value| {
        kubeconfig(&folder, cluster, &json!({}));
        let policy = json!({"k8s_certificate_authority": folder.path().join("ca.pem")});
        let kubernetes = json!({"kubeconfig": folder.path().join("kubeconfig")});
        super::kubernetes(&json!({"kubernetes": kubernetes, "policy": policy}))
    };
    ask(&overruled(&json!({"server": url, "certificate-authority-data": stranger}))).await.unwrap();
    let other = Certificates::make().start();
    let wrong = overruled(&json!({"server": other.url(), "insecure-skip-tls-verify": true}));
    assert_eq!(reported(ask(&wrong).await.unwrap_err()).0, 999);
    for cluster in [json!({"server": url}), json!({"server": url, "certificate-authority-data": stranger})] {
        let (code, text) = reported(ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap_err());
        let beginning = format!("{url} is not trusted, or does not speak TLS: ");
        assert!(code == 999 && text.starts_with(&beginning), "{code} {text}");
    }
    for pem in ["", "hidden", "-----BEGIN CERTIFICATE-----\naGlkZGVu\n-----END CERTIFICATE-----\n"] {
        write(&folder.path().join("ca.pem"), pem);
        let error = ask(&overruled(&json!({"server": url}))).await.unwrap_err();
        assert_eq!(reported(error), (999, "the authority for the Kubernetes API cannot be used".to_owned()));
    }
}

#[tokio::test]
async fn server_name_in_certificate_may_differ() {
    let (folder, certificates) = (TempDir::new().unwrap(), Certificates::for_host("api.example"));
    let server = certificates.start();
    let mut cluster = json!({"server": server.url(), "certificate-authority-data": certificates.authority_data()});
    assert_eq!(reported(ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap_err()).0, 999);
    cluster["tls-server-name"] = "api.example".into();
    ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap();
    // The server name in the kubeconfig applies only to the API server that the kubeconfig names.
    let root = json!({"kubeconfig": folder.path().join("kubeconfig"), "k8s_api_root": server.url()});
    assert_eq!(reported(ask(&kubernetes(&json!({"kubernetes": root}))).await.unwrap_err()).0, 999);
    cluster["tls-server-name"] = "no name".into();
    let text = reported(ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap_err()).1;
    assert_eq!(text, "the address of the Kubernetes API is no URL");
}

#[tokio::test]
async fn verification_is_skipped_when_kubeconfig_says_so() {
    let (folder, server) = (TempDir::new().unwrap(), Certificates::for_host("elsewhere.example").start());
    let mut cluster = json!({"server": server.url(), "insecure-skip-tls-verify": true});
    ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap();
    cluster["certificate-authority-data"] = Certificates::make().authority_data().into();
    let text = reported(ask(&kubeconfig(&folder, &cluster, &json!({}))).await.unwrap_err()).1;
    assert!(text.contains("names an authority and has insecure-skip-tls-verify"), "{text}");
}

#[tokio::test]
async fn client_certificate_comes_from_files_or_inline() {
    let (folder, certificates) = (TempDir::new().unwrap(), Certificates::make());
    let server = Server::with_tls(certificates.server_for_known(), |_, _| Reply::ok(r#"{"metadata":{}}"#));
    let cluster = json!({"server": server.url(), "certificate-authority-data": certificates.authority_data()});
    let at = |name: &str| folder.path().join(name);
    let (certificate, key) = &certificates.client;
    write(&at("client.pem"), certificate);
    write(&at("client.key"), key);
    let user = json!({"client-certificate": "client.pem", "client-key": "client.key"});
    ask(&kubeconfig(&folder, &cluster, &user)).await.unwrap();
    let user =
        json!({"client-certificate-data": STANDARD.encode(certificate), "client-key-data": STANDARD.encode(key)});
    ask(&kubeconfig(&folder, &cluster, &user)).await.unwrap();
    // The certificate and key in the network configuration override the kubeconfig's certificate and key.
    let stranger = Certificates::make().client;
    let user =
        json!({"client-certificate-data": STANDARD.encode(stranger.0), "client-key-data": STANDARD.encode(stranger.1)});
    let refused = kubeconfig(&folder, &cluster, &user);
    assert_eq!(reported(ask(&refused).await.unwrap_err()).0, 11, "the server hangs up");
    let policy = json!({"k8s_client_certificate": at("client.pem"), "k8s_client_key": at("client.key")});
    let conf = json!({"kubernetes": {"kubeconfig": at("kubeconfig")}, "policy": policy});
    ask(&kubernetes(&conf)).await.unwrap();
    for (name, what) in [("client.pem", "the client certificate"), ("client.key", "the client key")] {
        write(&at(name), "-----BEGIN hidden-----");
        let text = reported(ask(&kubernetes(&conf)).await.unwrap_err()).1;
        assert_eq!(text, format!("{what} for the Kubernetes API cannot be used"));
        write(&at("client.pem"), certificate);
    }
}

#[tokio::test]
async fn server_without_tls_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 hidden\r\n\r\n").unwrap();
        // Read the client's request, because closing a connection with unread data would reset the connection.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    });
    let (folder, cluster) = (TempDir::new().unwrap(), json!({"server": format!("https://{address}")}));
    let text = reported(ask(&kubeconfig(&folder, &cluster, &json!({"token": "hidden"}))).await.unwrap_err()).1;
    assert!(text.starts_with(&format!("https://{address} is not trusted, or does not speak TLS: ")), "{text}");
}
