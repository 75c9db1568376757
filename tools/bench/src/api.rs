//! Measures the etcd API of `margay serve --listen` on an embedded store, beside Debian's etcd. The benchmark calls
//! both Margay's daemon and etcd with the same client library, over TCP.

use std::any::Any;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use etcd_client::{Client, GetOptions, PutOptions, Txn, TxnOp, WatchOptions};
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::findings::{Bound, Findings};
use crate::report::{Times, median};
use crate::serve::Daemon;
use crate::{Outcome, Programs};
use testkit::server::{Etcd, dead_address};

const KEYS: u32 = 100_000;
const VALUE_BYTES: usize = 1024;
/// Number of keys per transaction while a store is filled before the measurement.
const FILL: u32 = 128;
/// The client counts to measure, each with the minimum ratio of redb's rate to etcd's rate.
const CLIENTS: [(usize, f64); 3] = [(1, 1.0), (16, 0.8), (256, 0.7)];
/// Number of measuring rounds for each server.
const ROUNDS: usize = 6;
const ROUND: Duration = Duration::from_secs(10);
/// The number of watches on keys that never change.
const WATCHES: usize = 1000;
/// Number of clients that put keys while the idle watches exist.
const BESIDE: usize = 16;

/// A running server of etcd's API, either Margay's daemon or etcd.
struct Server {
    name: &'static str,
    url: String,
    /// The id of the server's process, from which the memory usage is read.
    process: u32,
    /// The server's process, which ends when this value is dropped.
    _running: Box<dyn Any>,
}

impl Server {
    fn etcd() -> Outcome<Self> {
        let etcd = Etcd::start()?;
        let process = etcd.process().ok_or("etcd has ended")?;
        Ok(Self { name: "etcd (Debian)", url: etcd.url(), process, _running: Box::new(etcd) })
    }

    fn daemon(programs: &Programs, folder: &Path, engine: &'static str) -> Outcome<Self> {
        let path = folder.join(engine);
        let store = format!("{engine}://{}", path.display());
        if !path.exists() {
            run_to_its_end(Command::new(&programs.margay).args(["--store", &store, "store", "create"]))?;
        }
        let url = format!("http://{}", dead_address()?);
        let daemon = Daemon::start_with(programs, &store, &["--listen", &url, "--insecure-loopback"])?;
        Ok(Self { name: engine, url, process: daemon.id(), _running: Box::new(daemon) })
    }

    async fn connect(&self) -> Outcome<Client> {
        let begun = Instant::now();
        loop {
            let mut client = Client::connect([&self.url], None).await?;
            match client.status().await {
                // The daemon opens its private socket shortly before its etcd API, so the first connections may fail.
                Err(_) if begun.elapsed() < Duration::from_secs(10) => sleep(Duration::from_millis(5)).await,
                answered => return answered.map(|_| client).map_err(Into::into),
            }
        }
    }

    /// Returns a field of `/proc/PID/status` of the server's process, in MiB.
    fn mib(&self, field: &str) -> Outcome<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process))?;
        let line = status.lines().find_map(|line| line.strip_prefix(field)).ok_or("no such field")?;
        let kib: f64 = line.trim_start_matches(':').split_whitespace().next().ok_or("no number")?.parse()?;
        Ok(kib / 1024.0)
    }

    async fn fill(&self) -> Outcome<()> {
        let mut client = self.connect().await?;
        for first in (0..KEYS).step_by(FILL as usize) {
            let puts = (first..KEYS.min(first + FILL)).map(|number| TxnOp::put(key(number), value(), None));
            client.txn(Txn::new().and_then(puts.collect::<Vec<_>>())).await?;
        }
        Ok(())
    }

    /// Runs one measuring round in which `clients` concurrent clients put keys. Returns the puts per second and the
    /// duration of each put.
    async fn put(&self, clients: usize) -> Outcome<(f64, Times)> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut putting = JoinSet::new();
        for number in 0..clients {
            let (mut client, stop) = (self.connect().await?, Arc::clone(&stop));
            putting.spawn(async move {
                let mut random = Random(number as u64 + 1);
                let mut times = Times::default();
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    client.put(key(random.below(KEYS)), value(), Some(PutOptions::new())).await?;
                    times.push(begun.elapsed());
                }
                Ok::<_, etcd_client::Error>(times)
            });
        }
        let begun = Instant::now();
        sleep(ROUND).await;
        stop.store(true, Ordering::Relaxed);
        let mut all = Times::default();
        while let Some(times) = putting.join_next().await {
            all.append(times??);
        }
        Ok((all.len() as f64 / begun.elapsed().as_secs_f64(), all))
    }
}

/// Runs a program until it ends; an error if its exit status is not success.
fn run_to_its_end(command: &mut Command) -> Outcome<()> {
    let done = command.output()?;
    if done.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&done.stderr).into_owned().into()) }
}

fn key(number: u32) -> String {
    format!("/bench/{number:08}")
}

fn value() -> Vec<u8> {
    vec![b'v'; VALUE_BYTES]
}

