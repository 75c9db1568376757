//! Tests of plugin calls on stores whose files are damaged, in hundreds of random ways.
//!
//! In each round, a store with containers is copied, one file of the copy is damaged, and the plugin is called. Each
//! call must either behave as on an undamaged store, or fail with an explanation. No call may assign an address that is
//! already held, treat the damaged store as a new store, or panic.
//!
//! `MARGAY_DAMAGE_SEED` sets the random seed, and `MARGAY_DAMAGE_ROUNDS` the number of rounds.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::lab::{Engine, Lab, after, embedded_conf};
use crate::process::{Call, Outcome};
use crate::random::{Random, setting};

const CONTAINERS: usize = 40;
const ROUNDS: u64 = 200;
const SEED: u64 = 20_261_121;
const PAGE: u64 = 4096;
/// Maximum number of damaged store copies that are kept after failed rounds.
const MOST_KEPT: usize = 5;
const SUBNET: &str = "10.88.0.0/24";

/// Remedies, one for each kind of damage; the error about a damaged store must contain one of these strings. Damaged
/// files can look like a store of a newer version or of another engine; the error text then says which program or
/// setting is needed.
const TELLING: [&str; 3] = ["restore", "a newer margay made it", "set datastore_type to"];

/// An undamaged store, and the address that each of its containers holds.
struct Base {
    lab: Lab,
    held: BTreeMap<String, IpAddr>,
}

impl Base {
    fn new(engine: Engine) -> Self {
        let lab = Lab::new(engine);
        let conf = lab.conf_with("bridge", json!({ "subnet": SUBNET }));
        let add = |number| {
            let container = format!("c{number}");
            let ip = Call::new("ADD", &container, &conf).ok().address();
            (container, ip)
        };
        let held = (0..CONTAINERS).map(add).collect();
        Self { lab, held }
    }

    /// Lists the store's files, relative to the store's folder.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        walk(&self.lab.store, &mut files);
        let relative = |path: PathBuf| path.strip_prefix(&self.lab.store).unwrap().to_owned();
        let mut files: Vec<_> = files.into_iter().map(relative).collect();
        files.sort();
        files
    }

    /// Makes a damaged copy of the undamaged store, and returns a description of the damage.
    fn damaged_copy(&self, to: &Path, random: &mut Random) -> String {
        let files = self.files();
        for file in &files {
            fs::create_dir_all(to.join(file).parent().unwrap()).unwrap();
            fs::copy(self.lab.store.join(file), to.join(file)).unwrap();
        }
        let size = |file: &PathBuf| fs::metadata(to.join(file)).unwrap().len();
        // In half of the rounds the damaged file is the largest file, which contains the addresses.
        let largest = files.iter().max_by_key(|file| size(file)).unwrap();
        let file = if random.once_in(2) { largest } else { random.pick(&files) };
        format!("{} {}", file.display(), damage(&to.join(file), random))
    }
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { walk(&path, files) } else { files.push(path) }
    }
}

/// Damages one file, and returns a description of the damage.
fn damage(path: &Path, random: &mut Random) -> String {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let size = file.metadata().unwrap().len();
    match random.below(if size == 0 { 2 } else { 6 }) {
        0 => {
            fs::remove_file(path).unwrap();
            "deleted".into()
        }
        1 => {
            let length = 1 + random.below(3 * PAGE);
            let garbage: Vec<u8> = (0..length).map(|_| random.next().to_le_bytes()[0]).collect();
            file.write_all_at(&garbage, size).unwrap();
            format!("with {length} more bytes")
        }
        2 => {
            let length = random.below(size);
            file.set_len(length).unwrap();
            format!("cut from {size} to {length} bytes")
        }
        3 => {
            let at = random.below(size.div_ceil(PAGE)) * PAGE;
            let length = usize::try_from(PAGE.min(size - at)).unwrap();
            file.write_all_at(&vec![0; length], at).unwrap();
            format!("with zeros at {at}")
        }
        _ => {
            let bits: Vec<u64> = (0..=random.below(8)).map(|_| random.below(size * 8)).collect();
            for bit in &bits {
                let mut byte = [0];
                file.read_exact_at(&mut byte, bit / 8).unwrap();
                byte[0] ^= 1 << (bit % 8);
                file.write_all_at(&byte, bit / 8).unwrap();
            }
            format!("with bits {bits:?} flipped")
        }
    }
}

/// Returns for each known file of the store whether the file exists and is not empty.
fn presence(store: &Path) -> BTreeMap<&'static str, bool> {
    let names = ["store.id", "db.redb", "sled/db", "sled/conf"];
    names.map(|name| (name, fs::metadata(store.join(name)).is_ok_and(|file| file.len() > 0))).into()
}

