//! Measures the main plugin, started as a new process for each call, while it sets up a container's interface. Compares
//! the plugin with Debian's `ptp` plugin (with the IPAM plugin `host-local`), and with a bare veth pair that is created
//! through netlink.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ipam_core::model::keys;
use kv::Value;

use super::ground::Ground;
use super::{ms, ratio, runtime, whole};
use crate::contender::run as run_process;
use crate::findings::{Bound, Findings};
use crate::report::{Times, median};
use crate::serve::Daemon;
use crate::single::peak_of;
use crate::{Outcome, Programs};

/// The number of measurements of each contender.
const ROUNDS: u32 = 100;
/// Number of containers that have an address before the measurement begins.
const RESIDENTS: u32 = 40;
/// Number of calls during which the requests to etcd are counted.
const COUNTED: u32 = 20;
/// The number of concurrent callers of the plugin.
const CALLERS: usize = 16;
const EACH: usize = 10;
const CROWDS: usize = 5;
/// The CIDR from which the address pools are made.
const POOL: &str = "10.0.0.0/12";
/// The kernel's setting for IPv4 forwarding, which ptp turns on.
const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
const CLUSTER_INFORMATION: &str = r#"{"kind":"ClusterInformation","apiVersion":"projectcalico.org/v3","metadata":{"name":"default","uid":"0b8f3bb8-6a1d-4d0c-9f0f-2b7d0c2b7c11","creationTimestamp":"2026-01-01T00:00:00Z"},"spec":{"clusterGUID":"b1b1b1b1","datastoreReady":true}}"#;

/// A contender: a main plugin with its network configuration, or the minimal program.
#[derive(Clone, Debug)]
struct Wirer {
    name: &'static str,
    program: PathBuf,
    /// The network configuration of the plugin; empty for the minimal program.
    netconf: String,
    cni_path: PathBuf,
}

impl Wirer {
    fn call(&self, verb: &str, id: &str, netns: &str) -> Outcome<Duration> {
        let mut command = Command::new(&self.program);
        command.env_clear();
        if self.netconf.is_empty() {
            command.args([verb, netns, "bench-floor"]);
        } else {
            command.envs([
                ("CNI_COMMAND", verb),
                ("CNI_CONTAINERID", id),
                ("CNI_NETNS", &format!("/run/netns/{netns}")),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", &self.cni_path.to_string_lossy()),
            ]);
        }
        run_process(command, &self.netconf)
    }
}

/// Network namespaces for containers, which are removed when this value is dropped.
struct Namespaces(Vec<String>);

impl Namespaces {
    fn make(names: impl IntoIterator<Item = String>) -> Outcome<Self> {
        let mut made = Self(Vec::new());
        for name in names {
            run_process(ip(&["netns", "add", &name]), "")?;
            made.0.push(name);
        }
        Ok(made)
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = ip(&["netns", "del", name]).status();
        }
    }
}

fn ip(arguments: &[&str]) -> Command {
    let mut command = Command::new("ip");
    command.args(arguments);
    command
}

/// The IPv4 forwarding setting from before the measurements, which is restored when this value is dropped.
struct Forwarding(Option<String>);

impl Forwarding {
    fn remember() -> Self {
        Self(fs::read_to_string(FORWARDING).ok())
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        if let Some(was) = &self.0 {
            let _ = fs::write(FORWARDING, was);
        }
    }
}

/// Measures ADD and DEL by one caller and by many, the requests to etcd, and the plugin's memory and size.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let _forwarding = Forwarding::remember();
    let folder = folder.join("wire");
    let bin = folder.join("bin");
    fs::create_dir_all(&bin)?;
    for name in ["calico", "calico-ipam"] {
        symlink(&programs.plugin, bin.join(name))?;
    }
    let runtime = runtime()?;
    let ground = runtime.block_on(ground(&folder))?;
    let etcd = etcd_wirer(&ground, &bin, &folder);
    let redb = embedded(programs, &folder, &bin, "redb", "redb")?;
    let sled = embedded(programs, &folder, &bin, "sled", "sled, served")?;
    let alone = Wirer { name: "sled, by itself", ..embedded(programs, &folder.join("alone"), &bin, "sled", "")? };
    let floor = Wirer {
        name: "the floor: a pair and a route",
        program: programs.floor_wire.clone(),
        netconf: String::new(),
        cni_path: bin,
    };
    let _daemon = Daemon::start(programs, &format!("sled://{}", folder.join("sled").display()))?;
    let contenders = [floor, ptp(programs, &folder), etcd, redb, sled, alone];
    let mut findings = Findings::default();
    one_caller(&contenders, &mut findings)?;
    requests(&ground, &contenders[ETCD], &mut findings)?;
    many_callers(&contenders, &mut findings)?;
    let peak = peak(&contenders[ETCD])?;
    findings.goal("wiring: memory of one ADD on etcd (MiB)", peak / 1024.0, Bound::AtMost(14.0));
    let bytes = fs::metadata(&programs.plugin)?.len();
    findings.goal("the one program of both plugins (MB)", bytes as f64 / 1e6, Bound::AtMost(9.0));
    findings.conclude("goals-wire");
    Ok(findings)
}

