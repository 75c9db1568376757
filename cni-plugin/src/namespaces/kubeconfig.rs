//! How to get into the Kubernetes API: by a kubeconfig, by what the configuration itself says, or from within the cluster.

use std::fs;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::api::{Api, Identity};
use super::{Namespaces, Problem};

/// Where a process in the cluster finds what it is given.
const IN_CLUSTER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Far more than any of these files has, in bytes.
const MAX_BYTES: u64 = 1 << 20;

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
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    #[serde(default)]
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Cluster {
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
    user: User,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct User {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    exec: Option<serde::de::IgnoredAny>,
    auth_provider: Option<serde::de::IgnoredAny>,
    username: Option<serde::de::IgnoredAny>,
}

impl Namespaces {
    /// Where to ask, with everything read that stands in files.
    pub(super) fn access(&self) -> Result<Api, Problem> {
        let (mut cluster, mut user) = if self.kubeconfig.as_os_str().is_empty() {
            (Cluster::default(), User::default())
        } else {
            read_kubeconfig(&self.kubeconfig)?
        };
        if self.kubeconfig.as_os_str().is_empty() && self.api_root.is_empty() {
            (cluster, user) = self.in_cluster()?;
        }
        set(&mut cluster.server, &self.api_root);
        if !self.authority.as_os_str().is_empty() {
            (cluster.certificate_authority, cluster.certificate_authority_data) = (Some(self.authority.clone()), None);
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
        connect(cluster, user)
    }

    fn in_cluster(&self) -> Result<(Cluster, User), Problem> {
        let Some((host, port)) = &self.service else {
            return Err(Problem::new("nothing says where the Kubernetes API is", "set kubernetes.kubeconfig"));
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let folder = Path::new(IN_CLUSTER);
        let cluster = Cluster {
            server: format!("https://{host}:{port}"),
            certificate_authority: Some(folder.join("ca.crt")),
            ..Cluster::default()
        };
        Ok((cluster, User { token_file: Some(folder.join("token")), ..User::default() }))
    }
}

fn set(target: &mut String, value: &str) {
    if !value.is_empty() {
        value.clone_into(target);
    }
}

/// The cluster and the user of the current context, with paths that are complete.
fn read_kubeconfig(path: &Path) -> Result<(Cluster, User), Problem> {
    let shown = path.display();
    let text = read(path)?;
    let wrong = |what: String| Problem::new(what, "compare it with: kubectl config view");
    let config: Kubeconfig = serde_saphyr::from_slice(&text).map_err(|error| {
        // What the parser says repeats a part of the file.
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
    for file in files.into_iter().flatten() {
        *file = folder.join(&*file);
    }
    Ok((cluster, user))
}

fn connect(cluster: Cluster, user: User) -> Result<Api, Problem> {
    let refused = |what: &str, instead: &str| {
        Err(Problem::new(format!("the kubeconfig asks for {what}, which is not supported"), instead.to_owned()))
    };
    if cluster.insecure_skip_tls_verify {
        return refused("insecure-skip-tls-verify", "name the API's authority: certificate-authority-data");
    }
    if cluster.proxy_url.is_some() {
        return refused("proxy-url", "give an address that this host reaches by itself");
    }
    if user.exec.is_some() || user.auth_provider.is_some() || user.username.is_some() {
        let what = "a login by a program, a provider or a password";
        return refused(what, "give a token, a tokenFile, or a client certificate");
    }
    let token = match (user.token, user.token_file) {
        (Some(token), _) => Some(token),
        (None, Some(file)) => Some(String::from_utf8_lossy(&read(&file)?).trim().to_owned()),
        (None, None) => None,
    };
    let authority = content(cluster.certificate_authority_data, cluster.certificate_authority)?;
    let certificate = content(user.client_certificate_data, user.client_certificate)?;
    let key = content(user.client_key_data, user.client_key)?;
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(Identity { certificate, key }),
        (None, None) => None,
        _ => return Err(Problem::new("a client certificate or its key is missing", "set both or neither")),
    };
    Api::new(&cluster.server, authority.as_deref(), identity, token.as_deref(), cluster.tls_server_name)
}

/// What stands in the configuration itself, or else in a file.
fn content(data: Option<String>, file: Option<PathBuf>) -> Result<Option<Vec<u8>>, Problem> {
    if let Some(data) = data.filter(|data| !data.is_empty()) {
        let decoded = STANDARD.decode(data.trim());
        return decoded
            .map(Some)
            .map_err(|_| Problem::new("a value ending in -data is not in base64", "mend the kubeconfig"));
    }
    file.filter(|file| !file.as_os_str().is_empty()).map(|file| read(&file)).transpose()
}

fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
    read.map_err(|error| {
        let what = format!("cannot read {}: {error}", path.display());
        Problem::new(what, "check kubernetes.kubeconfig, and that the file is there")
    })?;
    Ok(bytes)
}
