//! Measures how much a full store slows an ADD down. Runs the plugin as a new process per call, on a store with a full
//! history and many addresses and on an empty store.

use std::path::Path;

use crate::contender::{Contender, copy_folder, in_turns};
use crate::fill::{self, NODE, Share};
use crate::report::print;
use crate::{Outcome, Programs};

/// The number of measurements of each contender.
const ROUNDS: u32 = 200;

/// The content of a filled store, and its name in the report.
struct Load {
    name: &'static str,
    /// Number of nodes in the store besides the node on which the plugin runs.
    others: u32,
    own: Share,
}

const LOADS: [Load; 2] = [
    Load { name: "log at its bound, 1,280 addresses", others: 0, own: Share { blocks: 20, used: 64 } },
    Load { name: "log at its bound, 100,000 addresses", others: 79, own: Share { blocks: 20, used: 32 } },
];

/// Measures ADD and DEL on an empty store and on filled stores.
pub(crate) fn run(programs: &Programs, folder: &Path) -> Outcome<()> {
    let folder = folder.join("loaded");
    std::fs::create_dir(&folder)?;
    redb(programs, &folder)?;
    sled(programs, &folder)
}

/// Creates a contender whose new store has one network and one assigned address.
fn begun(programs: &Programs, folder: &Path, name: &'static str, engine: &str) -> Outcome<Contender> {
    std::fs::create_dir(folder)?;
    let contender = Contender::margay(programs, folder, name, engine);
    contender.add("resident")?;
    Ok(contender)
}

fn fill_store(engine: &str, store: &Path, load: &Load) -> Outcome<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        let store = fill::open(engine, store).await?;
        fill::give(&store, NODE, 0, load.own).await?;
        for other in 0..load.others {
            let share = Share { blocks: 20, used: 64 };
            fill::give(&store, &format!("other{other}"), load.own.blocks + other * share.blocks, share).await?;
        }
        fill::fill_log(&store).await?;
        let status = store.status();
        let reported = format!(
            "{} addresses in use, {} keys, {} revisions and {:.1} MiB of log",
            fill::in_use(&store).await?,
            status.live,
            status.revision.get() - status.compacted.get() + 1,
            status.log_bytes as f64 / f64::from(1 << 20),
        );
        store.close().await?;
        Ok(reported)
    })
}

fn redb(programs: &Programs, folder: &Path) -> Outcome<()> {
    let mut contenders = vec![begun(programs, &folder.join("redb"), "empty", "redb")?];
    let mut notes = vec![String::new()];
    for (number, load) in LOADS.iter().enumerate() {
        let place = folder.join(format!("redb{number}"));
        contenders.push(begun(programs, &place, load.name, "redb")?);
        notes.push(fill_store("redb", &place.join("ipam.redb"), load)?);
    }
    let (adds, dels) = in_turns(&contenders, ROUNDS)?;
    let rows = (0..contenders.len()).map(|who| {
        let at_most = ["-", "1.10", "1.20"];
        vec![
            contenders[who].name().to_owned(),
            format!("{:.2}", adds[who].median()),
            format!("{:.2}", adds[who].median() / adds[0].median()),
            at_most[who].to_owned(),
            format!("{:.2}", dels[who].median()),
            notes[who].clone(),
        ]
    });
    let header = ["redb", "ADD p50 (ms)", "/ empty", "at most", "DEL p50 (ms)", "in the store"];
    print(&format!("Cold ADD on a full store, redb, {ROUNDS} runs each in turns"), &header, rows.collect());
    Ok(())
}

fn sled(programs: &Programs, folder: &Path) -> Outcome<()> {
    let load = &LOADS[0];
    let place = folder.join("sled");
    let full = begun(programs, &place, load.name, "sled")?;
    let note = fill_store("sled", &place.join("ipam.sled"), load)?;
    let floor_store = folder.join("floor.sled");
    copy_folder(&place.join("ipam.sled/sled"), &floor_store)?;
    let floor = Contender::Sled { program: programs.floor_sled.clone(), store: floor_store };
    let empty = begun(programs, &folder.join("empty-sled"), "empty", "sled")?;
    let contenders = [floor, full, empty];
    let (adds, dels) = in_turns(&contenders, ROUNDS)?;
    let rows = (0..contenders.len()).map(|who| {
        vec![
            contenders[who].name().to_owned(),
            format!("{:.2}", adds[who].median()),
            format!("{:.2}", adds[who].median() / adds[0].median()),
            ["-", "1.30", "-"][who].to_owned(),
            if who == 0 { "-".to_owned() } else { format!("{:.2}", dels[who].median()) },
            ["a copy of the full store", &note, ""][who].to_owned(),
        ]
    });
    let header = ["sled", "ADD p50 (ms)", "/ bare sled", "at most", "DEL p50 (ms)", "in the store"];
    print(&format!("Cold ADD on a full store, sled, {ROUNDS} runs each in turns"), &header, rows.collect());
    Ok(())
}
