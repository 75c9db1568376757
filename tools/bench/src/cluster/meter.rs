//! Reads how much etcd and this process have done: etcd's requests, bytes and syncs from its metrics, and the processor
//! time of both from `/proc`.

use std::fs;
use std::time::Duration;

use crate::Outcome;
use testkit::server::Etcd;

/// Linux reports processor times in `/proc` in units of 1/100 s on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// Counters of etcd's and this process's work since their start, or their difference between two readings.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reading {
    /// Number of reads, puts, deletions and transactions that etcd has received.
    pub(super) requests: f64,
    /// Number of bytes of all requests.
    pub(super) bytes_sent: f64,
    /// Number of bytes of all answers.
    pub(super) bytes_received: f64,
    /// Time that etcd has spent in syncs of its log, in seconds.
    pub(super) sync_seconds: f64,
    /// Processor time of the clients, which is that of this process, in seconds.
    pub(super) client_seconds: f64,
    /// Processor time of etcd, in seconds.
    pub(super) etcd_seconds: f64,
}

impl Reading {
    fn combined(self, other: Self, combine: fn(f64, f64) -> f64) -> Self {
        Self {
            requests: combine(self.requests, other.requests),
            bytes_sent: combine(self.bytes_sent, other.bytes_sent),
            bytes_received: combine(self.bytes_received, other.bytes_received),
            sync_seconds: combine(self.sync_seconds, other.sync_seconds),
            client_seconds: combine(self.client_seconds, other.client_seconds),
            etcd_seconds: combine(self.etcd_seconds, other.etcd_seconds),
        }
    }

    /// Adds what was done in `other`, the difference of two other readings.
    pub(super) fn add(&mut self, other: Self) {
        *self = self.combined(other, |one, other| one + other);
    }
}

/// Measures what etcd and this process do from the creation of the meter on.
#[derive(Debug)]
pub(super) struct Meter<'e> {
    etcd: &'e Etcd,
    start: Reading,
}

impl<'e> Meter<'e> {
    pub(super) fn start(etcd: &'e Etcd) -> Outcome<Self> {
        let metrics = etcd.ask("/metrics")?;
        Ok(Self { etcd, start: read(&metrics, etcd)? })
    }

    /// Returns what was done since the meter was started. The request for etcd's metrics is not included.
    pub(super) fn stop(self) -> Outcome<Reading> {
        let times = read("", self.etcd)?;
        let metrics = read(&self.etcd.ask("/metrics")?, self.etcd)?;
        let end = Reading { client_seconds: times.client_seconds, etcd_seconds: times.etcd_seconds, ..metrics };
        Ok(end.combined(self.start, |end, start| end - start))
    }
}

fn read(metrics: &str, etcd: &Etcd) -> Outcome<Reading> {
    let etcd = etcd.process().ok_or("etcd has ended")?;
    let seconds = |process: &str| -> Outcome<f64> {
        Ok(processor_time(&fs::read_to_string(format!("/proc/{process}/stat"))?)?.as_secs_f64())
    };
    Ok(Reading {
        requests: sum(metrics, |name| {
            name.starts_with("grpc_server_started_total{") && name.contains("\"etcdserverpb.KV\"")
        }),
        bytes_sent: sum(metrics, |name| name == "etcd_network_client_grpc_received_bytes_total"),
        bytes_received: sum(metrics, |name| name == "etcd_network_client_grpc_sent_bytes_total"),
        sync_seconds: sum(metrics, |name| name == "etcd_disk_wal_fsync_duration_seconds_sum"),
        client_seconds: seconds("self")?,
        etcd_seconds: seconds(&etcd.to_string())?,
    })
}

/// Returns the sum of the metrics whose names, with labels, `is_meant` accepts.
fn sum(metrics: &str, is_meant: impl Fn(&str) -> bool) -> f64 {
    let samples = metrics.lines().filter_map(|line| line.rsplit_once(' '));
    samples.filter(|(name, _)| is_meant(name)).filter_map(|(_, value)| value.trim().parse::<f64>().ok()).sum()
}

/// Returns the user and system time in the text of a file `/proc/PID/stat`.
fn processor_time(stat: &str) -> Outcome<Duration> {
    // The process name, which is in parentheses, may contain spaces. The 12th and 13th fields after it are the times.
    let fields = stat.rsplit_once(") ").map(|(_, fields)| fields).ok_or("no process name in /proc/PID/stat")?;
    let mut times = fields.split(' ').skip(11);
    let mut ticks = || -> Outcome<f64> { Ok(times.next().ok_or("no times in /proc/PID/stat")?.parse()?) };
    Ok(Duration::from_secs_f64((ticks()? + ticks()?) / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_meant_names_are_added() {
        let metrics = "# HELP a b 7\na{service=\"x\"} 2\na{service=\"y\"} 1.5e+02\nab 9\n";
        assert_eq!(sum(metrics, |name| name.starts_with("a{")), 152.0);
    }

    #[test]
    fn processor_time_follows_name_with_spaces() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 130 20 0 0\n";
        assert_eq!(processor_time(stat).unwrap(), Duration::from_millis(1_500));
        assert!(processor_time("7 a S").is_err());
    }
}
