//! Records metrics of the daemon's own work for `/metrics`, and the time at which the daemon's store last finished an
//! operation.
//!
//! Durations are recorded in histograms, in seconds. The values of labels come only from fixed lists in this program,
//! so callers cannot make the metrics grow without bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use datastore::shared_store::SharedStoreObserver;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Upper bounds of a histogram's buckets, in seconds: from a quarter of a millisecond to 90 seconds.
const BUCKET_SECONDS: [f64; 16] =
    [0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 90.0];

/// A counter of answers for each verb and result.
type AnswerCounters = Family<[(&'static str, &'static str); 2], Counter>;

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestResult {
    /// The daemon carried out the request.
    Done,
    /// The daemon refused the request, or the request failed.
    Failed,
}

impl RequestResult {
    fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// Metrics of the daemon's own work.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    queue: Histogram,
    commit: Histogram,
    sync: Histogram,
    add: Histogram,
    del: Histogram,
    answers: AnswerCounters,
    callers: Gauge,
    viewers: Gauge,
    lock: Gauge,
    hand_overs: Counter,
    pub(crate) pulse: Pulse,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl SharedStoreObserver for Metrics {
    fn taken(&self) {
        self.lock.set(1);
    }

    fn handed_over(&self) {
        self.lock.set(0);
        self.hand_overs.inc();
    }

    fn released(&self) {
        self.lock.set(0);
    }

    fn wait_begins(&self) {
        self.pulse.wait_begins();
    }

    fn wait_ends(&self) {
        self.pulse.wait_ends();
    }

    fn synced(&self, took: Duration) {
        self.sync.observe(took.as_secs_f64());
        self.pulse.beat();
    }
}

impl Metrics {
    /// Creates all metrics with the initial value 0.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("margay_serve");
        let mut time = |name: &str, help: &str| {
            let times = Histogram::new(BUCKET_SECONDS);
            registry.register_with_unit(name, help, Unit::Seconds, times.clone());
            times
        };
        let queue = time("queue", "Wait of a request until its work began");
        let commit = time("commit", "Time that the store took for a commit");
        let sync = time("sync", "Time that the disk took to make a commit durable");
        let add = time("add", "Time of an ADD from its request to its answer");
        let del = time("del", "Time of a DEL from its request to its answer");
        let answers = AnswerCounters::default();
        registry.register("answers", "Requests that were answered, by verb and result", answers.clone());
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        let callers = gauge("connections", "Connections of plugins and commands");
        let viewers = gauge("http_connections", "Connections of browsers and scrapers");
        let lock = gauge("lock_held", "1 while the daemon holds the lock of the store, else 0");
        let hand_overs = Counter::default();
        registry.register("hand_overs", "Times that the daemon gave the store to another process", hand_overs.clone());
        Self {
            registry,
            queue,
            commit,
            sync,
            add,
            del,
            answers,
            callers,
            viewers,
            lock,
            hand_overs,
            pulse: Pulse::default(),
        }
    }

    /// Records how long a request waited in the daemon's write queue.
    pub fn observe_queue(&self, waited: Duration) {
        self.queue.observe(waited.as_secs_f64());
    }

    /// Records how long the store took to commit.
    pub fn observe_commit(&self, took: Duration) {
        self.commit.observe(took.as_secs_f64());
        self.pulse.beat();
    }

    /// Records the time from the request of an ADD to its answer.
    pub fn observe_add(&self, took: Duration) {
        self.add.observe(took.as_secs_f64());
    }

    /// Records the time from the request of a DEL to its answer.
    pub fn observe_del(&self, took: Duration) {
        self.del.observe(took.as_secs_f64());
    }

    /// Counts the answer to a verb. `verb` comes from a fixed list of this program, never from a caller.
    pub fn count_answer(&self, verb: &'static str, ending: RequestResult) {
        self.answers.get_or_create(&[("verb", verb), ("result", ending.as_str())]).inc();
    }

    /// Counts a connection of a plugin or a command as open until the returned guard is dropped.
    pub fn count_caller(self: &Arc<Self>) -> CountGuard {
        CountGuard::of(&self.callers)
    }

    /// Counts a connection of a browser or a scraper as open until the returned guard is dropped.
    pub fn count_viewer(self: &Arc<Self>) -> CountGuard {
        CountGuard::of(&self.viewers)
    }

    /// The number of connected browsers and scrapers.
    pub fn viewers(&self) -> i64 {
        self.viewers.get()
    }

