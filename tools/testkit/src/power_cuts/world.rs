//! A simulated disk that survives many power cuts, and the ledger of the plugin calls that were answered before each
//! cut.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use ::power::{Cut, Disk, Folders, Image, Syncs};
use datastore::Create;
use kv::StoreExt;
use serde_json::{Value, json};

use super::callers::Work;
use super::ledger::Ledger;
use super::served::Daemon;
use super::{Tally, count};
use crate::lab::{Engine, Lab, embedded_conf};
use crate::process::Call;
use crate::programs::command;
use crate::random::Random;

/// Maximum number of revisions in the store's history.
const FULL_LOG: usize = 10_000;
/// First estimate of the number of disk operations in one plugin call.
const OPERATIONS: u64 = 30;

/// The moment of a test round at which the power is cut.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// The power is cut after the given number of disk operations, or earlier if all calls have ended.
    Operation(u64),
    /// The power is cut when the callers have received this many answers in the round.
    Answer(u64),
}

/// The plan of a test round, which has one power cut.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    callers: u64,
    calls: u64,
    moment: Moment,
    pub folders: Folders,
    luck: u64,
    served: bool,
}

impl Plan {
    pub fn draw(random: &mut Random, world: &World) -> Self {
        let (callers, calls) = (1 + random.below(4), 1 + random.below(4));
        let all = callers * calls;
        let moment = match random.below(4) {
            0 => Moment::Answer(1 + random.below(all)),
            // Among the drawn operation numbers, one in nine is greater than the round's number of disk operations: the
            // power is then cut after all calls have ended.
            _ => Moment::Operation(random.below(all * world.operations * 9 / 8 + 2)),
        };
        let folders = if random.once_in(2) { Folders::Strict } else { Folders::Prefix };
        Self { callers, calls, moment, folders, luck: random.next(), served: random.once_in(2) }
    }
}

/// A simulated disk, and the ledger of the plugin calls that were answered while the store was on this disk.
#[derive(Clone, Debug)]
pub struct World {
    pub engine: Engine,
    syncs: Syncs,
    pub image: Image,
    pub ledger: Ledger,
    /// The approximate number of disk operations in one plugin call.
    operations: u64,
}

impl World {
    /// Creates a `World` with an empty disk.
    pub fn empty(engine: Engine, syncs: Syncs) -> Self {
        Self { engine, syncs, image: Image::default(), ledger: Ledger::default(), operations: OPERATIONS }
    }

    /// Creates a `World` with a store whose history has its maximum length, so that each commit also removes old
    /// revisions.
    pub fn with_full_log(engine: Engine, syncs: Syncs) -> Self {
        let lab = Lab::new(engine);
        let conf = lab.conf_with("bridge", network());
        Call::new("ADD", "first", &conf).ok();
        Call::new("DEL", "first", &conf).ok();
        lab.with_ipam(Create::Never, async |ipam, _| {
            let mut puts = tokio::task::JoinSet::new();
            for number in 0..FULL_LOG {
                let store = Arc::clone(ipam.store());
                puts.spawn(async move { store.put("/filler", number.to_string()).await });
            }
            for put in puts.join_all().await {
                put.unwrap();
            }
        });
        Self { image: Image::of_folder(lab.root.path()).unwrap(), ..Self::empty(engine, syncs) }
    }

