//! Reads the quota of a member from the member's metrics. etcd before 3.6 does not report its quota in any other way.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use etcd_client::Channel;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tonic::codegen::{Body, Service, http};

use crate::address::{Address, Transport};

/// The time limit of reading a member's metrics.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of a member's metrics in bytes. The metrics page of an etcd 3.4 with one client is about 130 KB long.
const MAX_METRICS_BYTES: u64 = 4 << 20;
/// The name of the quota metric, with the space that separates it from its value.
const QUOTA_METRIC: &str = "etcd_server_quota_backend_bytes ";

/// Returns the quota of a member in bytes, or `None` if the member does not serve its metrics to clients.
pub(crate) async fn read_quota(address: &Address, channel: Channel) -> Option<u64> {
    let (_, authority) = address.url.split_once("://")?;
    let metrics = async {
        match address.transport {
            Transport::Plain => over_http1(TcpStream::connect(authority).await.ok()?).await,
            Transport::Unix => over_http1(UnixStream::connect(authority).await.ok()?).await,
            Transport::Tls => over_tls(&address.url, channel).await,
        }
    };
    quota_in(&timeout(METRICS_TIMEOUT, metrics).await.ok()??)
}

/// Reads a member's metrics over HTTP/1. Without TLS, etcd before 3.5 serves its metrics over HTTP/1 only, because it
/// treats every HTTP/2 connection as gRPC.
async fn over_http1(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Option<String> {
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.ok()?;
    let mut answer = Vec::new();
    stream.take(MAX_METRICS_BYTES).read_to_end(&mut answer).await.ok()?;
    String::from_utf8(answer).ok()
}

/// Reads a member's metrics over a gRPC channel: with TLS, etcd serves its metrics on the same connections as gRPC.
async fn over_tls(url: &str, channel: Channel) -> Option<String> {
    let Channel::Tonic(mut channel) = channel else { return None };
    let request = http::Request::get(format!("{url}/metrics")).body(tonic::body::Body::empty()).ok()?;
    poll_fn(|context| channel.poll_ready(context)).await.ok()?;
    let mut body = channel.call(request).await.ok()?.into_body();
    let mut answer = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        if let Ok(data) = frame.ok()?.into_data() {
            answer.extend_from_slice(&data);
        }
        if answer.len() as u64 > MAX_METRICS_BYTES {
            return None;
        }
    }
    String::from_utf8(answer).ok()
}

fn quota_in(metrics: &str) -> Option<u64> {
    let value = metrics.lines().find_map(|line| line.strip_prefix(QUOTA_METRIC))?;
    // Prometheus writes large numbers with an exponent.
    let bytes: f64 = value.trim().parse().ok()?;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a quota is a whole number of bytes")]
    (bytes >= 1.0).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_is_found_among_metrics() {
        let metrics =
            "# TYPE etcd_server_quota_backend_bytes gauge\netcd_server_quota_backend_bytes 2.147483648e+09\nx 1\n";
        assert_eq!(quota_in(metrics), Some(2 << 30));
        for other in
            ["", "etcd_server_quota_backend_bytes", "etcd_server_quota_backend_bytes x\n", "HTTP/1.0 404 Not Found"]
        {
            assert_eq!(quota_in(other), None, "{other}");
        }
        assert_eq!(quota_in("etcd_server_quota_backend_bytes 0\n"), None, "etcd was started without a quota");
    }
}
