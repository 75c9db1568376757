//! Waits until the network policy of a pod is active, which is the case when Felix, Calico's agent, has created a
//! status file for the pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent::{CniError, Result};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::time::{sleep, timeout};

/// The folder in which Felix creates the status files, unless the configuration names another folder.
const STATUS_FOLDER: &str = "/var/run/calico/endpoint-status";
/// Pause between two checks whether Felix's status file exists. Each check for the status file takes a few
/// microseconds, and Felix takes longer than 20 ms to activate a pod's rules.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The characters that Go escapes in a segment of a URL's path: all characters except letters, digits and `-_.~$&+=:@`.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'$')
    .remove(b'&')
    .remove(b'+')
    .remove(b'=')
    .remove(b':')
    .remove(b'@');

/// How an ADD waits for the network policy of its pod: the folder of Felix's status files, and the maximum wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PolicyWait {
    folder: PathBuf,
    longest: Duration,
}

impl PolicyWait {
    /// Reads `policy_setup_timeout_seconds` and `endpoint_status_dir`; returns `None` for a timeout of 0 seconds.
    ///
    /// # Errors
    /// CNI error code 999 with Calico's message if the timeout is negative.
    pub(crate) fn new(seconds: i64, folder: &str) -> Result<Option<Self>> {
        let wrong = |_| {
            CniError::internal(format!("invalid pod startup delay of {seconds}"))
                .with_details("policy_setup_timeout_seconds is the longest wait in seconds, 0 for none")
        };
        let longest = Duration::from_secs(u64::try_from(seconds).map_err(wrong)?);
        let folder = if folder.is_empty() { STATUS_FOLDER } else { folder };
        Ok((!longest.is_zero()).then(|| Self { folder: folder.into(), longest }))
    }

    /// Waits for Felix's status file of a pod's endpoint, at most for the configured time and for the remaining time of
    /// the call. If the status file does not appear in time, this function only logs a warning, because Calico's ADD
    /// also succeeds without the status file.
    pub(crate) async fn wait(&self, namespace: &str, pod: &str, endpoint: &str, left: Duration) {
        let file = self.folder.join(file_name(namespace, pod, endpoint));
        let longest = self.longest.min(left);
        if timeout(longest, appears(&file)).await.is_err() {
            tracing::warn!(
                file = %file.display(),
                "the pod's network policy was not in place after {:.1} s; starting the pod anyway", longest.as_secs_f32()
            );
        }
    }
}

async fn appears(file: &Path) {
    while !file.exists() {
        sleep(POLL_INTERVAL).await;
    }
}

fn file_name(namespace: &str, pod: &str, endpoint: &str) -> String {
    let escaped = |part| utf8_percent_encode(part, ESCAPED).to_string();
    // In the status file's name, the namespace and the pod name are one escaped segment.
    format!("k8s {}%2F{} {}", escaped(namespace), escaped(pod), escaped(endpoint))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use super::*;

    #[test]
    fn file_names_are_escaped_as_go_does() {
        assert_eq!(file_name("shop", "pod1", "eth0"), "k8s shop%2Fpod1 eth0");
        assert_eq!(file_name("a-b", "web-0.x_~", "eth0:1@$&+="), "k8s a-b%2Fweb-0.x_~ eth0:1@$&+=");
        assert_eq!(file_name("a/b", "ü c", "%?#;,\"!*'()"), "k8s a%2Fb%2F%C3%BC%20c %25%3F%23%3B%2C%22%21%2A%27%28%29");
    }

    #[test]
    fn wait_lasts_as_configured() {
        let new = |seconds| PolicyWait::new(seconds, "");
        assert_eq!(new(0).unwrap(), None);
        let wait = new(2).unwrap().unwrap();
        assert_eq!((wait.longest.as_secs(), wait.folder), (2, PathBuf::from("/var/run/calico/endpoint-status")));
        assert!(new(i64::MAX).unwrap().is_some());
        let error = new(-1).unwrap_err();
        assert_eq!((error.code().number(), error.message()), (999, "invalid pod startup delay of -1"));
        assert!(new(i64::MIN).is_err());
    }

    async fn took(wait: &PolicyWait, left: Duration) -> Duration {
        let begun = Instant::now();
        wait.wait("shop", "pod1", "eth0", left).await;
        begun.elapsed()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn wait_ends_when_file_exists_or_comes() {
        let folder = tempfile::tempdir().unwrap();
        let status = folder.path().join("status");
        let wait = PolicyWait::new(i64::MAX, status.to_str().unwrap()).unwrap().unwrap();
        let (taken, ()) = tokio::join!(took(&wait, LONG), async {
            // The test creates the status folder only while the plugin is already waiting.
            sleep(Duration::from_millis(200)).await;
            fs::create_dir(&status).unwrap();
            fs::write(status.join("k8s shop%2Fpod2 eth0"), "").unwrap();
            sleep(Duration::from_millis(200)).await;
            fs::write(status.join("k8s shop%2Fpod1 eth0"), "{}").unwrap();
        });
        assert!(taken >= Duration::from_millis(400) && taken < Duration::from_secs(5), "{taken:?}");
        assert!(took(&wait, LONG).await < Duration::from_secs(1));
        assert!(took(&wait, Duration::ZERO).await < Duration::from_secs(1));
    }

    #[tokio::test]
    async fn wait_ends_in_time_when_file_does_not_come() {
        let folder = tempfile::tempdir().unwrap();
        let wait = PolicyWait::new(1, folder.path().to_str().unwrap()).unwrap().unwrap();
        let taken = took(&wait, LONG).await;
        assert!(taken >= Duration::from_secs(1) && taken < Duration::from_secs(5), "{taken:?}");
        let taken = took(&wait, Duration::from_millis(100)).await;
        assert!(taken < Duration::from_secs(1), "{taken:?}");
    }
}
