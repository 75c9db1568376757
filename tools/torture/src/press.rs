//! Disturbs the daemon in three ways: clients that never read, clients that restart their watches, and processes that
//! open the store directly. While some clients misbehave, no call of a well-behaved client may hang, and the clients'
//! throughput must not drop too far while other processes open the store directly.

use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use datastore::served::{ServedStore, connect};
use datastore::{Drivers, Location};
use etcd_client::{Client, WatchOptions};
use kv::{Range, RangeRequest, Store, StoreExt};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

use crate::chaos::{self, Daemon};
use crate::scene::open_etcd;

/// Number of clients that watch all keys and never read the events.
const DEAF: usize = 60;
/// Number of clients that keep restarting their watches.
const RESTLESS: usize = 4;
const WATCHES: i64 = 10;
/// Number of processes that repeatedly open the store directly, which forces the daemon to release it.
const TAKERS: usize = 4;
/// The interval between the progress requests of a client that restarts its watches.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(1);
/// Number of progress requests that a client sends before it restarts a watch.
const REPORTS: usize = 10;
/// Maximum duration of a client's call; a longer call counts as hanging.
const CALL_TIMEOUT: Duration = Duration::from_secs(90);
/// Arguments that limit the daemon's history, because the command `margay store status` reads the whole history.
const HISTORY: [&str; 4] = ["--history-revisions", "2000", "--history-min-age", "1s"];

/// The plan of a load test: the daemon's program, the store's engine, the duration and the limits.
#[derive(Clone, Debug)]
pub struct PressPlan {
    /// The path of the program `margay`.
    pub margay: PathBuf,
    /// The store drivers that this program supports.
    pub drivers: Drivers,
    /// The name of the storage engine: sled or redb.
    pub engine: String,
    /// The duration of the whole load test, of which two tenths are for measuring the throughput.
    pub time: Duration,
    /// Maximum duration of one client's call to the daemon. A process that opens the store directly may take twice as
    /// long as `max_call`.
    pub max_call: Duration,
    /// Minimum throughput while another process repeatedly opens the store directly, as a share of the undisturbed
    /// throughput.
    pub min_share: f64,
}

/// The measurements of one load test.
#[derive(Debug)]
pub struct PressReport {
    calls: u64,
    taken: u64,
    slowest: Duration,
    slowest_taken: Duration,
    alone: f64,
    beside: f64,
}

impl fmt::Display for PressReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { calls, taken, slowest, slowest_taken, alone, beside } = self;
        write!(
            f,
            "press: {calls} calls, the slowest {slowest:.1?}; the store was taken {taken} times, the slowest {slowest_taken:.1?}; \
             {alone:.0} calls/s alone, {beside:.0} beside a process that takes the store"
        )
    }
}

/// The number of client calls of one kind, and the duration of the slowest of these calls.
#[derive(Debug, Default)]
struct Calls {
    count: AtomicU64,
    slowest: Mutex<Duration>,
}

