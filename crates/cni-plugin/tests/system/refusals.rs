//! Tests of plugin calls that fail as they must, and of the files that a failed call must not change.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use serde_json::json;

use crate::copy::copy_program;
use crate::lab::{ENGINES, Engine, Lab, embedded_conf};
use crate::mounts::Mount;
use crate::process::{Call, Outcome};
use testkit::programs::plugin;

const SUBNET: &str = "10.3.0.0/24";
/// The user ID of an unprivileged user.
const UNPRIVILEGED: u32 = 65534;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Lists all files and folders inside a folder, with the content of the files.
fn content(path: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let name = path.display().to_string();
        if path.is_dir() {
            all.push((name, Vec::new()));
            all.extend(content(&path));
        } else {
            all.push((name, fs::read(&path).unwrap()));
        }
    }
    all.sort();
    all
}

#[test]
fn store_is_missing() {
    for engine in ENGINES {
        for plugin in ["bridge", "calico"] {
            let lab = Lab::new(engine);
            let conf = lab.conf_of(plugin);
            let refusal = Call::new("ADD", "c1", &conf).run().refusal();
            let url = format!("{}://{}", engine.name(), lab.store.display());
            refusal.says(&["there is no store", "margay --store", &url, "pool create"]);
            assert_eq!(refusal.code, 999);
            Call::new("CHECK", "c1", &conf).run().refusal().says(&["there is no store"]);
            let del = Call::new("DEL", "c1", &conf).ok();
            assert_eq!(del.stdout, "");
            assert!(!lab.store.exists(), "{engine:?} {plugin}: something was made");
        }
    }
}

#[test]
fn store_has_no_pool() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        let own = Call::new("ADD", "c1", &lab.conf_with("bridge", json!({ "subnet": SUBNET })));
        own.ok();
        // No pool has addresses of the requested IPv6 family.
        let conf = lab.conf_with("bridge", json!({"assign_ipv4": "false", "assign_ipv6": "true"}));
        Call::new("ADD", "c2", &conf).run().refusal().says(&["pool"]);
        assert_eq!(lab.books().held.len(), 1);
    }
}

#[test]
fn store_belongs_to_another_user() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, SUBNET);
        let held = lab.add("c1").ok().address();
        // The plugin's user needs access to the plugin binary and the folder of the store, but not to the store itself.
        let program_copy = lab.root.path().join("plugin");
        copy_program(plugin(), &program_copy);
        fs::set_permissions(&program_copy, Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(lab.root.path(), Permissions::from_mode(0o755)).unwrap();
        let is_root = nix::unistd::geteuid().is_root();
        if !is_root {
            // Without root, the test cannot run the plugin as another user, so it removes the owner's permissions on
            // the store.
            fs::set_permissions(&lab.store, Permissions::from_mode(0o000)).unwrap();
        }
        let own = embedded_conf(engine, &lab.store, "bridge", json!({ "subnet": SUBNET }));
        for verb in ["ADD", "CHECK", "DEL"] {
            for conf in [&lab.conf_of("bridge"), &own] {
                let call = Call::new(verb, "c1", conf).by(&program_copy);
                let mut command = call.command();
                if is_root {
                    command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
                }
                call.run_as(command).refusal().says(&["no permission", "root", lab.store.to_str().unwrap()]);
            }
        }
        fs::set_permissions(&lab.store, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(lab.add("c1").ok().address(), held);
    }
}

#[test]
fn store_path_is_file() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        fs::write(&lab.store, "foreign").unwrap();
        for store in [lab.store.clone(), lab.store.join("below")] {
            for ipam in [json!({}), json!({ "subnet": SUBNET })] {
                let conf = embedded_conf(engine, &store, "bridge", ipam);
                for verb in ["ADD", "DEL"] {
                    Call::new(verb, "c1", &conf).run().refusal().says(&["in the way", "another path"]);
                }
            }
        }
        assert_eq!(fs::read_to_string(&lab.store).unwrap(), "foreign");
    }
}

#[test]
fn store_folder_has_something_else() {
    for engine in ENGINES {
        let lab = Lab::new(engine);
        fs::create_dir(&lab.store).unwrap();
        fs::write(lab.store.join("thesis.tex"), "foreign").unwrap();
        let before = content(&lab.store);
        let conf = lab.conf_with("bridge", json!({ "subnet": SUBNET }));
        Call::new("ADD", "c1", &conf).run().refusal().says(&["thesis.tex", "no store"]);
        assert_eq!(content(&lab.store), before);
    }
}

#[test]
fn store_is_of_other_engine() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, SUBNET);
        let held = lab.add("c1").ok().address();
        let advice = format!("set datastore_type to {}", engine.name());
        for ipam in [json!({}), json!({ "subnet": SUBNET })] {
            let conf = embedded_conf(engine.other(), &lab.store, "bridge", ipam);
            for verb in ["ADD", "CHECK", "DEL"] {
                Call::new(verb, "c1", &conf).run().refusal().says(&[&advice]);
            }
        }
        assert_eq!(lab.add("c1").ok().address(), held);
    }
}

