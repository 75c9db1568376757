//! Tests of the plugin on a full disk.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::lab::{ENGINES, Engine, Lab, after};
use crate::mounts::Mount;
use crate::process::{Call, Outcome};

const SIZE: &str = "8m";
/// The numbers of free bytes to test: none, less than a commit needs, and enough for some commits.
const SPARE: [u64; 3] = [0, 16 << 10, 400 << 10];

/// Fills a disk completely, and then frees the given number of bytes.
fn fill(path: &Path, spare: u64) {
    let mut file = File::create(path).unwrap();
    for length in [1 << 16, 1 << 12, 1] {
        let piece = vec![7; length];
        loop {
            match file.write(&piece) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    let length = file.metadata().unwrap().len();
    file.set_len(length - spare).unwrap();
}

/// Size in bytes of the disk space that is reserved for releases.
const BALLAST: u64 = 1 << 20;

/// Returns how many bytes the reserved space occupies on the disk.
fn ballast(lab: &Lab) -> u64 {
    fs::metadata(lab.store.join("ballast")).unwrap().blocks() * 512
}

/// Returns true if a plugin call succeeded. The error of a failed call must report that the disk is full, and say what
/// to do.
fn is_done(outcome: &Outcome) -> bool {
    if outcome.exit == 1 {
        outcome.refusal().says(&["space"]);
        let text = outcome.refusal().text;
        assert!(text.contains("free some") || text.contains("make room"), "{text}");
    }
    outcome.exit == 0
}

fn full(engine: Engine, spare: u64) {
    let mut lab = Lab::new(engine);
    let disk = lab.root.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let _mount = Mount::tmpfs(&disk, SIZE);
    lab.store = disk.join("store");
    lab.pool("lab", "10.99.0.0/24");
    let conf = lab.conf_of("bridge");
    let mut held: BTreeMap<String, IpAddr> = BTreeMap::new();
    for number in 0..20 {
        let container = format!("early-{number}");
        let ip = lab.add(&container).ok().address();
        held.insert(container, ip);
    }

    fill(&disk.join("filler"), spare);
    let mut refused = Vec::new();
    for number in 0..40 {
        let container = format!("late-{number}");
        let outcome = lab.add(&container).run();
        if is_done(&outcome) {
            held.insert(container, outcome.address());
        } else {
            refused.push(container);
        }
    }
    println!("{engine:?}, {spare} bytes spare: {} of 40 calls refused", refused.len());
    assert!(spare != 0 || !refused.is_empty(), "the disk was not full");
    for number in 0..10 {
        let container = format!("early-{number}");
        held.remove(&container);
        lab.del(&container).ok();
    }
    if spare == 0 {
        let kept = ballast(&lab);
        // On a full disk, the ADD may still succeed if the engine's files contain free space.
        let outcome = lab.add("greedy").run();
        if is_done(&outcome) {
            held.insert("greedy".into(), outcome.address());
        } else {
            refused.push("greedy".into());
        }
        assert!(ballast(&lab) >= kept, "{engine:?}: an ADD took what is kept for releases");
        let mut newer = conf.clone();
        newer["cniVersion"] = "1.1.0".into();
        let refusal = Call::new("STATUS", "", &newer).run().refusal();
        assert_eq!(refusal.says(&["space"]).code, 50);
    }

    fs::remove_file(disk.join("filler")).unwrap();
    for container in &refused {
        // Run DEL as a runtime does after a failed ADD, whether or not the ADD has changed the store.
        lab.del(container).ok();
    }
    for (container, ip) in &held {
        Call::new("CHECK", container, &after(&conf, &[format!("{ip}/24")])).ok();
    }
    let expected: BTreeSet<_> = held.values().copied().collect();
    assert_eq!(expected.len(), held.len(), "an address was given twice");
    assert_eq!(lab.books().held.into_keys().collect::<BTreeSet<_>>(), expected);
    let ip = lab.add("after").ok().address();
    assert!(!expected.contains(&ip), "{ip} is in use");
    assert_eq!(ballast(&lab), BALLAST, "it is put back as soon as there is room");
    lab.del("after").ok();
    for container in held.keys() {
        lab.del(container).ok();
    }
    lab.nothing_is_left();
}

#[test]
fn full_disk_loses_nothing() {
    for engine in ENGINES {
        for spare in SPARE {
            full(engine, spare);
        }
    }
}

/// Tests a first ADD whose configuration allows it to create the store, on a disk without room for a store.
#[test]
fn full_disk_has_no_room_for_new_store() {
    for engine in ENGINES {
        let mut lab = Lab::new(engine);
        let disk = lab.root.path().join("disk");
        fs::create_dir(&disk).unwrap();
        let _mount = Mount::tmpfs(&disk, SIZE);
        lab.store = disk.join("store");
        let conf = lab.conf_with("bridge", serde_json::json!({"subnet": "10.99.0.0/24"}));
        fill(&disk.join("filler"), 0);
        let add = Call::new("ADD", "c1", &conf);
        assert!(!is_done(&add.run()), "{engine:?}");
        Call::new("DEL", "c1", &conf).run();
        fs::remove_file(disk.join("filler")).unwrap();
        add.ok();
        assert_eq!(lab.books().count_of("net1.c1"), 1);
        Call::new("DEL", "c1", &conf).ok();
        lab.nothing_is_left();
    }
}

/// Runs DELs on a full disk, where other files immediately use any space that becomes free. The store has `resident`
/// containers; on the full disk, at least the first `sure` DELs must succeed.
fn crowd(engine: Engine, resident: usize, sure: usize) {
    let mut lab = Lab::new(engine);
    let disk = lab.root.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let _mount = Mount::tmpfs(&disk, "16m");
    lab.store = disk.join("store");
    lab.pool("lab", "10.99.0.0/22");
    for number in 0..resident {
        lab.add(&format!("c{number}")).ok();
    }
    let mut gone = 0;
    for number in 0..resident {
        fill(&disk.join(format!("filler-{number}")), 0);
        let outcome = lab.del(&format!("c{number}")).run();
        gone += usize::from(is_done(&outcome));
        assert!(number >= sure || outcome.exit == 0, "{engine:?}, {number} before: {outcome:?}");
        if number % 50 == 7 {
            // On a full disk, the ADD may succeed if the store's own file contains space that DELs have freed.
            let kept = ballast(&lab);
            lab.add("greedy").run();
            assert!(ballast(&lab) >= kept, "{engine:?}: an ADD took what is kept for releases");
        }
    }
    println!("{engine:?}: {gone} of {resident} could go, {} bytes of the ballast are left", ballast(&lab));
    for number in 0..resident {
        fs::remove_file(disk.join(format!("filler-{number}"))).unwrap();
    }
    for number in 0..resident {
        lab.del(&format!("c{number}")).ok();
    }
    lab.del("greedy").ok();
    lab.nothing_is_left();
    lab.add("after").ok();
    assert_eq!(ballast(&lab), BALLAST);
}

/// Tests DELs on redb, where the reserved disk space lasts for all DELs because redb makes room by deleting history.
#[test]
fn full_disk_can_be_left_by_crowd_on_redb() {
    crowd(Engine::REDB, 200, 200);
}

/// Tests DELs on sled. sled writes whenever a store is opened, and its log grows with each release, so the reserved
/// space lasts only for some releases.
#[test]
fn full_disk_can_be_left_by_some_on_sled() {
    crowd(Engine::SLED, 60, 5);
}

/// Tests a store without reserved disk space, as created by an earlier version or on a full disk.
#[test]
fn full_disk_without_reserved_space() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.99.0.0/24");
        fs::remove_file(lab.store.join("ballast")).unwrap();
        lab.add("c1").ok();
        assert_eq!(ballast(&lab), BALLAST, "the next one makes it");
        fs::remove_file(lab.store.join("ballast")).unwrap();
        lab.del("c1").ok();
        lab.nothing_is_left();
    }
}
