//! Tests of the settings for the Kubernetes API in the network configuration and in the kubeconfig, and tests of
//! proxies.

use std::os::unix::fs::{chown, symlink};
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::trust::Certificates;
use super::{Reply, Server, TOKEN, kubeconfig, kubernetes, reported, set_mode, write};
use crate::kubernetes::Kubernetes;

const LONG: Duration = Duration::from_secs(20);

fn api() -> Server {
    Server::saying(Reply::ok(r#"{"metadata":{}}"#))
}

/// Returns the value of a header in the head of an HTTP request.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| line.split_once(": ").filter(|(found, _)| *found == name)).map(|(_, value)| value)
}

async fn ask(kubernetes: &Kubernetes) {
    kubernetes.client().unwrap().namespace("shop", LONG).await.unwrap();
}

#[track_caller]
fn refused(kubernetes: &Kubernetes) -> String {
    let error = kubernetes.client().err().unwrap_or_else(|| panic!("{kubernetes:?} must be refused"));
    let (code, text) = reported(error);
    assert_eq!(code, 999, "{text}");
    text
}

#[tokio::test]
async fn login_is_by_token_or_password() {
    for (user, expected) in [
        (json!({"token": TOKEN}), Some("Bearer hidden-token")),
        (json!({"tokenFile": "token"}), Some("Bearer hidden-in-file")),
        (json!({"token": TOKEN, "tokenFile": "token"}), Some("Bearer hidden-in-file")),
        (json!({"username": "me", "password": "hidden:x"}), Some("Basic bWU6aGlkZGVuOng=")),
        (json!({"username": "me"}), Some("Basic bWU6")),
        (json!({"token": TOKEN, "username": "me", "password": "x"}), Some("Bearer hidden-token")),
        (json!({"token": null, "tokenFile": "", "username": "", "password": null}), None),
        (json!({}), None),
    ] {
        let (folder, server) = (TempDir::new().unwrap(), api());
        write(&folder.path().join("token"), "\n hidden-in-file\n");
        ask(&kubeconfig(&folder, &json!({"server": server.url()}), &user)).await;
        assert_eq!(header(&server.only_head(), "authorization"), expected, "{user}");
    }
}

#[tokio::test]
async fn login_token_is_read_again_when_replaced() {
    let (folder, server) = (TempDir::new().unwrap(), api());
    let token = folder.path().join("token");
    write(&token, "one");
    let mut client =
        kubeconfig(&folder, &json!({"server": server.url()}), &json!({"tokenFile": token})).client().unwrap();
    client.namespace("shop", LONG).await.unwrap();
    // When Kubernetes replaces a token file, it renames a new file to the token file's name.
    write(&folder.path().join("new"), "two");
    std::fs::rename(folder.path().join("new"), &token).unwrap();
    client.namespace("shop", LONG).await.unwrap();
    let heads = server.heads();
    assert_eq!([0, 1].map(|at| header(&heads[at], "authorization").unwrap()), ["Bearer one", "Bearer two"]);
    assert_eq!(server.connections(), 1);
    write(&token, " \n");
    assert!(reported(client.namespace("shop", LONG).await.unwrap_err()).1.ends_with("token is empty"));
    write(&token, "two\nlines");
    assert!(reported(client.namespace("shop", LONG).await.unwrap_err()).1.contains("has characters that none has"));
}

#[tokio::test]
async fn login_configuration_beats_kubeconfig() {
    let (folder, server, other) = (TempDir::new().unwrap(), api(), api());
    kubeconfig(&folder, &json!({"server": server.url()}), &json!({"tokenFile": "nowhere"}));
    let path = folder.path().join("kubeconfig");
    let token = json!({"type": "k8s", "k8s_auth_token": "mine"});
    ask(&kubernetes(&json!({"kubernetes": {"kubeconfig": path}, "policy": token}))).await;
    assert_eq!(header(&server.only_head(), "authorization"), Some("Bearer mine"));
    // Like Calico's plugin, Margay ignores the part of `policy.k8s_api_root` from `/api/` on.
    let root = format!("{}/api/v1/", other.url());
    let policy = json!({"type": "k8s", "k8s_auth_token": "mine", "k8s_api_root": root});
    ask(&kubernetes(&json!({"kubernetes": {"kubeconfig": path}, "policy": policy}))).await;
    assert!(other.only_head().starts_with("GET /api/v1/namespaces/shop HTTP/1.1\r\n"));
    // The setting `kubernetes.k8s_api_root` overrides `policy.k8s_api_root`, and no part of its path is cut off.
    let root = format!("{}/proxy/", server.url());
    ask(&kubernetes(&json!({"kubernetes": {"k8s_api_root": root}, "policy": policy}))).await;
    assert!(server.heads()[1].starts_with("GET /proxy/api/v1/namespaces/shop HTTP/1.1\r\n"));
    assert_eq!(other.heads().len(), 1);
}

#[test]
fn login_error_when_kubeconfig_is_missing_or_not_named() {
    let nothing =
        "invalid configuration: no configuration has been provided, try setting KUBERNETES_MASTER environment variable";
    assert_eq!(refused(&kubernetes(&json!({}))), nothing);
    assert_eq!(refused(&kubernetes(&json!({"policy": {"type": "k8s", "k8s_auth_token": TOKEN}}))), nothing);
    let conf = json!({"kubernetes": {"kubeconfig": "/nowhere/none"}});
    assert_eq!(refused(&kubernetes(&conf)), "stat /nowhere/none: no such file or directory");
}

#[test]
fn login_error_names_supported_ways() {
    let folder = TempDir::new().unwrap();
    let cluster = json!({"server": "https://127.0.0.1:1"});
    for (user, what) in [
        (json!({"exec": {"command": "hidden"}}), "a login by a program (exec)"),
        (json!({"auth-provider": {"name": "hidden"}}), "a login by an auth-provider"),
        (json!({"as": "hidden"}), "requests in the name of another user (as)"),
    ] {
        let error = kubeconfig(&folder, &cluster, &user).client().err().unwrap();
        assert_eq!(error.details(), "give a token, a tokenFile, or a client certificate");
        let expected = format!("the kubeconfig asks for {what}, which is not supported");
        assert_eq!(reported(error), (999, expected));
    }
    for server in ["", "hidden", "127.0.0.1:6443", "hidden://x", "https://", "https://a b"] {
        let text = refused(&kubeconfig(&folder, &json!({"server": server}), &json!({})));
        assert_eq!(text, "the address of the Kubernetes API is no URL", "{server}");
    }
    for user in [json!({"client-key": "k"}), json!({"client-certificate-data": "aGlkZGVu"})] {
        write(&folder.path().join("k"), "hidden");
        let text = refused(&kubeconfig(&folder, &cluster, &user));
        assert_eq!(text, "a client certificate or its key is missing");
    }
    let text = refused(&kubeconfig(&folder, &cluster, &json!({"client-key-data": "hidden!"})));
    assert_eq!(text, "a value ending in -data is not in base64");
}

#[test]
fn kubeconfig_is_not_repeated_when_malformed() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("kubeconfig");
    let kubernetes = kubernetes(&json!({"kubernetes": {"kubeconfig": path}}));
    for text in [
        "",
        "hidden",
        "- hidden",
        "clusters: hidden",
        "users: [{name: a, user: {token: [hidden]}}]",
        "current-context: a\ncontexts: [{name: a, context: {cluster: b}}]",
        "a: &a [hidden, *a]",
        "\u{0}hidden",
    ] {
        write(&path, text);
        let reported = refused(&kubernetes);
        assert!(reported.starts_with(&format!("the kubeconfig {} ", path.display())), "{reported}");
    }
    write(&path, b"\xff\xfehidden");
    refused(&kubernetes);
    write(&path, "x".repeat((1 << 20) + 1));
    assert!(refused(&kubernetes).ends_with(" has more than 1048576 bytes"));
    std::fs::remove_file(&path).unwrap();
    // No process writes to this named pipe, so reading it would block.
    mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    assert!(refused(&kubernetes).ends_with("this is no file"));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(refused(&kubernetes).starts_with("cannot read "));
}

