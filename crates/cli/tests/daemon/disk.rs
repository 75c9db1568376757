//! Tests the daemon with full disks and with damaged stores.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use serde_json::Value;

use crate::daemon::Daemon;
use crate::lab::{ENGINES, Lab, with_own_mounts};
use crate::programs::{Call, margay, run};

/// Fills a file system to the last byte.
pub(crate) fn fill(folder: &Path) {
    let mut file = File::options().create(true).append(true).open(folder.join("filler")).unwrap();
    for size in [1 << 16, 1 << 12, 1] {
        while file.write_all(&vec![b'x'; size]).is_ok() {}
    }
}

/// Returns the test's network configuration, with the store in a different folder.
fn conf_at(lab: &Lab, store: &Path) -> Value {
    let mut conf = lab.conf();
    conf["datastore_path"] = store.to_str().unwrap().into();
    conf
}

#[test]
fn dels_go_on_when_disk_is_full() {
    with_own_mounts();
    for engine in ENGINES {
        let (lab, disk) = Lab::on_small_disk(engine);
        lab.margay("pool create lab 10.79.0.0/24").ok();
        let mut daemon = Daemon::start(&lab);
        for number in 0..20 {
            lab.add(&format!("c{number}")).ok().by_daemon();
        }
        fill(&disk);
        let mut refused = None;
        for number in 20..200 {
            let add = lab.add(&format!("c{number}")).run();
            if add.code != Some(0) {
                refused = Some(add.failed());
                break;
            }
        }
        let refused = refused.expect("no ADD was refused on a full disk");
        assert!(refused.out.contains("space"), "{refused:?}");
        // Like DEL, commands that release addresses may use reserved space on a full disk.
        let released = lab.margay("ipam release --container c0");
        assert_eq!(released.code, Some(0), "{engine}: {released:?}\n{}", daemon.log());
        let held = lab.held_there();
        assert!(held.len() >= 19);
        for number in 0..20 {
            let del = lab.del(&format!("c{number}")).run();
            assert_eq!(del.code, Some(0), "{engine} {number}: {del:?}");
        }
        assert_eq!(lab.held_there().len(), held.len() - 19);
        fs::remove_file(disk.join("filler")).unwrap();
        lab.margay("reservation create later 10.79.0.250").ok();
        crate::daemon::serves_again(&lab, "later", crate::programs::TEST_TIMEOUT / 6);
        daemon.runs();
        lab.is_in_order();
        drop(daemon);
    }
}

/// Releases of addresses can use the reserved disk space, even if another program uses any disk space as soon as it is
/// free.
#[test]
fn dels_go_on_when_another_program_takes_all_room() {
    const CONTAINERS: usize = 60;
    with_own_mounts();
    for engine in ENGINES {
        let released = [Beside::Nothing, Beside::Daemon].map(|beside| {
            let (lab, disk) = Lab::on_small_disk(engine);
            lab.margay("pool create lab 10.79.0.0/24").ok();
            for number in 0..CONTAINERS {
                lab.add(&format!("c{number}")).ok();
            }
            let daemon = (beside == Beside::Daemon).then(|| Daemon::start(&lab));
            fill(&disk);
            let released = (0..CONTAINERS).take_while(|number| {
                let del = lab.del(&format!("c{number}")).run();
                fill(&disk);
                del.code == Some(0)
            });
            let released = released.count();
            drop(daemon);
            released
        });
        assert!(released[1] >= released[0], "{engine}: {released:?}");
    }
}

/// Whether the plugin runs with or without a daemon in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    Daemon,
}

#[test]
fn damaged_store_is_reported_as_without_daemon() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.79.0.0/24");
        lab.add("c1").ok();
        let id = lab.store.join("store.id");
        let whole = fs::read(&id).unwrap();
        fs::write(&id, "no store at all").unwrap();
        let without = lab.add("c2").run().failed();
        let mut daemon = Daemon::start(&lab);
        let beside = lab.add("c2").run().failed();
        assert_eq!(beside.out, without.out);
        let shown = lab.margay("ipam show").failed();
        assert!(shown.out.is_empty(), "{shown:?}");
        // Once the store is repaired, the daemon serves the store.
        fs::write(&id, whole).unwrap();
        crate::daemon::serves_again(&lab, "c2", crate::programs::TEST_TIMEOUT / 6);
        assert_eq!(lab.held().len(), 1);
        daemon.runs();
    }
}

#[test]
fn damaged_store_gives_no_address_twice() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.79.0.0/24");
        let mut daemon = Daemon::start(&lab);
        let first = lab.add("c1").ok().by_daemon().address();
        // The test copies the store here and later replaces the store by this older copy, as if the engine had lost
        // commits.
        let kept = lab.root().join("kept");
        let copied = run({
            let mut command = std::process::Command::new("cp");
            command.arg("-a").arg(&lab.store).arg(&kept);
            command
        });
        copied.ok();
        for number in 2..8 {
            lab.add(&format!("c{number}")).ok().by_daemon();
        }
        // An older copy replaces the store, as after restoring a snapshot of the disk. The copy of the store has its
        // own folder and queue file, but the store id of the original.
        fs::rename(&lab.store, lab.root().join("aside")).unwrap();
        fs::rename(&kept, &lab.store).unwrap();
        let without = Call::new("ADD", "c9", &conf_at(&lab, &lab.store)).run();
        if without.code == Some(0) {
            assert_ne!(without.address(), first);
            lab.is_in_order();
        }
        daemon.runs();
        let url = lab.location_of(&lab.root().join("aside")).to_string();
        let check = run(margay(["--store", &url, "ipam", "check", "--show-all-ips", "-o", "json"])).ok();
        assert!(check.out.contains("net1.c7") && !check.out.contains("net1.c9"), "{check:?}");
    }
}
