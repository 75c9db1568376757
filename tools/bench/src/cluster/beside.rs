//! Measures small puts by a client of etcd other than Margay, first without load and then beside the load that Margay
//! causes.

use std::future::Future;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use etcd_client::Client;
use ipam_core::pools;
use tokio::task::JoinSet;

use super::ground::{Families, Ground, Host};
use super::raw::{Bare, Shape};
use super::{hosts, ms, ratio, runtime, whole};
use crate::contender::Contender;
use crate::fill::{one_address, soon};
use crate::findings::Findings;
use crate::report::{Times, median};
use crate::{Outcome, Programs};

/// How long the puts of the unrelated etcd client are measured each time.
const LOOK: Duration = Duration::from_millis(2500);
const ROUNDS: usize = 3;
const VALUE: [u8; 256] = [b'v'; 256];
const PAUSE: Duration = Duration::from_millis(2);
const CALLERS: usize = 16;
/// Number of simulated hosts under a light load; together the hosts make about 100 ADDs per second.
const CALM: usize = 50;
const CALM_PAUSE: Duration = Duration::from_millis(250);

/// The kind of load on etcd while the puts of an unrelated etcd client are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    None,
    Calm,
    Callers,
    Hosts,
    Bare,
}

const LOADS: [Load; 5] = [Load::None, Load::Calm, Load::Callers, Load::Hosts, Load::Bare];

impl Load {
    fn name(self) -> String {
        match self {
            Self::None => "nothing".into(),
            Self::Calm => format!("{CALM} hosts that make 100 ADDs and 100 DELs a second"),
            Self::Callers => format!("{CALLERS} callers on one node that ADD and DEL as fast as they can"),
            Self::Hosts => "200 hosts that ADD and DEL as fast as they can".into(),
            Self::Bare => "200 bare clients that commit what these ADDs do".into(),
        }
    }
}

/// The etcd server, hosts and programs that the kinds of load on etcd share.
struct Stage {
    ground: Ground,
    contender: Contender,
    hosts: Vec<Host>,
    bare: Vec<Bare>,
    shapes: Arc<Vec<Shape>>,
}

/// Measures the puts of a client in another process under each kind of load. Each round runs every kind of load on etcd
/// once.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let runtime = runtime()?;
    let mut stage = runtime.block_on(async {
        let ground = Ground::start(folder).await?;
        let (hosts, bare) = hosts::crowd(&ground).await?;
        let shapes = Arc::new(hosts::shapes(&ground, 0).await?);
        ground.settle(["busy".to_owned()], 1_000, &[hosts::RESIDENTS]).await?;
        let contender = ground.contender(programs, "margay-ipam", "busy", Families::V4);
        Outcome::Ok(Stage { ground, contender, hosts, bare, shapes })
    })?;
    let mut found = vec![[const { Vec::new() }; 3]; LOADS.len()];
    for _ in 0..ROUNDS {
        for (load, found) in LOADS.into_iter().zip(&mut found) {
            let ([p50, p90], rate) = runtime.block_on(stage.scan(load))?;
            for (values, value) in found.iter_mut().zip([p50, p90, rate]) {
                values.push(value);
            }
        }
    }
    let idle = median(&found[0][0]);
    let rows = LOADS.iter().zip(&found).map(|(load, [p50, p90, rates])| {
        let rate = if *load == Load::None { "-".to_owned() } else { whole(median(rates)) };
        vec![load.name(), rate, ms(median(p50)), ms(median(p90)), ratio(median(p50) / idle)]
    });
    let mut findings = Findings::default();
    findings.table(
        "beside",
        format!(
            "Puts of another client of the same etcd, a process of its own, medians of {ROUNDS} rounds in turns (ms)"
        ),
        &["beside", "changes/s", "put p50", "p90", "/ beside nothing"],
        rows.collect(),
    );
    Ok(findings)
}

impl Stage {
    /// Returns the p50 and p90 of the unrelated etcd client's puts, in milliseconds, and the number of changes per
    /// second that `load` made.
    async fn scan(&mut self, load: Load) -> Outcome<([f64; 2], f64)> {
        let over = Arc::new(AtomicBool::new(false));
        let (url, flag) = (self.ground.etcd.url(), Arc::clone(&over));
        let scan = tokio::task::spawn_blocking(move || {
            let found = other_process(&url).map_err(|error| error.to_string());
            flag.store(true, Relaxed);
            found
        });
        let begun = Instant::now();
        let changes = self.work(load, &over).await;
        let elapsed = begun.elapsed();
        // The process of the unrelated etcd client is awaited even if the load on etcd failed, so that it is not left
        // running.
        let found = scan.await??;
        Ok((found, changes? as f64 / elapsed.as_secs_f64()))
    }