/// For each kind of credential file, returns the path of a file, and Kubernetes API settings that name the file.
fn each_file(folder: &TempDir) -> Vec<(PathBuf, Kubernetes)> {
    let at = |name: &str| folder.path().join(name);
    for name in ["token", "ca", "certificate", "key"] {
        write(&at(name), "hidden");
    }
    let with = |name: &str, authority: Option<&str>, user: Value| {
        let cluster = json!({"server": "http://127.0.0.1:1", "certificate-authority": authority});
        kubeconfig(folder, &cluster, &user);
        std::fs::rename(at("kubeconfig"), at(name)).unwrap();
        json!({"kubeconfig": at(name)})
    };
    let plain = with("plain", None, json!({}));
    let token = with("with-token", None, json!({"tokenFile": "token"}));
    let ca = with("with-authority", Some("ca"), json!({}));
    let both = with("with-certificate", None, json!({"client-certificate": "certificate", "client-key": "key"}));
    let policy = |name: &str, file: &str| json!({"kubernetes": plain, "policy": {name: at(file)}});
    let pair = json!({"k8s_client_certificate": at("certificate"), "k8s_client_key": at("key")});
    let ways = [
        (at("plain"), json!({"kubernetes": plain})),
        (at("token"), json!({"kubernetes": token})),
        (at("ca"), json!({"kubernetes": ca})),
        (at("certificate"), json!({"kubernetes": both})),
        (at("key"), json!({"kubernetes": both})),
        (at("ca"), policy("k8s_certificate_authority", "ca")),
        (at("certificate"), json!({"kubernetes": plain, "policy": pair})),
        (at("key"), json!({"kubernetes": plain, "policy": pair})),
    ];
    ways.into_iter().map(|(file, conf)| (file, kubernetes(&conf))).collect()
}

