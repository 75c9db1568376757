//! The main plugin's requests to the Kubernetes API, on one connection.

use std::fs;
use std::io::ErrorKind;
use std::time::Duration;

use agent::{CniError, Code, Result};
use hyper::StatusCode;

use super::api::{Answer, Api, CHECK_ADDRESS};
use super::pod::{Namespace, Pod, pod_cidrs};
use super::problem::{Failure, Problem};
use super::{Kubernetes, NO_CONFIGURATION, is_dns_name};

const AGENT: &str = concat!("margay/", env!("CARGO_PKG_VERSION"));

/// A conversation with the Kubernetes API. It needs a runtime of tokio's with time and input and output; a runtime that was
/// waiting for a name server is shut down in the background.
pub(crate) struct Client {
    api: Api,
}

impl Kubernetes {
    /// A client for the API, for any number of requests. Files are read, and nothing is sent yet.
    ///
    /// # Errors
    /// Code 999. Calico's texts where the configuration says nothing, or names a kubeconfig that is not there.
    pub(crate) fn client(&self) -> Result<Client> {
        if self.says_nothing() {
            return Err(CniError::internal(NO_CONFIGURATION).with_details("set kubernetes.kubeconfig"));
        }
        let path = &self.kubeconfig;
        let is_missing = || fs::metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound);
        if !path.as_os_str().is_empty() && is_missing() {
            return Err(CniError::internal(format!("stat {}: no such file or directory", path.display()))
                .with_details("check kubernetes.kubeconfig"));
        }
        Ok(Client { api: self.access(AGENT).map_err(reported)? })
    }
}

impl Client {
    /// A namespace.
    ///
    /// # Errors
    /// Those of Kubernetes's own client, code 999; code 11 if there is no answer in the time that is left, no way to the API,
    /// or if the API cannot answer now.
    pub(crate) async fn namespace(&mut self, name: &str, left: Duration) -> Result<Namespace> {
        let path = format!("/api/v1/namespaces/{name}");
        self.object("namespaces", &[name], &path, left, |body| Namespace::from_json(name, body)).await
    }

    /// A pod.
    ///
    /// # Errors
    /// As [`namespace`](Self::namespace).
    pub(crate) async fn pod(&mut self, namespace: &str, name: &str, left: Duration) -> Result<Pod> {
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        self.object("pods", &[name, namespace], &path, left, Pod::from_json).await
    }

    /// The ranges of a node's pods: `spec.podCIDRs`.
    ///
    /// # Errors
    /// As [`namespace`](Self::namespace).
    pub(crate) async fn node_pod_cidrs(&mut self, name: &str, left: Duration) -> Result<Vec<String>> {
        self.object("nodes", &[name], &format!("/api/v1/nodes/{name}"), left, pod_cidrs).await
    }

    /// Requests the version, to see if the API answers. The request limits the API to two seconds.
    ///
    /// # Errors
    /// As [`namespace`](Self::namespace).
    pub(crate) async fn version(&mut self, left: Duration) -> Result<()> {
        let is_object = |body: &[u8]| matches!(body.trim_ascii_start().first(), Some(b'{')).then_some(());
        self.object("version", &[], "/version?timeout=2s", left, is_object).await
    }

    /// The object at a path. The names in the path come from a runtime, or from a file.
    async fn object<T>(
        &mut self,
        kind: &str,
        names: &[&str],
        path: &str,
        left: Duration,
        read: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T> {
        if let Some(name) = names.iter().find(|name| !is_dns_name(name)) {
            return Err(CniError::internal(format!("{name:?} is no name that one of {kind} can have")));
        }
        let answer = self.api.get(path, left).await.map_err(|failure| self.unanswered(failure, path))?;
        if answer.status != StatusCode::OK {
            return Err(self.refused(&answer, kind, names.first().copied().unwrap_or_default()));
        }
        let wrong = || {
            let what = format!("what {} sent is none of {kind}", self.api.url());
            CniError::internal(what).with_details("check that this is the address of a Kubernetes API")
        };
        read(&answer.body).ok_or_else(wrong)
    }

    fn unanswered(&self, failure: Failure, path: &str) -> CniError {
        match failure {
            Failure::Unreachable(error) => {
                let refused = error.kind() == ErrorKind::ConnectionRefused;
                let code = if refused { Code::Internal } else { Code::TryAgain };
                CniError::new(code, self.api.no_connection(path, &error)).with_details(CHECK_ADDRESS)
            }
            Failure::Late(left) => {
                let what = format!("Get \"{}{path}\": context deadline exceeded", self.api.url());
                let details = format!("there was no answer in {:.1} s; {CHECK_ADDRESS}", left.as_secs_f32());
                CniError::new(Code::TryAgain, what).with_details(details)
            }
            Failure::Reported(problem) => reported(problem),
        }
    }

    fn refused(&self, answer: &Answer, kind: &str, name: &str) -> CniError {
        let text = self.api.complaint(answer, kind, name);
        let status = answer.status;
        let (code, advice) = match status {
            StatusCode::UNAUTHORIZED => {
                (Code::Internal, "check the token or the client certificate of the kubeconfig; it may have run out")
            }
            StatusCode::FORBIDDEN => (
                Code::Internal,
                "give the user of the kubeconfig a role with the verb get on nodes, namespaces and pods",
            ),
            StatusCode::TOO_MANY_REQUESTS => (Code::TryAgain, "the Kubernetes API is busy"),
            _ if status.is_server_error() => (Code::TryAgain, "see the log of the Kubernetes API"),
            _ => (Code::Internal, ""),
        };
        CniError::new(code, text).with_details(advice)
    }
}

pub(super) fn reported(problem: Problem) -> CniError {
    CniError::new(problem.code, problem.what).with_details(problem.advice)
}