/// The index of Debian's plugin ptp in the list of contenders.
const PTP: usize = 1;
const ETCD: usize = 2;
const REDB: usize = 3;
const SERVED: usize = 4;

async fn ground(folder: &Path) -> Outcome<Ground> {
    let ground = Ground::start(folder).await?;
    ground.settle(["wired".to_owned()], 0, &[u64::from(RESIDENTS)]).await?;
    ground.write(vec![(keys::cluster_information(), Value::from(CLUSTER_INFORMATION))]).await?;
    Ok(ground)
}

fn etcd_wirer(ground: &Ground, bin: &Path, folder: &Path) -> Wirer {
    let (url, lock) = (ground.etcd.url(), folder.join("ipam.lock"));
    let netconf = format!(
        r#"{{"cniVersion":"1.0.0","name":"bench","type":"calico","nodename":"wired","nodename_file_optional":true,"datastore_type":"etcdv3","etcd_endpoints":"{url}","ipam_lock_file":"{}","ipam":{{"type":"calico-ipam"}}}}"#,
        lock.display()
    );
    Wirer { name: "margay-cni on etcd", program: bin.join("calico"), netconf, cni_path: bin.to_owned() }
}

/// Creates a contender: the plugin with an embedded store in which [`RESIDENTS`] containers have an address.
fn embedded(programs: &Programs, folder: &Path, bin: &Path, engine: &str, name: &'static str) -> Outcome<Wirer> {
    fs::create_dir_all(folder)?;
    let store = folder.join(engine);
    let url = format!("{engine}://{}", store.display());
    let mut pool = Command::new(&programs.margay);
    pool.args(["--store", &url, "pool", "create", "bench", POOL]);
    run_process(pool, "")?;
    let netconf = format!(
        r#"{{"cniVersion":"1.0.0","name":"bench","type":"calico","nodename":"wired","datastore_type":"{engine}","datastore_path":"{}","ipam":{{"type":"calico-ipam"}}}}"#,
        store.display()
    );
    let ipam = Wirer { name, program: bin.join("calico-ipam"), netconf: netconf.clone(), cni_path: bin.to_owned() };
    for resident in 0..RESIDENTS {
        ipam.call("ADD", &format!("resident{resident}"), "none")?;
    }
    Ok(Wirer { name, program: bin.join("calico"), netconf, cni_path: bin.to_owned() })
}

/// Creates the contender that runs Debian's ptp with Debian's host-local.
fn ptp(programs: &Programs, folder: &Path) -> Wirer {
    let cni_path = programs.host_local.parent().unwrap_or(Path::new("/usr/lib/cni")).to_owned();
    let netconf = format!(
        r#"{{"cniVersion":"1.0.0","name":"bench-ptp","type":"ptp","ipam":{{"type":"host-local","dataDir":"{}","ranges":[[{{"subnet":"10.64.0.0/12"}}]],"routes":[{{"dst":"0.0.0.0/0"}}]}}}}"#,
        folder.join("host-local").display()
    );
    Wirer { name: "ptp + host-local (Debian)", program: cni_path.join("ptp"), netconf, cni_path }
}

fn one_caller(contenders: &[Wirer], findings: &mut Findings) -> Outcome<()> {
    let names = (0..contenders.len()).map(|who| format!("margay-bench-{who}"));
    let namespaces = Namespaces::make(names)?;
    let mut adds = vec![Times::default(); contenders.len()];
    let mut dels = adds.clone();
    for round in 0..ROUNDS as usize + 2 {
        for turn in 0..contenders.len() {
            // Every second round runs the contenders in reverse order, so that no contender always runs directly after
            // the same other contender.
            let turn = if round.is_multiple_of(2) { turn } else { contenders.len() - 1 - turn };
            let who = (turn + round) % contenders.len();
            let (contender, netns) = (&contenders[who], &namespaces.0[who]);
            let id = format!("c{round}");
            let add = contender.call("ADD", &id, netns)?;
            let del = contender.call("DEL", &id, netns)?;
            // The first two rounds are warm-up rounds and are not measured.
            if round >= 2 {
                adds[who].push(add);
                dels[who].push(del);
            }
        }
    }
    let [floor, ptp, ptp_del] = [adds[0].median(), adds[PTP].median(), dels[PTP].median()];
    let row = |who: usize| {
        let (add, del) = (&adds[who], &dels[who]);
        vec![
            contenders[who].name.to_owned(),
            ms(add.median()),
            ms(add.quantile(0.9)),
            ratio(add.median() / ptp),
            ratio(add.median() / floor),
            ms(del.median()),
            ratio(del.median() / ptp_del),
        ]
    };
    findings.table(
        "wire",
        format!("Wiring a container: whole cold processes, {ROUNDS} runs each in turns, {RESIDENTS} containers resident (ms)"),
        &["", "ADD p50", "p90", "/ ptp", "/ floor", "DEL p50", "/ ptp"],
        (0..contenders.len()).map(row).collect(),
    );
    let add = |who: usize| adds[who].median();
    findings.goal("wiring: ADD on etcd (ms)", add(ETCD), Bound::AtMost(9.0));
    findings.goal("wiring: ADD on etcd / ptp + host-local", add(ETCD) / ptp, Bound::AtMost(1.3));
    findings.goal("wiring: ADD on redb / ptp + host-local", add(REDB) / ptp, Bound::AtMost(1.1));
    findings.goal("wiring: ADD on sled, served / ptp + host-local", add(SERVED) / ptp, Bound::AtMost(1.1));
    for (who, name) in [(ETCD, "etcd"), (REDB, "redb"), (SERVED, "sled, served")] {
        let ratio = dels[who].median() / ptp_del;
        findings.goal(&format!("wiring: DEL on {name} / ptp's"), ratio, Bound::AtMost(0.7));
    }
    Ok(())
}

