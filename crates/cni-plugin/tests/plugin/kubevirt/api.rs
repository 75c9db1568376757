//! The small part of the Kubernetes API that replaying the recording needs, over plain HTTP.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value, json};

/// The objects of the Kubernetes API, and which requests the API refuses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Content {
    pub(crate) objects: Map<String, Value>,
    /// How the Kubernetes API refuses requests for a resource: as `forbidden`, `unauthorized`, `error` or `silent`.
    pub(crate) refuse: Map<String, Value>,
    /// True if KubeVirt's custom resource definitions are missing in the API.
    pub(crate) without_kubevirt: bool,
}

impl Content {
    /// Reads the API's content from the JSON of a recorded step, or of a recorded case's setup.
    pub(crate) fn of(kubernetes: &Value) -> Self {
        let map = |name: &str| kubernetes[name].as_object().cloned().unwrap_or_default();
        Self { objects: map("objects"), refuse: map("refuse"), without_kubevirt: kubernetes["kubevirt"] == false }
    }
}

/// A Kubernetes API server that runs until the test program ends.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) url: String,
    content: Arc<Mutex<Content>>,
}

impl Api {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let content = Arc::<Mutex<Content>>::default();
        let shared = Arc::clone(&content);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let content = shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
                std::thread::spawn(move || serve(stream, &content));
            }
        });
        Self { url, content }
    }

    pub(crate) fn set(&self, content: Content) {
        *self.content.lock().unwrap_or_else(PoisonError::into_inner) = content;
    }
}

fn serve(mut stream: TcpStream, content: &Content) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(request)) = lines.next() else { return };
    let mut is_known = false;
    for line in lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()) {
        is_known |= line.eq_ignore_ascii_case("authorization: Bearer secret-token");
    }
    let path = request.split(' ').nth(1).unwrap_or_default();
    let (status, body) = if is_known { answer(content, path) } else { refusal(401, "Unauthorized", "no token") };
    if status == 0 {
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let length = body.len();
    // Ignore a failed write of the response: the HTTP client has disconnected.
    let _ = write!(stream, "HTTP/1.1 {status} .\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
}

fn refusal(code: u16, reason: &str, message: &str) -> (u16, String) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code});
    (code, status.to_string())
}

/// Returns the HTTP status code and the body of the answer to a request; status code 0 stands for no answer.
fn answer(content: &Content, path: &str) -> (u16, String) {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let (group, plural, name, place) = match parts[..] {
        ["api", "v1", "namespaces", name] => ("", "namespaces", name, String::new()),
        ["api", "v1", "namespaces", space, plural, name] => {
            ("", plural, name, format!(" in the namespace \"{space}\""))
        }
        ["apis", group, "v1", "namespaces", space, plural, name] => {
            (group, plural, name, format!(" in the namespace \"{space}\""))
        }
        _ => return (404, "404 page not found\n".to_owned()),
    };
    if group == "kubevirt.io" && content.without_kubevirt {
        return (404, "404 page not found\n".to_owned());
    }
    let full = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
    match content.refuse.get(plural).and_then(Value::as_str) {
        Some("forbidden") => {
            let user = "system:serviceaccount:kube-system:calico-cni-plugin";
            let text = format!(
                "{full} \"{name}\" is forbidden: User \"{user}\" cannot get resource \"{plural}\" in API group \"{group}\"{place}"
            );
            refusal(403, "Forbidden", &text)
        }
        Some("unauthorized") => refusal(401, "Unauthorized", "Unauthorized"),
        Some("error") => refusal(500, "InternalError", "Internal error occurred: etcdserver: request timed out"),
        Some("silent") => (0, String::new()),
        Some(other) => panic!("{other} is no way to refuse"),
        None => match content.objects.get(path) {
            Some(object) => (200, object.to_string()),
            None => refusal(404, "NotFound", &format!("{full} \"{name}\" not found")),
        },
    }
}
