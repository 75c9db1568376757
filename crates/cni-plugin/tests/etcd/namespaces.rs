//! Tests of IP pools that are selected by the labels of a Kubernetes namespace. Selecting a pool by labels costs one
//! request to the Kubernetes API, and only if a pool has a namespace selector.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use conformance::patient;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::lab::Lab;
use crate::process::{Call, Outcome};

const TOKEN: &str = "hidden-token";
const TEAM: &str = r#"{"kind":"Namespace","apiVersion":"v1","metadata":{"name":"blue","labels":{"team":"x"}}}"#;

/// An HTTPS server with the small part of the Kubernetes API that the tests need.
struct Api {
    address: String,
    /// The HTTP heads of all requests that the server has received.
    asked: Arc<Mutex<Vec<String>>>,
    authority: String,
    _runtime: tokio::runtime::Runtime,
}

impl Api {
    /// Starts a server that replies to every request with the given HTTP status and body, or never if the status is
    /// empty.
    fn answering(status: &'static str, body: &'static str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_slice(certificate.pem().as_bytes()).unwrap()],
                PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap(),
            )
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let heads = Arc::clone(&asked);
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, heads) = (acceptor.clone(), Arc::clone(&heads));
                tokio::spawn(async move {
                    // A client that does not trust the test server's certificate closes the connection.
                    let Ok(mut stream) = acceptor.accept(socket).await else { return };
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(stream.read_u8().await.unwrap());
                    }
                    let head = String::from_utf8(head).unwrap();
                    heads.lock().unwrap_or_else(PoisonError::into_inner).push(head);
                    if status.is_empty() {
                        tokio::time::sleep(Duration::from_secs(60)).await;
                    }
                    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    stream.write_all(answer.as_bytes()).await.unwrap();
                    stream.flush().await.unwrap();
                });
            }
        });
        Self { address, asked, authority: authority.pem(), _runtime: runtime }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes a kubeconfig in the format that Calico's installer writes.
    fn kubeconfig(&self, folder: &Path) -> PathBuf {
        write(&folder.join("ca.pem"), &self.authority);
        let text = format!(
            "# Kubeconfig file for Calico CNI plugin.\napiVersion: v1\nkind: Config\nclusters:\n- name: local\n  cluster:\n    \
             server: https://{}\n    certificate-authority: ca.pem\nusers:\n- name: calico\n  user:\n    token: \"{TOKEN}\"\n\
             contexts:\n- name: calico-context\n  context:\n    cluster: local\n    user: calico\ncurrent-context: calico-context\n",
            self.address
        );
        let path = folder.join("kubeconfig");
        write(&path, &text);
        path
    }
}

/// Writes a file that only its owner may write to, independent of the umask.
fn write(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    set_mode(path, 0o644);
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Starts a test cluster with a pool for namespaces with the label `team: x`. The network configurations of these tests
/// exclude the default test pool.
fn lab_with_teams() -> Lab {
    let lab = Lab::start();
    let pool = r#"{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"team"},"spec":{"cidr":"10.78.0.0/24",
        "blockSize":26,"namespaceSelector":"team == 'x'","nodeSelector":"all()"}}"#;
    lab.put("/calico/resources/v3/projectcalico.org/ippools/team", pool);
    lab
}

fn pod(verb: &str, conf: &Value) -> Call {
    let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=blue;K8S_POD_NAME=web";
    Call::new(verb, "c1", conf).with("CNI_ARGS", args)
}

fn conf(lab: &Lab, kubeconfig: &Path) -> Value {
    let mut conf = lab.conf();
    conf["kubernetes"] = json!({"kubeconfig": kubeconfig});
    // The network's pool list is empty, so the network does not use the test's default pool.
    conf["ipam"]["ipv4_pools"] = json!([]);
    conf
}

#[track_caller]
fn no_secret(outcome: &Outcome) {
    assert!(!format!("{outcome:?}").contains("hidden"), "{outcome:?}");
}