    /// Runs the load `load` against etcd until `over` is set. Returns the number of changes that `load` made in etcd.
    async fn work(&mut self, load: Load, over: &Arc<AtomicBool>) -> Outcome<usize> {
        match load {
            Load::None => {
                while !over.load(Relaxed) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(0)
            }
            Load::Calm => together(self.hosts[..CALM].iter().cloned(), over, |host| churn(host, CALM_PAUSE)).await,
            Load::Hosts => together(self.hosts.iter().cloned(), over, |host| churn(host, Duration::ZERO)).await,
            Load::Callers => {
                let (contender, over) = (self.contender.clone(), Arc::clone(over));
                Ok(tokio::task::spawn_blocking(move || call(&contender, &over)).await??)
            }
            Load::Bare => {
                let mut changes = 0;
                while !over.load(Relaxed) {
                    hosts::commit_all(&mut self.bare, &self.shapes).await?;
                    changes += self.bare.len() * self.shapes.len();
                }
                Ok(changes)
            }
        }
    }
}

/// Adds and deletes one container again and again, with a pause after each call.
async fn churn(host: Host, pause: Duration) -> Result<usize, String> {
    // Each host has its own container, so no other host writes this container's handle.
    let request = one_address(&host.name, 1 << 41 | pools::start_of(&host.name));
    host.ipam.assign(&request, soon()).await.map_err(|error| error.to_string())?;
    tokio::time::sleep(pause).await;
    let released = host.ipam.release_attachment(&request.attachment, &[], soon()).await;
    released.map_err(|error| error.to_string())?;
    tokio::time::sleep(pause).await;
    Ok(2)
}

/// Repeats `work` on all hosts concurrently until `over` is set. Returns the number of changes that all hosts made.
async fn together<F>(
    hosts: impl Iterator<Item = Host>,
    over: &Arc<AtomicBool>,
    work: impl Fn(Host) -> F + Copy + Send + 'static,
) -> Outcome<usize>
where
    F: Future<Output = Result<usize, String>> + Send,
{
    let mut running: JoinSet<Result<usize, String>> = hosts
        .map(|host| {
            let over = Arc::clone(over);
            async move {
                let mut changes = 0;
                while !over.load(Relaxed) {
                    changes += work(host.clone()).await?;
                }
                Ok(changes)
            }
        })
        .collect();
    let mut changes = 0;
    while let Some(done) = running.join_next().await {
        changes += done??;
    }
    Ok(changes)
}

/// Runs many concurrent callers of the plugin until `over` is set. Returns the number of changes that all callers made.
fn call(contender: &Contender, over: &AtomicBool) -> Result<usize, String> {
    let one = |caller: usize| {
        let mut changes = 0;
        while !over.load(Relaxed) {
            let id = format!("beside{caller}");
            contender.add(&id).map_err(|error| error.to_string())?;
            contender.del(&id).map_err(|error| error.to_string())?;
            changes += 2;
        }
        Ok::<usize, String>(changes)
    };
    thread::scope(|scope| {
        let running: Vec<_> = (0..CALLERS).map(|caller| scope.spawn(move || one(caller))).collect();
        running.into_iter().map(|caller| caller.join().unwrap_or_else(|_| Err("a caller panicked".into()))).sum()
    })
}

/// Starts this program as a second process, in which it acts as an etcd client unrelated to Margay. Returns the
/// measurements of the process that runs the unrelated etcd client.
fn other_process(url: &str) -> Outcome<[f64; 2]> {
    let output = Command::new(std::env::current_exe()?).args(["puts-of", url]).output()?;
    let text = String::from_utf8(output.stdout)?;
    let numbers: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    numbers.first_chunk().copied().ok_or_else(|| format!("the other client failed: {said}").into())
}

/// Puts keys to etcd for the duration of one measurement. Prints the p50 and p90 of the puts in milliseconds.
#[expect(clippy::print_stdout, reason = "read by the process that measures")]
pub(crate) fn print_puts(url: &str) -> Outcome<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let times = runtime.block_on(async {
        let mut client = Client::connect([url], None).await?;
        client.put("beside", VALUE, None).await?;
        let (mut times, begun) = (Times::default(), Instant::now());
        while begun.elapsed() < LOOK {
            let put = Instant::now();
            client.put("beside", VALUE, None).await?;
            times.push(put.elapsed());
            tokio::time::sleep(PAUSE).await;
        }
        Outcome::Ok(times)
    })?;
    println!("{} {}", times.median(), times.quantile(0.9));
    Ok(())
}