    /// Renders all metrics in the OpenMetrics text format, without the final `# EOF` line.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a `String` cannot fail.
        _ = encode_registry(&mut text, &self.registry);
        text
    }
}

/// Keeps a gauge incremented until the guard is dropped.
#[derive(Debug)]
pub struct CountGuard(Gauge);

impl CountGuard {
    fn of(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Records when the store last finished an operation: a commit, a read for a queued verb, or a hand-over.
#[derive(Debug)]
pub struct Pulse {
    started_at: Instant,
    /// When the store last finished an operation, in milliseconds since `started_at`.
    last: AtomicU64,
    /// Number of current waits that do not count as a stall: another process has the store, or the engine is being
    /// opened.
    waits: AtomicUsize,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { started_at: Instant::now(), last: AtomicU64::new(0), waits: AtomicUsize::new(0) }
    }
}

impl Pulse {
    /// Records a beat: the store has finished an operation.
    pub fn beat(&self) {
        let now = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts the store as alive until [`Self::wait_ends`] is called. The caller waits for another process that has the
    /// store, or for the engine to open.
    pub fn wait_begins(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends a wait that began with [`Self::wait_begins`], and records that the store has made progress.
    pub fn wait_ends(&self) {
        self.beat();
        self.waits.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns the time since the later of two moments: when the store last finished an operation, and `received_at`.
    /// Returns zero between [`Self::wait_begins`] and [`Self::wait_ends`].
    pub fn stalled_for(&self, received_at: Instant) -> Duration {
        if self.waits.load(Ordering::Relaxed) > 0 {
            return Duration::ZERO;
        }
        let last = self.started_at + Duration::from_millis(self.last.load(Ordering::Relaxed));
        last.max(received_at).elapsed()
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn metrics_text_has_every_number() {
        let metrics = Arc::new(Metrics::new());
        metrics.observe_queue(Duration::from_millis(1));
        metrics.observe_commit(Duration::from_millis(3));
        metrics.synced(Duration::from_millis(2));
        metrics.observe_add(Duration::from_millis(7));
        metrics.observe_add(Duration::from_secs(100));
        metrics.observe_del(Duration::from_millis(7));
        metrics.count_answer("ADD", RequestResult::Done);
        metrics.count_answer("ADD", RequestResult::Failed);
        metrics.count_answer("ADD", RequestResult::Done);
        metrics.taken();
        metrics.handed_over();
        metrics.taken();
        let (caller, _viewer) = (metrics.count_caller(), metrics.count_viewer());
        drop(caller);
        let text = metrics.text();
        for line in [
            "# TYPE margay_serve_add_seconds histogram",
            "margay_serve_add_seconds_count 2",
            "margay_serve_add_seconds_bucket{le=\"0.01\"} 1",
            "margay_serve_add_seconds_bucket{le=\"90.0\"} 1",
            "margay_serve_add_seconds_bucket{le=\"+Inf\"} 2",
            "margay_serve_queue_seconds_count 1",
            "margay_serve_commit_seconds_count 1",
            "margay_serve_sync_seconds_count 1",
            "margay_serve_del_seconds_count 1",
            "margay_serve_answers_total{verb=\"ADD\",result=\"done\"} 2",
            "margay_serve_answers_total{verb=\"ADD\",result=\"failed\"} 1",
            "margay_serve_connections 0",
            "margay_serve_http_connections 1",
            "margay_serve_lock_held 1",
            "margay_serve_hand_overs_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn metrics_standstill_ends_with_beat_wait_or_request() {
        let (pulse, long_ago) = (Pulse::default(), Instant::now());
        let stands_still = || sleep(Duration::from_millis(60));
        stands_still();
        assert!(pulse.stalled_for(long_ago) >= Duration::from_millis(60));
        assert!(pulse.stalled_for(Instant::now()) < pulse.stalled_for(long_ago), "a request that has just come");
        let before_beat = Instant::now();
        pulse.beat();
        assert!(pulse.stalled_for(long_ago) <= before_beat.elapsed() + Duration::from_millis(1));
        pulse.wait_begins();
        stands_still();
        assert_eq!(pulse.stalled_for(long_ago), Duration::ZERO);
        let before_end = Instant::now();
        pulse.wait_ends();
        assert!(pulse.stalled_for(long_ago) <= before_end.elapsed() + Duration::from_millis(1));
    }
}
