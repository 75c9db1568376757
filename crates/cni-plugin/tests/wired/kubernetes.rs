//! Serves the small part of the Kubernetes API that replaying the recording needs, over plain HTTP, and records the
//! requests.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::carrier::{Served, serve};

/// The address of the Kubernetes API in each test case's own network namespace.
pub(crate) const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8001);

#[derive(Debug, Default)]
struct Content {
    /// The objects of the Kubernetes API, by URL path.
    objects: Map<String, Value>,
    /// How the Kubernetes API answers all requests: with `forbidden`, with `unauthorized`, or normally (an empty
    /// string).
    mode: String,
    /// The recorded requests to the Kubernetes API since the last call of [`Api::requests`].
    requests: Vec<Value>,
}

/// A running Kubernetes API server, which stops when this `Api` is dropped.
#[derive(Debug)]
pub(crate) struct Api {
    content: Arc<Mutex<Content>>,
    _served: Served,
}

fn locked(content: &Mutex<Content>) -> MutexGuard<'_, Content> {
    content.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Api {
    /// Starts the Kubernetes API server in the calling thread's network namespace.
    pub(crate) fn start() -> Self {
        let content = Arc::<Mutex<Content>>::default();
        let shared = Arc::clone(&content);
        let served = serve(ADDRESS, move |stream| {
            let content = Arc::clone(&shared);
            // Ignore a failed write of the response: the HTTP client has disconnected.
            async move { drop(answer(stream, &content).await) }
        });
        Self { content, _served: served }
    }

    /// Applies a case's setup or step to the simulated Kubernetes API: its objects, and how it answers (for example,
    /// with refusals).
    pub(crate) fn set(&self, kubernetes: &Value) {
        let mut content = locked(&self.content);
        content.objects = kubernetes["objects"].as_object().cloned().unwrap_or_default();
        content.mode = kubernetes["mode"].as_str().unwrap_or_default().to_owned();
    }

    /// Returns the requests to the Kubernetes API since the last call of this function, with consecutive duplicates
    /// removed.
    pub(crate) fn requests(&self) -> Value {
        let mut requests = std::mem::take(&mut locked(&self.content).requests);
        requests.dedup();
        requests.into()
    }
}

async fn answer(stream: TcpStream, content: &Mutex<Content>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut request = String::new();
    // An HTTP client that has timed out may disconnect without sending a request.
    if stream.read_line(&mut request).await? == 0 {
        return Ok(());
    }
    let mut words = request.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (mut accept, mut by) = (String::new(), String::new());
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 || line.trim_end().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "accept" => value.trim().clone_into(&mut accept),
            "user-agent" => value.trim().split('/').next().unwrap_or_default().clone_into(&mut by),
            _ => {}
        }
    }
    let (status, body) = {
        let mut content = locked(content);
        content.requests.push(json!({"method": method, "path": target, "accept": accept, "by": by}));
        response(&content, target.split('?').next().unwrap_or_default())
    };
    let head = format!(
        "HTTP/1.1 {status} .\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    stream.shutdown().await
}

fn response(content: &Content, path: &str) -> (u16, String) {
    match content.mode.as_str() {
        "forbidden" => {
            return failure(403, "Forbidden", "pods \"x\" is forbidden: User \"calico\" cannot get resource \"pods\"");
        }
        "unauthorized" => return failure(401, "Unauthorized", "Unauthorized"),
        _ => {}
    }
    if path == "/version" {
        return (200, json!({"major": "1", "minor": "30", "gitVersion": "v1.30.0"}).to_string());
    }
    if let Some(object) = content.objects.get(path) {
        return (200, object.to_string());
    }
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match parts[..] {
        ["api", "v1", .., plural, name] => failure(404, "NotFound", &format!("{plural} \"{name}\" not found")),
        _ => (404, "404 page not found\n".to_owned()),
    }
}

fn failure(code: u16, reason: &str, message: &str) -> (u16, String) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code});
    (code, status.to_string())
}