    /// Lets the callers work, cuts the power, and checks the disk image that remains. The returned error describes what
    /// is wrong with the remaining disk image.
    pub fn round(&mut self, plan: &Plan, random: &mut Random, tally: &mut Tally) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::new(self.image.clone(), self.syncs);
        let ledger = Mutex::new(std::mem::take(&mut self.ledger));
        let mounted = disk.mount(folder.path()).unwrap();
        let store = folder.path().join("store");
        let mut conf = embedded_conf(self.engine, &store, "bridge", network());
        conf["log_level"] = "debug".into();
        let location = self.engine.at(&store);
        let last = match plan.moment {
            Moment::Operation(operations) => {
                disk.cut_after(operations);
                None
            }
            Moment::Answer(answers) => Some(answers),
        };
        let operations = self.operations;
        let daemon = plan.served.then(|| Daemon::start(&location, &disk));
        let by_daemon = AtomicU64::new(0);
        let work = Work {
            disk: &disk,
            conf: &conf,
            ledger: &ledger,
            calls: plan.calls,
            last,
            operations,
            by_daemon: &by_daemon,
        };
        work.run(plan.callers, random);
        count(tally, if disk.is_cut() { "cut while there was work" } else { "cut after all work" });
        disk.cut();
        if daemon.is_some() {
            *tally.entry("calls answered by the daemon".to_owned()).or_default() += by_daemon.into_inner();
        }
        drop((daemon, mounted));
        for path in disk.unsynced() {
            count(tally, format!("not synced: {}", kind_of(&path)));
        }
        self.ledger = ledger.into_inner().unwrap_or_else(PoisonError::into_inner);
        let each = disk.operations() / self.ledger.acknowledged().max(1);
        self.operations = (3 * self.operations + each).div_ceil(4);
        self.image = disk.after_cut(Cut { seed: plan.luck, folders: plan.folders });
        count(tally, format!("names: {:?}", plan.folders));
        *tally.entry("operations of the disk".to_owned()).or_default() += disk.operations();
        self.scan(tally)
    }

    /// Checks a copy of the disk image that remained after the power cut.
    pub fn scan(&mut self, tally: &mut Tally) -> Result<(), String> {
        let left = Lab::new(self.engine);
        let disk = left.root.path().join("disk");
        self.image.copy_to(&disk).unwrap();
        let left = Lab { store: disk.join("store"), ..left };
        let ledger = &mut self.ledger;
        let seen = catch_unwind(AssertUnwindSafe(|| scan(&left, ledger)));
        let seen = seen.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(text.unwrap_or("a panic").to_owned())
        })?;
        for (what, times) in seen {
            *tally.entry(what.to_owned()).or_default() += times;
        }
        Ok(())
    }

    /// Copies the remaining disk image to a folder that is not deleted. Returns the path of the folder with the copied
    /// disk image.
    pub fn keep(&self) -> String {
        let folder = tempfile::Builder::new().prefix("margay-power-").tempdir().unwrap().keep();
        self.image.copy_to(&folder.join("disk")).unwrap();
        folder.display().to_string()
    }
}

/// Returns a network configuration with which each container gets one IPv4 and one IPv6 address.
pub fn network() -> Value {
    json!({ "ranges": [[{ "subnet": "10.66.0.0/24" }], [{ "subnet": "fd66::/120" }]] })
}

/// Maps a file's path to its kind: file names that differ only in a number get the same kind, because sled numbers its
/// snapshots.
fn kind_of(path: &Path) -> String {
    let text = path.display().to_string();
    text.split_once("/snap.").map_or(text.clone(), |(folder, _)| format!("{folder}/snap.*"))
}

/// Runs an ADD on the store that remains after the power cut, and compares the store with the ledger.
fn scan(left: &Lab, ledger: &mut Ledger) -> Result<Vec<(&'static str, u64)>, String> {
    let acknowledged = ledger.acknowledged();
    let after = Call::new("ADD", "after", &left.conf_with("bridge", network())).run();
    if after.exit != 0 {
        return Err(format!("an ADD fails: {after:?}"));
    }
    if ledger.has_any(&after.addresses()) {
        return Err(format!("an ADD was told {:?}, which another container has", after.addresses()));
    }
    check(left)?;
    let mut recorded: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
    for (ip, handle) in left.books().held {
        let container = handle.strip_prefix("net1.").unwrap_or(&handle).to_owned();
        recorded.entry(container).or_default().insert(ip);
    }
    recorded.remove("after");
    let (happened, nothing) = ledger.settle(recorded)?;
    Ok(vec![
        ("calls acknowledged", acknowledged),
        ("calls cut off or killed: all had happened", happened),
        ("calls cut off or killed: nothing had happened", nothing),
    ])
}

/// Fails if `margay ipam check` finds a fault.
fn check(left: &Lab) -> Result<(), String> {
    let store = format!("{}://{}", left.engine.name(), left.store.display());
    let command = command();
    let output = Command::new(&command).args(["--store", &store, "ipam", "check"]).env_clear().output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}; build margay-cli first", command.display()));
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("margay ipam check: {output:?}")),
    }
}