/// Generates the same pseudorandom numbers (xorshift) in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 % u64::from(end)).unwrap_or_default()
    }
}

/// Measures puts, watches, memory and the listing of all keys on each server.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let folder = folder.join("api");
    fs::create_dir(&folder)?;
    let mut findings = Findings::default();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let servers =
            [Server::etcd()?, Server::daemon(programs, &folder, "redb")?, Server::daemon(programs, &folder, "sled")?];
        for server in &servers {
            server.fill().await?;
        }
        puts(&servers, &mut findings).await?;
        drop(servers);
        costs(programs, &folder, &mut findings).await
    })?;
    findings.conclude("goals-api");
    Ok(findings)
}

async fn puts(servers: &[Server], findings: &mut Findings) -> Outcome<()> {
    let mut rows = Vec::new();
    for (clients, wanted) in CLIENTS {
        let mut rates = vec![Vec::new(); servers.len()];
        let mut times = vec![Times::default(); servers.len()];
        for _ in 0..ROUNDS {
            for (place, server) in servers.iter().enumerate() {
                let (rate, put) = server.put(clients).await?;
                rates[place].push(rate);
                times[place].append(put);
            }
        }
        let etcd = median(&rates[0]);
        for (place, server) in servers.iter().enumerate() {
            let rate = median(&rates[place]);
            rows.push(vec![
                server.name.to_owned(),
                clients.to_string(),
                format!("{rate:.0}"),
                format!("{:.2}", rate / etcd),
                format!("{:.2}", times[place].median()),
                format!("{:.2}", times[place].quantile(0.99)),
            ]);
            if server.name == "redb" {
                findings.goal(&format!("puts on redb, clients: {clients} / etcd"), rate / etcd, Bound::AtLeast(wanted));
            }
        }
    }
    let seconds = ROUND.as_secs() * ROUNDS as u64;
    let title = format!("Durable puts of 1 KiB over {KEYS} keys, {seconds} s for each row, in turns (ms)");
    findings.table("api-puts", title, &["", "clients", "puts/s", "/ etcd", "p50", "p99"], rows);
    Ok(())
}

/// Measures a server's memory after its start, with watches and after a list of all keys, and the cost of idle watches.
async fn costs(programs: &Programs, folder: &Path, findings: &mut Findings) -> Outcome<()> {
    let mut rows = Vec::new();
    for engine in ["redb", "sled"] {
        let server = Server::daemon(programs, folder, engine)?;
        let mut client = server.connect().await?;
        client.get(key(0), None).await?;
        let idle = server.mib("VmRSS")?;
        let mut streams = Vec::with_capacity(WATCHES);
        for number in 0..WATCHES {
            let quiet = WatchOptions::new().with_prefix();
            streams.push(client.watch(format!("/quiet/{number}/"), Some(quiet)).await?);
        }
        let watching = server.mib("VmRSS")?;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        let mut other = Some(streams);
        for _ in 0..ROUNDS / 2 {
            with.push(server.put(BESIDE).await?.0);
            drop(other.take());
            sleep(Duration::from_millis(200)).await;
            without.push(server.put(BESIDE).await?.0);
            let mut streams = Vec::with_capacity(WATCHES);
            for number in 0..WATCHES {
                let quiet = WatchOptions::new().with_prefix();
                streams.push(client.watch(format!("/quiet/{number}/"), Some(quiet)).await?);
            }
            other = Some(streams);
        }
        drop(other);
        let cost = 100.0 * (1.0 - median(&with) / median(&without));
        drop(client);
        drop(server);

        let server = Server::daemon(programs, folder, engine)?;
        let mut client = server.connect().await?;
        client.get(key(0), None).await?;
        let before = server.mib("VmRSS")?;
        let mut client = client.kv_client().max_decoding_message_size(usize::MAX);
        let listed = client.get("/bench/", Some(GetOptions::new().with_prefix())).await?;
        let bytes: usize = listed.kvs().iter().map(|kv| kv.key().len() + kv.value().len()).sum();
        let share = (server.mib("VmHWM")? - before) * 1024.0 * 1024.0 / bytes as f64;
        rows.push(vec![
            engine.to_owned(),
            format!("{idle:.1}"),
            format!("{watching:.1}"),
            format!("{cost:.1}"),
            format!("{share:.2}"),
        ]);
        if engine == "redb" {
            findings.goal("the idle API on redb: memory (MiB)", idle, Bound::AtMost(18.0));
            findings.goal("... with 1,000 watches (MiB)", watching, Bound::AtMost(32.0));
            findings.goal("cost of 1,000 idle watches for 16 clients (%)", cost, Bound::AtMost(10.0));
            findings.goal("a list of 100,000 keys: memory / its bytes", share, Bound::AtMost(3.0));
        }
    }
    findings.table(
        "api-costs",
        format!("The API over a store of {KEYS} keys"),
        &["", "idle, MiB", "with 1,000 watches, MiB", "what these cost puts, %", "a list of all: memory / its bytes"],
        rows,
    );
    Ok(())
}
