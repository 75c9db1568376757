//! Measures how long pods and their CNI calls take, in turns with the standard plugins bridge and host-local.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::cluster::Cluster;
use crate::network::{Network, Setup};
use crate::pods::{Watch, workload};
use crate::programs;

const PODS: usize = 40;
const ROUNDS: usize = 3;

/// Times of one round, in seconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// From the creation of the Deployment until its last pod was ready.
    ready: f64,
    /// The median of the main plugin's ADDs, with the IPAM plugin's part.
    add: f64,
    /// All ADDs one after the other.
    adds: f64,
    /// The median of the main plugin's DELs.
    del: f64,
}

pub(crate) fn compare(cluster: &mut Cluster) -> String {
    let own = cluster.setup;
    let other = Setup { network: Network::HostLocal, ..own };
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (setup, times) in [other, own].into_iter().zip(&mut times) {
            let measured = Measured::install(cluster, setup);
            cluster.set_network_of(setup, &json!({}));
            std::thread::sleep(Duration::from_secs(3));
            let time = round(cluster, &measured);
            println!("  {setup}: {time:?}");
            times.push(time);
        }
    }
    cluster.set_network(&json!({}));
    let [others, owns] = times.map(|times| {
        let of = |time: fn(&Times) -> f64| median(times.iter().map(time).collect());
        Times { ready: of(|t| t.ready), add: of(|t| t.add), adds: of(|t| t.adds), del: of(|t| t.del) }
    });
    format!(
        "{PODS} pods ready after {:.1} s, {:.2} x of {other} ({:.1} s); ADD {:.0} ms, {:.2} x of {:.0} ms; \
         DEL {:.0} ms, {:.2} x of {:.0} ms; medians of {ROUNDS}",
        owns.ready,
        owns.ready / others.ready,
        others.ready,
        owns.add * 1e3,
        owns.add / others.add,
        others.add * 1e3,
        owns.del * 1e3,
        owns.del / others.del,
        others.del * 1e3,
    )
}

fn round(cluster: &mut Cluster, measured: &Measured) -> Times {
    let watch = Watch::start(cluster.boot());
    let begun = Instant::now();
    cluster.apply(&workload("Deployment", "timed", PODS).to_string());
    let ready = watch.until_ready(PODS).into_values().max().unwrap().duration_since(begun).as_secs_f64();
    drop(watch);
    cluster.wait_for_pods("timed", PODS);
    cluster.delete("deployment", "timed");
    std::thread::sleep(Duration::from_secs(3));
    let (adds, dels) = (measured.seconds("ADD"), measured.seconds("DEL"));
    assert!(adds.len() >= PODS, "only {} ADDs were measured", adds.len());
    Times { ready, adds: adds.iter().sum(), add: median(adds), del: median(dels) }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A main plugin whose calls are measured, while this value lives: the test program `pod` takes its place, and calls it
/// in the folder `timed`.
#[derive(Debug)]
struct Measured {
    plugin: PathBuf,
    kept: PathBuf,
    log: PathBuf,
}

impl Measured {
    fn install(cluster: &Cluster, setup: Setup) -> Self {
        let bin = cluster.disk().join("opt/cni/bin");
        let timed = bin.join("timed");
        fs::create_dir_all(&timed).unwrap();
        // The other plugins are found there as well. Links stay links, since Margay's plugins are one program.
        for entry in fs::read_dir(&bin).unwrap().flatten().filter(|entry| entry.path() != timed) {
            let copied = Command::new("cp").args(["-a", "--remove-destination"]).arg(entry.path()).arg(&timed).status();
            assert!(copied.unwrap().success());
        }
        let name = setup.main_plugin();
        let (plugin, kept, log) = (bin.join(name), bin.join("kept"), timed.join("timed.log"));
        let _ = fs::remove_file(&log);
        fs::rename(&plugin, &kept).unwrap();
        testkit::copy::copy_program(programs::pod(), &plugin);
        Self { plugin, kept, log }
    }

    /// Returns the durations of the measured calls of a verb, in seconds.
    fn seconds(&self, verb: &str) -> Vec<f64> {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let words = log.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        words.filter(|words| words[0] == verb).map(|words| words[2].parse::<f64>().unwrap() / 1e6).collect()
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        fs::rename(&self.kept, &self.plugin).unwrap();
    }
}
