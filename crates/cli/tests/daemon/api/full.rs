//! Tests etcd's API in the daemon on a full disk.

use std::fs;

use super::Api;
use crate::disk::fill;
use crate::lab::{ENGINES, Lab, with_own_mounts};
use crate::programs::wait_until;

#[test]
fn disk_full_raises_alarm_and_deletes_go_on() {
    with_own_mounts();
    for engine in ENGINES {
        let (lab, disk) = Lab::on_small_disk(engine);
        lab.margay("store create --format 2").ok();
        let api = Api::start(&lab);
        for number in 0..20 {
            api.etcdctl(&format!("put /t/{number} {}", "x".repeat(1000))).ok();
        }
        let granted = api.etcdctl("lease grant 600").ok().out;
        let lease = granted.split(' ').nth(1).unwrap();
        api.etcdctl(&format!("put /t/leased x --lease={lease}")).ok();
        assert_eq!(api.etcdctl("alarm list").ok().out, "");
        fill(&disk);
        let refused = (0..1000).find_map(|number| {
            let put = api.etcdctl(&format!("put /t/more/{number} {}", "x".repeat(10_000)));
            (put.code != Some(0)).then_some(put)
        });
        let refused = refused.expect("no put was refused on a full disk");
        assert!(refused.err.contains("etcdserver: mvcc: database space exceeded"), "{engine}: {refused:?}");
        let again = api.etcdctl(&format!("put /t/again {}", "x".repeat(100_000)));
        assert!(again.err.contains("etcdserver: mvcc: database space exceeded"), "{engine}: {again:?}");
        assert!(api.etcdctl("alarm list").ok().out.contains("NOSPACE"), "{engine}");
        for number in 0..20 {
            api.etcdctl(&format!("del /t/{number}")).ok();
        }
        api.etcdctl(&format!("lease revoke {lease}")).ok();
        assert_eq!(api.etcdctl("get /t/leased --keys-only").ok().out, "");
        fs::remove_file(disk.join("filler")).unwrap();
        wait_until("puts go on", || api.etcdctl("put /t/again x").code == Some(0));
        assert_eq!(api.etcdctl("alarm list").ok().out, "", "{engine}");
        api.end();
        lab.margay("store verify").ok();
    }
}
