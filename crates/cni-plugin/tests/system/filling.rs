//! Tests of a store to which a migration is still copying: each verb fails, says how to continue the migration, and
//! changes nothing.

use std::fs;

use datastore::Create;
use kv::{Range, StoreExt};
use serde_json::json;

use crate::lab::{ENGINES, Lab, after};
use crate::process::Call;

/// The document that marks a migration as unfinished.
const MARK: (&str, &str) = (
    "/margay/v1/migration",
    r#"{"way":"migrate","from":"sled:///a","to":"redb:///b","source":"x","state":"copied","revision":7}"#,
);
const COMMAND: &str = "margay migrate sled:///a redb:///b --finish";

fn put(lab: &Lab, mark: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let wait = std::time::Duration::from_secs(30);
        let open = datastore::open(&lab.location(), &Create::Never.with_wait(wait)).await.unwrap();
        if mark {
            open.store().put(MARK.0, MARK.1).await.unwrap();
        } else {
            open.store().delete(Range::key(MARK.0)).await.unwrap();
        }
        open.close().await.unwrap();
    });
}

#[test]
fn unfinished_import_refuses_every_verb() {
    for engine in ENGINES {
        let lab = Lab::with_pool(engine, "10.6.0.0/24");
        let own = lab.add("c1").ok().address();
        put(&lab, true);
        let newest = || fs::read(lab.store.join("head")).unwrap()[..8].to_vec();
        let before = newest();
        let check = Call::new("CHECK", "c1", &after(&lab.conf_of("bridge"), &[format!("{own}/24")]));
        for call in [lab.add("c2"), lab.add("c1"), lab.del("c1"), lab.del("unknown"), check] {
            assert_eq!(call.run().refusal().says(&["not finished", COMMAND]).code, 11);
        }
        let mut conf = lab.conf_of("bridge");
        conf["cniVersion"] = "1.1.0".into();
        let without = |call: Call| {
            ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"].iter().fold(call, |call, name| call.without(name))
        };
        assert_eq!(without(Call::new("STATUS", "", &conf)).run().refusal().says(&[COMMAND]).code, 50);
        conf["cni.dev/valid-attachments"] = json!([]);
        assert_eq!(without(Call::new("GC", "", &conf)).run().refusal().says(&[COMMAND]).code, 11);
        assert_eq!(newest(), before, "{engine:?}: something was written");
        put(&lab, false);
        lab.del("c1").ok();
        assert_eq!(lab.books().held.len(), 0);
    }
}
