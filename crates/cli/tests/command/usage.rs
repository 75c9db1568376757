//! Tests usage messages, help texts, and how a command chooses the store.

use crate::common::{Run, margay};

#[test]
fn help_and_version_are_answers() {
    let help = margay(["--help"]);
    assert_eq!(help.code, 0);
    assert!(help.out.contains("Examples:") && help.out.contains("Which store:"), "{}", help.out);
    assert_eq!(help.err, "");
    let version = margay(["--version"]);
    assert_eq!((version.code, version.out.as_str()), (0, concat!("margay ", env!("CARGO_PKG_VERSION"), "\n")));
}

#[test]
fn help_and_pages_give_same_reasons_for_same_engine() {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let help = margay(["store", "--help"]).out;
    let (_, advice) = help.split_once("Which engine: ").unwrap();
    let advice = words(advice.split("\n\n").next().unwrap());
    assert!(advice.starts_with("sled is the default; take redb where ") && advice.ends_with('.'), "{advice}");
    for page in ["README.md", "docs/choose-a-store.md"] {
        let text = std::fs::read_to_string(format!("{}/../../{page}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        assert!(words(&text).contains(&advice), "{page} says something else than: {advice}");
    }
}

#[test]
fn help_of_every_verb_has_examples() {
    for verb in ["pool create", "reservation create", "ipam show", "ipam check", "ipam release", "install"] {
        let help = margay(verb.split(' ').chain(["--help"]));
        assert_eq!(help.code, 0);
        assert!(help.out.contains("Examples:\n  margay "), "{verb}: {}", help.out);
    }
}

#[test]
fn wrong_usage_is_exit_1_with_suggestion_on_stderr() {
    let cases: [(&[&str], &str); 10] = [
        (&["pool", "creat", "a", "10.0.0.0/8"], "a similar subcommand exists: 'create'"),
        (&["pool", "create", "a", "10.0.0.0/8", "--block-sise", "26"], "a similar argument exists: '--block-size'"),
        (&["pool", "create", "a", "10.0.0.1/8"], "did you mean 10.0.0.0/8?"),
        (&["pool", "create", "a", "10.0.0.0"], "not a range such as"),
        (&["ipam", "release"], "--ip <ADDRESS>|--handle <HANDLE>|--container <ID>"),
        (&["ipam", "release", "--ip", "10.0.0.1", "--handle", "h"], "cannot be used with"),
        (&["ipam", "show", "--ip", "10.0.0.300"], "invalid IP address syntax"),
        (&["install"], "<--beside-calico|--undo|--status>"),
        (&["install", "--undo", "--status"], "cannot be used with"),
        (&["ipam", "show", "-o", "xml"], "possible values: table, wide, yaml, json"),
    ];
    for (args, expected) in cases {
        let run = margay(args);
        assert_eq!((run.code, run.out.as_str()), (1, ""), "{args:?}");
        assert!(run.err.starts_with("error: ") && run.err.contains(expected), "{args:?}: {}", run.err);
    }
}

#[test]
fn store_is_named_unless_given() {
    let dir = tempfile::tempdir().unwrap();
    let conf_dir = dir.path().to_str().unwrap();
    // The port in this URL refuses connections.
    let unopenable =
        Run::new(["ipam", "show", "--cni-conf-dir", conf_dir]).env("ETCD_ENDPOINTS", "http://127.0.0.1:1").run();
    assert_eq!(unopenable.code, 1);
    let mut lines = unopenable.err.lines();
    assert_eq!(lines.next(), Some("store: etcd://127.0.0.1:1 (from the environment)"));
    assert!(lines.next().unwrap().starts_with("error: etcd http://127.0.0.1:1: "), "{}", unopenable.err);
    let given = margay(["ipam", "show", "--store", "etcd://127.0.0.1:1"]);
    assert!(given.err.starts_with("error: etcd http://127.0.0.1:1: "), "{}", given.err);
}

#[test]
fn stores_are_listed_and_untouched_when_several() {
    let dir = tempfile::tempdir().unwrap();
    for engine in ["sled", "redb"] {
        let path = dir.path().join(engine);
        let conf = format!(
            r#"{{"name":"{engine}","type":"bridge","datastore_type":"{engine}","datastore_path":"{}",
                "ipam":{{"type":"margay-ipam"}}}}"#,
            path.display()
        );
        std::fs::write(dir.path().join(format!("{engine}.conf")), conf).unwrap();
    }
    let run = margay(["pool", "create", "a", "10.0.0.0/24", "--cni-conf-dir", dir.path().to_str().unwrap()]);
    assert_eq!((run.code, run.out.as_str()), (1, ""));
    assert!(run.err.contains("names several stores:\n  redb:///"), "{}", run.err);
    assert!(run.err.contains("hint: name one of these stores, for example with --store redb:///"), "{}", run.err);
    assert!(!dir.path().join("sled").exists() && !dir.path().join("redb").exists());
}

#[test]
fn password_in_url_is_never_repeated() {
    for url in ["etcd://root:hunter2@a:2379", "sled://root:hunter2@a/b", "root:hunter2@a"] {
        let run = margay(["ipam", "show", "--store", url]);
        assert_eq!(run.code, 1);
        assert!(!run.err.contains("hunter2"), "{}", run.err);
    }
}
