//! Tests of CHECK on a real store: when CHECK fails, and what CHECK does if the container's state is unknown.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use crate::copy::copy_program;
use crate::lab::{ENGINES, Lab, after};
use crate::process::Call;
use testkit::programs::plugin;

#[test]
fn check_fails_only_when_address_is_free_or_of_another() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.4.0.0/24");
        let own = lab.add("c1").ok().address();
        let others = lab.add("c2").ok().address();
        let conf = lab.conf_of("bridge");
        let check = |address: &str| Call::new("CHECK", "c1", &after(&conf, &[address.to_owned()]));
        let before = lab.books().held;
        check(&format!("{own}/24")).ok();
        let refusal = check(&format!("{others}/24")).run().refusal();
        assert_eq!(refusal.says(&["is not recorded for container c1", "is held by net1.c2"]).code, 999);
        check("10.4.0.77/24").run().refusal().says(&["10.4.0.77 is not recorded", "10.4.0.77 is free", "made anew"]);
        // The address is in no pool of Margay, so another IPAM plugin assigned the address.
        let elsewhere = check("192.0.2.7/24").ok();
        assert!(elsewhere.stderr.contains("192.0.2.7"), "{elsewhere:?}");
        assert_eq!(lab.books().held, before, "nothing is changed");
    }
}

#[test]
fn check_is_retried_later_when_store_is_unreachable() {
    assert!(nix::unistd::geteuid().is_root(), "this test needs root, to run the plugin as another user");
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.4.0.0/24");
        let own = lab.add("c1").ok().address();
        let program_copy = lab.root.path().join("plugin");
        copy_program(plugin(), &program_copy);
        fs::set_permissions(&program_copy, Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(lab.root.path(), Permissions::from_mode(0o755)).unwrap();
        let conf = after(&lab.conf_of("bridge"), &[format!("{own}/24")]);
        let check = Call::new("CHECK", "c1", &conf).by(&program_copy);
        let mut command = check.command();
        command.uid(65534).gid(65534);
        let refusal = check.run_as(command).refusal();
        assert_eq!(refusal.says(&["no permission"]).code, 11);
    }
}