/// Runs the plugin calls of one test round, and checks their outcomes.
fn round(base: &Base, copy: &Path, random: &mut Random) {
    // If the network configuration defines the pool, the plugin may create a missing store. The plugin must reliably
    // distinguish a store whose files were lost from a store that never existed.
    let ipam = if random.once_in(2) { json!({ "subnet": SUBNET }) } else { json!({ "ipv4_pools": [SUBNET] }) };
    let conf = embedded_conf(base.lab.engine, copy, "bridge", ipam);
    let containers: Vec<_> = base.held.keys().collect();
    let known = *random.pick(&containers);
    let address = base.held[known];
    let before = presence(copy);

    is_free_or_fails(base, &run("ADD", "new-1", &conf), None);
    let check = run("CHECK", known, &after(&conf, &[format!("{address}/24")]));
    let del = run("DEL", known, &conf);
    if del.exit == 0 {
        assert!(!del.stderr.contains("nothing to release"), "DEL took the store for missing: {}", del.stderr);
        let again = Call::new("CHECK", known, &conf).run();
        assert!(again.exit == 1, "DEL has freed nothing");
    }
    let freed = (del.exit == 0).then_some(address);
    is_free_or_fails(base, &run("ADD", "new-2", &conf), freed);
    let _ = check;

    let lost = presence(copy).into_iter().find(|(name, is_there)| before[name] && !is_there);
    assert_eq!(lost, None, "a file is gone");
}

/// Runs a plugin call that must succeed, or fail with one of the strings in `TELLING`.
fn run(verb: &str, container: &str, conf: &Value) -> Outcome {
    let outcome = Call::new(verb, container, conf).run();
    if outcome.exit == 1 {
        let refusal = outcome.refusal();
        let tells = TELLING.iter().any(|text| refusal.text.contains(text));
        assert!(tells, "{verb} does not say what to do: {refusal:?}");
    }
    outcome
}

fn is_free_or_fails(base: &Base, add: &Outcome, freed: Option<IpAddr>) {
    if add.exit == 0 {
        let ip = add.address();
        let holder = base.held.iter().find(|(_, held)| **held == ip && freed != Some(ip));
        assert_eq!(holder, None, "{ip} is in use");
    }
}

/// After a failed round, damages a new copy of the store in the same way and keeps the copy for debugging.
fn keep(base: &Base, seed: u64, number: u64, failures: usize) -> String {
    if failures >= MOST_KEPT {
        return "not kept".into();
    }
    let kept = tempfile::tempdir().unwrap().keep();
    base.damaged_copy(&kept, &mut Random::new(seed, number));
    kept.display().to_string()
}

fn by_the_hundred(engine: Engine) {
    let (seed, rounds) = (setting("MARGAY_DAMAGE_SEED", SEED), setting("MARGAY_DAMAGE_ROUNDS", ROUNDS));
    println!("{engine:?}: MARGAY_DAMAGE_SEED={seed} MARGAY_DAMAGE_ROUNDS={rounds}");
    let base = Base::new(engine);
    let mut failures = Vec::new();
    for number in 0..rounds {
        let copy = base.lab.root.path().join("copy");
        let mut random = Random::new(seed, number);
        let what = base.damaged_copy(&copy, &mut random);
        if catch_unwind(AssertUnwindSafe(|| round(&base, &copy, &mut random))).is_err() {
            failures.push(format!("round {number}: {what}; a copy: {}", keep(&base, seed, number, failures.len())));
        }
        fs::remove_dir_all(&copy).unwrap();
    }
    assert!(failures.is_empty(), "with seed {seed}:\n{}", failures.join("\n"));
}

#[test]
fn damage_by_hundreds_on_sled() {
    by_the_hundred(Engine::SLED);
}

#[test]
fn damage_by_hundreds_on_redb() {
    by_the_hundred(Engine::REDB);
}

/// Tests unfinished sled snapshots, which do not count as damage: a process that is killed or finds the disk full
/// leaves an incomplete snapshot.
#[test]
fn damage_is_not_seen_in_unfinished_sled_snapshot() {
    let base = Base::new(Engine::SLED);
    let conf = base.lab.conf_with("bridge", json!({ "subnet": SUBNET }));
    for (number, part) in [&b""[..], &[1; 11], &[7; 100]].into_iter().enumerate() {
        fs::write(base.lab.store.join("sled/snap.7FFFFFFFFFFFFFFF.generating"), part).unwrap();
        let add = Call::new("ADD", &format!("new-{number}"), &conf).ok();
        is_free_or_fails(&base, &add, None);
        let (known, address) = base.held.first_key_value().unwrap();
        Call::new("CHECK", known, &after(&conf, &[format!("{address}/24")])).ok();
    }
}
