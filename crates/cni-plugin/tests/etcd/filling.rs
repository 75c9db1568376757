//! Tests of plugin calls on a cluster while documents are being imported into etcd.

use crate::lab::Lab;

const MARK: &str =
    r#"{"way":"migrate","from":"sled:///a","to":"etcd://b:1","source":"x","state":"copying","revision":0}"#;

#[test]
fn unfinished_import_refuses_calls() {
    let lab = Lab::start();
    lab.add("c1").ok();
    lab.put("/margay/v1/migration", MARK);
    for call in [lab.add("c2"), lab.del("c1"), lab.del("unknown")] {
        let refusal = call.run().refusal();
        assert_eq!(refusal.says(&["not finished", "margay migrate sled:///a etcd://b:1"]).code, 11);
    }
    lab.no_notes_are_left();
    lab.erase("/margay/");
    lab.del("c1").ok();
    lab.nothing_is_left();
}
