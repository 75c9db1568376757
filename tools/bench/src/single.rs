//! Measures the calls of a single caller, each in a new process, one after another, alternating between the contenders.

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::resource::{UsageWho, getrusage};

use crate::contender::{Contender, copy_folder, in_turns, plugin, run as run_process};
use crate::report::print;
use crate::{Outcome, Programs};

/// Number of containers that exist before the measurement begins.
const RESIDENTS: u32 = 40;
/// The number of measurements of each contender.
const ROUNDS: u32 = 300;

const MIB: f64 = (1 << 20) as f64;

/// Measures ADD and DEL of each contender, and the memory and the size of the plugin.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<()> {
    let redb = Contender::margay(programs, folder, "margay-ipam on redb", "redb");
    let sled = Contender::margay(programs, folder, "margay-ipam on sled", "sled");
    let host_local = Contender::host_local(programs, folder);
    for contender in [&redb, &sled, &host_local] {
        for resident in 0..RESIDENTS {
            contender.add(&format!("resident{resident}"))?;
        }
    }
    let floor_store = folder.join("floor.sled");
    copy_folder(&folder.join("ipam.sled/sled"), &floor_store)?;
    let bare_sled = Contender::Sled { program: programs.floor_sled.clone(), store: floor_store };
    let empty = Contender::Empty { program: programs.floor_empty.clone() };

    let mut contenders = vec![empty, host_local, redb.clone(), bare_sled, sled.clone()];
    if let Some(plugin) = &programs.baseline {
        contenders.push(redb.with_plugin("the baseline on redb", plugin));
        contenders.push(sled.with_plugin("the baseline on sled", plugin));
    }
    let (adds, dels) = in_turns(&contenders, ROUNDS)?;
    let [empty, host_local, _, bare_sled, _] = [0, 1, 2, 3, 4].map(|who| adds[who].median());
    let row = |who: usize| {
        let (times, median) = (&adds[who], adds[who].median());
        let del = if dels[who].median().is_nan() { String::from("-") } else { format!("{:.2}", dels[who].median()) };
        vec![
            contenders[who].name().to_owned(),
            format!("{median:.2}"),
            format!("{:.2}", times.quantile(0.9)),
            format!("{:.2}", median / host_local),
            format!("{:.2}", median / bare_sled),
            format!("{:.1}", median / empty),
            del,
        ]
    };
    print(
        &format!("Cold ADD, whole process, {ROUNDS} runs each in turns, {RESIDENTS} containers resident (ms)"),
        &["", "ADD p50", "p90", "/ host-local", "/ bare sled", "/ empty", "DEL p50"],
        (0..contenders.len()).map(row).collect(),
    );
    memory_and_size(programs, &redb)
}

/// Returns the peak memory of one ADD by the plugin `contender`, in KiB.
pub(crate) fn peak_kib(contender: &Contender) -> Outcome<f64> {
    let (program, netconf) = contender.as_plugin().ok_or("not a plugin")?;
    let kib = peak_of(program, netconf, &[])?;
    contender.del("peak")?;
    Ok(kib)
}

/// Returns the peak memory, in KiB, of one ADD of the container `peak`. The plugin gets the environment variables in
/// `variables`.
pub(crate) fn peak_of(program: &Path, netconf: &str, variables: &[(&str, &str)]) -> Outcome<f64> {
    let mut peak = plugin(Path::new(&std::env::current_exe()?), "ADD", "peak");
    peak.envs(variables.iter().copied()).args(["peak-of".as_ref(), program.as_os_str(), netconf.as_ref()]);
    let said = String::from_utf8(peak.output()?.stdout)?;
    Ok(said.trim().parse().map_err(|_| format!("the ADD whose memory is measured failed: {said}"))?)
}

fn memory_and_size(programs: &Programs, redb: &Contender) -> Outcome<()> {
    let kib = peak_kib(redb)?;
    let bytes = fs::metadata(&programs.plugin)?.len();
    print(
        "One ADD on redb",
        &["", "MiB", "at most"],
        vec![
            vec!["peak memory".into(), format!("{:.1}", kib / 1024.0), "12".into()],
            vec!["the plugin's file".into(), format!("{:.1}", bytes as f64 / MIB), "8.6".into()],
        ],
    );
    Ok(())
}

/// Runs a program with the environment variables of this process, and prints that program's peak memory in KiB.
#[expect(clippy::print_stdout, reason = "read by the process that measures")]
pub(crate) fn print_peak_of(arguments: &[String]) -> Outcome<()> {
    let [program, input, arguments @ ..] = arguments else {
        return Err("usage: bench peak-of PROGRAM INPUT [ARGUMENT...]".into());
    };
    let mut command = Command::new(program);
    command.args(arguments);
    run_process(command, input)?;
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(())
}
