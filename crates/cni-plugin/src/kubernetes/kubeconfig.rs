//! Determines the address of the Kubernetes API and the credentials for it from a kubeconfig, the network
//! configuration, or the cluster that the process runs in.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Uri;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::Kubernetes;
use super::api::{Api, Login};
use super::dial::{self, ApiAddress, ApiProblem, ApiRoute, ClientIdentity, Proxy, TlsTrust};

/// The folder in which a pod's process finds the credentials of its service account.
const IN_CLUSTER_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Kubeconfig {
    current_context: String,
    contexts: Vec<NamedContext>,
    clusters: Vec<NamedCluster>,
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: KubeconfigContext,
}

#[derive(Deserialize)]
struct KubeconfigContext {
    cluster: String,
    #[serde(default)]
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: KubeconfigCluster,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct KubeconfigCluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: bool,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: KubeconfigUser,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct KubeconfigUser {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    username: Option<String>,
    password: Option<String>,
    exec: Option<IgnoredAny>,
    auth_provider: Option<IgnoredAny>,
    #[serde(rename = "as")]
    impersonated: Option<IgnoredAny>,
}

impl Kubernetes {
    /// Prepares access to the Kubernetes API, and reads all files that the settings name. The argument `agent` is the
    /// User-Agent header of the API requests.
    ///
    /// As in Kubernetes's own client, a value in the network configuration overrides the kubeconfig's value. If the
    /// network configuration sets the API server, the server name in the kubeconfig is ignored. If the network
    /// configuration sets a certificate authority, `insecure-skip-tls-verify` is ignored.
    pub(super) fn access(&self, agent: &'static str) -> Result<Api, ApiProblem> {
        let (mut cluster, mut user) = match (self.kubeconfig.as_os_str().is_empty(), self.api_root.is_empty()) {
            (false, _) => read_kubeconfig(&self.kubeconfig)?,
            (true, false) => (KubeconfigCluster::default(), KubeconfigUser::default()),
            (true, true) => self.in_cluster()?,
        };
        if !self.api_root.is_empty() {
            (cluster.server, cluster.tls_server_name) = (self.api_root.clone(), None);
        }
        if !self.authority.as_os_str().is_empty() {
            (cluster.certificate_authority, cluster.certificate_authority_data) = (Some(self.authority.clone()), None);
            cluster.insecure_skip_tls_verify = false;
        }
        if !self.token.is_empty() {
            (user.token, user.token_file) = (Some(self.token.clone()), None);
        }
        if !self.certificate.as_os_str().is_empty() {
            (user.client_certificate, user.client_certificate_data) = (Some(self.certificate.clone()), None);
        }
        if !self.key.as_os_str().is_empty() {
            (user.client_key, user.client_key_data) = (Some(self.key.clone()), None);
        }
        connect(cluster, user, agent)
    }