impl Calls {
    fn ended(&self, took: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut slowest = self.slowest.lock().unwrap_or_else(PoisonError::into_inner);
        *slowest = took.max(*slowest);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn slowest(&self) -> Duration {
        *self.slowest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn measure<T, E: fmt::Display>(
        &self,
        what: &str,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, String> {
        let begun = Instant::now();
        let ended = timeout(CALL_TIMEOUT, call).await;
        let ended = ended.map_err(|_| format!("{what} did not end in {CALL_TIMEOUT:?}"))?;
        self.ended(begun.elapsed());
        ended.map_err(|error| format!("{what}: {error}"))
    }
}

#[derive(Debug)]
struct Press {
    margay: PathBuf,
    location: Location,
    api: String,
    over: AtomicBool,
    calls: Calls,
    taken: Calls,
}

fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

/// Runs the load test and returns its measurements.
///
/// # Errors
/// An error if a call was too slow, failed or hung, or if the throughput was too low while another process repeatedly
/// opened the store.
pub async fn press(plan: &PressPlan) -> Result<PressReport, String> {
    let folder = tempfile::Builder::new().prefix("margay-press").tempdir().map_err(text)?;
    let location = plan.drivers.of_engine(&plan.engine, folder.path().join("store")).map_err(text)?;
    take(&plan.margay, &location, &["store", "create", "--format", "2"])?;
    let api = format!("http://{}", chaos::free_address().map_err(text)?);
    let daemon = Daemon::start_with(&plan.margay, &location, Some(&api), &HISTORY).map_err(text)?;
    let private = reach(&location).await?;
    let press = Press {
        margay: plan.margay.clone(),
        location,
        api,
        over: AtomicBool::new(false),
        calls: Calls::default(),
        taken: Calls::default(),
    };
    let press = Arc::new(press);
    let tenth = plan.time / 10;
    let alone = press.throughput(0, tenth).await?;
    let beside = press.throughput(1, tenth).await?;
    if beside < alone * plan.min_share {
        return Err(format!("{alone:.0} calls/s alone, and {beside:.0} beside a process that takes the store"));
    }
    let (calls, taken) = press.crowd(private, tenth * 8).await?;
    drop(daemon);
    let (slowest, slowest_taken) = (calls.slowest(), taken.slowest());
    let report = PressReport { calls: calls.count(), taken: taken.count(), slowest, slowest_taken, alone, beside };
    let is_late = slowest > plan.max_call || slowest_taken > 2 * plan.max_call;
    if is_late { Err(report.to_string()) } else { Ok(report) }
}

async fn reach(location: &Location) -> Result<ServedStore, String> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(30) {
        if let Some(store) = connect(location, CALL_TIMEOUT).await {
            return Ok(store);
        }
        sleep(Duration::from_millis(10)).await;
    }
    Err("the daemon does not come up".to_owned())
}

/// Runs a `margay` command that opens the store's files, which forces the daemon to release the store.
fn take(margay: &Path, location: &Location, arguments: &[&str]) -> Result<(), String> {
    let mut command = Command::new(margay);
    command.args(["--store", &location.to_string()]).args(arguments).stdin(Stdio::null());
    let done = command.output().map_err(|error| format!("{}: {error}", margay.display()))?;
    let said = || format!("margay {}: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr));
    if done.status.success() { Ok(()) } else { Err(said()) }
}

impl Press {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Opens the store directly again and again until the load test ends, which forces the daemon to release it.
    async fn take_store(self: Arc<Self>) -> Result<(), String> {
        while !self.is_over() {
            let press = Arc::clone(&self);
            let taking = spawn_blocking(move || take(&press.margay, &press.location, &["store", "status"]));
            // The command `margay store status` fails if the daemon does not release the store within two seconds. A
            // failed command is ignored: its measured duration already shows that it waited too long.
            let flattened = async {
                match taking.await.map_err(text)? {
                    Err(error) if error.contains("is in use by another process") => Ok(()),
                    taken => taken,
                }
            };
            self.taken.measure("store status", flattened).await?;
        }
        Ok(())
    }

    /// Writes and reads a key through etcd's API until the load test ends.
    async fn call_api(self: Arc<Self>, number: usize) -> Result<(), String> {
        let store = open_etcd(&self.api).map_err(text)?;
        let key = format!("/press/{number}");
        while !self.is_over() {
            self.calls.measure("a put", store.put(key.clone(), "1")).await?;
            self.calls.measure("a read", store.range(RangeRequest::new(Range::key(key.clone())))).await?;
        }
        Ok(())
    }

    /// Writes and reads a key through the daemon's own socket until the load test ends.
    async fn call_socket(self: Arc<Self>, store: ServedStore) -> Result<(), String> {
        while !self.is_over() {
            self.calls.measure("a put at the socket", store.put("/press/own", "1")).await?;
            let read = store.range(RangeRequest::new(Range::key("/press/own")));
            self.calls.measure("a read at the socket", read).await?;
        }
        Ok(())
    }

    /// Watches all keys through etcd's API without ever reading the events.
    async fn be_deaf(self: Arc<Self>) -> Result<(), String> {
        let mut client = Client::connect([&self.api], None).await.map_err(text)?;
        let everything = WatchOptions::new().with_all_keys().with_start_revision(1).with_prev_key();
        let stream = client.watch("", Some(everything)).await.map_err(text)?;
        while !self.is_over() {
            sleep(Duration::from_millis(100)).await;
        }
        drop(stream);
        Ok(())
    }

    /// Restarts the watches on one stream again and again, and sends progress requests in between.
    async fn be_restless(self: Arc<Self>) -> Result<(), String> {
        let mut client = Client::connect([&self.api], None).await.map_err(text)?;
        let first = WatchOptions::new().with_prefix().with_watch_id(WATCHES + 1);
        let (mut requests, mut answers) = client.watch("/press", Some(first)).await.map_err(text)?.split();
        let asking = async {
            let mut id = 0;
            while !self.is_over() {
                id = id % WATCHES + 1;
                requests.cancel(id).await.map_err(text)?;
                requests
                    .watch("/press", Some(WatchOptions::new().with_prefix().with_watch_id(id)))
                    .await
                    .map_err(text)?;
                for _ in 0..REPORTS {
                    requests.request_progress().await.map_err(text)?;
                    sleep(PROGRESS_INTERVAL).await;
                }
            }
            Ok::<_, String>(())
        };
        let reading = async {
            loop {
                let answer = timeout(CALL_TIMEOUT, answers.message()).await;
                let answer = answer.map_err(|_| "a stream of watches stands still".to_owned())?.map_err(text)?;
                answer.ok_or("a stream of watches ended")?;
            }
        };
        tokio::select! {
            asked = asking => asked,
            failed = reading => failed,
        }
    }

    /// Measures the calls per second of one client while `takers` other processes repeatedly open the store directly.
    async fn throughput(self: &Arc<Self>, takers: usize, time: Duration) -> Result<f64, String> {
        let mut tasks = JoinSet::new();
        for _ in 0..takers {
            tasks.spawn(Arc::clone(self).take_store());
        }
        tasks.spawn(Arc::clone(self).call_api(0));
        let (before, begun) = (self.calls.count(), Instant::now());
        sleep(time).await;
        let calls = self.calls.count() - before;
        let rate = calls as f64 / begun.elapsed().as_secs_f64();
        self.end(tasks).await?;
        Ok(rate)
    }

    /// Runs all clients and processes of the load test concurrently.
    async fn crowd(self: &Arc<Self>, private: ServedStore, time: Duration) -> Result<(&Calls, &Calls), String> {
        let mut tasks = JoinSet::new();
        for _ in 0..DEAF {
            tasks.spawn(Arc::clone(self).be_deaf());
        }
        for _ in 0..RESTLESS {
            tasks.spawn(Arc::clone(self).be_restless());
        }
        for _ in 0..TAKERS {
            tasks.spawn(Arc::clone(self).take_store());
        }
        for number in 1..3 {
            tasks.spawn(Arc::clone(self).call_api(number));
        }
        tasks.spawn(Arc::clone(self).call_socket(private));
        let end = Instant::now() + time;
        while Instant::now() < end && !tasks.is_empty() {
            // No task may end before the load test does; a task that ends early counts as failed.
            let Ok(ended) = timeout(end.saturating_duration_since(Instant::now()), tasks.join_next()).await else {
                break;
            };
            ended.ok_or("no task")?.map_err(text)??;
        }
        self.end(tasks).await?;
        Ok((&self.calls, &self.taken))
    }

    async fn end(&self, mut tasks: JoinSet<Result<(), String>>) -> Result<(), String> {
        self.over.store(true, Ordering::Relaxed);
        while let Some(ended) = tasks.join_next().await {
            ended.map_err(text)??;
        }
        self.over.store(false, Ordering::Relaxed);
        Ok(())
    }
}