/// This test must run as root, because only root may change the owner of a file.
#[test]
fn kubeconfig_is_refused_when_writable_by_others() {
    let folder = TempDir::new().unwrap();
    for (file, kubernetes) in each_file(&folder) {
        assert!(kubernetes.client().is_ok(), "{}", file.display());
        let shown = file.display();
        for mode in [0o620, 0o602, 0o666, 0o664, 0o777] {
            set_mode(&file, mode);
            let expected = format!("others than its owner may write to {shown}; run: chmod go-w {shown}");
            assert_eq!(refused(&kubernetes), expected, "{mode:o}");
        }
        for mode in [0o600, 0o400, 0o644, 0o755] {
            set_mode(&file, mode);
            assert!(kubernetes.client().is_ok(), "{shown} {mode:o}");
        }
        chown(&file, Some(1234), None).unwrap();
        let expected = format!("{shown} belongs to the user 1234; run: chown root {shown} && chmod go-w {shown}");
        assert_eq!(refused(&kubernetes), expected);
        chown(&file, Some(0), None).unwrap();
        // Permissions are checked on the file itself, not on a symbolic link to the file.
        let aside = folder.path().join("aside");
        std::fs::rename(&file, &aside).unwrap();
        symlink(&aside, &file).unwrap();
        assert!(kubernetes.client().is_ok());
        set_mode(&aside, 0o666);
        assert!(refused(&kubernetes).contains("chmod go-w"));
        set_mode(&aside, 0o644);
        std::fs::rename(&aside, &file).unwrap();
    }
}

const NAMESPACE: &str = r#"{"metadata":{"labels":{"team":"x"}}}"#;

#[tokio::test]
async fn proxy_reads_requests_without_tls() {
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
async fn proxy_passes_on_what_it_cannot_read() {
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
    // The Proxy-Authorization header contains the Base64 form of `us@er:hidden`.
    assert!(head.contains("\r\nproxy-authorization: Basic dXNAZXI6aGlkZGVu\r\n"), "{head}");
    assert!(!head.contains(TOKEN), "{head}");
}

#[tokio::test]
async fn proxy_is_named_when_it_refuses_or_is_silent() {
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
fn proxy_of_other_kind_is_refused() {
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