#[test]
fn namespace_labels_choose_pool() {
    let (lab, api) = (lab_with_teams(), Api::answering("200 OK", TEAM));
    lab.put("/calico/resources/v3/projectcalico.org/ippools/lab", &disabled(&lab));
    let conf = conf(&lab, &api.kubeconfig(lab.root.path()));
    let outcome = pod("ADD", &conf).ok();
    no_secret(&outcome);
    assert!(outcome.address().to_string().starts_with("10.78.0."), "{outcome:?}");
    let asked = api.asked();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(asked[0].starts_with("GET /api/v1/namespaces/blue HTTP/1.1\r\n"), "{asked:?}");
    assert!(asked[0].contains(&format!("authorization: Bearer {TOKEN}\r\n")), "{asked:?}");
    pod("DEL", &conf).ok();
    lab.nothing_is_left();
    assert_eq!(api.asked().len(), 1, "DEL needs no labels");
    // STATUS has no Kubernetes namespace, so it does not request a namespace's labels from the Kubernetes API.
    let mut status = conf;
    status["cniVersion"] = "1.1.0".into();
    pod("STATUS", &status).ok();
    assert_eq!(api.asked().len(), 1);
}

/// Returns the default test pool's document with `disabled` set to true.
fn disabled(lab: &Lab) -> String {
    use kv::StoreExt;
    lab.with_ipam(datastore::Create::Never, async |ipam, _| {
        let stored = ipam.store().get("/calico/resources/v3/projectcalico.org/ippools/lab").await.unwrap().unwrap();
        let mut pool: Value = serde_json::from_slice(stored.value.as_bytes()).unwrap();
        pool["spec"]["disabled"] = true.into();
        pool.to_string()
    })
}

#[test]
fn namespace_is_not_read_when_no_pool_needs_it() {
    let api = Api::answering("200 OK", TEAM);
    let lab = Lab::start();
    let conf = conf(&lab, &api.kubeconfig(lab.root.path()));
    pod("ADD", &conf).ok();
    assert_eq!(api.asked().len(), 0);
    // As in Calico, a namespace counts as having no labels if no kubeconfig is configured.
    let lab = lab_with_teams();
    let outcome = pod("ADD", &lab.conf()).ok();
    assert!(outcome.address().to_string().starts_with("10.77.0."), "{outcome:?}");
}

#[test]
fn namespace_error_when_api_refuses_says_what_to_do() {
    let lab = lab_with_teams();
    for (status, body, code, texts) in [
        ("403 Forbidden", "{}", 999, ["does not allow it", "a role with the verb get on namespaces"]),
        ("401 Unauthorized", "{}", 999, ["does not know who asks", "it may have run out"]),
        ("404 Not Found", "{}", 999, ["knows no such namespace", "the right cluster"]),
        ("503 Service Unavailable", "", 11, ["answered 503", "see the log of the Kubernetes API"]),
        ("200 OK", "<html>", 999, ["is no namespace", "the address of a Kubernetes API"]),
    ] {
        let api = Api::answering(status, body);
        let outcome = pod("ADD", &conf(&lab, &api.kubeconfig(lab.root.path()))).run();
        let refusal = outcome.refusal();
        refusal.says(&["failed to get namespace blue: ", &api.address]).says(&texts);
        assert_eq!(refusal.code, code, "{refusal:?}");
        no_secret(&outcome);
    }
    lab.nothing_is_left();
}

#[test]
fn namespace_wait_stays_within_call_when_api_is_silent() {
    let (lab, api) = (lab_with_teams(), Api::answering("", ""));
    let mut conf = conf(&lab, &api.kubeconfig(lab.root.path()));
    let begun = Instant::now();
    let refusal = pod("ADD", &conf).run().refusal();
    assert_eq!(refusal.says(&["failed to get namespace blue: ", "gave no answer in 5.0 s"]).code, 11);
    assert!(begun.elapsed() < patient(Duration::from_secs(11)), "{:?}", begun.elapsed());
    conf["datastore_timeout"] = 2.into();
    pod("ADD", &conf).run().refusal().says(&["gave no answer in"]);
    lab.nothing_is_left();
}