fn requests(ground: &Ground, wirer: &Wirer, findings: &mut Findings) -> Outcome<()> {
    let namespaces = Namespaces::make(["margay-bench-requests".to_owned()])?;
    let (mut adds, mut dels) = (0.0, 0.0);
    for number in 0..COUNTED {
        let id = format!("counted{number}");
        let before = served_requests(ground.etcd.address())?;
        wirer.call("ADD", &id, &namespaces.0[0])?;
        let between = served_requests(ground.etcd.address())?;
        wirer.call("DEL", &id, &namespaces.0[0])?;
        adds += between - before;
        dels += served_requests(ground.etcd.address())? - between;
    }
    let counted = f64::from(COUNTED);
    findings.goal("wiring: requests to etcd of an ADD", adds / counted, Bound::AtMost(4.0));
    findings.goal("wiring: requests to etcd of a DEL", dels / counted, Bound::AtMost(3.0));
    Ok(())
}

/// Returns the number of requests for keys that etcd has begun to serve, from etcd's metrics.
fn served_requests(address: std::net::SocketAddr) -> Outcome<f64> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let is_ours = |line: &&str| {
        line.starts_with("grpc_server_started_total") && line.contains("etcdserverpb.KV") && !line.contains("Compact")
    };
    let number = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<f64>().ok());
    Ok(text.lines().filter(is_ours).filter_map(number).sum())
}

fn many_callers(contenders: &[Wirer], findings: &mut Findings) -> Outcome<()> {
    let name = |caller: usize, number: usize| format!("margay-bench-{caller}-{number}");
    let names = (0..CALLERS).flat_map(|caller| (0..EACH).map(move |number| name(caller, number)));
    let _namespaces = Namespaces::make(names)?;
    let measured = [PTP, ETCD, REDB, SERVED];
    let mut rates = vec![Vec::new(); contenders.len()];
    for round in 0..CROWDS {
        for who in measured {
            let contender = &contenders[who];
            let all = |verb: &str| -> Outcome<Duration> {
                let begun = Instant::now();
                let failed = thread::scope(|scope| {
                    let calls = |caller: usize| {
                        (0..EACH).try_for_each(|number| {
                            let id = format!("r{round}c{caller}n{number}");
                            let called = contender.call(verb, &id, &name(caller, number));
                            called.map(drop).map_err(|error| error.to_string())
                        })
                    };
                    let running: Vec<_> = (0..CALLERS).map(|caller| scope.spawn(move || calls(caller))).collect();
                    running.into_iter().find_map(|caller| caller.join().unwrap_or(Err("panicked".into())).err())
                });
                failed.map_or_else(|| Ok(begun.elapsed()), |error| Err(error.into()))
            };
            rates[who].push((CALLERS * EACH) as f64 / all("ADD")?.as_secs_f64());
            all("DEL")?;
        }
    }
    let rate = |who: usize| median(&rates[who]);
    findings.table(
        "wire-callers",
        format!("{CALLERS} callers at once that wire containers, {CROWDS} rounds of {} calls", CALLERS * EACH),
        &["", "ADD/s", "/ ptp"],
        measured
            .iter()
            .map(|who| vec![contenders[*who].name.to_owned(), whole(rate(*who)), ratio(rate(*who) / rate(PTP))])
            .collect(),
    );
    for (who, name) in [(ETCD, "etcd"), (REDB, "redb"), (SERVED, "sled, served")] {
        findings.goal(&format!("wiring, 16 callers at once on {name}: ADD/s"), rate(who), Bound::AtLeast(100.0));
    }
    Ok(())
}

/// Returns the peak memory of one ADD by the contender, in KiB.
fn peak(wirer: &Wirer) -> Outcome<f64> {
    let namespaces = Namespaces::make(["margay-bench-peak".to_owned()])?;
    let netns = format!("/run/netns/{}", namespaces.0[0]);
    let kib = peak_of(
        &wirer.program,
        &wirer.netconf,
        &[("CNI_NETNS", &netns), ("CNI_PATH", &wirer.cni_path.to_string_lossy())],
    )?;
    wirer.call("DEL", "peak", &namespaces.0[0])?;
    Ok(kib)
}
