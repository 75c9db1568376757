//! Tests in which the system clock of all plugin calls (set by libfaketime) jumps between ten years early and ten years
//! late.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;

use datastore::Create;
use ipam_core::model::{Document, IpamConfig, keys};
use kv::{Range, StoreExt};
use serde_json::{Value, json};
use time::OffsetDateTime;

use crate::lab::{ENGINES, Engine, Lab, after};
use crate::process::{Call, Outcome};
use crate::random::{Random, setting};

const TEN_YEARS: i64 = 3652 * 24 * 3600;
const COOLDOWN: u32 = 60;
/// A time in seconds after which every cooldown is over, however wrong the clock was.
const TEST_TIMEOUT: i64 = 2 * COOLDOWN as i64 + 1;
/// In a pool of sixteen addresses, three are never assigned: the network address, the gateway and the broadcast
/// address.
const USABLE: usize = 13;
const STEPS: u64 = 50;
const SEED: u64 = 20_261_121;

/// Finds the library libfaketime, which makes a process see another system time.
fn library() -> PathBuf {
    let folders = fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
    let mut found = folders.map(|folder| folder.join("faketime/libfaketimeMT.so.1")).filter(|path| path.exists());
    found.next().expect("libfaketime is missing: scripts/setup test installs it (Debian's package faketime)")
}

/// A test store whose callers all see the same wrong clock.
struct Clocked {
    lab: Lab,
    conf: Value,
    library: PathBuf,
    /// The offset of the callers' clock, in seconds.
    off: i64,
    held: BTreeMap<String, IpAddr>,
    next: u64,
}

impl Clocked {
    fn new(engine: Engine) -> Self {
        let lab = Lab::new(engine);
        let conf = lab.conf_with("bridge", json!({ "subnet": "10.67.0.0/28" }));
        Self { lab, conf, library: library(), off: 0, held: BTreeMap::new(), next: 0 }
    }

    /// Runs a plugin call that sees the wrong system clock; the plugin's timeouts use the monotonic clock, which is
    /// right.
    fn run(&self, verb: &str, container: &str, conf: &Value) -> Outcome {
        Call::new(verb, container, conf)
            .with("LD_PRELOAD", self.library.to_str().unwrap())
            .with("FAKETIME", &format!("{:+}", self.off))
            .with("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .with("FAKETIME_DISABLE_SHM", "1")
            .run()
    }

    /// Runs ADD, and returns false if the pool had no free address.
    fn add(&mut self) -> bool {
        self.next += 1;
        let container = format!("c{}", self.next);
        let outcome = self.run("ADD", &container, &self.conf);
        if outcome.exit == 1 {
            outcome.refusal().says(&["No IPs available in pools"]);
            return false;
        }
        let ip = outcome.address();
        assert!(self.held.values().all(|held| *held != ip), "{ip} was assigned twice");
        self.held.insert(container, ip);
        true
    }

    fn ok(&self, verb: &str, container: &str, conf: &Value) {
        let outcome = self.run(verb, container, conf);
        assert_eq!(outcome.exit, 0, "{verb} {container} with a clock that is {} s off: {outcome:?}", self.off);
    }

    fn del(&mut self, random: &mut Random) {
        let containers: Vec<String> = self.held.keys().cloned().collect();
        let container = random.pick(&containers);
        self.ok("DEL", container, &self.conf);
        self.held.remove(container);
        self.ok("DEL", container, &self.conf);
    }

    fn records_match_reports(&self) {
        let recorded = self.lab.books().held;
        let reported: BTreeMap<IpAddr, String> =
            self.held.iter().map(|(container, ip)| (*ip, format!("net1.{container}"))).collect();
        assert_eq!(recorded, reported);
    }

    /// Returns true if a document in the store contains a time in the given year.
    fn knows_the_year(&self, year: i32) -> bool {
        self.lab.with_ipam(Create::Never, async |ipam, _| {
            let all = ipam.store().list(Range::All).await.unwrap();
            all.kvs.iter().any(|kv| String::from_utf8_lossy(kv.value.as_bytes()).contains(&format!("\"{year}-")))
        })
    }
}

fn jumps(engine: Engine, seed: u64) {
    println!("{engine:?}: MARGAY_CLOCK_SEED={seed}");
    let mut random = Random::new(seed, 0);
    let mut clocked = Clocked::new(engine);
    clocked.off = TEN_YEARS;
    assert!(clocked.add());
    let year = (OffsetDateTime::now_utc() + time::Duration::seconds(TEN_YEARS)).year();
    assert!(clocked.knows_the_year(year), "the plugin has not seen the time that was set: is it linked statically?");
    clocked.lab.with_ipam(Create::Never, async |ipam, _| {
        let config = IpamConfig::default().with_cooldown_seconds(COOLDOWN);
        ipam.store().put(keys::config(), config.encode().unwrap()).await.unwrap();
    });
    for _ in 0..STEPS {
        clocked.off = match random.below(4) {
            0 => -TEN_YEARS,
            1 => 0,
            2 => TEN_YEARS,
            _ => clocked.off + i64::try_from(random.below(90)).unwrap(),
        };
        if clocked.held.is_empty() || random.once_in(2) {
            clocked.add();
        } else if random.once_in(2) {
            clocked.del(&mut random);
        } else {
            let (container, ip) = clocked.held.first_key_value().unwrap();
            clocked.ok("CHECK", container, &after(&clocked.conf, &[format!("{ip}/28")]));
            clocked.ok("ADD", container, &clocked.conf);
        }
        clocked.records_match_reports();
    }
    while !clocked.held.is_empty() {
        clocked.del(&mut random);
    }
    for _ in 0..3 {
        while clocked.add() {}
        clocked.off += TEST_TIMEOUT;
    }
    assert_eq!(clocked.held.len(), USABLE, "some addresses rest for ever");
    clocked.records_match_reports();
}

#[test]
fn clock_jumps_of_ten_years_lose_and_keep_nothing() {
    for engine in ENGINES {
        jumps(engine, setting("MARGAY_CLOCK_SEED", SEED));
    }
}