#[test]
fn store_file_system_is_read_only() {
    for engine in ENGINES {
        let mut lab = Lab::new(engine);
        let disk = lab.root.path().join("disk");
        fs::create_dir(&disk).unwrap();
        let mount = Mount::tmpfs(&disk, "16m");
        lab.store = disk.join("store");
        lab.pool("lab", SUBNET);
        let held = lab.add("c1").ok().address();
        mount.remount("ro");
        for verb in ["ADD", "CHECK", "DEL"] {
            Call::new(verb, "c1", &lab.conf_of("bridge")).run().refusal().says(&["read-only file system", "write"]);
        }
        // The store that the next plugin call names does not exist yet.
        let conf = embedded_conf(engine, &disk.join("new"), "bridge", json!({ "subnet": SUBNET }));
        Call::new("ADD", "c1", &conf).run().refusal().says(&["read-only file system"]);
        mount.remount("rw");
        assert_eq!(lab.add("c1").ok().address(), held);
        lab.del("c1").ok();
        lab.nothing_is_left();
    }
}

#[test]
fn store_is_of_newer_version() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, SUBNET);
        let held = lab.add("c1").ok().address();
        let path = lab.store.join("store.id");
        let ours = fs::read_to_string(&path).unwrap();
        let newer = ours.replace("format 1\n", "format 2\n");
        assert_ne!(ours, newer);
        fs::write(&path, newer).unwrap();
        let before = content(&lab.store);
        for ipam in [json!({}), json!({ "subnet": SUBNET })] {
            let conf = lab.conf_with("bridge", ipam);
            for verb in ["ADD", "CHECK", "DEL"] {
                Call::new(verb, "c1", &conf).run().refusal().says(&["format 2", "newer margay"]);
            }
        }
        assert_eq!(content(&lab.store), before);
        fs::write(&path, ours).unwrap();
        assert_eq!(lab.add("c1").ok().address(), held);
    }
}

#[test]
fn store_path_is_relative() {
    for engine in ENGINES {
        for (plugin, code) in [("bridge", 7), ("calico", 999)] {
            let conf = embedded_conf(engine, Path::new("margay/store"), plugin, json!({}));
            for verb in ["ADD", "CHECK", "DEL"] {
                let refusal = Call::new(verb, "c1", &conf).run().refusal();
                assert_eq!(refusal.says(&["datastore_path", "not an absolute path"]).code, code);
            }
        }
    }
}

/// Runs a first ADD whose configuration defines the pool, which creates the store.
fn make_store(lab: &Lab, umask: &str) -> Outcome {
    let call = Call::new("ADD", "c1", &lab.conf_with("bridge", json!({ "subnet": SUBNET })));
    call.run_as(call.command_through(&["/bin/sh", "-c", &format!("umask {umask}; exec \"$0\"")]))
}

#[test]
fn store_is_private_with_any_umask() {
    for engine in ENGINES {
        for umask in ["000", "022", "077", "027"] {
            let lab = Lab::new(engine);
            let outcome = make_store(&lab, umask);
            assert_eq!(outcome.exit, 0, "{outcome:?}");
            // Call the plugin a second time, since an engine creates some of its files only on the second call.
            lab.del("c1").ok();
            let mut folders = vec![lab.store.clone()];
            while let Some(folder) = folders.pop() {
                assert_eq!(mode(&folder), 0o700, "{} with umask {umask}", folder.display());
                for entry in fs::read_dir(&folder).unwrap() {
                    let path = entry.unwrap().path();
                    if path.is_dir() {
                        folders.push(path);
                    } else {
                        assert_eq!(mode(&path), 0o600, "{} with umask {umask}", path.display());
                    }
                }
            }
        }
    }
}

/// Tests a store whose queue file was lost: the store's data is complete, so no plugin call may report a missing store.
#[test]
fn store_has_lost_its_queue() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, SUBNET);
        let held = lab.add("c1").ok().address();
        fs::remove_file(lab.store.join("queue")).unwrap();
        let del = lab.del("c1").run();
        if del.exit == 1 {
            del.refusal().says(&["queue"]);
            continue;
        }
        // If the store's queue file is missing, a plugin call that writes may create it again, and the store then works
        // as before.
        let conf = lab.conf_with("bridge", json!({ "subnet": SUBNET }));
        Call::new("ADD", "c2", &conf).ok();
        assert!(!lab.books().held.contains_key(&held), "{engine:?}: DEL said success and freed nothing");
    }
}

#[test]
fn store_type_is_unknown() {
    let lab = Lab::new(Engine::SLED);
    let mut conf = lab.conf_of("bridge");
    conf["datastore_type"] = "rocksdb".into();
    let refusal = Call::new("ADD", "c1", &conf).run().refusal();
    assert_eq!(refusal.says(&["unknown datastore type: rocksdb", "sled, redb or etcdv3"]).code, 7);
}
