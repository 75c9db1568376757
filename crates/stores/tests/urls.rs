//! Tests how store URLs are parsed, and how the engine of a store in a folder is recognized.

use std::fs;

use driver::{ConfigError, DEFAULT_ENGINE, Driver, Location, Scope};
use stores::{at, drivers};

#[test]
fn scheme_may_be_in_capitals() {
    for (url, same) in [
        ("HTTP://a", None),
        ("Redb:///A/b", Some("redb:///A/b")),
        ("SLED:///a", Some("sled:///a")),
        ("ETCD://A:2379", Some("etcd://A:2379")),
        ("Etcd+HTTPS://a:2379", Some("etcd+https://a:2379")),
        ("ETCD+UNIX:///a", Some("etcd+unix:///a")),
    ] {
        assert_eq!(at(url).ok().map(|location| location.to_string()).as_deref(), same, "{url}");
    }
}

#[test]
fn urls_parse_and_print_back() {
    for url in [
        "sled:///var/lib/margay/ipam.sled",
        "redb:///srv/my stores/a@b",
        "memory:",
        "etcd://10.0.0.1:2379",
        "etcd+https://a:2379,[fd00::1]:2379",
        "etcd+unix:///run/etcd/localhost:2379",
    ] {
        assert_eq!(at(url).unwrap().to_string(), url);
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let cases = [
        ("sled://relative/path", ConfigError::UrlPath("sled".into())),
        ("redb://", ConfigError::UrlPath("redb".into())),
        ("sled:///", ConfigError::UrlPath("sled".into())),
        ("sled:///a?cache=1", ConfigError::UrlOptions("sled".into())),
        ("sled+x:///a", ConfigError::UnknownScheme("sled+x".into())),
        ("etcd+x://a", ConfigError::UnknownScheme("etcd+x".into())),
        ("memory:///a", ConfigError::UnknownScheme("memory".into())),
        ("postgres://x/y", ConfigError::UnknownScheme("postgres".into())),
        ("/var/lib/x", ConfigError::NotAUrl { path: Some("/var/lib/x".into()) }),
        ("/var/lib/x:y", ConfigError::NotAUrl { path: Some("/var/lib/x:y".into()) }),
        ("", ConfigError::NotAUrl { path: None }),
        ("sled", ConfigError::NotAUrl { path: None }),
        ("sled:a", ConfigError::NotAUrl { path: None }),
        ("sled+x:a", ConfigError::NotAUrl { path: None }),
        ("MEMORY:", ConfigError::NotAUrl { path: None }),
        ("POSTGRES://x", ConfigError::UnknownScheme("POSTGRES".into())),
        ("ETCD+FTP://x", ConfigError::UnknownScheme("ETCD+FTP".into())),
        ("etcd://", ConfigError::NoEndpoints),
        ("etcd://a:2379/calico", ConfigError::EtcdUrl),
    ];
    for (url, expected) in cases {
        assert_eq!(at(url).unwrap_err(), expected, "{url}");
    }
}

#[test]
fn advice_lists_stores() {
    let advice = |error: ConfigError| drivers().advice(&error);
    assert_eq!(advice(ConfigError::UnknownType("x".into())), "set datastore_type to sled, redb or etcdv3");
    assert_eq!(
        advice(ConfigError::UnknownScheme("x".into())),
        "use a store URL of one of these forms: sled:///path, redb:///path, etcd://host:port and, with TLS, \
         etcd+https://host:port"
    );
    assert_eq!(advice(ConfigError::NotAUrl { path: Some("/a".into()) }), "did you mean sled:///a or redb:///a?");
    assert!(advice(ConfigError::NoEndpoints).ends_with("set \"datastore_type\" to \"sled\" or \"redb\""));
    assert_eq!(
        advice(ConfigError::MemoryStore),
        "name a store that is kept on disk, such as sled:///var/lib/margay/ipam.sled"
    );
}

#[test]
fn errors_repeat_no_secret() {
    for url in [
        "etcd://root:hunter2@a:2379",
        "etcd+https://a:1,root:hunter2@b:2",
        "sled://root:hunter2@host/path",
        "http://root:hunter2@a:2379",
        "root:hunter2@a",
        "sled:root:hunter2",
    ] {
        let error = at(url).unwrap_err();
        let said = format!("{error} {} {error:?}", drivers().advice(&error));
        assert!(!said.contains("hunter2"), "{url}: {said}");
    }
}

#[test]
fn folder_store_is_known_by_its_files() {
    let root = tempfile::tempdir().unwrap();
    let found = |folder: &str| drivers().in_folder(root.path().join(folder)).unwrap().facts().name;
    assert_eq!([found("nothing"), found("a.redb"), found("a.txt")], [DEFAULT_ENGINE, "redb", DEFAULT_ENGINE]);
    let make = |folder: &str, file: &str, content: &str| {
        fs::create_dir_all(root.path().join(folder)).unwrap();
        fs::write(root.path().join(folder).join(file), content).unwrap();
    };
    make("one.sled", "db.redb", "x");
    assert_eq!(found("one.sled"), "redb", "its file beats the name of the folder");
    make("two.sled", "db.redb", "x");
    make("two.sled", "store.id", "engine sled\nformat 1\nid x\n");
    assert_eq!(found("two.sled"), "sled", "what store.id says beats the files");
}

#[test]
fn names_and_types_differ() {
    let all: Vec<&dyn Driver> = drivers().iter().collect();
    for (place, driver) in all.iter().enumerate() {
        let facts = driver.facts();
        for other in &all[..place] {
            assert!(other.facts().name != facts.name && other.facts().datastore_type != facts.datastore_type);
        }
        assert_eq!(driver.engine().is_some(), facts.scope == Scope::Machine, "{}", facts.name);
    }
    let is_same = |one: Location, other: Location| one == other;
    assert!(is_same(at("sled:///a").unwrap(), at("sled:///a").unwrap()));
    assert!(!is_same(at("sled:///a").unwrap(), at("redb:///a").unwrap()));
}
