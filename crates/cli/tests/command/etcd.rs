//! Tests the command `margay` on a real etcd.

use std::process::Command;

use crate::support::Etcd;

const HIDDEN: &str = "hidden-password";

/// Runs `margay`, and returns its exit code, stdout and stderr.
fn margay(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_margay"));
    let output = command.args(args).env_clear().envs(env.iter().copied()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    assert!(!out.contains("hidden") && !err.contains("hidden"), "{out}{err}");
    (output.status.code(), out, err)
}

/// Enables authentication in etcd, so that only the user root with the password [`HIDDEN`] has access.
fn guard(etcd: &Etcd) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        client.user_add("root", HIDDEN, None).await.unwrap();
        client.role_add("root").await.unwrap();
        client.user_grant_role("root", "root").await.unwrap();
        client.auth_enable().await.unwrap();
    });
}

#[test]
fn etcd_pools_work_with_login() {
    let etcd = Etcd::start().unwrap();
    guard(&etcd);
    let url = etcd.url().replace("http:", "etcd:");
    let (endpoints, user) = (("ETCD_ENDPOINTS", etcd.url()), ("ETCD_USERNAME", "root"));
    let login = [user, ("ETCD_PASSWORD", HIDDEN)];
    let (code, out, err) = margay(&["pool", "create", "main", "10.65.0.0/16", "--store", &url], &login);
    assert_eq!(code, Some(0), "{out}{err}");
    let env = [(endpoints.0, endpoints.1.as_str()), login[0], login[1]];
    let (code, out, err) = margay(&["pool", "list", "--log-level", "trace"], &env);
    assert!(code == Some(0) && out.contains("10.65.0.0/16"), "{out}{err}");
    assert!(err.starts_with(&format!("store: {url} (from the environment)\n")), "{err}");

    let wrong = [user, ("ETCD_PASSWORD", "hidden-other")];
    for (env, words) in [(&wrong[..], "check user and password"), (&[], "it wants a user and a password")] {
        let (code, out, err) = margay(&["pool", "list", "--store", &url, "-l", "off"], env);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
        assert!(err.starts_with("error: etcd http://") && err.contains(words), "{err}");
    }
}

#[test]
fn etcd_configuration_file_names_place_and_login() {
    let etcd = Etcd::start().unwrap();
    guard(&etcd);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("calicoctl.cfg");
    let write = |password: &str| {
        let text = format!(
            "apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nmetadata:\nspec:\n  datastoreType: etcdv3\n  \
             etcdEndpoints: {}\n  etcdUsername: root\n  etcdPassword: {password}\n",
            etcd.url()
        );
        std::fs::write(&file, text).unwrap();
    };
    let path = file.to_str().unwrap();
    // The environment names another store than the configuration file, but the file takes precedence.
    let env = [("DATASTORE_TYPE", "sled"), ("DATASTORE_PATH", "/nowhere")];
    write(HIDDEN);
    let (code, out, err) = margay(&["pool", "create", "main", "10.65.0.0/16", "--config", path], &env);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(err.starts_with(&format!("store: {} (named in {path})\n", etcd.url().replace("http:", "etcd:"))), "{err}");
    write("hidden-other");
    let (code, _, err) = margay(&["pool", "list", "--config", path], &env);
    assert!(code == Some(1) && err.contains("check user and password"), "{err}");
    write("[hidden");
    let (code, _, err) = margay(&["pool", "list", "--config", path], &env);
    assert!(code == Some(1) && err.contains("syntax error in") && err.contains("hint: write the file like"), "{err}");
    let (code, _, err) = margay(&["pool", "list", "--config", path, "--store", "etcd://a:1"], &[]);
    assert!(code == Some(1) && err.contains("cannot be used with"), "{err}");
}

#[test]
fn etcd_bad_input_is_told_in_one_line_with_remedy() {
    let dead = format!("etcd://{}", crate::support::dead_address().unwrap());
    let key = [("ETCD_KEY_FILE", "/nowhere/key.pem")];
    let authority = [("ETCD_CA_CERT_FILE", "/nowhere/ca.pem")];
    let cases = [
        (dead.as_str(), &[][..], "check the address, and that etcd runs", "set certificates with ETCD_CA_CERT_FILE"),
        ("etcd+https://127.0.0.1:1", &authority, "cannot read /nowhere/ca.pem", "No such file"),
        ("etcd+https://127.0.0.1:1", &key, "a key for etcd is configured without its certificate", "ETCD_CERT_FILE"),
        ("postgres://a:1", &[], "postgres:// is not a kind of store", "hint: use a store URL of one of these forms: "),
        ("etcd://root:hidden@a:1", &[], "has a user or a password in it", "hint: remove user and password"),
        ("etcd://a:1/calico", &[], "more in it than hosts and ports", "hint: write the URL as etcd://host:port"),
    ];
    for (url, env, wrong, advice) in cases {
        let (code, out, err) = margay(&["pool", "list", "--store", url], env);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{url}: {err}");
        let first = err.lines().next().unwrap();
        assert!(first.starts_with("error: ") && first.contains(wrong) && err.contains(advice), "{url}: {err}");
        assert!(err.lines().count() <= 2, "{url}: {err}");
    }
}