    fn in_cluster(&self) -> Result<(KubeconfigCluster, KubeconfigUser), ApiProblem> {
        let Some((host, port)) = &self.service else {
            return Err(ApiProblem::new("nothing says where the Kubernetes API is", "set kubernetes.kubeconfig"));
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let folder = Path::new(IN_CLUSTER_FOLDER);
        let cluster = KubeconfigCluster {
            server: format!("https://{host}:{port}"),
            certificate_authority: Some(folder.join("ca.crt")),
            ..KubeconfigCluster::default()
        };
        Ok((cluster, KubeconfigUser { token_file: Some(folder.join("token")), ..KubeconfigUser::default() }))
    }
}

/// Reads the cluster and the user of the kubeconfig's current context, and resolves relative paths of files.
fn read_kubeconfig(path: &Path) -> Result<(KubeconfigCluster, KubeconfigUser), ApiProblem> {
    parse_kubeconfig(&dial::read_credentials(path)?, path)
}

fn parse_kubeconfig(text: &[u8], path: &Path) -> Result<(KubeconfigCluster, KubeconfigUser), ApiProblem> {
    let shown = path.display();
    let wrong = |what: String| ApiProblem::new(what, "compare it with: kubectl config view");
    let config: Kubeconfig = serde_saphyr::from_slice(text).map_err(|error| {
        // Report only the line of the YAML parser's error, because its message quotes the kubeconfig, which may contain
        // secrets.
        let line = error.location().map(|at| format!(" in line {}", at.line())).unwrap_or_default();
        wrong(format!("the kubeconfig {shown} cannot be read: something is wrong{line}"))
    })?;
    let current = &config.current_context;
    let context = config.contexts.into_iter().find(|context| context.name == *current);
    let context = context.ok_or_else(|| wrong(format!("the kubeconfig {shown} has no current context")))?.context;
    let cluster = config.clusters.into_iter().find(|cluster| cluster.name == context.cluster);
    let mut cluster =
        cluster.ok_or_else(|| wrong(format!("the kubeconfig {shown} has no cluster for its current context")))?.cluster;
    let user = config.users.into_iter().find(|user| user.name == context.user).map(|user| user.user);
    let mut user = user.unwrap_or_default();
    let folder = path.parent().unwrap_or(Path::new("/"));
    let files =
        [&mut cluster.certificate_authority, &mut user.token_file, &mut user.client_certificate, &mut user.client_key];
    for file in files.into_iter().flatten().filter(|file| !file.as_os_str().is_empty()) {
        *file = folder.join(&*file);
    }
    Ok((cluster, user))
}

fn connect(cluster: KubeconfigCluster, user: KubeconfigUser, agent: &'static str) -> Result<Api, ApiProblem> {
    let unusable = || ApiProblem::new("the address of the Kubernetes API is no URL", "write it as https://host:port");
    let uri: Uri = cluster.server.trim_end_matches('/').parse().map_err(|_| unusable())?;
    let address = ApiAddress::of(&uri).ok_or_else(unusable)?;
    let proxy = cluster.proxy_url.filter(|url| !url.is_empty()).map(|url| Proxy::new(&url)).transpose()?;
    let certificate = content(user.client_certificate_data.as_deref(), user.client_certificate.as_deref())?;
    let key = content(user.client_key_data.as_deref(), user.client_key.as_deref())?;
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(ClientIdentity { certificate, key }),
        (None, None) => None,
        _ => return Err(ApiProblem::new("a client certificate or its key is missing", "set both or neither")),
    };
    let authority = content(cluster.certificate_authority_data.as_deref(), cluster.certificate_authority.as_deref())?;
    let trust = match (authority, cluster.insecure_skip_tls_verify) {
        (None, false) => TlsTrust::System,
        (None, true) => TlsTrust::Everyone,
        (Some(authority), false) => TlsTrust::Authority(authority),
        (Some(_), true) => {
            let what = "the kubeconfig names an authority and has insecure-skip-tls-verify, which is not supported";
            return Err(ApiProblem::new(what, "remove one of the two"));
        }
    };
    let login = login(user)?;
    // Report an unreadable token file before the first API request.
    login.credential()?;
    let server_name = cluster.tls_server_name.filter(|name| !name.is_empty());
    let way = ApiRoute::new(address, proxy, server_name, || dial::tls_config(&trust, identity.as_ref()))?;
    Ok(Api {
        way: way.ok_or_else(unusable)?,
        prefix: uri.path().trim_end_matches('/').to_owned(),
        login,
        agent,
        kept: None,
        secret: String::new(),
    })
}

/// Chooses the credentials of the user in a kubeconfig. As in Kubernetes's own client, a token file overrides a token.
fn login(user: KubeconfigUser) -> Result<Login, ApiProblem> {
    let refused = [
        (user.exec, "a login by a program (exec)"),
        (user.auth_provider, "a login by an auth-provider"),
        (user.impersonated, "requests in the name of another user (as)"),
    ];
    if let Some((_, what)) = refused.iter().find(|(asked, _)| asked.is_some()) {
        let what = format!("the kubeconfig asks for {what}, which is not supported");
        return Err(ApiProblem::new(what, "give a token, a tokenFile, or a client certificate"));
    }
    let is_set = |text: &String| !text.is_empty();
    if let Some(file) = user.token_file.filter(|file| !file.as_os_str().is_empty()) {
        return Ok(Login::TokenFile(file));
    }
    if let Some(token) = user.token.filter(is_set) {
        return Ok(Login::Token(token));
    }
    Ok(match (user.username.filter(is_set), user.password.filter(is_set)) {
        (None, None) => Login::Unnamed,
        (name, password) => Login::Password(name.unwrap_or_default(), password.unwrap_or_default()),
    })
}

/// Parses a kubeconfig, for use by the fuzzers. The returned error describes what is wrong in the kubeconfig.
pub(crate) fn check_kubeconfig(text: &[u8]) -> Result<(), String> {
    parse_kubeconfig(text, Path::new("/etc/kubeconfig")).map(drop).map_err(|problem| format!("{problem:?}"))
}

/// Returns the content of a kubeconfig setting, either from the Base64 text `data` or from the file that the setting
/// names.
fn content(data: Option<&str>, file: Option<&Path>) -> Result<Option<Vec<u8>>, ApiProblem> {
    if let Some(data) = data.filter(|data| !data.is_empty()) {
        let decoded = STANDARD.decode(data.trim());
        return decoded
            .map(Some)
            .map_err(|_| ApiProblem::new("a value ending in -data is not in base64", "mend the kubeconfig"));
    }
    file.filter(|file| !file.as_os_str().is_empty()).map(dial::read_credentials).transpose()
}
