//! Compares plugins that use the daemon `margay serve` with plugins that open the store themselves. Measures the
//! daemon's memory and processor time.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::runtime::Builder;

use crate::cluster::callers::{CALLERS, EACH, Verb, at_once};
use crate::contender::{Contender, in_turns, run as run_process};
use crate::fill::{self, NODE, Share};
use crate::findings::{Bound, Findings};
use crate::report::{Times, median};
use crate::{Outcome, Programs};

/// The number of containers that exist before the measurement begins.
const RESIDENTS: u32 = 40;
/// The number of measurements of each contender.
const ROUNDS: u32 = 300;
/// Number of measuring rounds with many concurrent callers.
const CROWDS: usize = 10;
/// Number of blocks in the store of the daemon whose memory is measured.
const BLOCKS: u32 = 10_000;
/// Number of daemon starts in the measurement of the start time.
const STARTS: usize = 10;
/// How long the memory and processor time of the idle daemon are measured.
const IDLE: Duration = Duration::from_secs(20);

/// A running daemon. Dropping this value ends the daemon with SIGTERM.
pub(crate) struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts the daemon on a store, and waits until the daemon's socket exists.
    pub(crate) fn start(programs: &Programs, url: &str) -> Outcome<Self> {
        Self::start_with(programs, url, &[])
    }

    /// Starts the daemon as [`Daemon::start`] does, with additional options of `margay serve`.
    pub(crate) fn start_with(programs: &Programs, url: &str, options: &[&str]) -> Outcome<Self> {
        let name = Command::new(&programs.margay).args(["--store", url, "serve", "--name"]).output()?;
        let name = String::from_utf8(name.stdout)?;
        let socket = format!("/run/margay/serve/{}.sock", name.trim());
        let mut command = Command::new(&programs.margay);
        command.args(["--store", url, "serve"]).args(options).stdin(Stdio::null()).stderr(Stdio::null());
        // `MALLOC_ARENA_MAX` and `MALLOC_MMAP_THRESHOLD_` configure the C library's allocator as the daemon's systemd
        // unit does.
        command.env("MALLOC_ARENA_MAX", "1").env("MALLOC_MMAP_THRESHOLD_", "131072");
        let daemon = Self { child: command.spawn()? };
        let begun = Instant::now();
        while !Path::new(&socket).exists() {
            if begun.elapsed() > Duration::from_secs(10) {
                return Err(format!("the daemon of {url} does not come up").into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(daemon)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Reads the file `file` of the daemon's process under `/proc/PID/`.
    fn process(&self, file: &str) -> Outcome<String> {
        Ok(fs::read_to_string(format!("/proc/{}/{file}", self.child.id()))?)
    }

    /// Returns the daemon's resident memory in MiB.
    fn mib(&self) -> Outcome<f64> {
        let status = self.process("status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        let kib: f64 = line.split_whitespace().next().ok_or("no number")?.parse()?;
        Ok(kib / 1024.0)
    }

    /// Returns the processor time of the daemon's process in seconds, including its ended threads.
    fn seconds(&self) -> Outcome<f64> {
        const TICKS_PER_SECOND: f64 = 100.0;
        let stat = self.process("stat")?;
        // In `/proc/PID/stat`, the program's name is in parentheses and may contain spaces.
        let (_, fields) = stat.rsplit_once(')').ok_or("no name in stat")?;
        let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
        Ok(ticks.sum::<Result<f64, _>>()? / TICKS_PER_SECOND)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = self.child.wait();
    }
}

/// Measures plugin calls with and without the daemon, and the daemon's memory and processor time.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<Findings> {
    let mut findings = Findings::default();
    let folder = folder.join("serve");
    fs::create_dir(&folder)?;
    calls(programs, &folder, &mut findings)?;
    costs(programs, &folder, &mut findings)?;
    findings.conclude("goals-served");
    Ok(findings)
}

fn calls(programs: &Programs, folder: &Path, findings: &mut Findings) -> Outcome<()> {
    let served = folder.join("served");
    let alone = folder.join("alone");
    fs::create_dir(&served)?;
    fs::create_dir(&alone)?;
    let contenders = [
        Contender::Empty { program: programs.floor_empty.clone() },
        Contender::host_local(programs, folder),
        Contender::margay(programs, &served, "redb, served", "redb"),
        Contender::margay(programs, &served, "sled, served", "sled"),
        Contender::margay(programs, &alone, "redb, by itself", "redb"),
        Contender::margay(programs, &alone, "sled, by itself", "sled"),
    ];
    for contender in &contenders[1..] {
        for resident in 0..RESIDENTS {
            contender.add(&format!("resident{resident}"))?;
        }
    }
    let daemon = |engine: &str| {
        let url = format!("{engine}://{}", served.join(format!("ipam.{engine}")).display());
        Daemon::start(programs, &url)
    };
    let _daemons = [daemon("redb")?, daemon("sled")?];
    let (adds, dels) = in_turns(&contenders, ROUNDS)?;
    let peer = adds[1].median();
    let row = |place: usize| {
        let (times, del) = (&adds[place], dels[place].median());
        vec![
            contenders[place].name().to_owned(),
            format!("{:.2}", times.median()),
            format!("{:.2}", times.quantile(0.9)),
            format!("{:.2}", times.median() / peer),
            if del.is_nan() { "-".to_owned() } else { format!("{del:.2}") },
        ]
    };
    findings.table(
        "served",
        format!("Cold ADD, whole process, {ROUNDS} runs each in turns, {RESIDENTS} containers resident (ms)"),
        &["", "ADD p50", "p90", "/ host-local", "DEL p50"],
        (0..contenders.len()).map(row).collect(),
    );
    for (place, engine) in [(2, "redb"), (3, "sled")] {
        let what = format!("cold ADD on {engine} through the daemon / host-local");
        findings.goal(&what, adds[place].median() / peer, Bound::AtMost(0.7));
    }
    crowds(&contenders[..4], findings)
}

/// Measures the calls of many concurrent callers of each contender. Contenders are compared by the median, over all
/// rounds, of each round's slowest call. The 99th percentile of all calls would only show pauses of the machine: they
/// hit one or two rounds of every contender, even of a program that does nothing.
fn crowds(contenders: &[Contender], findings: &mut Findings) -> Outcome<()> {
    let mut rates = vec![Vec::new(); contenders.len()];
    let mut times = vec![Times::default(); contenders.len()];
    let mut tails = vec![Vec::new(); contenders.len()];
    for round in 0..CROWDS {
        for (place, contender) in contenders.iter().enumerate() {
            let (elapsed, adds) = at_once(contender, Verb::Add, round)?;
            rates[place].push((CALLERS * EACH) as f64 / elapsed.as_secs_f64());
            tails[place].push(adds.quantile(0.99) / adds.median());
            times[place].append(adds);
            // The DELs that release the addresses of the measured ADDs are not measured.
            at_once(contender, Verb::Del, round)?;
        }
    }
    let (empty, peer) = (median(&rates[0]), median(&rates[1]));
    let row = |place: usize| {
        let (rate, times) = (median(&rates[place]), &times[place]);
        vec![
            contenders[place].name().to_owned(),
            format!("{rate:.0}"),
            format!("{:.2}", rate / peer),
            format!("{:.2}", rate / empty),
            format!("{:.2}", times.median()),
            format!("{:.2}", times.quantile(0.99)),
            format!("{:.2}", median(&tails[place])),
        ]
    };
    findings.table(
        "served-callers",
        format!("{CALLERS} callers at once, {CROWDS} rounds of {} calls, each a process (ms)", CALLERS * EACH),
        &["", "ADD/s", "/ host-local", "/ empty", "ADD p50", "p99", "p99 / p50 of a round"],
        (0..contenders.len()).map(row).collect(),
    );
    let wanted = (3.0 * peer).min(0.8 * empty);
    for (place, engine) in [(2, "redb"), (3, "sled")] {
        let what = format!("{CALLERS} callers on {engine} through the daemon: ADD/s");
        findings.goal(&what, median(&rates[place]), Bound::AtLeast(wanted));
        let what = format!("{CALLERS} callers on {engine} through the daemon: p99 / p50");
        findings.goal(&what, median(&tails[place]), Bound::AtMost(2.5));
    }
    Ok(())
}

/// Measures the memory and processor time of an idle daemon, and the time from the daemon's start to its first answer.
/// The benchmark sets no limit for the daemon's memory after listing all blocks, because this memory depends on the
/// size of the store.
fn costs(programs: &Programs, folder: &Path, findings: &mut Findings) -> Outcome<()> {
    let mut rows = Vec::new();
    for engine in ["redb", "sled"] {
        let path = folder.join(format!("large.{engine}"));
        let url = format!("{engine}://{}", path.display());
        Builder::new_current_thread().enable_all().build()?.block_on(async {
            let store = fill::create(engine, &path).await?;
            fill::give(&store, NODE, 0, Share { blocks: BLOCKS, used: 1 }).await?;
            store.close().await?;
            Outcome::Ok(())
        })?;
        let ask = |arguments: &[&str]| {
            let mut command = Command::new(&programs.margay);
            command.args(["--store", &url]).args(arguments);
            run_process(command, "")
        };
        let mut starts = Times::default();
        for _ in 0..STARTS {
            let begun = Instant::now();
            let daemon = Daemon::start(programs, &url)?;
            ask(&["ipam", "show", "--show-configuration"])?;
            starts.push(begun.elapsed());
            drop(daemon);
        }
        let daemon = Daemon::start(programs, &url)?;
        ask(&["ipam", "show", "--show-configuration"])?;
        let before = daemon.seconds()?;
        thread::sleep(IDLE);
        let busy = (daemon.seconds()? - before) / IDLE.as_secs_f64() * 100.0;
        let mib = daemon.mib()?;
        ask(&["ipam", "show"])?;
        rows.push(vec![
            engine.to_owned(),
            format!("{mib:.1}"),
            format!("{:.1}", daemon.mib()?),
            format!("{busy:.2}"),
            format!("{:.1}", starts.median()),
            format!("{:.1}", starts.quantile(1.0)),
        ]);
        findings.goal(&format!("the idle daemon on {engine}: memory (MiB)"), mib, Bound::AtMost(16.0));
        findings.goal(&format!("the idle daemon on {engine}: % of a core"), busy, Bound::AtMost(0.3));
        let what = format!("the daemon on {engine}: start to first answer (ms)");
        findings.goal(&what, starts.median(), Bound::AtMost(50.0));
    }
    findings.table(
        "served-costs",
        format!("The daemon of a store with {BLOCKS} blocks"),
        &[
            "",
            "memory, MiB",
            "after a listing of all",
            "idle, % of a core",
            "start to first answer, ms",
            "the slowest start",
        ],
        rows,
    );
    Ok(())
}