#[test]
fn etcd_store_verbs_work() {
    let etcd = Etcd::start().unwrap();
    let url = etcd.url().replace("http:", "etcd:");
    let folder = tempfile::tempdir().unwrap();
    let on = |url: &str, args: &[&str]| margay(&[&["--store", url], args].concat(), &[]);
    let (code, out, err) = on(&url, &["pool", "create", "main", "10.65.0.0/16"]);
    assert_eq!(code, Some(0), "{out}{err}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // The etcd contains more keys than fit in one page, keys of other programs, and a value that is not text.
    runtime.block_on(async {
        let mut client = etcd_client::Client::connect([etcd.url()], None).await.unwrap();
        for number in 0..100 {
            let key = format!("/calico/ipam/v2/handle/h{number:03}");
            client.put(key, format!("{{\"handleID\":\"h{number:03}\"}}"), None).await.unwrap();
        }
        client.put("/margay/v1/odd", vec![0xff, 0], None).await.unwrap();
        client.put("/registry/pods/default/web", "kubernetes'", None).await.unwrap();
    });

    let (code, out, err) = on(&url, &["store", "status", "-o", "json"]);
    assert_eq!(code, Some(0), "{err}");
    let status: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&status["engine"], &status["endpoints"][0]), (&"etcd".into(), &etcd.url().into()));
    assert!(status["keys"].as_u64().unwrap() >= 102 && status["bytes"].as_u64().unwrap() > 0, "{status}");
    assert!(status["version"].as_str().unwrap().starts_with("3."), "{status}");
    let (code, out, err) = on(&url, &["store", "status"]);
    assert!(code == Some(0) && out.contains(" below /calico/ and /margay/\n"), "{out}{err}");

    let file = folder.path().join("backup");
    let file = file.to_str().unwrap();
    let (code, out, err) = on(&url, &["store", "backup", file, "-o", "json"]);
    assert_eq!(code, Some(0), "{err}");
    let backup: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(backup["keys"], status["keys"]);
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains(r#"{"key":"/margay/v1/odd","value64":"/wA="}"#) && !text.contains("/registry/"), "{text}");
    for engine in ["sled", "redb"] {
        let local = format!("{engine}://{}/{engine}", folder.path().display());
        let (code, out, err) = on(&local, &["store", "restore", file]);
        assert_eq!(code, Some(0), "{out}{err}");
        let copy = folder.path().join(format!("backup-{engine}"));
        let (code, _, err) = on(&local, &["store", "backup", copy.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{err}");
        let copy = std::fs::read_to_string(copy).unwrap();
        let rows = |text: &str| text.lines().skip(1).filter(|line| !line.contains("sha256")).count();
        assert!(
            rows(&copy) == rows(&text)
                && copy.lines().skip(1).zip(text.lines().skip(1)).take(rows(&text)).all(|(a, b)| a == b)
        );
        let (code, out, _) = on(&local, &["pool", "list"]);
        assert!(code == Some(0) && out.contains("10.65.0.0/16"), "{out}");
    }

    for (args, advice) in [
        (&["verify"][..], "etcdctl endpoint hashkv"),
        (&["restore", file, "--replace"], "etcdctl snapshot restore"),
        (&["compact"], "--auto-compaction-retention"),
        (&["upgrade"], "etcd upgrades its files itself"),
    ] {
        let (code, out, err) = on(&url, &[&["store"], args].concat());
        assert_eq!((code, out.as_str()), (Some(1), ""), "{args:?}: {err}");
        assert!(err.contains(&format!("error: {} is not for etcd\nhint: ", args[0])) && err.contains(advice), "{err}");
    }
    let dead = format!("etcd://{}", crate::support::dead_address().unwrap());
    for args in [&["status"][..], &["backup", "/tmp/never-written-by-margay"]] {
        let (code, out, err) = on(&dead, &[&["store"], args].concat());
        assert!(code == Some(1) && out.is_empty() && err.contains("check the address, and that etcd runs"), "{err}");
    }
}
