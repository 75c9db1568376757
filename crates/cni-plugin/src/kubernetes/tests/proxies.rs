//! Proxies between the plugin and the API.

use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use super::server::{Reply, Server};
use super::trust::Certificates;
use super::{TOKEN, kubeconfig, reported};

const LONG: Duration = Duration::from_secs(20);
const NAMESPACE: &str = r#"{"metadata":{"labels":{"team":"x"}}}"#;

#[tokio::test]
async fn a_proxy_reads_requests_without_tls() {
    let (folder, proxy) = (TempDir::new().unwrap(), Server::saying(Reply::ok(NAMESPACE)));
    let cluster = json!({"server": "http://api.example:8080/x", "proxy-url": proxy.url()});
    let kubernetes = kubeconfig(&folder, &cluster, &json!({"token": TOKEN}));
    let mut client = kubernetes.client().unwrap();
    client.namespace("shop", LONG).await.unwrap();
    client.namespace("shop", LONG).await.unwrap();
    assert_eq!(proxy.connections(), 1);
    for head in proxy.heads() {
        assert!(head.starts_with("GET http://api.example:8080/x/api/v1/namespaces/shop HTTP/1.1\r\n"), "{head}");
        assert!(head.contains("\r\nhost: api.example:8080\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nauthorization: Bearer {TOKEN}\r\n")), "{head}");
        assert!(!head.contains("proxy-authorization"), "{head}");
    }
}

#[tokio::test]
async fn a_proxy_passes_on_what_it_cannot_read() {
    let (folder, certificates) = (TempDir::new().unwrap(), Certificates::make());
    let server = Server::with_tls(certificates.server(), |_, _| Reply::ok(NAMESPACE));
    let proxy = Server::saying(Reply::Tunnel);
    let cluster = json!({
        "server": server.url(),
        "certificate-authority-data": certificates.authority_data(),
        "proxy-url": format!("http://us%40er:hid%64en@{}", proxy.address),
    });
    let mut client = kubeconfig(&folder, &cluster, &json!({"token": TOKEN})).client().unwrap();
    client.namespace("shop", LONG).await.unwrap();
    client.namespace("shop", LONG).await.unwrap();
    assert_eq!((server.heads().len(), server.connections()), (2, 1));
    let head = proxy.only_head();
    assert!(head.starts_with(&format!("CONNECT {0} HTTP/1.1\r\nhost: {0}\r\n", server.address)), "{head}");
    // us@er:hidden
    assert!(head.contains("\r\nproxy-authorization: Basic dXNAZXI6aGlkZGVu\r\n"), "{head}");
    assert!(!head.contains(TOKEN), "{head}");
}

#[tokio::test]
async fn a_proxy_that_refuses_or_says_nothing_is_told() {
    let folder = TempDir::new().unwrap();
    for (status, code) in [("407 Proxy Authentication Required", 999), ("403 Forbidden", 999), ("502 Bad Gateway", 11)]
    {
        let proxy = Server::saying(Reply::status(status, "hidden"));
        let url = format!("http://user:hidden@{}", proxy.address);
        let cluster = json!({"server": "https://127.0.0.1:1", "proxy-url": url});
        let mut client = kubeconfig(&folder, &cluster, &json!({"token": TOKEN})).client().unwrap();
        let expected = format!("the proxy http://{} refused a connection to 127.0.0.1:1: {status}", proxy.address);
        assert_eq!(reported(client.namespace("shop", LONG).await.unwrap_err()), (code, expected));
    }
    for reply in [Reply::Bytes(Vec::new()), Reply::Bytes(b"hidden\r\n\r\n".to_vec())] {
        let proxy = Server::saying(reply);
        let cluster = json!({"server": "https://127.0.0.1:1", "proxy-url": proxy.url()});
        let (code, text) =
            reported(kubeconfig(&folder, &cluster, &json!({})).client().unwrap().version(LONG).await.unwrap_err());
        assert!(
            code == 11 && text.starts_with(&format!("the connection to the proxy {} broke: ", proxy.url())),
            "{text}"
        );
    }
    let silent = Server::saying(Reply::Nothing);
    let cluster = json!({"server": "https://127.0.0.1:1", "proxy-url": silent.url()});
    let mut client = kubeconfig(&folder, &cluster, &json!({})).client().unwrap();
    let (code, text) = reported(client.version(Duration::from_millis(300)).await.unwrap_err());
    assert_eq!(
        (code, text.as_str()),
        (11, "Get \"https://127.0.0.1:1/version?timeout=2s\": context deadline exceeded")
    );
    let cluster = json!({"server": "https://api.example", "proxy-url": "http://127.0.0.1:1"});
    let (code, text) =
        reported(kubeconfig(&folder, &cluster, &json!({})).client().unwrap().version(LONG).await.unwrap_err());
    let expected = "Get \"https://api.example/version?timeout=2s\": proxyconnect tcp: dial tcp 127.0.0.1:1: connect: connection refused";
    assert_eq!((code, text.as_str()), (999, expected));
}

#[test]
fn other_kinds_of_proxies_are_refused() {
    let folder = TempDir::new().unwrap();
    for url in
        ["https://user:hidden@127.0.0.1:1", "socks5://user:hidden@127.0.0.1:1", "hidden", "http://", "://hidden", "a b"]
    {
        let cluster = json!({"server": "https://127.0.0.1:1", "proxy-url": url});
        let error = kubeconfig(&folder, &cluster, &json!({})).client().err().unwrap();
        assert!(error.details().starts_with("write it as http://host:port; "), "{error}");
        assert_eq!(reported(error).1, "the kubeconfig asks for a proxy-url that is not supported");
    }
}