#[test]
fn namespace_error_when_kubeconfig_is_bad_says_what_to_do() {
    let (lab, api) = (lab_with_teams(), Api::answering("200 OK", TEAM));
    let missing = lab.root.path().join("none");
    pod("ADD", &conf(&lab, &missing)).run().refusal().says(&["cannot read ", "none: ", "kubernetes.kubeconfig"]);
    let path = api.kubeconfig(lab.root.path());
    let good = std::fs::read_to_string(&path).unwrap();
    for (from, to, texts) in [
        ("token:", "token: [hidden", ["cannot be read: something is wrong in line", "kubectl config view"]),
        (
            "current-context: calico-context",
            "current-context: other",
            ["has no current context", "kubectl config view"],
        ),
        (
            "certificate-authority: ca.pem",
            "proxy-url: https://me:hidden@127.0.0.1:1",
            ["is not supported", "http://host:port"],
        ),
        ("token: ", "exec: ", ["is not supported", "give a token"]),
        ("https://", "hidden://", ["is no URL", "https://host:port"]),
        ("certificate-authority: ca.pem", "tls-server-name: 127.0.0.1", ["is not trusted", "check the authority"]),
        (
            "certificate-authority: ca.pem",
            "certificate-authority-data: \"hidden!\"",
            ["not in base64", "mend the kubeconfig"],
        ),
        ("certificate-authority: ca.pem", "certificate-authority: nowhere.pem", ["nowhere.pem: No such file", "check"]),
    ] {
        write(&path, &good.replace(from, to));
        let outcome = pod("ADD", &conf(&lab, &path)).run();
        outcome.refusal().says(&["failed to get namespace blue: "]).says(&texts);
        no_secret(&outcome);
    }
    write(&path, &good);
    for (file, mode) in [("kubeconfig", 0o664), ("ca.pem", 0o646)] {
        let file = lab.root.path().join(file);
        set_mode(&file, mode);
        let refusal = pod("ADD", &conf(&lab, &path)).run().refusal();
        refusal.says(&["others than its owner may write to", &format!("chmod go-w {}", file.display())]);
        set_mode(&file, 0o600);
    }
    assert_eq!(api.asked().len(), 0);
    // If the kubeconfig turns off the check of the API's certificate, the plugin call logs a warning.
    write(&path, &good.replace("certificate-authority: ca.pem", "insecure-skip-tls-verify: true"));
    let outcome = pod("ADD", &conf(&lab, &path)).ok();
    assert!(outcome.stderr.contains("insecure-skip-tls-verify"), "{outcome:?}");
    assert_eq!(api.asked().len(), 1);
    pod("DEL", &conf(&lab, &path)).ok();
    lab.nothing_is_left();
}

#[test]
fn namespace_is_read_by_service_account_within_cluster() {
    let (lab, api) = (lab_with_teams(), Api::answering("200 OK", TEAM));
    let mut conf = lab.conf();
    conf["policy"] = json!({"type": "k8s"});
    pod("ADD", &conf).run().refusal().says(&["nothing says where the Kubernetes API is", "set kubernetes.kubeconfig"]);
    let account = lab.root.path().join("account");
    std::fs::create_dir(&account).unwrap();
    write(&account.join("token"), &format!("{TOKEN}\n"));
    write(&account.join("ca.crt"), &api.authority);
    // Run the plugin in its own mount namespace, so that other processes still see the original /run.
    let script = format!(
        "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io && ln -s {} /run/secrets/kubernetes.io/serviceaccount \
         && exec \"$0\"",
        account.display()
    );
    let (host, port) = api.address.split_once(':').unwrap();
    let add = pod("ADD", &conf)
        .with("PATH", "/usr/bin:/bin")
        .with("KUBERNETES_SERVICE_HOST", host)
        .with("KUBERNETES_SERVICE_PORT", port);
    let outcome = add.run_as(add.command_through(&["/usr/bin/unshare", "--mount", "/bin/sh", "-c", &script]));
    assert_eq!(outcome.exit, 0, "{outcome:?}");
    assert_eq!(api.asked().len(), 1);
    assert!(api.asked()[0].contains(TOKEN), "{:?}", api.asked());
}
