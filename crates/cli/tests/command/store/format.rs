//! Tests `margay store create` and `margay store upgrade`, which choose the format of a store's rows.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use crate::common::Lab;
use crate::conditions::ground::{done, process};
use crate::store::content::{blocks, content, write};

#[test]
fn format_upgrade_happens_once_and_keeps_content() {
    for lab in Lab::each() {
        write(&lab.location, blocks(3));
        let before = content(&lab.location);
        let location = &lab.location;
        assert!(lab.margay("store status").answer().contains("format 1\n"));
        let dry = lab.margay("store upgrade --dry-run").answer();
        assert!(dry.contains(&format!("raised {location} from format 1 to 2")), "{dry}");
        assert_eq!(lab.margay("store upgrade -o json").json()["from"], 1);
        assert_eq!(lab.margay("store upgrade").answer(), format!("{location} is already at format 2, the newest\n"));
        assert!(lab.margay("store status").answer().contains("format 2\n"));
        assert_eq!(content(location), before);
        lab.margay("store verify").answer();
    }
}

#[test]
fn format_of_new_store_is_either_and_never_over_another() {
    for format in [1, 2] {
        for lab in Lab::each() {
            let made = lab.margay(&format!("store create --format {format}")).answer();
            assert_eq!(made, format!("Successfully created {}, format {format}\n", lab.location));
            assert_eq!(lab.margay("store status -o json").json()["format"], format);
            let again = lab.margay("store create").failure();
            assert!(again.contains("is there already") && again.contains("store upgrade"), "{again}");
            lab.margay("pool create p 10.9.0.0/24").answer();
        }
    }
    assert!(Lab::each()[0].margay("store create --format 3").err.contains("3 is not in 1..=2"));
}

/// Shell script that runs a program with the folder `$0` mounted over the plugin folder.
const PLUGINS: &str = r#"mkdir -p /opt/cni/bin && mount --bind "$0" /opt/cni/bin && exec "$@""#;

#[test]
fn format_upgrade_is_refused_while_older_plugin_is_there() {
    for lab in Lab::each() {
        write(&lab.location, blocks(1));
        let folder = tempfile::tempdir().unwrap();
        let upgrade = |lines: &str| {
            let plugin = folder.path().join("margay-ipam");
            fs::write(&plugin, format!("#!/bin/sh\nprintf '{lines}'\n")).unwrap();
            fs::set_permissions(&plugin, Permissions::from_mode(0o755)).unwrap();
            let before = ["unshare", "--mount", "sh", "-c", PLUGINS, folder.path().to_str().unwrap()];
            let store = lab.location.to_string();
            let args = ["--store", &store, "store", "upgrade"].map(str::to_owned);
            done(process(&before, env!("CARGO_BIN_EXE_margay"), &args))
        };
        let refused = upgrade("margay-ipam 0.1.0\\nCNI versions: 1.0.0\\n");
        assert_eq!(refused.code, 1, "{refused:?}");
        assert!(refused.err.contains("/opt/cni/bin/margay-ipam is of a version that cannot read"), "{}", refused.err);
        assert!(refused.err.contains("nothing was changed"), "{}", refused.err);
        assert!(lab.margay("store status").answer().contains("format 1\n"));
        // An upgrade proceeds even if other programs have the plugin's file name, or if the installed plugins can read
        // the new format.
        assert_eq!(upgrade("another plugin\\n").code, 0);
        assert_eq!(upgrade("margay-ipam 0.1.0\\nCNI versions: 1.0.0\\nFormats of stores: 1, 2\\n").code, 0);
        assert!(lab.margay("store status").answer().contains("format 2\n"));
    }
}
